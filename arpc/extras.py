"""The command that installs an optional dependency, for the texts of errors."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Final
from urllib.parse import unquote, urlparse

__all__ = ["DISTRIBUTION", "install_command"]

DISTRIBUTION: Final = "torch-arpc"
"""The name of the published package. `arpc` itself belongs to an unrelated project on the package index."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra of arpc to this environment.

    >>> install_command("cli")  # doctest: +SKIP
    "pip install 'torch-arpc[cli]'"
    """
    return f"pip install '{_source()}[{extra}]'"


def _source() -> str:
    """Return the folder that arpc was installed from; its published name if the folder is not known."""
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlparse(json.loads(origin)["url"]) if origin is not None else None
    except (importlib.metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return DISTRIBUTION
    # a wheel file may be gone by the time of the command
    if url is None or url.scheme != "file" or url.path.endswith(".whl"):
        return DISTRIBUTION
    return unquote(url.path)
