"""What people do with RRefs."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import threading
from contextlib import aclosing

import pytest
import torch

import arpc
from arpc.agent.scope import current_scope
from arpc.ids import GloballyUniqueId, WorkerInfo
from tests.rref import objects
from tests.rref.conftest import nothing_is_held, until
from tests.rref.objects import Counter, Gate, gates


@pytest.fixture
def gate():
    gates["gate"] = Gate()
    yield gates["gate"]
    del gates["gate"]


# -- the value


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
async def test_a_function_leaves_its_result_on_its_owner(group, owner):
    rref = arpc.remote(owner, torch.add, (torch.ones(2), 1))
    assert rref.is_owner() == (owner == "worker0")
    assert (rref.owner(), rref.owner_name()) == (group[owner].info, owner)
    assert torch.equal(await rref, torch.full((2,), 2.0))
    assert torch.equal(await rref.to_here(timeout=5), torch.full((2,), 2.0))


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
async def test_a_class_makes_an_object_that_stays(group, owner):
    counter = arpc.remote(owner, Counter, kwargs={"total": 5})
    assert await counter.rpc_sync().add(1) == 6
    assert await counter.rpc_async().add_later(2) == 8
    assert await counter.remote().add(3) == 11
    assert await counter._get_type() is Counter


@pytest.mark.parametrize("function", [objects.count_up, objects.count_up_later])
async def test_a_generator_is_a_stream_held_remotely(group, function):
    rref = arpc.remote("worker1", function, (6,))
    async with aclosing(aiter(rref.stream(window=1))) as first:
        assert [await anext(first), await anext(first)] == [0, 1]
    rest = [number async for number in rref.stream()]
    assert rest[-1] == 5
    assert rest[0] in {2, 3}  # one may have been on its way when the first was left


async def test_methods_that_yield_are_streamed(group):
    counter = arpc.remote("worker1", Counter)
    assert [number async for number in counter.stream().numbers(5)] == [0, 1, 2, 3, 4]
    assert [number async for number in counter.stream(window=2).numbers_later(3)] == [0, 1, 2]


async def test_methods_can_be_named_by_themselves(group):
    counter: arpc.RRef[Counter] = arpc.remote("worker1", Counter)
    assert await counter.rpc_async()(Counter.add, 1) == 1
    assert await counter.rpc_sync()(Counter.add_later, 1) == 2
    assert await counter.remote()(Counter.add, 1) == 3
    assert [number async for number in counter.stream()(Counter.numbers, 2)] == [0, 1]


async def test_a_script_module_is_called_where_it_is(group):
    linear = arpc.remote("worker1", objects.make_script_module)
    assert (await linear.rpc_sync().forward(torch.ones(1, 2))).shape == (1, 3)
    assert (await linear.remote().forward(torch.ones(1, 2))).shape == (1, 3)
    assert issubclass(await linear._get_type(), torch.jit.ScriptModule)
    assert isinstance(await arpc.RRef(objects.make_script_module()), torch.jit.ScriptModule)


async def test_proxies_complete_what_is_known_of_the_value(group):
    counter = arpc.remote("worker1", Counter)
    assert {"add", "next"} <= set(dir(counter.rpc_async()))  # an object of a class is one of that class
    following = counter.remote().next()
    assert "add" not in dir(following.rpc_async())
    await following._get_type()
    assert "add" in dir(following.rpc_async())
    assert "add" in dir(arpc.RRef(Counter()).remote())


async def test_an_error_while_creating_is_raised_at_each_use(group):
    rref = arpc.remote("worker1", objects.fail, ("too bad",))
    for use in (rref.to_here, rref.rpc_sync().anything, rref.remote().anything().to_here, rref._get_type):
        with pytest.raises(ValueError, match="too bad") as caught:
            await use()
        assert isinstance(caught.value.__cause__, arpc.RemoteTraceback)


async def test_a_method_that_is_not_there(group):
    counter = arpc.remote("worker1", Counter)
    with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
        await counter.rpc_async().non_exist()


async def test_a_local_rref_is_not_counted_until_it_is_shared(group):
    rref = arpc.RRef([1, 2])
    assert await rref.local_value() == [1, 2]
    assert await rref is await rref.local_value()
    assert group[0].rrefs() == []
    assert await arpc.rpc_sync("worker1", objects.fetch, (rref,)) == [1, 2]
    assert await rref.rpc_sync().index(2) == 1


async def test_local_value_is_for_the_owner(group):
    rref = arpc.remote("worker1", int)
    with pytest.raises(arpc.RRefError, match=r"can't call local_value\(\) on user WorkerInfo\(id=0, name=worker0\)"):
        await rref.local_value()


# -- names


async def test_names_are_those_torch_users_know(group):
    assert repr(arpc.RRef(1)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    rref = arpc.remote("worker1", int)
    assert str(rref) == (
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=2))"
    )


async def test_a_notebook_shows_class_owner_and_state(group):
    class Printer:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def text(self, text: str) -> None:
            self.texts.append(text)

    printer = Printer()
    rref = arpc.remote("worker1", dict)
    await rref.to_here()
    rref._repr_pretty_(printer, False)
    own = arpc.RRef(1)
    own._repr_pretty_(printer, False)
    assert own._repr_html_() == "<code>RRef[int] on &#x27;worker0&#x27; (owned here)</code>"
    await rref.release()
    rref._repr_pretty_(printer, False)
    assert printer.texts == [
        "RRef[dict] on 'worker1' (confirmed)",
        "RRef[int] on 'worker0' (owned here)",
        "RRef[dict] on 'worker1' (released)",
    ]


# -- on the way


async def test_rrefs_travel_in_containers_and_come_back(group):
    box = {"rrefs": [arpc.remote("worker1", int, (1,)), arpc.remote("worker0", int, (2,)), arpc.RRef(3)]}
    assert await arpc.rpc_sync("worker2", objects.fetch_nested, (box,)) == [1, 2, 3]
    back = await arpc.rpc_sync("worker2", objects.give_back, (box,))
    assert [await rref for rref in back["rrefs"]] == [1, 2, 3]
    assert [rref.is_owner() for rref in back["rrefs"]] == [False, True, True]


@pytest.mark.parametrize("owner", ["worker0", "worker1", "worker2"])
@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
async def test_from_anyone_to_anyone(group, owner, to):
    rref = arpc.remote(owner, int, (7,))
    assert await arpc.rpc_sync(to, objects.fetch, (rref,)) == 7
    back = await arpc.rpc_sync(to, objects.give_back, (rref,))
    del rref
    assert await back == 7
    assert back.owner_name() == owner


async def test_from_user_to_user_to_user(group):
    rref = arpc.remote("worker1", int, (7,))
    ways = [("worker2", "worker0", "worker2"), ("worker1", "worker2"), ("worker0", "worker0")]
    assert await asyncio.gather(*(objects.pass_on(rref, *way) for way in ways)) == [7, 7, 7]


async def test_returned_from_functions(group):
    rref = await arpc.rpc_sync("worker1", objects.make_local, (9,))
    assert (rref.owner_name(), await rref) == ("worker1", 9)
    nested = arpc.remote("worker1", objects.make_local, (9,))
    inner = await nested
    assert (inner.owner_name(), await inner) == ("worker1", 9)


async def test_a_handler_starts_once_its_rrefs_are_confirmed(group):
    for _ in range(5):
        rref = arpc.remote("worker1", int)
        assert await arpc.rpc_sync("worker2", objects.is_confirmed, (rref,))
        assert await arpc.remote("worker2", objects.is_confirmed, (rref,))


async def test_every_kind_of_handler_waits_for_its_rrefs(group):
    rref = arpc.remote("worker1", int, (3,))
    assert await arpc.rpc_sync("worker2", arpc.inline(functools.partial(objects.is_confirmed).func), (rref,))
    assert [item async for item in arpc.stream("worker2", stream_of, (rref,))] == [True, 3]


async def stream_of(rref):
    yield rref.confirmed_by_owner()
    yield await rref


async def test_a_value_only_its_argument_keeps(group, gate):
    """The caller lets go at once: the callee's fork must keep the value until it is done with it."""
    future = arpc.rpc_async("worker2", fetch_after_gate, (arpc.remote("worker1", int, (5,)),))
    await gate.entered.wait()
    await until(lambda: not group[0].rref_context.forks.users)
    gate.event.set()
    assert await future == 5


