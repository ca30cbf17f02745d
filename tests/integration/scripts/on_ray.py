# ruff: noqa: T201
"""Launches groups on a Ray cluster of several nodes, all on this machine, and prints what became of them.

python on_ray.py EMPTY_DIRECTORY
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import arpc
from arpc import cli
from tests.integration.launching import main_of_each

ROOT = Path(__file__).parents[3]
RESTARTING = Path(__file__).with_name("restarting.py")


async def greet_and_say_where() -> tuple[list[str], str, str, str]:
    heard = await main_of_each("hello")
    return heard, ray.get_runtime_context().get_node_id(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]


async def die_in_the_first_attempt() -> str:
    async with arpc.init_rpc() as worker:
        if os.environ["ARPC_INCARNATION"] == "0" and worker.id == 1:
            os._exit(3)
    return os.environ["ARPC_INCARNATION"]


def fail() -> None:
    raise ValueError("on purpose")


async def wait_for_the_end_of_a_node(marker: str) -> str:
    async with arpc.init_rpc() as worker:
        if os.environ["ARPC_INCARNATION"] == "0":
            if worker.id == 1:
                Path(marker).write_text(ray.get_runtime_context().get_node_id())
            await asyncio.Event().wait()
    return ray.get_runtime_context().get_node_id()


async def lose_a_node(cluster: Cluster, nodes: list, marker: Path) -> None:
    launch = asyncio.create_task(
        arpc.launch.ray(wait_for_the_end_of_a_node, (str(marker),), workers=2, max_restarts=2, strategy="STRICT_SPREAD")
    )
    while not marker.exists() or not marker.read_text():  # noqa: ASYNC110 - it is written by another process
        await asyncio.sleep(0.05)
    lost = marker.read_text()
    (node,) = (node for node in nodes if node.node_id == lost)
    await asyncio.to_thread(cluster.remove_node, node)
    launched = await launch
    print("lost a node:", launched.restarts, lost not in launched.values.values(), len(set(launched.values.values())))


async def main(cluster: Cluster, nodes: list, directory: Path) -> None:
    placed = await arpc.launch.ray(greet_and_say_where, workers={"ps": 1, "trainer": 1}, strategy="STRICT_SPREAD")
    print("function:", [heard for heard, *_ in placed.values.values()], placed.restarts)
    print("spread:", len({node for _, node, *_ in placed.values.values()}), [end[2:] for end in placed.values.values()])

    launched = await arpc.launch.ray(die_in_the_first_attempt, workers=2, max_restarts=1)
    print("restarted:", launched.values, launched.restarts)

    try:
        await arpc.launch.ray(fail, workers=1)
    except arpc.LaunchError as error:
        print("failed:", error, "|", error.traceback.splitlines()[-1])

    await lose_a_node(cluster, nodes, directory / "lost")
    while (await asyncio.to_thread(ray.available_resources)).get("CPU") != 2:  # noqa: ASYNC110 - Ray takes its time
        await asyncio.sleep(0.1)
    print("room for two again")


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, logging_level="warning")
        directory = Path(sys.argv[1])
        asyncio.run(main(cluster, nodes, directory))
        (directory / "again").touch()
        arguments = ["launch", "--on", "ray", "-n", "2", "--strategy", "SPREAD", str(RESTARTING)]
        print("command:", cli.main([*arguments, str(directory / "again")]))
    finally:
        ray.shutdown()
        cluster.shutdown()
