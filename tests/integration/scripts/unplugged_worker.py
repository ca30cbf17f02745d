"""One of two workers, of which the first pulls out its own network cable for a while.

Arguments: its rank, its address, where they meet.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import arpc

NAMES = ("left", "right")
OPTIONS = arpc.RpcOptions(heartbeat_interval=0.2, heartbeat_timeout=1.0, init_timeout=30, rref_grace=20, rpc_timeout=40)


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def echo(value: str) -> str:
    return value


def cable(state: str) -> None:
    command = ["ip", "link", "set", "cable", state]
    subprocess.run(command, check=True, timeout=10)


async def unplug(worker: arpc.Worker) -> None:
    held = worker.remote("right", list)
    assert await held == []
    pending = worker.rpc_async("right", hang, timeout=0)
    stream = worker.membership()
    assert isinstance(await anext(stream), arpc.MemberJoined)
    await asyncio.to_thread(cable, "down")
    cut_at = time.monotonic()
    try:
        await pending
    except arpc.WorkerLostError as error:
        print("lost", error.worker, error.may_have_run, "after", time.monotonic() - cut_at)  # noqa: T201
    print(type(await anext(stream)).__name__)  # noqa: T201
    unsent = worker.rpc_async("right", echo, args=("went out",))
    await asyncio.to_thread(cable, "up")
    print(await unsent)  # noqa: T201
    print(type(await anext(stream)).__name__)  # noqa: T201
    assert await held == [], "the RRef was lost"
    print("kept")  # noqa: T201


async def main() -> None:
    rank, host, meeting_point = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = OPTIONS.replace(listen=(f"tcp://{host}:0",))
    async with arpc.init_rpc(
        NAMES[rank], rank=rank, world_size=2, init_method=meeting_point, options=options
    ) as worker:
        if rank == 0:
            await unplug(worker)


if __name__ == "__main__":
    arpc.run(main)
