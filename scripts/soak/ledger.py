"""The event log of one process: each call sent, how it ended, and each function that ran. It survives SIGKILL.

One line for each event, written with one `os.write`, so that it is in the file before anything else happens:

========================================== ======================================================================
``S token kind to others time``            a call is about to be made; ``others``: workers besides caller and callee
                                           whose faults may make it fail, separated by commas, or ``-``
``E token outcome flags lost time``        it ended: ``ok`` or the name of the error's class, see `describe`
``X token``                                the function of the call begins to run
``W text``                                 a result was wrong
``P begin end cpu``                        the event loop did not run from begin to end; CPU seconds it used then
``C pid seconds``                          a handler forked a child, which ends by itself after so many seconds
========================================== ======================================================================

Kinds of call have no spaces. `scripts.soak.records` reads the files.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Final

import arpc

__all__ = ["HungCallError", "Ledger", "describe"]

NOT_RUN: Final = "n"
"""Flag of an error that guarantees that the call did not run."""
PASSED_ON: Final = "p"
"""Flag of an error that arrived from the callee: its handler raised it, or passed it on from a call of its own."""


class HungCallError(Exception):
    """A call did not end within the limit of the soak, whatever its own timeout was."""


class Ledger:
    """Writes the event log of one process."""

    def __init__(self, directory: Path, name: str, start: int) -> None:
        self.process = f"{name}.{start}"
        self._numbers = itertools.count()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(directory / f"{self.process}.ledger", flags)

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def begin(self, kind: str, to: str, others: tuple[str, ...] = ()) -> str:
        """Log a call that is about to be made. Returns its token, which is unique over all processes."""
        token = f"{self.process}.{next(self._numbers)}"
        self._write(f"S {token} {kind} {to} {','.join(others) or '-'} {time.monotonic():.3f}")
        return token

    def end(self, token: str, error: BaseException | None) -> None:
        """Log the end of a call, with a result or an error."""
        self._write(f"E {token} {describe(error)} {time.monotonic():.3f}")

    def ran(self, token: str) -> None:
        """Log that the function of a call begins to run in this process."""
        self._write(f"X {token}")

    def wrong(self, text: str) -> None:
        """Log a wrong result."""
        self._write(f"W {' '.join(text.split())}")

    def stalled(self, begin: float, end: float, cpu_s: float) -> None:
        """Log a time in which the event loop did not run."""
        self._write(f"P {begin:.3f} {end:.3f} {cpu_s:.3f}")

    def forked(self, pid: int, seconds: float) -> None:
        """Log a child that a handler has forked."""
        self._write(f"C {pid} {seconds:.1f}")


def describe(error: BaseException | None) -> str:
    """Return an outcome as three words: name, flags (or ``-``), and the worker that was lost (or ``-``)."""
    if error is None:
        return "ok - -"
    if isinstance(error, asyncio.CancelledError):
        return "cancelled - -"
    if isinstance(error, HungCallError):
        return "hung - -" if error.__cause__ is None else f"HungCallError {PASSED_ON} -"
    flags = NOT_RUN if _says_not_run(error) else ""
    if isinstance(error.__cause__, arpc.RemoteTraceback):
        flags += PASSED_ON
    lost = error.worker if isinstance(error, arpc.WorkerLostError) else ""
    return f"{type(error).__name__} {flags or '-'} {lost or '-'}"


def _says_not_run(error: BaseException) -> bool:
    # an error without the attribute guarantees nothing, except OverloadedError: the callee refused the call
    return not getattr(error, "may_have_run", not isinstance(error, arpc.OverloadedError))
