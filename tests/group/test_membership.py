"""What two workers compare to know what they share."""

from __future__ import annotations

import sys

from arpc.group.membership import host_fingerprint, main_fingerprint


def test_a_machine_has_one_fingerprint():
    assert host_fingerprint() == host_fingerprint() != ""


def test_a_script_is_known_by_what_is_in_it(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    first = main_fingerprint()
    script.write_text("print(2)")
    assert main_fingerprint() != first
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "missing.py"), raising=False)
    assert main_fingerprint() == ""


def test_nobody_can_share_a_notebook(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert main_fingerprint() == ""
