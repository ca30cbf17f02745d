"""Workers that a pass leaves with nothing of a context: they say so in their answer, and need not be told its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from torch import Tensor

import arpc
from arpc.autograd.contexts import AutogradContext
from arpc.autograd.engine import run_policy
from arpc.autograd.passes.messages import Parcel, PassHeading
from arpc.testing import Cluster
from arpc.wire.messages import AutogradRelease
from tests.autograd import functions
from tests.autograd.conftest import until
from tests.autograd.passes.test_backward_pass import Postponed, weigh, weight
from tests.autograd.test_backward import leaf

gate = asyncio.Event()
"""What handlers wait for. Made anew for each test, as is the next."""
waiting = asyncio.Event()
"""Set by those who do."""
tasks: list[asyncio.Task[Tensor]] = []


async def triple(x: Tensor) -> Tensor:
    return 3 * x


async def triple_by_way_of(x: Tensor, further: str) -> Tensor:
    return 3 * await arpc.rpc_sync(further, triple, (x,))


async def triple_late(x: Tensor) -> Tensor:
    waiting.set()
    await gate.wait()
    return 3 * x


async def triple_late_by_way_of(x: Tensor, further: str) -> Tensor:
    waiting.set()
    await gate.wait()
    return await arpc.rpc_sync(further, triple, (x,))


async def triple_in_turns(x: Tensor) -> AsyncIterator[Tensor]:
    yield 3 * x
    await gate.wait()
    yield 3 * weight


async def triple_and_go_on(x: Tensor, further: str) -> Tensor:
    async def go_on() -> Tensor:
        await gate.wait()
        return await arpc.rpc_sync(further, triple, (torch.ones(3, requires_grad=True),))

    tasks.append(asyncio.create_task(go_on()))
    return 3 * x


async def run_a_pass_of_the_caller(ctx_id: int, caller: str) -> list[float]:
    x = leaf()
    await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync(caller, triple, (x,))).sum()])
    return arpc.autograd.get_gradients(ctx_id)[x].tolist()


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    """However slow the machine is, what takes next to nothing is not taken for long."""
    monkeypatch.setattr(run_policy, "SHORT_S", 60.0)
    for name in ("gate", "waiting"):
        monkeypatch.setitem(globals(), name, asyncio.Event())
    tasks.clear()


@pytest.fixture
def released(group, monkeypatch) -> list[tuple[str, int]]:
    """Who was told the end of a context, by whom: perhaps more than once, on a busy machine."""
    told: list[tuple[str, int]] = []
    for worker in group:
        tell = worker.autograd.lifetimes._send_release

        def tell_noted(to: int, context_id: int, name: str = worker.name, tell=tell):
            told.append((name, to))
            return tell(to, context_id)

        monkeypatch.setattr(worker.autograd.lifetimes, "_send_release", tell_noted)
    return told


def knows(group: Cluster, worker: int, ctx_id: int) -> bool:
    return ctx_id in group[worker].autograd.container.contexts


async def test_who_has_nothing_more_to_do_with_a_context_leaves_it_with_the_answer(group, released):
    x, y = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", functions.mul, (x, y))
        assert knows(group, 1, ctx_id)
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == y.tolist()
        assert not knows(group, 1, ctx_id)
        assert group[1].autograd.gradients(ctx_id) == {}
    assert released == []


async def test_so_do_those_who_only_pass_gradients_on(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = await arpc.rpc_sync("worker1", triple_by_way_of, (x, "worker2"))
        await arpc.autograd.backward(ctx_id, [result.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [9.0] * 3
        assert not knows(group, 1, ctx_id)
        assert not knows(group, 2, ctx_id)
    assert released == []


async def test_and_all_of_a_fan_out(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        results = await asyncio.gather(*(arpc.rpc_async(worker, triple, (x,)) for worker in ("worker1", "worker2")))
        await arpc.autograd.backward(ctx_id, [sum(results).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3
        assert not knows(group, 1, ctx_id)
        assert not knows(group, 2, ctx_id)
    assert released == []


async def test_who_has_gradients_stays(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", weigh, (x,))).sum()])
        assert len(group[1].autograd.gradients(ctx_id)) == 1
    assert set(released) == {("worker0", 1)}


async def test_who_has_a_graph_stays(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        first = await arpc.rpc_sync("worker1", triple, (x,))
        second = await arpc.rpc_sync("worker1", triple, (x,))
        await arpc.autograd.backward(ctx_id, [first.sum()])
        assert knows(group, 1, ctx_id)
        await arpc.autograd.backward(ctx_id, [second.sum()], retain_graph=True)
        assert knows(group, 1, ctx_id)
        await arpc.autograd.backward(ctx_id, [second.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [9.0] * 3
        assert not knows(group, 1, ctx_id)
    assert released == []


async def test_a_context_that_was_left_can_be_used_again(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        for turn in range(1, 4):
            await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", triple, (x,))).sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0 * turn] * 3
            assert not knows(group, 1, ctx_id)
        await arpc.rpc_sync("worker1", triple, (x,))
        assert knows(group, 1, ctx_id)
    assert set(released) == {("worker0", 1)}


async def test_nobody_leaves_while_calls_are_under_way(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        late = arpc.rpc_async("worker1", triple_late, (x,))
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", triple, (x,))).sum()])
        assert knows(group, 1, ctx_id)
        gate.set()
        await arpc.autograd.backward(ctx_id, [(await late).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3


async def test_nor_while_a_stream_is(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        stream = arpc.stream("worker1", triple_in_turns, (x,))
        results = [await anext(stream), await arpc.rpc_sync("worker1", triple, (x,))]
        await arpc.autograd.backward(ctx_id, [sum(results).sum()])
        assert knows(group, 1, ctx_id)
        gate.set()
        await arpc.autograd.backward(ctx_id, [(await anext(stream)).sum()])
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [3.0] * 3
        await stream.aclose()


async def count_and_triple() -> AsyncIterator[Tensor | int]:
    yield 0
    await gate.wait()
    yield 3 * weight


async def test_nor_while_a_stream_is_that_overtakes_the_pass(group, monkeypatch):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        first = await arpc.rpc_sync("worker1", triple, (x,))
        with monkeypatch.context() as patched:
            postponed = Postponed(group[0], patched)
            passing = asyncio.create_task(arpc.autograd.backward(ctx_id, [first.sum()]))
            await postponed.has_sent.wait()
        stream = arpc.stream("worker1", count_and_triple)
        assert await anext(stream) == 0
        await postponed.let_go()
        await passing
        assert knows(group, 1, ctx_id)
        gate.set()
        await arpc.autograd.backward(ctx_id, [(await anext(stream)).sum()])
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [3.0] * 3
        await stream.aclose()


@pytest.mark.parametrize("further", [(), ("worker2",)], ids=len)
async def test_nor_who_has_to_answer_a_call_that_overtakes_the_pass(group, monkeypatch, further):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        first = await arpc.rpc_sync("worker1", triple, (x,))
        with monkeypatch.context() as patched:
            postponed = Postponed(group[0], patched)
            passing = asyncio.create_task(arpc.autograd.backward(ctx_id, [first.sum()]))
            await postponed.has_sent.wait()
        late = arpc.rpc_async("worker1", triple_late_by_way_of if further else triple_late, (x, *further))
        await waiting.wait()
        await postponed.let_go()
        await passing
        assert knows(group, 1, ctx_id)
        gate.set()
        second = await late
        assert 1 in group[0].autograd.container.find(ctx_id).known_workers
        await arpc.autograd.backward(ctx_id, [second.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3


async def test_what_outlives_its_handler_is_not_recorded_after_that(group, released):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        result = await arpc.rpc_sync("worker1", triple_and_go_on, (x, "worker2"))
        await arpc.autograd.backward(ctx_id, [result.sum()])
        assert not knows(group, 1, ctx_id)
        gate.set()
        assert (await tasks[0]).grad_fn is None
        assert not knows(group, 1, ctx_id)
        assert not knows(group, 2, ctx_id)
    assert released == []


async def test_who_made_the_context_does_not_leave_it(group):
    async with arpc.autograd.context() as ctx_id:
        gradients = await arpc.rpc_sync("worker1", run_a_pass_of_the_caller, (ctx_id, "worker0"))
        assert gradients == [3.0] * 3
        assert knows(group, 0, ctx_id)
        assert knows(group, 1, ctx_id)


async def test_a_parcel_that_comes_after_that_in_the_same_pass_denies_nothing(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", triple, (x,))).sum()])
        last_pass = group[0].autograd.container.find(ctx_id).last_pass
        asking = Parcel(is_first=True, asks=(1, 1 << 60))
        assert group[1].autograd._take(0, asking, PassHeading(ctx_id, last_pass, False, 99)) is None
        assert group[1].autograd._take(0, asking, PassHeading(ctx_id, last_pass + 1, False, 99)) is not None
        assert (
            group[1].autograd._take(2, asking, PassHeading(ctx_id, last_pass, False, 99)) is not None
        )  # which has not heard that
        await arpc.rpc_sync("worker1", triple, (x,))  # which it knows the context by again
        assert group[1].autograd._take(0, asking, PassHeading(ctx_id, last_pass, False, 99)) is None
        assert knows(group, 1, ctx_id)


async def test_news_of_a_failure_find_whoever_enters_it_again(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", triple, (x,))).sum()])
        last_pass = group[0].autograd.container.find(ctx_id).last_pass
        await group[1].autograd._on_abort(ctx_id, last_pass)
        await arpc.rpc_sync("worker1", triple, (x,))
        assert group[1].autograd.container.find(ctx_id).aborted_passes == {last_pass}


async def test_the_end_of_a_context_is_told_in_vain_to_who_has_left_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker1", triple, (x,))).sum()])
        assert group[1].autograd.container.has_left(ctx_id)
        await group[0].agent.request(AutogradRelease, "worker1", (ctx_id, 0))
        assert not group[1].autograd.container.has_left(ctx_id)
        await arpc.rpc_sync("worker1", triple, (x,))
        assert not knows(group, 1, ctx_id)


async def weigh_alone() -> Tensor:
    return (weight * weight).sum()


async def test_nobody_is_taken_to_have_left_who_was_asked_for_another_pass_meanwhile(group):
    x = leaf()
    rref = arpc.remote("worker1", weigh_alone)
    await rref
    async with arpc.autograd.context() as ctx_id:
        result = await arpc.rpc_sync("worker1", triple, (x,))
        await asyncio.gather(arpc.autograd.backward(ctx_id, [result.sum()]), rref.backward(ctx_id))
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3.0] * 3
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [4.0] * 3
        assert 1 in group[0].autograd.container.find(ctx_id).known_workers


async def test_one_from_an_rref_keeps_nobody_from_leaving_when_it_is_over(group, released):
    x = leaf()
    rref = arpc.remote("worker1", weigh_alone)
    await rref
    async with arpc.autograd.context() as ctx_id:
        await rref.backward(ctx_id, retain_graph=True)
        await arpc.autograd.backward(ctx_id, [(await arpc.rpc_sync("worker2", triple, (x,))).sum()])
        assert knows(group, 1, ctx_id)
        assert not knows(group, 2, ctx_id)
    assert set(released) == {("worker0", 1)}


# -- with the answer to a call


async def count(x: Tensor) -> int:
    return x.numel()


async def count_late(x: Tensor) -> int:
    waiting.set()
    await gate.wait()
    return x.numel()


async def count_by_way_of(x: Tensor, further: str) -> int:
    return await arpc.rpc_sync(further, count, (x,))


async def count_and_go_on(x: Tensor, further: str) -> int:
    async def go_on() -> Tensor:
        await gate.wait()
        return await arpc.rpc_sync(further, triple, (weight,))

    tasks.append(asyncio.create_task(go_on()))
    return x.numel()


async def result_of_task() -> Tensor:
    return await tasks[0]


async def test_who_has_recorded_nothing_leaves_with_the_answer_to_a_call(group, released):
    async with arpc.autograd.context() as ctx_id:
        for _ in range(3):
            assert await arpc.rpc_sync("worker1", count, (torch.ones(3),)) == 3
            assert not knows(group, 1, ctx_id)
            assert group[1].autograd.gradients(ctx_id) == {}
        assert not group[0].autograd.container.find(ctx_id).known_workers
    assert released == []


async def test_so_does_who_answers_several_calls_at_a_time(group, released):
    async with arpc.autograd.context() as ctx_id:
        late = arpc.rpc_async("worker1", count_late, (torch.ones(3),))
        await waiting.wait()
        assert await arpc.rpc_sync("worker1", count, (torch.ones(2),)) == 2
        assert knows(group, 1, ctx_id)
        gate.set()
        assert await late == 3
        assert not knows(group, 1, ctx_id)
        assert not group[0].autograd.container.find(ctx_id).known_workers
    assert released == []


async def test_who_was_sent_tensors_that_require_grad_stays(group, released):
    async with arpc.autograd.context() as ctx_id:
        assert await arpc.rpc_sync("worker1", count, (leaf(),)) == 3
        assert knows(group, 1, ctx_id)
    assert set(released) == {("worker0", 1)}


async def test_who_has_called_on_stays(group, released):
    async with arpc.autograd.context() as ctx_id:
        assert await arpc.rpc_sync("worker1", count_by_way_of, (torch.ones(3), "worker2")) == 3
        assert knows(group, 1, ctx_id)
        assert not knows(group, 2, ctx_id)
    assert set(released) == {("worker0", 1)}


async def test_who_left_with_an_answer_is_told_of_the_end_if_a_call_has_brought_it_back(group, released):
    async with arpc.autograd.context() as ctx_id:
        assert await arpc.rpc_sync("worker1", count, (torch.ones(3),)) == 3
        late = arpc.rpc_async("worker1", count_late, (torch.ones(3),))
        await waiting.wait()
        assert knows(group, 1, ctx_id)
    assert set(released) == {("worker0", 1)}
    assert not knows(group, 1, ctx_id)
    gate.set()
    await late


def test_answers_that_overtake_each_other_do_not_hide_who_is_there():
    context = AutogradContext(0)
    context.known_workers[1] = 3
    context.worker_left(1, 2)  # the last to leave, heard first: one call has come while nobody was there
    assert context.known_workers == {1: 1}
    context.worker_left(1, 1)
    assert context.known_workers == {}


async def test_a_task_that_outlives_its_handler_brings_its_worker_back(group, released):
    async with arpc.autograd.context() as ctx_id:
        assert await arpc.rpc_sync("worker1", count_and_go_on, (torch.ones(3), "worker2")) == 3
        assert not knows(group, 1, ctx_id)
        gate.set()
        result = await arpc.rpc_sync("worker1", result_of_task)
        await arpc.autograd.backward(ctx_id, [result.sum()])
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [3.0] * 3
    assert not knows(group, 1, ctx_id)
    assert not knows(group, 2, ctx_id)


async def test_and_is_told_of_the_end_even_if_that_has_come_before(group):
    async with arpc.autograd.context() as ctx_id:
        assert await arpc.rpc_sync("worker1", count_and_go_on, (torch.ones(3), "worker2")) == 3
    gate.set()
    await tasks[0]
    await until(lambda: not knows(group, 1, ctx_id) and not knows(group, 2, ctx_id))
    assert not group[1].autograd.container.callable


async def test_a_worker_that_keeps_unused_contexts_is_told_of_the_end(group, released):
    group[1].autograd.container.leaves_unused = False  # as the drop-in does
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", triple, (torch.ones(3),))
        assert knows(group, 1, ctx_id)
        assert 1 in group[0].autograd.container.find(ctx_id).known_workers
    await until(lambda: not knows(group, 1, ctx_id))
    assert set(released) == {("worker0", 1)}
