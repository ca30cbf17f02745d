"""How many messages, and writes, tensors take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.transport.stream import TcpTransport
from tests.agent.stage import echo


class CountingWrites:
    """Stands in for the transport of a connection."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.writes: list[int] = []

    def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        self._transport.write(data)

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.writes.append(sum(map(len, parts)))
        self._transport.writelines(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("as_dict", [False, True])
async def test_a_thousand_small_tensors_are_one_message_with_one_write(as_dict: bool):
    options = RpcOptions(gc_freeze=False, shared_memory_bytes=0, listen=("tcp://127.0.0.1:0",))
    async with cluster(2, options=options, transports={"tcp": TcpTransport()}) as group:
        await group[0].rpc_sync("worker1", echo)
        counted = []
        for worker, other in ((group[0], "worker1"), (group[1], "worker0")):
            connection = worker.agent.known_peer(other).connection
            connection._transport = CountingWrites(connection._transport)
            connection._write = connection._transport.write
            counted.append(connection._transport)
        sent: Any = [torch.full((16,), float(number)) for number in range(1000)]
        if as_dict:
            sent = {str(number): tensor for number, tensor in enumerate(sent)}

        arrived = await group[0].rpc_sync("worker1", echo, args=(sent,))

        torch.testing.assert_close(arrived, sent)
        for transport in counted:
            (size,) = transport.writes
            assert 64_000 < size < 100_000
