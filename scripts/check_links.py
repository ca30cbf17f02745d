"""Crawls the pages that `make docs` has built, and fails if a link, a picture or an anchor leads nowhere.

``python -m scripts.check_links build/site``. Addresses outside of the site are counted, not fetched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in {"href", "src"}:
                self.links.add(value)
            elif name in {"id", "name"}:
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield every link of every page that leads to no file of the site, or to no anchor of its page."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if parts.path.startswith("/"):
                target = site.resolve() / unquote(parts.path.lstrip("/"))
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site.resolve())}: {link}: no such file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site.resolve())}: {link}: no such anchor"


def main() -> int:
    """Print the broken links, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    broken = list(broken_links(parser.parse_args().site))
    print("\n".join(broken) or "no broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
