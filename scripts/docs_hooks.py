"""Hooks of `make docs` besides building the pages of docs/: they add files from outside, and adjust links."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
ROOT_PAGES: Final = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security-policy.md",
}
"""Files at the root of the repository, and their names on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the examples and the pages at the root of the repository: pages link to them."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in {".py", ".ipynb"}:
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    for name, page in ROOT_PAGES.items():
        if (replaced := files.get_file_from_path(page)) is not None:
            files.remove(replaced)  # docs/contributing.md only refers to the text
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point to the copies, from pages of docs/ and from those at the root."""
    for name, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}").replace(f"]({name}", f"]({page}")
    return markdown.replace("](../examples/", "](examples/").replace("](docs/", "](")


def on_page_content(html: str, **_: Any) -> str:
    """Remove the two colons that announce an example in a docstring: they mean nothing here."""
    return html.replace("<p>::</p>", "")
