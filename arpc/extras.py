"""Which command installs an optional dependency, for errors that say what to do."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Final
from urllib.parse import unquote, urlparse

__all__ = ["DISTRIBUTION", "install_command"]

DISTRIBUTION: Final = "torch-arpc"
"""What the package is called where it is published. `arpc` itself belongs to an unrelated project there."""


def install_command(extra: str) -> str:
    """The command that adds an extra of arpc to this environment.

    >>> install_command("cli")  # doctest: +SKIP
    "pip install 'torch-arpc[cli]'"
    """
    return f"pip install '{_source()}[{extra}]'"


def _source() -> str:
    """The folder that arpc was installed from; its published name if that is not known."""
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlparse(json.loads(origin)["url"]) if origin is not None else None
    except (importlib.metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return DISTRIBUTION
    # a wheel's file has no extras of its own to install later, and may be gone
    if url is None or url.scheme != "file" or url.path.endswith(".whl"):
        return DISTRIBUTION
    return unquote(url.path)