async def fetch_after_gate(rref):
    await objects.pass_gate("gate")
    return await rref


async def test_calls_keep_the_value_they_are_for(group, gate):
    future = arpc.remote("worker1", Holder).rpc_async().wait_at_gate()
    await gate.entered.wait()
    assert len(group[1].rrefs()) == 1
    gate.event.set()
    assert await future == "through"


class Holder:
    async def wait_at_gate(self):
        return await objects.pass_gate("gate", "through")


async def test_plain_functions_use_rrefs_from_their_threads(group):
    assert await arpc.rpc_sync("worker1", objects.add_remotely_from_a_thread, ("worker2", 4)) == 5
    assert await arpc.rpc_sync("worker1", objects.add_remotely_from_a_thread, ("worker1", 4)) == 5


# -- without waiting


async def test_chains_go_out_before_anything_has_come_back(group, gate):
    first = arpc.remote("worker1", objects.pass_gate, ("gate", Counter(1)))
    rref = first
    for _ in range(10):
        rref = rref.remote().next()
    total = rref.remote().add(0)
    other = arpc.remote("worker2", objects.fetch, (total,))
    assert not first.confirmed_by_owner()
    await gate.entered.wait()
    gate.event.set()
    assert await other == 11
    assert await total == 11


async def test_a_small_call_may_overtake_the_creation_it_needs(group):
    """The creation carries a large tensor, the call of its method does not, and arrives first."""
    large = torch.ones(1 << 20)
    total = arpc.remote("worker1", torch.mul, (large, 2)).remote().sum()
    assert await total == large.numel() * 2


