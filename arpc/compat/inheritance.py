"""Lets processes that this one starts run on arpc as well."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["install_in_children"]

_FOLDER: Final = str(Path(__file__).parent / "children")


def install_in_children() -> bool:
    """Have Python processes find arpc in the place of torch's RPC if they inherit this one's environment.

    That is so for those that multiprocessing spawns or a fork server forks, and for those that subprocess starts. False
    if Python ignores the environment here, as it does with ``-E`` and ``-I``, and then in multiprocessing's children.
    """
    if sys.flags.ignore_environment:
        return False
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, paths)])
    return True
