"""Books of what was sent, how it ended, and what ran: kept in files, which outlive whoever is killed.

A line each, written at once and whole: ``S token kind to time`` before a call is made, ``E token outcome time`` when it
has ended, ``X token`` when its function runs on the callee, ``W text`` for an answer that was wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import arpc

__all__ = ["Books", "Call", "Ledger", "read_books"]

NOT_RUN = "not run"
"""Ends the outcome of a call that certainly did not run."""


class Ledger:
    """The books of one process."""

    def __init__(self, directory: Path, name: str, start: int) -> None:
        self._prefix = f"{name}.{start}"
        self._numbers = itertools.count()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(directory / f"{self._prefix}.ledger", flags)

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def ran(self, token: str) -> None:
        """The function of a call begins to run here."""
        self._write(f"X {token}")

    def wrong(self, text: str) -> None:
        """An answer was not what it should be."""
        self._write(f"W {text}")

    @contextmanager
    def call(self, kind: str, to: str) -> Iterator[str]:
        """Around a call; gives its token. What the call raises passes through, and is noted."""
        token = f"{self._prefix}.{next(self._numbers)}"
        self._write(f"S {token} {kind} {to} {time.monotonic():.3f}")
        outcome = "ok"
        try:
            yield token
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = _outcome(error)
            raise
        finally:
            self._write(f"E {token} {outcome.replace(' ', '-')} {time.monotonic():.3f}")


def _outcome(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error.__cause__, arpc.RemoteTraceback):
        return name  # of a call that the function itself has made
    never_ran = isinstance(error, arpc.WorkerLostError) and not error.may_have_run
    return f"{name} {NOT_RUN}" if never_ran or isinstance(error, arpc.OverloadedError) else name


@dataclass(slots=True)
class Call:
    """One call, put together from all books."""

    kind: str = ""
    to: str = ""
    sent_at: float = 0.0
    ended_at: float = 0.0
    ends: list[str] = field(default_factory=list)
    runs: int = 0

    @property
    def outcome(self) -> str:
        return self.ends[0] if self.ends else ""


@dataclass
class Books:
    """All books together."""

    calls: dict[str, Call]
    wrong: list[str]

    def killed_callers(self, killed: set[str]) -> int:
        """Calls without an end, of processes that were killed."""
        return sum(not call.ends and caller_of(token) in killed for token, call in self.calls.items())

    def complaints(self, killed: set[str]) -> list[str]:
        """What does not add up. ``killed``: the processes (``name.start``) that had no chance to write an end."""
        found = [f"wrong answer: {text}" for text in self.wrong]
        for token, call in self.calls.items():
            what = f"call {token} ({call.kind} to {call.to}, ended {call.ends or 'never'}, ran {call.runs} times)"
            if not call.kind:
                found.append(f"{what} ran but was never sent")
            elif call.runs > 1:
                found.append(f"{what} ran more than once")
            elif len(call.ends) > 1:
                found.append(f"{what} ended more than once")
            elif not call.ends and caller_of(token) not in killed:
                found.append(f"{what} has no end, and its caller was not killed")
            elif call.outcome == "ok" and call.runs != 1:
                found.append(f"{what} was answered without having run")
            elif call.outcome.endswith(NOT_RUN.replace(" ", "-")) and call.runs:
                found.append(f"{what} was said not to have run")
        return found

    def outcomes(self) -> dict[str, Counter[str]]:
        """How calls of each kind ended."""
        made: dict[str, Counter[str]] = {}
        for call in self.calls.values():
            made.setdefault(call.kind, Counter())[call.outcome or "caller-killed"] += 1
        return made


def caller_of(token: str) -> str:
    """The process that made a call, as ``name.start``."""
    return token.rpartition(".")[0]


def read_books(directory: Path) -> Books:
    """Put the books of all processes together."""
    books = Books({}, [])
    calls = books.calls
    for path in sorted(directory.glob("*.ledger")):
        # the last line of a process that was killed may be cut short
        for line in path.read_text(errors="replace").split("\n")[:-1]:
            what, _, rest = line.partition(" ")
            if what == "W":
                books.wrong.append(rest)
                continue
            token, _, details = rest.partition(" ")
            call = calls.get(token)
            if call is None:
                call = calls[token] = Call()
            if what == "X":
                call.runs += 1
            elif what == "S":
                call.kind, call.to, sent_at = details.rsplit(" ", 2)
                call.sent_at = float(sent_at)
            else:
                outcome, ended_at = details.split(" ")
                call.ends.append(outcome)
                call.ended_at = float(ended_at)
    return books
