"""A worker is told of a tensor that cannot be; run as a program, which an abort would end: see `test_lying_peer`."""

from __future__ import annotations

import asyncio
import pickle
import sys

import torch

import arpc
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from arpc.wire.values.table import Code, encode_table
from tests.wire.lying_peers import exploit


@arpc.export
async def echo(value):
    return value


async def main(allow: str) -> None:
    table = encode_table((64, bytes([Code.ENTRY]), [0], [()], [exploit()]))
    async with cluster(2, options=RpcOptions(gc_freeze=False, allow=allow or None)) as group:
        await group[0].rpc_sync("worker1", echo, args=(1,))  # so that function 1 is known
        connection = group[0].agent.known_peer("worker1").connection
        payload = pickle.dumps((1,), protocol=5)
        for type_ in (MessageType.REQUEST, MessageType.REPLY, MessageType.RREF_CREATE):
            connection.send(frame(type_, 0, 1 << 40, 1, 0, payload, b"", table, (bytes(64),)))
            assert await group[0].rpc_sync("worker1", echo, args=(7,)) == 7
        arrived = await group[0].rpc_sync("worker1", echo, args=(torch.ones(3),))
        assert arrived.tolist() == [1.0, 1.0, 1.0]
    sys.stdout.write("alive\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
