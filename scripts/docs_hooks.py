"""What `make docs` does besides building pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Copy the examples, too: pages link to them, and they lie beside docs/."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in {".py", ".ipynb"}:
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point to the copies."""
    return markdown.replace("](../examples/", "](examples/")


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce their examples by two colons, which mean nothing here."""
    return html.replace("<p>::</p>", "")
