"""The output of workers: whole lines prefixed with the worker's name, and the traceback that ends a worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, Literal, TextIO, TypeAlias

from arpc.launch.plan import Slot
from arpc.launch.status import Status

__all__ = ["LineSplitter", "Screen", "Tail", "last_traceback", "lost_another", "reading", "wants_colour"]

Stream: TypeAlias = Literal["stdout", "stderr"]

LONGEST_LINE_BYTES: Final = 1 << 16
TAIL_LINES: Final = 2000
DEFAULT_WIDTH: Final = 80
COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Colours of the terminal's own palette, so that they are legible on its background; red is left for failures."""

_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Escape sequences that move the cursor, erase or hide; those of colours, which end in m, are kept."""
_START: Final = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAIN: Final = ("The above exception was the direct cause", "During handling of the above exception")
_LOST: Final = re.compile(r"(?:arpc\.errors\.)?(?:WorkerLostError|OwnerLostError|ConnectionClosedError)\b")


class LineSplitter:
    """Splits a stream of bytes into lines. Text that a carriage return overwrote is left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that are complete now. An unfinished line is cut at `LONGEST_LINE_BYTES`."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        yield from map(_shown, lines)

    @property
    def progress(self) -> str:
        """The unfinished line if it has a carriage return, as a progress bar has; else empty."""
        return _shown(self._rest) if b"\r" in self._rest else ""

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _shown(rest)


def _shown(line: bytes) -> str:
    # a progress bar overwrites itself: a terminal would show only its last text
    return _CONTROL.sub("", line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


class Tail:
    """The last lines of a worker's stderr."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    def add(self, line: str) -> None:
        self._lines.append(line)

    @property
    def traceback(self) -> str:
        """The traceback that the worker ended with; empty if there is none."""
        return last_traceback(tuple(self._lines))


@contextlib.asynccontextmanager
async def reading(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """Read from the read end of a pipe on the running loop; it is closed on exit."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    try:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    except BaseException:
        pipe.close()
        raise
    try:
        yield reader
    finally:
        transport.close()


def last_traceback(lines: Sequence[str]) -> str:
    """Return the last traceback in these lines, with those of the exceptions that led to it, and all that follows.

    >>> print(last_traceback(["hello", "Traceback (most recent call last):", "  File ...", "ValueError: no"]))
    Traceback (most recent call last):
      File ...
    ValueError: no
    """
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    if not starts:
        return ""
    first = starts.pop()
    while starts and any(line.startswith(_CHAIN) for line in lines[max(starts[-1], first - 3) : first]):
        first = starts.pop()
    return "\n".join(lines[first:]).rstrip()


def lost_another(traceback: str) -> bool:
    r"""Whether this traceback was caused by the loss of another worker, which is then to blame.

    >>> lost_another("Traceback ...\narpc.errors.WorkerLostError: worker 'ps0' was lost")
    True
    """
    unindented = [line for line in traceback.splitlines() if line[:1].strip()]
    return bool(unindented) and _LOST.match(unindented[-1]) is not None


def wants_colour(stream: TextIO) -> bool:
    """Whether the stream shows colours and the user wants them: https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """The output of the launcher: the workers' lines, and on a terminal some lines that stay below them.

    Those are the progress bars of workers, which are lines that workers overwrite, and the status line of the group.
    """

    def __init__(self, slots: Sequence[Slot], out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._is_live = self._err.isatty() and os.environ.get("TERM") != "dumb"
        self._status = ""
        self._progress: dict[int, str] = {}
        self._drawn = 0
        """The number of lines that are drawn below those of the workers now."""
        colours = itertools.cycle(COLOURS)
        self._prefixes = {slot.rank: (f"[{slot.name}]", next(colours)) for slot in slots}
        self.is_closed = False
        """True once a write has failed: the pipe or the terminal is gone."""

    @property
    def columns(self) -> int | None:
        """The columns that a worker has for a progress bar; None if there is no terminal."""
        if not self._is_live or not self._out.isatty():
            return None
        return max(1, _width(self._err) - 2 - max(len(prefix) for prefix, _ in self._prefixes.values()))

    def line(self, rank: int, stream: Stream, text: str) -> None:
        """Show a line of a worker."""
        to = self._out if stream == "stdout" else self._err
        self._write(to, f"{self._prefix(rank, to)} {text}\n")

    def show_progress(self, rank: int, text: str) -> None:
        """Keep a line of a worker below the others, in place of its previous one; an empty text removes it."""
        if not self._is_live or self._progress.get(rank, "") == text:
            return
        self._progress.pop(rank, None)
        if text:
            self._progress[rank] = text
        self._write(self._err, "")

    def _prefix(self, rank: int, to: TextIO) -> str:
        prefix, colour = self._prefixes[rank]
        return f"\x1b[{colour}m{prefix}\x1b[0m" if wants_colour(to) else prefix

    def say(self, text: str, *, is_bad: bool = False) -> None:
        """Print a message of the launcher to stderr."""
        if is_bad and wants_colour(self._err):
            text = f"\x1b[31m{text}\x1b[0m"
        self._write(self._err, f"{text}\n")

    def show_status(self, status: Status) -> None:
        """Show the status of the group on the last line, in place of the previous one; on a terminal only."""
        if self._is_live and not self.is_closed:
            columns = max(1, _width(self._err) - 1)
            self._status = status.styled(columns) if wants_colour(self._err) else status.plain(columns)
            self._write(self._err, "")

    def close(self) -> None:
        self._status = ""
        self._progress.clear()
        if self._is_live:
            self._write(self._err, "")

    def _write(self, to: TextIO, text: str) -> None:
        if self.is_closed:
            return
        try:
            if self._is_live:
                self._err.write(f"\r\x1b[{self._drawn - 1}A\x1b[J" if self._drawn > 1 else "\r\x1b[K")
                self._drawn = 0
                if to is not self._err:
                    self._err.flush()
            _write_all(to, text)
            if self._is_live:
                self._draw_below()
        except (OSError, ValueError):  # a pipe without a reader, a terminal that is gone, a full disk; a closed file
            self.is_closed = True

    def _draw_below(self) -> None:
        lines = [f"{self._prefix(rank, self._err)} {text}" for rank, text in sorted(self._progress.items())]
        if self._status:
            lines.append(self._status)
        self._drawn = len(lines)
        text = "\n".join(lines)
        # no line wrapping: if a bar that is too wide went on in a second line, erasing would miss that
        _write_all(self._err, f"\x1b[?7l{text}\x1b[0m\x1b[?7h" if self._progress else text)


def _write_all(to: TextIO, text: str) -> None:
    try:
        to.write(text)
    except UnicodeEncodeError:
        encoding = to.encoding or "ascii"
        to.write(text.encode(encoding, "backslashreplace").decode(encoding))
    to.flush()


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH  # 0 if the terminal does not know
    except (OSError, ValueError):
        return DEFAULT_WIDTH