async def test_a_value_can_be_fetched_before_it_is_there(group, gate):
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5))
    fetches = [
        asyncio.ensure_future(arpc.rpc_sync("worker2", objects.fetch, (rref,))),
        asyncio.ensure_future(rref.to_here()),
    ]
    await gate.entered.wait()
    gate.event.set()
    assert await asyncio.gather(*fetches) == [5, 5]


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
async def test_waiting_for_a_value_can_be_cancelled_and_timed_out(group, gate, owner):
    rref = arpc.remote(owner, objects.pass_gate, ("gate", 5))
    with pytest.raises(arpc.RpcTimeoutError):
        await rref.to_here(timeout=0.05)
    fetch = asyncio.ensure_future(rref.to_here())
    await gate.entered.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    gate.event.set()
    assert await rref == 5


async def test_a_coroutine_that_is_closed_gives_up_its_fetch(group, gate):
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5))
    await gate.entered.wait()
    owner = group[0].agent.known_peer("worker1")
    fetch = rref.to_here()
    fetch.send(None)
    assert owner.calls_in_flight == 2, "the creation and the fetch"
    fetch.close()
    assert owner.calls_in_flight == 1
    gate.event.set()
    assert await rref == 5


async def test_a_creation_that_times_out(group, gate):
    await arpc.rpc_sync("worker1", objects.nothing)  # so that there is a connection
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5), timeout=0.5)
    await gate.entered.wait()
    fetch = asyncio.ensure_future(rref.to_here())  # is interrupted, though its own timeout is far
    with pytest.raises(arpc.RpcTimeoutError):
        await rref._get_future()
    with pytest.raises(arpc.RRefCreationError):  # whoever of the two notices first
        await fetch
    with pytest.raises(arpc.RRefCreationError, match="it is possible that RRef"):
        await rref
    with pytest.raises(arpc.RRefCreationError, match="RRef creation via remote"):
        await arpc.rpc_sync("worker2", objects.fetch, (rref,))
    await gate.cancelled.wait()


async def test_users_elsewhere_of_a_creation_that_times_out(group, gate):
    await arpc.rpc_sync("worker1", objects.nothing)  # so that there is a connection
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 5), timeout=0.2)
    with pytest.raises(arpc.RRefCreationError, match="was cancelled, or ran past its deadline"):
        await arpc.rpc_sync("worker2", objects.fetch, (rref,))


