"""remote() on its way: what its answer brings, and what becomes of those who wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import arpc
from arpc.testing import Cluster
from tests.rref import objects
from tests.rref.objects import Counter


@pytest.fixture
def gate():
    objects.gates["gate"] = objects.Gate()
    yield objects.gates["gate"]
    del objects.gates["gate"]


def calls_handled(group: Cluster, worker: int) -> int:
    return group[worker].statistics()["executor"]["calls_handled"]


async def connected(group: Cluster) -> None:
    await arpc.rpc_sync("worker1", objects.nothing)


@pytest.mark.parametrize("value", [None, 7, "text", [1, {"a": 2.5}], (), (1,), ((),), NotImplemented])
async def test_a_value_that_is_wanted_at_once_comes_with_the_answer(group, value):
    await connected(group)
    before = calls_handled(group, 1)
    rref = arpc.remote("worker1", objects.give_back, (value,))  # held, or its delete might be counted too
    assert await rref == value
    assert calls_handled(group, 1) == before + 1


@pytest.mark.parametrize("sizes", [(), (3,), (3, 4)])
async def test_a_value_that_arrives_as_a_tuple_is_that_tuple(group, sizes):
    await connected(group)
    rref = arpc.remote("worker1", objects.shape, sizes)
    assert await rref == sizes
    assert await rref == sizes  # fetched


async def test_a_worker_that_is_known_by_its_id_alone_cannot_be_asked_for_a_value():
    async with arpc.testing.cluster(["a"], elastic=True) as group:
        newcomer = await group.add("b")
        with pytest.raises(arpc.UnknownWorkerError, match=r"id 1 yet: call remote\(\) with its name") as caught:
            group[0].remote(newcomer.info.id, objects.give_back, (1,))
        assert not caught.value.may_have_run
        assert await group[0].remote("b", objects.give_back, (1,)) == 1
        assert await group[0].remote(newcomer.info.id, objects.give_back, (2,)) == 2


async def test_a_tensor_comes_with_the_answer(group):
    await connected(group)
    before = calls_handled(group, 1)
    small = arpc.remote("worker1", torch.ones, (3,))
    assert torch.equal(await small, torch.ones(3))
    large = arpc.remote("worker1", torch.ones, (1 << 20,))
    assert (await large).sum() == 1 << 20
    assert calls_handled(group, 1) == before + 2


async def test_an_rref_in_a_value_that_comes_with_the_answer_is_a_fork_of_its_own(group):
    await connected(group)
    inner = await arpc.remote("worker1", objects.make_local, (5,))
    assert await inner == 5
    assert inner.owner_name() == "worker1"


async def test_creations_that_have_left_before_they_are_awaited_are_fetched(group):
    await connected(group)
    before = calls_handled(group, 1)
    first, second = arpc.remote("worker1", int, (1,)), arpc.remote("worker1", int, (2,))
    assert await asyncio.gather(first.to_here(), second.to_here()) == [1, 2]
    assert calls_handled(group, 1) == before + 4  # the tasks begin in the next turn, when both have left
    assert await first == 1


async def test_a_creation_that_is_awaited_is_sent_with_those_before_it(group):
    await connected(group)
    before = calls_handled(group, 1)
    first, second = arpc.remote("worker1", int, (1,)), arpc.remote("worker1", int, (2,))
    assert await second == 2
    assert calls_handled(group, 1) == before + 2
    assert await first == 1
    assert calls_handled(group, 1) == before + 3


async def test_a_call_does_not_overtake_a_creation_of_the_same_turn(group):
    await connected(group)
    rref = arpc.remote("worker1", Counter)
    # the creation is held until the end of this turn, or until the next call
    assert await asyncio.gather(*[rref.rpc_async().add(1) for _ in range(3)]) == [1, 2, 3]


async def test_a_creation_that_is_cancelled_before_it_was_sent_never_arrives(group):
    await connected(group)
    before = calls_handled(group, 1)
    rref = arpc.remote("worker1", Counter)
    assert rref._get_future().cancel()
    with pytest.raises(arpc.RRefCreationError, match="was cancelled"):
        await rref
    await arpc.rpc_sync("worker1", objects.nothing)
    assert calls_handled(group, 1) <= before + 2  # the call, and perhaps the news that the creation was given up
    assert not any(row.type == "Counter" for row in group[1].rrefs())


async def test_a_value_that_the_answer_does_not_bring_is_fetched(group, gate):
    await connected(group)
    made = []

    async def make_and_wait():
        made.append(arpc.remote("worker1", objects.pass_gate, ("gate", 5)))
        return await made[0]

    waits = asyncio.create_task(make_and_wait())
    await gate.entered.wait()
    creation = made[0]._creation
    assert creation.waiter is not None
    creation.set_result(())
    gate.event.set()
    assert await waits == 5


async def test_another_who_waits_is_not_cancelled_with_who_waits_for_the_answer(group, gate):
    await connected(group)
    made: list[arpc.RRef[int]] = []

    async def make_and_wait() -> int:
        made.append(arpc.remote("worker1", objects.pass_gate, ("gate", 6)))
        return await made[0]

    first = asyncio.ensure_future(make_and_wait())
    await gate.entered.wait()
    second = asyncio.ensure_future(made[0].to_here())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.event.set()
    assert await second == 6


async def test_a_later_fetch_asks_again(group):
    await connected(group)
    rref = arpc.remote("worker1", Counter)
    assert (await rref).total == 0
    await rref.rpc_sync().add(3)
    assert (await rref).total == 3


async def test_an_error_is_fetched_as_always(group):
    await connected(group)
    rref = arpc.remote("worker1", objects.fail, ("no luck",))
    for _ in range(2):
        with pytest.raises(ValueError, match="no luck"):
            await rref
    assert rref.confirmed_by_owner()


async def test_a_value_that_cannot_travel_says_so_and_stays(group):
    await connected(group)
    rref = arpc.remote("worker1", threading.Lock)
    for _ in range(2):
        with pytest.raises(arpc.SerializationError, match="lock"):
            await rref
    assert rref.confirmed_by_owner()
    assert await rref.rpc_sync().acquire() is True


@pytest.mark.parametrize("function", [objects.make_unreadable, objects.make_unreadable_later])
@pytest.mark.parametrize("timeout", [arpc.UNSET, 30])
async def test_a_value_that_cannot_be_built_here_says_so_and_stays(group, function, timeout):
    await connected(group)
    await arpc.remote("worker1", function).rpc_sync().where()  # the function has a number now
    rref = arpc.remote("worker1", function, timeout=timeout)
    for _ in range(2):
        with pytest.raises(arpc.SerializationError, match="gone bad") as caught:
            await rref
        assert caught.value.is_of_answer
        assert rref.failure is None
    assert rref.confirmed_by_owner()
    assert await rref.rpc_sync().where() == "worker1"


async def test_who_waits_for_the_answer_can_be_cancelled_and_the_creation_goes_on(group, gate):
    await connected(group)

    async def make_and_wait(made):
        made.append(arpc.remote("worker1", objects.pass_gate, ("gate", 5)))
        return await made[0]

    made: list[arpc.RRef[int]] = []
    waiting = asyncio.ensure_future(make_and_wait(made))
    await gate.entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not made[0].confirmed_by_owner()
    gate.event.set()
    assert await made[0] == 5
    assert not gate.cancelled.is_set()
    assert made[0].confirmed_by_owner()


async def test_a_creation_of_a_handler_that_is_cancelled_is_cancelled_too(group, gate):
    call = arpc.rpc_async("worker2", objects.make_behind_gate, ("worker1",))
    await gate.entered.wait()
    call.cancel()
    await gate.cancelled.wait()


async def test_who_waits_for_the_answer_hears_of_a_lost_owner(gate):
    options = arpc.RpcOptions(gc_freeze=False, rref_grace=0.2)
    async with arpc.testing.cluster(2, options=options, elastic=True) as group:
        await connected(group)

        async def make_and_wait() -> object:
            return await arpc.remote("worker1", objects.pass_gate, ("gate", 5))

        waiting = asyncio.ensure_future(make_and_wait())
        await gate.entered.wait()
        await group[1].shutdown(graceful=False)
        with pytest.raises(arpc.OwnerLostError):
            await waiting


async def test_the_future_of_a_creation_that_is_just_failing_has_its_error(group, gate):
    await connected(group)
    arpc.remote("worker1", objects.make_number, (1,))
    rref = arpc.remote("worker1", objects.pass_gate, ("gate",))
    await gate.entered.wait()
    rref._creation.set_exception(arpc.RpcTimeoutError("late"))
    group[0].agent.known_peer("worker1").cancel(rref._creation.call_id)
    with pytest.raises(arpc.RpcTimeoutError, match="late"):
        await rref._get_future()
    with pytest.raises(arpc.RRefCreationError, match="timed out"):
        await rref
    await gate.cancelled.wait()


async def test_the_future_of_a_creation_has_no_value_and_can_be_asked_for_late(group):
    rref = arpc.remote("worker1", int, (5,))
    assert await rref == 5
    assert rref._get_future() is rref._get_future()
    assert await rref._get_future() is None


async def test_cancelling_the_future_of_a_creation_cancels_the_function(group, gate):
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5))
    future = rref._get_future()
    await gate.entered.wait()
    assert future.cancel()
    await gate.cancelled.wait()
    with pytest.raises(arpc.RRefCreationError, match="was cancelled"):
        await rref


async def test_cancelling_a_creation_interrupts_who_waits_for_its_answer(group, gate):
    await connected(group)
    made: list[arpc.RRef[int]] = []

    async def make_and_wait() -> int:
        made.append(arpc.remote("worker1", objects.pass_gate, ("gate", 5)))
        return await made[0]

    waiting = asyncio.ensure_future(make_and_wait())
    await gate.entered.wait()
    made[0]._get_future().cancel()
    with pytest.raises(arpc.RRefCreationError, match="was cancelled"):
        await waiting
    await gate.cancelled.wait()


async def test_functions_that_travel_by_value_can_create(group):
    base = 3
    assert await arpc.remote("worker1", lambda number: base + number, (4,)) == 7


class Multiplier(list[int]):
    """A function that cannot be hashed."""

    def __call__(self, number: int) -> int:
        return self[0] * number


async def test_functions_that_cannot_be_hashed_can_create(group):
    for _ in range(2):
        assert await arpc.remote("worker1", Multiplier([3]), (4,)) == 12


async def test_keyword_arguments_of_any_name(group):
    rref = arpc.remote("worker1", objects.keywords, (), {"rref": 1, "made": 2, "number": 3, "self": 4})
    assert await rref == {"rref": 1, "made": 2, "number": 3, "self": 4}


async def test_a_function_the_owner_cannot_find(group):
    with pytest.raises(TypeError, match="should be callable"):
        arpc.remote("worker1", 5)
    with pytest.raises(TypeError, match="args must be a tuple"):
        arpc.remote("worker1", int, "12")
