"""Every transport keeps the contract, on every loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from arpc.testing.conformance import TransportConformance
from arpc.transport.busy_poll import BusyPoll
from arpc.transport.contract import Transport
from arpc.transport.in_process import MemoryNetwork
from arpc.transport.shm.mapping import is_supported
from arpc.transport.sockets import Resources, StreamConnection, TcpTransport, UnixTransport
from arpc.transport.tls import TlsTransport
from tests.certificates import tls_for
from tests.conftest import LOOP_FACTORIES
from tests.transport.shm.sharing import SharingTransport


class Restless(BusyPoll):
    """Changes its mind with all that comes, as to whether to poll."""

    def join(self, connection: StreamConnection) -> None:
        super().join(connection)
        connection.set_busy_poll(self)

    def received(self, loop: asyncio.AbstractEventLoop) -> None:
        super().received(loop)
        for connection in self._connections:
            loop.call_soon(connection.set_busy_poll, None)
            loop.call_soon(connection.set_busy_poll, self)


TRANSPORTS: dict[str, tuple[Callable[[], Transport], str]] = {
    "memory": (MemoryNetwork, "memory://"),
    "tcp": (TcpTransport, "tcp://127.0.0.1:0"),
    "tls": (lambda: TlsTransport(tls_for("*")), "tcp://127.0.0.1:0"),
    "unix": (UnixTransport, "unix://"),
    "unix, restless": (lambda: UnixTransport(Resources(busy_poll=Restless(0.001))), "unix://"),
    "tls, restless": (lambda: TlsTransport(tls_for("*"), Resources(busy_poll=Restless(0.001))), "tcp://127.0.0.1:0"),
}


# These watch how the bytes of large buffers pass through the connection, or fill it
ABOUT_BYTES = {
    "abort_loses",
    "dropped_buffers_leave_both_sides_consistent",
    "large_buffers_are_not_copied",
    "large_buffers_arrive_in_memory_made_for_them",
    "receiver_that_raises_when_drained",
    "small_frames_overtake_large_buffers",
}


@pytest.mark.parametrize("check", TransportConformance.names())
@pytest.mark.parametrize("loop", LOOP_FACTORIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transport(transport: str, loop: str, check: str):
    make, address = TRANSPORTS[transport]
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop], debug=True) as runner:
        runner.run(TransportConformance(make, address).run(check))


@pytest.mark.skipif(not is_supported(), reason="only Linux has files in memory without a name")
@pytest.mark.parametrize("check", sorted({*TransportConformance.names()} - ABOUT_BYTES))
@pytest.mark.parametrize("loop", LOOP_FACTORIES)
def test_unix_with_shared_memory(loop: str, check: str):
    made: list[SharingTransport] = []

    def make() -> Transport:
        made.append(SharingTransport(from_bytes=1))
        return made[-1]

    async def run() -> None:
        try:
            await TransportConformance(make, "unix://").run(check)
        finally:
            for transport in made:
                await transport.aclose()

    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop], debug=True) as runner:
        runner.run(run())
