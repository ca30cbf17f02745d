"""Creations at the owner: what is kept of them, and who is told what went wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType

import pytest
import torch

import arpc
from arpc.agent.client.pending_calls import Call
from arpc.errors import ProtocolError
from arpc.rref.service import KEY, pack_label, unpack_label
from arpc.rref.states import OwnerState
from arpc.testing import Cluster
from arpc.transport.sockets import UnixTransport
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType, RRefCreationFailed
from arpc.wire.metadata import encode_metadata
from tests.rref import objects
from tests.rref.conftest import OPTIONS, cluster, nothing_is_held, until
from tests.rref.objects import Counter, Rotten

# a coroutine and a thread, with and without tensors beside the arguments, and with keyword arguments
ROTTEN = [
    pytest.param(objects.give_back_later, (Rotten(),), {}, id="coroutine"),
    pytest.param(objects.give_back, (Rotten(),), {}, id="thread"),
    pytest.param(objects.give_back_later, (torch.ones(3), Rotten()), {}, id="tensor-beside"),
    pytest.param(objects.give_back_later, (1,), {"rotten": Rotten()}, id="keyword"),
    pytest.param(lambda rotten: rotten, (Rotten(),), {}, id="function-by-value"),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), ROTTEN)
async def test_arguments_that_cannot_be_unpacked_are_told_to_all_who_use_the_value(group, function, args, kwargs):
    rref = arpc.remote("worker1", function, args, kwargs)
    early = rref.rpc_async().add(1)  # under way before anybody knows
    elsewhere = arpc.rpc_async("worker2", objects.call_add, (rref,))
    for use in (early, elsewhere, rref.to_here()):
        with pytest.raises(arpc.SerializationError, match="gone bad"):
            await use
    with pytest.raises(arpc.SerializationError, match="gone bad"):
        await rref.rpc_sync().add(1)
    with pytest.raises(arpc.SerializationError, match="gone bad"):
        await rref._get_future()
    del early, elsewhere, use


async def test_a_function_that_is_not_there_is_told_to_all_who_use_the_value(group, monkeypatch):
    module = ModuleType("only_here")
    exec("async def make(): pass", vars(module))  # whose module the owner will not find
    monkeypatch.setitem(sys.modules, "only_here", module)
    await arpc.rpc_sync("worker1", objects.nothing)
    rref = arpc.remote("worker1", module.make)
    monkeypatch.delitem(sys.modules, "only_here")  # the frame has not left yet
    early = rref.rpc_async().add(1)
    for use in (early, rref.to_here()):
        with pytest.raises(arpc.SerializationError, match="not on worker"):
            await use
    del early, use


@pytest.mark.parametrize(
    ("function", "args", "error"),
    [
        pytest.param(objects.fail, ("no luck",), ValueError, id="raised"),
        pytest.param(objects.make_number, (), TypeError, id="too-few-arguments"),
        pytest.param(objects.make_number, (1, 2), TypeError, id="too-many-arguments"),
    ],
)
async def test_an_error_of_the_function_is_no_error_of_the_creation(group, function, args, error):
    for _ in range(2):  # the first one defines the function
        rref = arpc.remote("worker1", function, args)
        assert await rref._get_future() is None
        with pytest.raises(error):
            await rref.rpc_sync().add(1)
        with pytest.raises(error):
            await rref.remote().add(1)


async def test_functions_without_a_number_have_a_name(group):
    rref = arpc.remote("worker1", lambda: 5)
    assert await rref == 5
    (row,) = group[1].rrefs()
    assert "<lambda> for worker worker0" in row.made


async def test_a_creation_with_a_number_that_was_used_before_is_refused(group: Cluster):
    assert await arpc.remote("worker1", objects.give_back, (1,)) == 1
    group[0].rref_context.numbers.pop("worker1")
    rref = arpc.remote("worker1", objects.give_back, (2,))
    with pytest.raises(arpc.RRefError, match="'worker0' has used before"):
        await rref
    del rref
    assert await arpc.remote("worker1", objects.give_back, (3,)) == 3
    await nothing_is_held(group)


async def test_creations_with_arguments_by_name_make_the_same(group):
    by_place = arpc.remote("worker1", objects.make_number, (5,))
    by_name = arpc.remote("worker1", objects.make_number, (), {"number": 5})
    assert await by_place == await by_name == 5
    assert [(row.state, row.made, row.forks) for row in group[1].rrefs()] == [
        ("ready", "make_number for worker worker0", {"worker0": 1})
    ] * 2
    assert {str(row.made) for row in group[0].rrefs()} == {"make_number"}


@pytest.mark.parametrize(
    "options",
    [OPTIONS.replace(max_calls_in_flight=8), OPTIONS.replace(rref_creation_stacks=True)],
    ids=["calls-are-counted", "stacks-are-told"],
)
async def test_options_that_look_at_calls_or_their_origin_change_no_value(options):
    async with cluster(2, options=options):
        for number in range(3):
            rref = arpc.remote("worker1", objects.make_number, (number,))
            assert await rref == number
            assert await rref.remote().bit_length() == number.bit_length()


async def test_a_creation_that_waits_goes_on_like_any_handler(group):
    objects.gates["gate"] = gate = objects.Gate()
    await arpc.remote("worker1", objects.make_number, (0,))
    rref = arpc.remote("worker1", objects.pass_gate, ("gate", 7))
    waiting = asyncio.ensure_future(rref.to_here())
    await gate.entered.wait()
    (row,) = [row for row in group[1].rrefs() if row.state == "creating"]
    assert row.type == "not there yet"
    gate.event.set()
    assert await waiting == 7
    del objects.gates["gate"]


async def test_a_creation_that_waits_can_run_out_of_time(group):
    objects.gates["gate"] = gate = objects.Gate()
    await arpc.remote("worker1", objects.make_number, (0,))  # so that there is a connection
    rref = arpc.remote("worker1", objects.pass_gate, ("gate",), timeout=0.5)
    await gate.entered.wait()
    # whoever is first to notice
    with pytest.raises(arpc.RRefCreationError, match=r"timed out|ran past its deadline"):
        await rref
    await until(lambda: not any(link.running for link in group[1].agent.connector.links))
    del objects.gates["gate"]


async def test_a_creation_that_was_given_up_before_it_came_is_refused(group: Cluster):
    await arpc.remote("worker1", objects.make_number, (0,))
    context = group[1].rref_context
    rref, fork = group[0].rref_context.ids.next_number(), group[0].rref_context.ids.next_number()
    peer = group[0].agent.known_peer("worker1")
    numbers = group[0].rref_context.numbers["worker1"]
    number, oldest = numbers.take()
    await group[0].agent.request(RRefCreationFailed, "worker1", (0, oldest, [rref, fork, number, "it was cut"]))
    label = pack_label(number, oldest, rref, fork, "")
    future = group[0].agent.loop.create_future()
    call = Call(
        peer, future, objects.make_number, (1,), timeout=5.0, type=int(MessageType.RREF_CREATE), metadata={KEY: label}
    )
    group[0].agent.sender.send(call)
    with pytest.raises(arpc.RRefError, match="given up by worker 'worker0'"):
        await future
    numbers.settle(number)
    context.forks.user_deleted(rref, fork)
    assert rref not in context.forks.owned


async def test_a_malformed_label_is_refused_and_nothing_else_happens(group, caplog):
    assert await arpc.remote("worker1", objects.make_number, (1,)) == 1
    peer = group[0].agent.known_peer("worker1")
    number = peer.function_ids[objects.make_number]
    for metadata in ({}, {KEY: b""}, {KEY: pack_label(1, 1, 1, 1, "")[:-1]}):
        peer.connection.send(frame(MessageType.RREF_CREATE, 0, 1, number, 0, b"", encode_metadata(metadata)))
    assert await arpc.remote("worker1", objects.make_number, (2,)) == 2
    assert caplog.text.count("malformed request of worker worker0") == 3


async def test_methods_of_a_value_can_be_chained(group):
    rref = arpc.remote("worker1", Counter, (0,))
    for _ in range(5):
        rref = rref.remote().next()
    assert (await rref).total == 5
    await until(lambda: len(group[1].rrefs()) == 1)


# -- creations in threads, whose answers the threads send


@pytest.fixture
async def pair() -> AsyncIterator[Cluster]:
    """Two workers with a socket between them, which hold no RRef any more when the test is over."""
    options = OPTIONS.replace(listen=("unix://",), shared_memory_bytes=0)
    async with cluster(2, options=options, transports={"unix": UnixTransport()}) as workers:
        yield workers
        objects.gate.set()
        await nothing_is_held(workers)
        assert all(not worker.leaked_rrefs for worker in workers)


def answered_by_threads(pair: Cluster) -> int:
    return pair[1].agent.dispatcher.threads.jobs_answered


def is_ready(pair: Cluster) -> bool:
    (owned,) = pair[1].rref_context.forks.owned.values()  # not `Worker.rrefs`, which lets the loop look
    return owned.state is OwnerState.READY


async def test_a_thread_answers_a_creation_with_the_value(pair):
    before = answered_by_threads(pair)
    rref = arpc.remote("worker1", Counter, (4,))
    assert (await rref).total == 4
    assert answered_by_threads(pair) == before + 1
    assert await rref.rpc_sync().add(1) == 5  # the value is there for the next call, whether the loop has looked or not
    assert [(row.state, row.type) for row in pair[1].rrefs()] == [("ready", "Counter")]


async def test_the_loop_keeps_the_value_of_a_thread_although_nobody_asks(pair):
    rref = arpc.remote("worker1", Counter, (4,))
    await rref._get_future()
    await until(lambda: is_ready(pair))
    assert pair[1].rrefs()[0].type == "Counter"


async def test_a_value_that_nobody_holds_any_more_is_dropped_when_its_thread_has_ended(pair):
    objects.gate.clear()
    rref = arpc.remote("worker1", objects.make_at_the_gate, (1,))
    await until(lambda: len(pair[1].rrefs()) == 1)
    del rref
    objects.gate.set()
    await until(lambda: pair[1].rref_context.forks.is_idle)


@pytest.mark.parametrize("is_late", [False, True], ids=["soon", "late"])
async def test_calls_that_wait_for_a_value_of_a_thread_go_on_when_it_ends(pair, is_late):
    objects.gate.clear()
    rref = arpc.remote("worker1", objects.make_at_the_gate, (1,))
    early = [rref.rpc_async().add(1), asyncio.ensure_future(rref.to_here(timeout=20))]
    await until(lambda: any(value.is_awaited for value in pair[1].rref_context.forks.owned.values()))
    if is_late:
        await until(lambda: not pair[1].rref_context.service.will_look)
    objects.gate.set()
    assert await early[0] == 2
    assert (await early[1]).total in {1, 2}


async def test_a_creation_that_was_cancelled_in_its_thread_has_no_value(pair):
    objects.gate.clear()
    rref = arpc.remote("worker1", objects.make_at_the_gate, (1,))
    await until(lambda: len(pair[1].rrefs()) == 1)
    assert rref._get_future().cancel()
    await until(lambda: pair[1].rrefs()[0].type == "raised RRefCreationError")
    objects.gate.set()
    with pytest.raises(arpc.RRefCreationError, match="cancelled"):
        await rref
    await until(lambda: pair[1].agent.dispatcher.threads.is_asleep)
    assert pair[1].rrefs()[0].type == "raised RRefCreationError"


@pytest.mark.parametrize("use", [objects.total_here, objects.local_total])
async def test_a_handle_on_the_owner_has_the_value_of_a_thread_before_the_loop_looks(pair, use):
    creations = pair[1].rref_context.service
    creations._look = lambda: None  # when its time has come, nothing happens
    rref = arpc.remote("worker1", Counter, (4,))
    await rref._get_future()
    assert not is_ready(pair)
    assert await arpc.rpc_sync("worker1", use, (rref,), timeout=20) == 4
    assert is_ready(pair)


async def test_a_value_is_said_to_be_awaited_before_the_loop_looks_for_it(pair, monkeypatch):
    """So a thread that ends right after the look wakes the loop."""
    objects.gate.clear()
    creations = pair[1].rref_context.service
    creations._look = lambda: None
    rref = arpc.remote("worker1", objects.make_at_the_gate, (1,))
    await until(lambda: len(pair[1].rrefs()) == 1)
    (value,) = pair[1].rref_context.forks.owned.values()
    seen = []

    def keep_answered() -> None:
        seen.append(value.is_awaited)
        type(creations).keep_answered(creations)

    monkeypatch.setattr(creations, "keep_answered", keep_answered)
    early = rref.rpc_async().add(1)
    await until(lambda: bool(seen))
    assert seen[0]
    objects.gate.set()
    assert await early == 2


async def test_a_report_that_a_thread_asks_for_leaves_values_to_the_loop(pair):
    creations = pair[1].rref_context.service
    creations._look = lambda: None
    rref = arpc.remote("worker1", Counter, (4,))
    await rref._get_future()
    assert [row.role for row in await asyncio.to_thread(pair[1].rrefs)] == ["owner"]
    assert not is_ready(pair)
    assert [row.state for row in pair[1].rrefs()] == ["ready"]


async def test_the_result_of_a_creation_that_was_cancelled_in_its_thread_is_not_pickled(pair):
    objects.gate.clear()
    objects.pickled.clear()
    rref = arpc.remote("worker1", objects.make_telling_at_the_gate)
    await until(lambda: len(pair[1].rrefs()) == 1)
    assert rref._get_future().cancel()
    await until(lambda: pair[1].rrefs()[0].type == "raised RRefCreationError")
    objects.gate.set()
    await until(lambda: pair[1].agent.dispatcher.threads.is_asleep)
    assert not objects.pickled


async def test_a_value_that_cannot_be_sent_stays_usable_on_its_owner(pair):
    await arpc.rpc_sync("worker1", objects.nothing)  # which connects: before that a creation leaves without waiting
    objects.pickled.clear()
    rref = arpc.remote("worker1", objects.Unsendable)
    with pytest.raises(arpc.SerializationError, match="Unsendable"):
        await rref
    reasons = len(objects.pickled)
    with pytest.raises(arpc.SerializationError, match="Unsendable"):
        await rref
    # by the thread of the creation, and by the call that says why: each as often as one call tries
    assert reasons == 2 * (len(objects.pickled) - reasons)
    assert await rref.rpc_sync().answer() == 42


async def test_a_value_that_is_too_large_for_a_thread_comes_with_the_answer(pair):
    await arpc.rpc_sync("worker1", objects.nothing)  # which connects: before that a creation leaves without waiting
    before = pair[1].agent.dispatcher.calls_handled
    rref = arpc.remote("worker1", objects.make_bytes, (1 << 20,))
    assert len(await rref) == 1 << 20
    assert pair[1].agent.dispatcher.calls_handled == before + 1
    assert await rref.rpc_sync().__len__() == 1 << 20


# -- the label

LABEL = (2, 3, (65535 << 48) + 4, 5, "")


@pytest.mark.parametrize("made", ["", "train.py, line 5", "straße"])
def test_a_label_comes_back(made):
    assert unpack_label(pack_label(*LABEL[:4], made)) == (*LABEL[:4], made)


def test_a_stack_that_is_no_text_is_read_all_the_same():
    assert unpack_label(pack_label(*LABEL[:4], "") + b"\xff")[-1] == "\ufffd"


@pytest.mark.parametrize("data", [None, b"", pack_label(*LABEL)[:-1]])
def test_less_than_a_label_is_refused(data):
    with pytest.raises(ProtocolError):
        unpack_label(data)
