"""The last log records and handler failures of a worker, which other workers and tools can read.

The journal is kept only while the worker collects metrics. The length of every text and list is limited, so that a
worker that logs or fails all day needs a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from arpc.log import tap
from arpc.user_errors import class_name_of, is_a, stack_of, text_of, traceback_of, with_traceback

__all__ = ["ErrorEntry", "Journal", "LogLine", "WorkerErrors", "WorkerLogs"]

MAX_LINES: Final = 500
MAX_ERRORS: Final = 100
MAX_MESSAGE: Final = 2_000
MAX_TRACEBACK: Final = 16_000
TEXTS_PERIOD_S: Final = 1.0
"""Failures of a handler are all counted, and described once in this period: formatting a traceback is slow."""


class LogLine(msgspec.Struct, frozen=True):
    """A record of the standard logging module."""

    time_s: float
    level: str
    logger: str
    message: str
    peer: str = ""
    """The caller of the handler that logged it; empty if none did."""
    traceback: str = ""


class ErrorEntry(msgspec.Struct):
    """Failures of one handler with one type of exception; caller and texts are of the failure at ``described_s``."""

    function: str
    caller: str
    error: str
    message: str
    traceback: str
    count: int
    first_s: float
    last_s: float
    described_s: float


class WorkerLogs(msgspec.Struct, frozen=True):
    """The last log lines of one worker, the oldest first."""

    worker: str
    lines: list[LogLine]


class WorkerErrors(msgspec.Struct, frozen=True):
    """The failures of one worker's handlers, the latest first."""

    worker: str
    errors: list[ErrorEntry]


class Journal:
    """The journal of one worker. Log records come from any thread, failures from the loop."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._lines: deque[tuple[int, LogLine]] = deque(maxlen=MAX_LINES)
        self._errors: dict[tuple[str, str], ErrorEntry] = {}
        self._untap = tap(self._logged)

    def close(self) -> None:
        self._untap()

    def logs(self, level: str = "", search: str = "", limit: int = MAX_LINES) -> WorkerLogs:
        """Return the last lines of at least that level that contain a text, ignoring case."""
        least = logging.getLevelNamesMapping().get(level.upper(), 0)
        wanted = search.casefold()
        found = [
            line
            for number, line in list(self._lines)  # another thread may add to them
            if number >= least and (not wanted or _contains(line, wanted))
        ]
        return WorkerLogs(self.worker, found[-limit:] if limit > 0 else [])

    def errors(self) -> WorkerErrors:
        return WorkerErrors(self.worker, sorted(self._errors.values(), key=lambda entry: -entry.last_s))

    def failed(self, caller: str, function: str, error: BaseException) -> None:
        """Record the exception of a handler."""
        if is_a(error, asyncio.CancelledError):
            return  # the handler was cancelled
        key = (function, class_name_of(error))
        now = time.time()
        known = self._errors.pop(key, None)  # it is added again at the end: the oldest failure is dropped first
        if known is not None and 0 <= now - known.described_s < TEXTS_PERIOD_S:
            known.count += 1
            known.last_s = now
            self._errors[key] = known
            return
        self._errors[key] = ErrorEntry(
            function=function,
            caller=caller,
            error=key[1],
            message=text_of(error, MAX_MESSAGE),
            traceback=stack_of(_without_runtime_frames(error), MAX_TRACEBACK),
            count=1 if known is None else known.count + 1,
            first_s=now if known is None else known.first_s,
            last_s=now,
            described_s=now,
        )
        while len(self._errors) > MAX_ERRORS:
            del self._errors[next(iter(self._errors))]

    def _logged(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> None:
        owner = fields.get("worker")
        if owner is not None and owner != self.worker:
            return  # of another worker in the same process
        line = LogLine(
            time_s=record.created,
            level=record.levelname,
            logger=record.name,
            message=_cut(_message_of(record), MAX_MESSAGE),
            peer=str(fields.get("peer") or ""),
            traceback=_cut(_traceback_of(record), MAX_TRACEBACK),
        )
        self._lines.append((record.levelno, line))


def _without_runtime_frames(error: BaseException) -> BaseException:
    """Remove the frames above the user's function: they explain nothing, and the reply does not have them either."""
    trace = traceback_of(error)
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("arpc."):
        trace = trace.tb_next
    return error if trace is None else with_traceback(error, trace)


def _contains(line: LogLine, wanted: str) -> bool:
    return any(wanted in part.casefold() for part in (line.message, line.logger, line.traceback))


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - a wrong format, or a user's __str__: logging itself prints that and goes on
        return str(record.msg)


def _traceback_of(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return "".join(traceback.format_exception(record.exc_info[1]))


def _cut(text: str, most: int) -> str:
    """Leave out the middle of a text that is too long: the ends say most."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
