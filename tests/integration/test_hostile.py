"""Hostile code of users in processes of their own, over real sockets; and signals, which stop them all the same."""

from __future__ import annotations

import signal

import pytest

import arpc
from arpc.user_errors import stack_of
from tests.hostile import MESSAGE
from tests.hostile_handlers import RAISING, RETURNING, TAKING
from tests.integration import functions
from tests.integration.processes import QUICK, Processes

NAMES = (
    "__reduce__-SystemExit",
    "__str__-KeyboardInterrupt",
    "__class__-SystemExit",
    "__getattribute__-CancelledError",
)
EXITS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "UnrulyError")


@pytest.mark.parametrize("listen", ["unix://", "tcp://127.0.0.1:0"])
async def test_a_process_survives_whatever_its_handlers_do(processes: Processes, listen: str):
    complaints = []
    async with processes.group("a", main=functions.serve, options=QUICK.replace(listen=(listen,))) as worker:
        for ways, names in ((RAISING, (*NAMES, *EXITS)), (RETURNING, NAMES), (TAKING, NAMES)):
            for number, (way, call) in enumerate(ways.items()):
                name = names[number % len(names)]
                try:
                    await call(worker, "a", name)
                except BaseException as error:  # noqa: BLE001 - what pickling an argument raises is raised as it is
                    is_wrong = issubclass(type(error), arpc.WorkerLostError | arpc.RpcTimeoutError)
                    if is_wrong or (ways is not TAKING and not issubclass(type(error), Exception)):
                        complaints.append(f"{name} by {way}: {stack_of(error)}")
                assert await worker.rpc_sync("a", functions.where) == ("a", processes["a"].pid)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, -signal.SIGTERM)])
async def test_a_signal_ends_a_process_that_no_handler_could_end(
    processes: Processes, number: signal.Signals, code: int
):
    async with processes.group("a", main=functions.serve) as worker:
        for name in EXITS:
            with pytest.raises(arpc.RemoteError, match=MESSAGE):
                await RAISING["at_once"](worker, "a", name)
        processes["a"].signal(number)
        assert await processes["a"].ended() == code
