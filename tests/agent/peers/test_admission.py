"""Which connections are accepted. In an elastic group, a name belongs to its latest worker."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import arpc
from arpc.agent.peers import admission as admission_module
from arpc.errors import AuthenticationError, RendezvousError, WireError, WorkerLostError
from arpc.options import RpcOptions
from arpc.startup import start_worker
from arpc.testing import Cluster, cluster
from arpc.wire.handshake import Refused
from arpc.wire.messages import Refusal
from tests.agent.leftovers import assert_both_alive, assert_nothing_left, until
from tests.agent.stage import echo

OPTIONS = arpc.RpcOptions(gc_freeze=False, heartbeat_interval=0.05, heartbeat_timeout=5.0)


async def test_a_worker_that_shuts_down_lets_nobody_in():
    async with cluster(2) as group:
        group[1].agent.is_closing = True
        with pytest.raises(WorkerLostError, match="is shutting down"):
            await group[0].rpc_sync("worker1", echo)
        group[1].agent.is_closing = False
        await assert_both_alive(group)


async def test_a_secret_must_be_known_to_both():
    async with cluster(2, options=RpcOptions(secret=b"the right one", gc_freeze=False)) as group:
        await assert_both_alive(group)
        group[0].agent.peer("worker1").connection.abort()
        await group[0].agent.peer("worker1").connection.wait_closed()
        dialer = group[0].agent.connector.dialer
        dialer.options = dialer.options.replace(secret=b"a wrong one")
        with pytest.raises(AuthenticationError, match=r"another group secret.*ARPC_SECRET"):
            await group[0].rpc_sync("worker1", echo)
        dialer.options = dialer.options.replace(secret=b"the right one")
        await assert_both_alive(group)


async def whoami() -> arpc.WorkerInfo:
    return arpc.get_worker_info()


async def take_for_dead(group: Cluster, name: str, monkeypatch: pytest.MonkeyPatch, rank: int | None = None) -> Any:
    """Let another worker have a name whose holder runs, but did not answer when it was asked for."""

    async def is_alive(*_: Any) -> bool:
        return False

    with monkeypatch.context() as patch:
        patch.setattr("arpc.agent.peers.dialer.Dialer.is_alive", is_alive)

        async def start() -> arpc.Worker:
            arpc.agent.scope.current_scope.set(None)
            return await start_worker(
                name,
                rank=rank,
                world_size=None,
                init_method="",
                store=group.store,
                options=OPTIONS,
                network=group.network,
            )

        worker = await asyncio.create_task(start())
    group._workers.append(worker)
    return worker


@pytest.mark.parametrize("rank", [None, 500])
async def test_one_that_was_taken_for_dead_is_let_in_no_more(monkeypatch, rank):
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        await group[1].rpc_sync("worker0", echo)
        old, new = group[1], await take_for_dead(group, "worker1", monkeypatch, rank)
        await until(lambda: group[0].agent.peer("worker1").info == new.info)
        assert await group[0].rpc_sync("worker1", whoami) == new.info
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=r"'worker1'.*taken for dead"):
                await old.rpc_sync("worker0", echo)
        assert await new.rpc_sync("worker0", echo, args=(1,)) == 1
        await old.shutdown(graceful=False)
        assert await new.rpc_sync("worker0", echo, args=(2,)) == 2
        await assert_nothing_left(worker for worker in group if worker is not old)


async def test_a_successor_may_have_a_lower_id(monkeypatch):
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        high = await take_for_dead(group, "other", monkeypatch, rank=900)
        assert high.id == 900
        await high.rpc_sync("worker0", echo)
        low = await take_for_dead(group, "other", monkeypatch, rank=700)
        assert low.id == 700
        assert await low.rpc_sync("worker0", echo, args=("in",)) == "in"
        assert await group[0].rpc_sync("other", whoami) == low.info
        with pytest.raises(WorkerLostError, match="taken for dead"):
            await high.rpc_sync("worker0", echo)


async def test_one_that_nobody_has_heard_of_yet_is_let_in_when_the_group_knows_it():
    async with cluster(1, options=OPTIONS.replace(heartbeat_interval=1.0), elastic=True) as group:
        late = await group.add("late")
        assert await late.rpc_sync("worker0", echo, args=(1,)) == 1
        assert group[0].get_worker_info("late") == late.info


async def test_a_store_that_is_lost_keeps_nobody_out(monkeypatch):
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        await group[1].rpc_sync("worker0", echo)

        async def resolve(_: Any) -> Any:
            raise RendezvousError("the store is gone")

        monkeypatch.setattr(group[0].agent, "resolve", resolve)
        connection = group[0].agent.peer("worker1").connection
        connection.abort(WireError("cut by the test"))
        await connection.wait_closed()
        await until(lambda: group[1].agent.peer("worker0").connection is None)
        assert await group[1].rpc_sync("worker0", echo, args=(1,)) == 1


async def test_those_who_were_refused_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(admission_module, "_REMEMBERED", 3)
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        checks = group[0].agent.connector.admission
        me = group[1].agent.connector.dialer.identity
        for number in range(6):
            stranger = msgspec.structs.replace(me, incarnation=number)
            with pytest.raises(Refused) as refused:
                checks.check_membership(stranger)
            assert refused.value.kind is Refusal.STARTING
            await until(lambda: not checks._looking)
            with pytest.raises(Refused, match="taken for dead") as refused:
                checks.check_membership(stranger)
            assert refused.value.kind is Refusal.STALE
        assert len(checks._refused) == 3


async def test_a_worker_of_an_earlier_group_is_refused():
    async with cluster(2, options=OPTIONS) as group:
        dialer = group[1].agent.connector.dialer
        dialer.identity = msgspec.structs.replace(dialer.identity, incarnation=5)
        with pytest.raises(WorkerLostError, match="started again, or belongs elsewhere"):
            await group[1].rpc_sync("worker0", echo)
