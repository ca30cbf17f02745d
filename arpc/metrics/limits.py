"""The forms and the longest duration of a trace of a running group."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_TRACE_S", "TRACE_FORMS"]

TRACE_FORMS: Final = ("json", "html")
MAX_TRACE_S: Final = 120.0
