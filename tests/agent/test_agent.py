"""The agent: whom it can call, how it finds them, and what features may add to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.scope import current_scope
from arpc.errors import UnknownWorkerError
from arpc.ids import WorkerInfo
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import echo, hold


async def whoami() -> WorkerInfo:
    return arpc.get_worker_info()


async def who_called() -> WorkerInfo:
    return current_scope.get().caller


# -- naming a worker


async def test_a_worker_is_called_by_name_id_or_info(trio):
    for to in ("worker2", 2, WorkerInfo("worker2", 2), trio[2].info):
        assert await trio[0].rpc_sync(to, whoami) == trio[2].info
        assert await trio[0].rpc_async(to, whoami) == trio[2].info
        assert [item async for item in trio[0].stream(to, names)] == ["worker2"]


async def names():
    yield arpc.get_worker_info().name


async def test_a_handler_knows_who_called(trio):
    assert await trio[2].rpc_sync("worker1", who_called) == trio[2].info
    assert await trio[1].rpc_sync("worker1", who_called) == trio[1].info, "oneself is a caller like any other"


@pytest.mark.parametrize("to", ["nobody", 17, -1, ""])
async def test_an_unknown_worker_is_an_error_that_names_the_known(trio, to):
    with pytest.raises(UnknownWorkerError, match=r"worker0.*worker1.*worker2"):
        await trio[0].rpc_sync(to, echo)
    with pytest.raises(UnknownWorkerError, match="worker1"):
        await trio[0].rpc_async(to, echo)
    with pytest.raises(LookupError, match="worker1"):
        trio[0].get_worker_info(to)


async def test_an_info_that_does_not_fit_is_unknown(trio):
    wrong = WorkerInfo("worker1", 2)
    with pytest.raises(UnknownWorkerError):
        await trio[0].rpc_sync(wrong, echo)
    with pytest.raises(UnknownWorkerError):
        trio[0].get_worker_info(wrong)


@pytest.mark.parametrize("to", [None, 1.5, ("worker1",), b"worker1", object()])
async def test_something_else_than_a_worker_is_a_type_error(pair, to):
    with pytest.raises(TypeError, match="by name, id or WorkerInfo"):
        pair[0].rpc_async(to, echo)
    with pytest.raises(TypeError, match="by name, id or WorkerInfo"):
        await pair[0].rpc_sync(to, echo)
    if to is not None:  # which asks for the worker itself
        with pytest.raises(TypeError, match="by name, id or WorkerInfo"):
            pair[0].get_worker_info(to)


@pytest.mark.parametrize("to", [["worker1"], {"name": "worker1"}])
async def test_so_is_something_that_cannot_be_looked_up(pair, to):
    with pytest.raises(TypeError):
        await pair[0].rpc_sync(to, echo)
    with pytest.raises(TypeError):
        pair[0].rpc_async(to, echo)


# -- finding a worker


async def test_a_worker_that_joined_later_is_found():
    async with cluster(1, elastic=True) as group:
        with pytest.raises(UnknownWorkerError):
            await group[0].rpc_sync("newcomer", whoami)
        newcomer = await group.add("newcomer")
        assert await group[0].rpc_sync("newcomer", whoami) == newcomer.info
        assert await group[0].rpc_sync(newcomer.id, whoami) == newcomer.info
        assert await newcomer.rpc_sync("worker0", whoami) == group[0].info
        await assert_nothing_left(group)


async def test_a_newcomer_that_calls_first_is_known_from_then_on():
    async with cluster(1, elastic=True) as group:
        newcomer = await group.add("newcomer")
        assert await newcomer.rpc_sync("worker0", whoami) == group[0].info
        assert group[0].get_worker_info("newcomer") == newcomer.info
        assert await group[0].rpc_sync("newcomer", whoami) == newcomer.info
        await assert_nothing_left(group)


async def test_calls_while_a_worker_is_being_looked_for_all_arrive():
    async with cluster(1, elastic=True) as group:
        await group.add("newcomer")
        futures = [group[0].rpc_async("newcomer", echo, args=(number,)) for number in range(10)]
        assert len(group[0].agent.caller.deferred) == 10
        assert await asyncio.gather(*futures) == list(range(10))
        assert not group[0].agent.caller.deferred
        await assert_nothing_left(group)


async def test_a_deferred_call_is_refused_if_it_cannot_be_sent():
    async with cluster(1, elastic=True) as group:
        await group.add("newcomer")
        with pytest.raises(ValueError, match="timeout"):
            await group[0].rpc_async("newcomer", echo, timeout=-1)
        await assert_nothing_left(group)


# -- what features add


class Doubler:
    """Doubles every tensor on its way to a handler, and counts what it sees."""

    key = "doubler"
    occasions = ("always",)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Any], is_stream: bool = False) -> bytes | None:
        self.seen.append(f"request to {peer.name}")
        slots[:] = [2 * slot if isinstance(slot, torch.Tensor) else slot for slot in slots]
        return b"%d" % len(self.seen)

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        self.seen.append(f"request {meta.decode()} of {peer.name}")

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> bytes | None:
        self.seen.append(f"reply {meta.decode()} to {peer.name}")
        return b"done"

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        self.seen.append(f"reply {meta.decode()} of {peer.name}")


async def with_interceptor(group: Any, monkeypatch: pytest.MonkeyPatch, make: Any) -> list[Any]:
    """Puts an interceptor into each worker, as the runtime does when it builds one."""
    added = []
    for worker in group:
        codec = worker.agent.codec
        interceptor = make()
        added.append(interceptor)
        sender = worker.agent.unobserved_sender
        monkeypatch.setattr(codec, "interceptors", (*codec.interceptors, interceptor))
        monkeypatch.setitem(codec._by_key, interceptor.key, interceptor)
        monkeypatch.setattr(sender, "_interceptors", tuple((known, known.occasions) for known in codec.interceptors))
        monkeypatch.setattr(sender, "_occasions", tuple(known.occasions for known in codec.interceptors))
    return added


async def test_an_interceptor_sees_a_call_four_times(pair, monkeypatch):
    near, far = await with_interceptor(pair, monkeypatch, Doubler)
    assert (await pair[0].rpc_sync("worker1", echo, args=(torch.ones(2),))).tolist() == [2, 2]
    assert near.seen == ["request to worker1", "reply done of worker1"]
    assert far.seen == ["request 1 of worker0", "reply 1 to worker0"]


async def test_an_interceptor_that_refuses_fails_the_call_only(pair, monkeypatch):
    class Refuser(Doubler):
        key = "refuser"

        def request_sent(
            self, peer: WorkerInfo, function: Any, slots: list[Any], is_stream: bool = False
        ) -> bytes | None:
            if function is hold:
                raise LookupError("refused here")
            return b"1"

        def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
            if slots:
                raise ValueError("refused there")

        def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> bytes | None:
            return None

    await with_interceptor(pair, monkeypatch, Refuser)
    with pytest.raises(LookupError, match="refused here"):
        await pair[0].rpc_sync("worker1", hold)
    with pytest.raises(ValueError, match="refused there"):
        await pair[0].rpc_sync("worker1", echo, args=(torch.ones(2),))
    assert await pair[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"


async def test_a_reducer_decides_how_its_type_travels(pair, monkeypatch):
    for worker in pair:
        reducers = worker.agent.codec.pickler._reducers
        monkeypatch.setitem(reducers, Opaque, lambda obj, _: (str, (f"opaque {obj.number}",)))
    assert await pair[0].rpc_sync("worker1", echo, args=([Opaque(3)],)) == ["opaque 3"]


class Opaque:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("only the reducer knows how")


# -- what it tells


async def test_statistics_of_everything_it_keeps(pair):
    statistics = pair[0].statistics()
    assert statistics["worker"] == "worker0"
    assert set(statistics["peers"]) == {"worker0", "worker1"}
    assert statistics["connector"]["connections"] == 1
    assert [address.partition(":")[0] for address in statistics["connector"]["listening"]] == ["memory"]
    assert statistics["executor"]["calls_handled"] == 0
    assert pair[1].statistics()["executor"]["calls_handled"] == 1
    assert statistics["deadlines"]["ticks_watched"] >= 0
    assert statistics["rendezvous"]["members"] == 2
    assert statistics["heartbeat"]["peers_given_up"] == 0