# -- what does not work


async def test_pickling_outside_of_a_call(group):
    rref = arpc.remote("worker1", int)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(arpc.SerializationError, match="can be pickled as part of a call only"):
            attempt(rref)


async def test_arguments_that_cannot_travel(group):
    with pytest.raises(arpc.SerializationError, match="argument 'total' of Counter"):
        arpc.remote("worker1", Counter, (threading.Lock(), arpc.RRef(1)))
    with pytest.raises(TypeError, match="function should be callable"):
        arpc.remote("worker1", 5)
    assert all(not worker.rrefs() for worker in group)


async def test_an_rref_of_another_worker_of_this_process(group):
    theirs = group[1].remote("worker2", int)
    with pytest.raises(
        arpc.SerializationError, match="belongs to worker 'worker1' and cannot be sent by worker 'worker0'"
    ):
        await arpc.rpc_sync("worker2", objects.fetch, (theirs,))


async def test_no_worker_no_rref():
    current_scope.set(None)
    with pytest.raises(arpc.NotInitializedError, match="belongs to a worker"):
        arpc.RRef(1)


# -- the end of it


async def test_release_is_known_to_the_owner_when_it_returns(group):
    rref = arpc.remote("worker1", int)
    async with rref:
        assert await rref == 0
        assert len(group[1].rrefs()) == 1
    assert group[1].rrefs() == []
    for use in (rref.to_here, rref.rpc_sync().bit_length):
        with pytest.raises(arpc.RRefError, match="has been released"):
            await use()
    with pytest.raises(arpc.RRefError, match="has been released"):
        await arpc.rpc_sync("worker2", objects.fetch, (rref,))
    await rref.release()


async def test_who_waits_for_a_value_that_is_released_before_it_is_there_hears_of_it(group):
    rref = arpc.remote("worker0", objects.make_number, (7,))
    waits = asyncio.create_task(rref.to_here())
    await asyncio.sleep(0)  # it waits, and the creation has not come yet
    assert not group[0].rref_context.forks.owned[rref._rref].is_ready
    await rref.release()
    with pytest.raises(arpc.RRefError, match="released before its value was there"):
        await waits


async def test_who_waits_for_a_value_hears_of_it_when_its_last_user_ends_after_the_release(group):
    rref = arpc.remote("worker0", objects.make_number, (7,))
    forks, fork = group[0].rref_context.forks, group[0].rref_context.ids.next_number()
    forks.fork_offered(rref._rref, fork, group[1].info, None)
    waiting = [asyncio.create_task(rref.to_here()), asyncio.create_task(rref.local_value())]
    await asyncio.sleep(0)  # they wait, and the creation has not come yet
    await rref.release()
    assert not forks.owned[rref._rref].is_ready
    forks.user_deleted(rref._rref, fork)
    assert rref._rref not in forks.owned
    for waits in waiting:
        with pytest.raises(arpc.RRefError, match="released before its value was there"):
            await asyncio.wait_for(waits, 10)


async def test_who_waits_for_a_value_hears_that_the_only_one_who_held_it_and_was_to_create_it_is_lost(group):
    context, gone = group[0].rref_context, WorkerInfo("gone", 77)
    rref, fork = (GloballyUniqueId(77, number).to_int() for number in range(2))
    context.forks.fork_requested(rref, fork, gone, is_created=False)
    waits = asyncio.create_task(context.forks.owned[rref].get())
    await asyncio.sleep(0)
    context.peer_lost(gone, "it died")
    assert rref not in context.forks.owned
    with pytest.raises(arpc.RRefCreationError, match="the worker that was to create it is lost"):
        await asyncio.wait_for(waits, 10)


async def test_release_on_the_owner(group):
    rref = arpc.remote("worker0", int)
    assert await rref == 0
    await rref.release()
    await nothing_is_held(group)
    with pytest.raises(arpc.RRefError, match="has been released"):
        await rref.local_value()
