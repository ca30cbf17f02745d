"""Parts of CPython and its library that have private names only, or names that look private.

They have no public fallback: those for frames are documented, the others are as old as Python 3.8.
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
"""Returns the frame that many calls up. It is documented, and the only way to identify a caller that costs nothing."""

frames_of_threads: Final = sys._current_frames
"""Returns the innermost frame of each thread, by the thread's ident. It is documented."""

run_module_as_main: Final[Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
"""Runs a module as ``python -m`` does, which calls this itself."""
