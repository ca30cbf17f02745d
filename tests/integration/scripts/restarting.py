"""A worker of a group that fails once and is started again by whoever launched it.

    torchrun ... restarting.py /path/that/does/not/exist

The first time the last rank dies in the middle of a call, with the group complete, and leaves a file. The second time
there is the file, and all call all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import arpc


async def die(marker: str) -> None:
    Path(marker).touch()
    os._exit(3)


async def process_id() -> int:
    return os.getpid()


async def main(marker: str) -> None:
    async with arpc.init_rpc() as worker:
        names = [info.name for info in arpc.get_worker_infos()]
        if not Path(marker).exists():
            await arpc.rpc_sync(names[-1], die, args=(marker,), timeout=0)
        answers = {await arpc.rpc_sync(name, process_id) for name in names}
        print(f"{worker.name} of {names} heard {len(answers)} processes", flush=True)  # noqa: T201


if __name__ == "__main__":
    arpc.run(main(sys.argv[1]))
