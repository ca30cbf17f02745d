"""What the README and the pages in docs/ say is true, as far as a program can tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from arpc.wire.frames import HEADER
from arpc.wire.messages import MessageType
from scripts.readme_figures import BEGIN, END, KEPT, PICTURE, SHOWN, fingerprint, with_table

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = (ROOT / "README.md").read_text()
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs() -> list[tuple[str, str]]:
    """Each python block, with the text block that follows it: its output."""
    blocks = FENCE.findall(README)
    return [
        (block, output)
        for (language, block), (kind, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if language == "python" and kind == "text"
    ]


def test_every_program_has_its_output():
    assert len(programs()) == README.count("```python\n") == 1


def test_it_is_short():
    prose = FENCE.sub("", README.replace(README[README.index(BEGIN) : README.index(END)], ""))
    assert len(re.findall(r"\b[A-Za-z][\w'-]*", re.sub(r"\]\([^)]*\)", "]", prose))) <= 600


def test_the_table_and_the_picture_show_the_same_figures():
    kept = json.loads(KEPT.read_text())
    assert with_table(README, kept) == README
    assert fingerprint(kept).encode() in PICTURE.read_bytes()
    assert set(SHOWN) <= set(kept["rows"])


@pytest.mark.parametrize(("program", "output"), programs())
def test_program_prints_what_is_shown(program, output, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
    assert done.stderr == ""


def test_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    assert shown
    assert set(shown) <= set(targets)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert links
    files = [link.partition("#")[0] for link in links if not link.startswith(("https:", "#"))]
    assert [file for file in files if not (page.parent / file).exists()] == []


def test_wire_page_knows_every_message():
    page = (ROOT / "docs" / "wire.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)
    assert {name: int(number) for number, name in rows} == {message.name: message.value for message in MessageType}


def test_wire_page_knows_the_header():
    page = (ROOT / "docs" / "wire.md").read_text()
    rows = re.findall(r"^\| (\d+)(?:-(\d+))? \| `\w+` \|", page, re.MULTILINE)
    sizes = [int(last or first) - int(first) + 1 for first, last in rows]
    codes = {1: "B", 2: "H", 4: "I", 8: "Q"}
    assert "<" + "".join(codes[size] for size in sizes) == HEADER.format
