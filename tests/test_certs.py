"""``arpc certs``."""

from __future__ import annotations

import re
import ssl
import stat
import sys

import pytest

from arpc.certs import Authority
from arpc.cli import main
from arpc.errors import ConfigurationError
from arpc.extras import install_command
from arpc.tls import TLS


def test_makes_files_that_work_together(tmp_path, capsys):
    assert main(["certs", str(tmp_path), "trainer:0", "ps*"]) == 0
    told = capsys.readouterr().out
    assert f"ARPC_TLS_CERT={tmp_path}/trainer:0.pem" in told
    for name in ("trainer:0", "ps%2A"):
        tls = TLS(cert=tmp_path / f"{name}.pem", key=tmp_path / f"{name}.key", ca=tmp_path / "ca.pem")
        assert tls.server_context.verify_mode is ssl.CERT_REQUIRED
    for key in tmp_path.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_second_run_keeps_the_authority(tmp_path):
    assert main(["certs", str(tmp_path), "a"]) == 0
    before = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "a.pem").read_bytes()
    assert main(["certs", str(tmp_path), "a", "b"]) == 0
    assert (tmp_path / "ca.pem").read_bytes() == before[0]
    assert (tmp_path / "a.pem").read_bytes() != before[1], "it was renewed"


def test_names_that_no_worker_can_have(tmp_path, capsys):
    assert main(["certs", str(tmp_path), "../../etc/passwd"]) == 1
    assert "arpc certs:" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"ca.pem", "ca.key"}


def test_without_cryptography(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigurationError, match=re.escape(install_command("certs"))):
        Authority(tmp_path)


@pytest.mark.parametrize("name", ["ca", "CA"])
def test_a_worker_does_not_replace_the_authority(tmp_path, capsys, name):
    assert main(["certs", str(tmp_path), "a"]) == 0
    before = (tmp_path / "ca.key").read_bytes()
    assert main(["certs", str(tmp_path), name]) == 1
    assert "authority" in capsys.readouterr().err
    assert (tmp_path / "ca.key").read_bytes() == before
