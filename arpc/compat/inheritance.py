"""Makes processes that this one starts use arpc in the place of torch's RPC as well."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["install_in_children"]

_FOLDER: Final = str(Path(__file__).parent / "children")


def install_in_children() -> bool:
    """Make Python processes that inherit this one's environment find arpc in the place of torch's RPC.

    Those are processes that multiprocessing spawns or a fork server forks, and that subprocess starts. Returns False if
    Python ignores the environment here, as with ``-E`` and ``-I``; multiprocessing's children then ignore it too.
    """
    if sys.flags.ignore_environment:
        return False
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, paths)])
    return True
