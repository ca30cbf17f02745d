"""Every transport keeps the contract, on every loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from arpc.testing.conformance import TransportConformance
from arpc.transport.base import Transport
from arpc.transport.memory import MemoryNetwork
from arpc.transport.stream import TcpTransport, UnixTransport
from tests.conftest import LOOP_FACTORIES

TRANSPORTS: dict[str, tuple[Callable[[], Transport], str]] = {
    "memory": (MemoryNetwork, "memory://"),
    "tcp": (TcpTransport, "tcp://127.0.0.1:0"),
    "unix": (UnixTransport, "unix://"),
}


@pytest.mark.parametrize("check", TransportConformance.names())
@pytest.mark.parametrize("loop", LOOP_FACTORIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transport(transport: str, loop: str, check: str):
    make, address = TRANSPORTS[transport]
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop], debug=True) as runner:
        runner.run(TransportConformance(make, address).run(check))
