"""One of two workers that only a network connects. Arguments: its rank, its address, where they meet, bytes to send."""

from __future__ import annotations

import sys

import torch

import arpc
from arpc.runtime import current

NAMES = ("left", "right")


async def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


async def talk(other: str, size_bytes: int) -> str:
    """Send a large tensor and have another one back; the address of the connection they took."""
    sent = torch.arange(size_bytes // 4, dtype=torch.int32)
    answer = await arpc.rpc_sync(other, doubled, args=(sent,))
    assert torch.equal(answer, sent * 2)
    connection = current().agent.known_peer(other).connection
    assert connection is not None
    return connection.address


async def main() -> None:
    rank, host, meeting_point, size_bytes = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    options = arpc.RpcOptions(listen=(f"tcp://{host}:0",), init_timeout=30)
    async with arpc.init_rpc(NAMES[rank], rank=rank, world_size=2, init_method=meeting_point, options=options):
        print("talked over", await talk(NAMES[1 - rank], size_bytes))  # noqa: T201


if __name__ == "__main__":
    arpc.run(main)
