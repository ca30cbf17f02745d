"""What CPython and its library have under private names only, or under names that look so.

There is nothing public to fall back on: the frames are documented, the rest is as old as Python 3.8.
"""

from __future__ import annotations

import pickle
import runpy
import sys
from typing import Any, Final

__all__ = ["PythonUnpickler", "caller_frame", "frames_of_threads", "run_module_as_main"]

PythonUnpickler: Final[Any] = pickle._Unpickler
"""The reader of pickles that is written in Python, with one method for each opcode."""

caller_frame: Final = sys._getframe
"""The frame so many calls up: documented, and the only way to know a caller that costs nothing."""

frames_of_threads: Final = sys._current_frames
"""The innermost frame of each thread, by its ident: documented."""

run_module_as_main: Final[Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
"""Runs a module as ``python -m`` does, which calls this itself."""
