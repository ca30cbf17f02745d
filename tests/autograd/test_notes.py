"""Calls with a few small tensors, on which nothing rides but what is recorded."""

from __future__ import annotations

import asyncio
import contextvars
import struct
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import arpc
from arpc.agent import variables
from arpc.agent.calls import Call
from arpc.agent.deadlines import NEVER
from arpc.autograd.context import Container, current_context_id
from arpc.autograd.nodes import RecvNode
from arpc.autograd.notes import Notes
from arpc.autograd.recording import Recorder
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.wire.frames import frame
from arpc.wire.handful import ARGUMENTS_AND_NOTE, RESULT_AND_NOTE, handful_payload
from arpc.wire.messages import MessageType
from tests.autograd.conftest import assert_nothing_is_left, until
from tests.autograd.test_backward import leaf

PEER: Final = WorkerInfo("peer", 1)
BOTH: Final = ["request_noted", "reply_noted"]


@arpc.export
async def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@arpc.export
async def mul_later(x: Tensor, y: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return x * y


@arpc.export
def mul_in_thread(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@arpc.export
async def mul_in_a_list(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x * y]


@arpc.export
async def mul_and_leave_grad_mode_off(x: Tensor, y: Tensor) -> Tensor:
    product = x * y
    torch.set_grad_enabled(False)
    return product


@arpc.export
async def change_in_place(x: Tensor, y: Tensor) -> Tensor:
    assert not x.is_leaf
    assert not x._is_view()
    x.mul_(3)
    assert (x._version, y._version) == (1, 0)
    y += x
    return y


async def look(*tensors: Tensor) -> list[tuple[bool, bool, int | None]]:
    return [(one.requires_grad, isinstance(one.grad_fn, RecvNode), current_context_id.get()) for one in tensors]


async def mul_elsewhere(x: Tensor, y: Tensor) -> Tensor:
    return 2 * await arpc.rpc_sync("worker2", mul, (x, y))


async def make() -> Tensor:
    return torch.tensor([float(current_context_id.get() or 0), 1.0], requires_grad=True)


async def mul_without_history(x: Tensor, y: Tensor) -> Tensor:
    return x.detach() * y.detach()


async def expand(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).expand(1 << 20, -1).contiguous()


async def fail(x: Tensor, y: Tensor) -> Tensor:
    raise LookupError("failed there")


async def learnt(function: Any, *args: Any) -> None:
    """Let a call be one that takes the short way: the first ones of a function never do."""
    for _ in range(3):
        await arpc.rpc_sync("worker1", function, args or (torch.ones(2), torch.ones(2)))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done about notes that have come, by any of the workers."""
    read: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def note(*args: Any) -> Any:
            read.append(name)
            return method(*args)

        return note

    for name in BOTH:
        monkeypatch.setattr(Notes, name, noting(name, getattr(Notes, name)))
    return read


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(mul, BOTH, id="at once"),
        pytest.param(mul_later, BOTH, id="later"),
        pytest.param(mul_in_thread, BOTH[1:], id="in a thread"),
        pytest.param(mul_in_a_list, BOTH[:1], id="in a list"),
        pytest.param(mul_and_leave_grad_mode_off, BOTH, id="with grad mode left off"),
    ],
)
async def test_whatever_way_a_reply_takes_it_is_recorded(group, notes, function, expected):
    x, y = leaf(), leaf(4.0, 5.0, 6.0)
    await learnt(function)
    for _ in range(2):
        async with arpc.autograd.context() as ctx_id:
            notes.clear()
            made = await arpc.rpc_sync("worker1", function, (x, y))
            assert notes == expected
            product = made[0] if isinstance(made, list) else made
            assert type(product.grad_fn) is RecvNode
            here, there = (group[n].autograd.container.find(ctx_id) for n in (0, 1))
            assert here.sends.keys() == there.recvs.keys()
            assert there.sends.keys() == here.recvs.keys() == {product.grad_fn.record.message_id}
            assert (here.known_workers, there.known_workers) == ({1}, {0})
            await arpc.autograd.backward(ctx_id, [product.sum()])
            gradients = arpc.autograd.get_gradients(ctx_id)
        assert torch.equal(gradients[x], y.detach())
        assert torch.equal(gradients[y], x.detach())


async def test_calls_of_handlers_have_notes_too(group, notes):
    x, y = leaf(), leaf()
    await learnt(mul_elsewhere)
    async with arpc.autograd.context() as ctx_id:
        made = await arpc.rpc_sync("worker1", mul_elsewhere, (x, y))
        # the one that the handler makes is answered first
        assert notes == [*BOTH[:1], *BOTH, *BOTH[1:]]
        await arpc.autograd.backward(ctx_id, [made.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2, 4, 6]


async def test_a_call_without_arguments_has_a_note(group, notes):
    await arpc.rpc_sync("worker1", look, ())
    async with arpc.autograd.context() as ctx_id:
        for _ in range(3):
            notes.clear()
            made = await arpc.rpc_sync("worker1", make)
            assert made.tolist() == [ctx_id, 1]
            assert type(made.grad_fn) is RecvNode
            assert notes == BOTH


async def test_a_worker_that_looks_at_everything_reads_notes_too(notes):
    x, y = leaf(), leaf(4.0, 5.0, 6.0)
    async with cluster(2, options=RpcOptions(gc_freeze=False, allow="exported")) as group:
        for function in (mul, mul_later, mul_in_thread):
            await learnt(function)
            async with arpc.autograd.context() as ctx_id:
                product = await arpc.rpc_sync("worker1", function, (x, y))
                await arpc.autograd.backward(ctx_id, [product.sum()])
                assert torch.equal(arpc.autograd.get_gradients(ctx_id)[x], y.detach())
        assert_nothing_is_left(group)
    assert set(notes) == {"reply_noted"}, "requests are looked at one by one, for the role of their caller"


async def test_what_came_with_a_note_may_be_changed_in_place(group, notes):
    x, y = leaf(), leaf()
    await learnt(mul)
    async with arpc.autograd.context() as ctx_id:
        for _ in range(2):
            notes.clear()
            changed = await arpc.rpc_sync("worker1", change_in_place, (x, y))
        assert notes == BOTH
        assert changed.tolist() == [4, 8, 12]
        changed.add_(1)
        assert (changed._version, changed.is_leaf, changed._is_view()) == (1, False, False)
        await arpc.autograd.backward(ctx_id, [changed.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert (gradients[x].tolist(), gradients[y].tolist()) == ([3] * 3, [1] * 3)


async def test_only_those_that_require_grad_have_a_history(group, notes):
    plain, x, y = torch.ones(3), leaf(), leaf()
    await learnt(look, plain, x, y)
    async with arpc.autograd.context() as ctx_id:
        for args, expected in (
            ((plain, x, y), [False, True, True]),
            ((x, plain), [True, False]),
            ((x,), [True]),
            ((plain,), [False]),
        ):
            seen = await arpc.rpc_sync("worker1", look, args)
            assert seen == [(requires, requires, ctx_id) for requires in expected]
            assert notes == BOTH[:1]
            notes.clear()


async def test_without_a_context_of_its_own_a_call_has_no_note(group, notes):
    x = leaf()
    await learnt(look, x)
    async with arpc.autograd.context() as ctx_id:
        other = contextvars.copy_context()
        other.run(current_context_id.set, None)
        task = asyncio.create_task(arpc.rpc_sync("worker1", look, (x,)), context=other)
        assert await task == [(True, False, None)]
        with torch.no_grad():
            assert await arpc.rpc_sync("worker1", look, (x,)) == [(True, False, None)]
        assert not notes
        assert not group[0].autograd.container.find(ctx_id).sends
        assert ctx_id not in group[1].autograd.container.contexts
    # nor in one that has ended
    current_context_id.set(ctx_id)
    async with arpc.autograd.context():
        current_context_id.set(ctx_id)
        assert await arpc.rpc_sync("worker1", look, (x,)) == [(True, False, None)]
    assert not notes


async def test_a_reply_without_history_has_no_note(group, notes):
    x, y = leaf(), leaf()
    await learnt(mul_without_history)
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", mul_without_history, (x, y))
        assert not product.requires_grad
        assert notes == BOTH[:1]
        assert not group[1].autograd.container.find(ctx_id).sends


async def test_a_large_reply_is_recorded_once(group, notes):
    x, y = leaf(), leaf()
    await learnt(expand)
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", expand, (x, y))
        assert not notes  # a function whose results are large waits for room, as every other request of it does
        assert len(group[1].autograd.container.find(ctx_id).sends) == 1
        await arpc.autograd.backward(ctx_id, [product[0].sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == y.tolist()


async def test_a_handler_that_fails_says_so(group, notes):
    x, y = leaf(), leaf()
    await learnt(mul)
    for _ in range(2):
        with pytest.raises(LookupError):
            await arpc.rpc_sync("worker1", fail, (x, y))
    async with arpc.autograd.context() as ctx_id:
        with pytest.raises(LookupError, match="failed there"):
            await arpc.rpc_sync("worker1", fail, (x, y))
        product = await arpc.rpc_sync("worker1", mul, (x, y))
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == y.tolist()


async def test_what_goes_wrong_as_a_reply_is_recorded_is_the_callers(group, monkeypatch):
    x, y = leaf(), leaf()
    await learnt(mul)

    def refuse(*_: Any) -> Any:
        raise LookupError("refused there")

    async with arpc.autograd.context():
        with monkeypatch.context() as patch:
            patch.setattr(Notes, "note_reply", refuse)
            with pytest.raises(LookupError, match="refused there"):
                await arpc.rpc_sync("worker1", mul, (x, y))
        assert type((await arpc.rpc_sync("worker1", mul, (x, y))).grad_fn) is RecvNode


factor: contextvars.ContextVar[int] = contextvars.ContextVar("factor")


async def mul_by_factor(x: Tensor, y: Tensor) -> Tensor:
    return x * y * factor.get(1)


async def test_what_else_rides_on_a_call_goes_along_with_what_is_recorded(group, notes, monkeypatch):
    x, y = leaf(), leaf()
    await learnt(mul_by_factor)
    monkeypatch.setitem(variables._declared, "factor", factor)
    factor.set(3)
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync("worker1", mul_by_factor, (x, y))
        assert notes == BOTH[1:]
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [3, 6, 9]


async def test_what_there_is_no_room_for_is_recorded_once(group, monkeypatch):
    x, y = torch.ones(512, requires_grad=True), torch.ones(512, requires_grad=True)
    await learnt(mul, x, y)
    peer = group[0].agent.known_peer("worker1")
    monkeypatch.setattr(peer, "take_room", lambda _: False)
    async with arpc.autograd.context() as ctx_id:
        await arpc.rpc_sync("worker1", mul, (x, y))
        assert len(group[0].autograd.container.find(ctx_id).sends) == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
async def test_the_room_that_a_call_takes_is_given_back(group, mode):
    x, y = torch.ones(512, requires_grad=True), torch.ones(512, requires_grad=True)
    await learnt(mul_later, x, y)
    peer = group[0].agent.known_peer("worker1")
    async with arpc.autograd.context():
        with mode():
            for is_cancelled in (False, True):
                call = asyncio.create_task(arpc.rpc_sync("worker1", mul_later, (x, y)))
                await asyncio.sleep(0)
                assert peer.in_flight_bytes > x.nbytes + y.nbytes
                if is_cancelled:
                    call.cancel()
                await asyncio.wait([call])
                assert call.cancelled() is is_cancelled
                assert not peer.in_flight_bytes


def forged(kind: int, tensors: Sequence[Tensor], note: bytes) -> bytes:
    payload = handful_payload(8192, kind, tensors)
    assert payload is not None
    return payload + note


X, Y, Z = torch.ones(3), torch.ones(3), torch.ones(3)
NOBODYS: Final = struct.pack("<QQ", 1 << 48, 0)
ANNOUNCED: Final = struct.pack("<QQ", 1, 7)


@pytest.mark.parametrize("function", [mul, mul_in_thread])
@pytest.mark.parametrize("allow", [None, "exported"])
@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(forged(ARGUMENTS_AND_NOTE, (X, Y), b""), id="no note"),
        pytest.param(forged(ARGUMENTS_AND_NOTE, (X, Y), NOBODYS[1:]), id="too little of it"),
        pytest.param(forged(ARGUMENTS_AND_NOTE, (X, Y), NOBODYS + b"x"), id="more than that"),
        pytest.param(forged(ARGUMENTS_AND_NOTE, (X, Y), ANNOUNCED), id="gradients of nothing"),
        pytest.param(forged(ARGUMENTS_AND_NOTE, (X, Y, Z), NOBODYS), id="an argument too much"),
        pytest.param(forged(ARGUMENTS_AND_NOTE, (), NOBODYS), id="no arguments"),
        pytest.param(forged(RESULT_AND_NOTE, (X,), NOBODYS), id="a result"),
        pytest.param(bytes((ARGUMENTS_AND_NOTE,)), id="nothing"),
    ],
)
async def test_bytes_of_a_bad_peer_fail_their_call_alone(function, allow, payload):
    options = RpcOptions(gc_freeze=False) if allow is None else RpcOptions(gc_freeze=False, allow=allow)
    async with cluster(2, options=options) as group:
        await learnt(function)
        peer = group[0].agent.known_peer("worker1")
        connection = peer.connection
        answer = asyncio.get_running_loop().create_future()
        call_id = peer.calls.add(NEVER, Call(answer, function, 0, connection))
        connection.send(frame(MessageType.REQUEST, 0, call_id, peer.function_ids[function], 0, payload))
        await asyncio.wait([answer], timeout=10)
        assert answer.exception() is not None
        assert (await arpc.rpc_sync("worker1", function, (X, Y))).tolist() == [1, 1, 1]
        assert peer.connection is connection


async def test_a_note_that_comes_after_the_end_of_its_context_is_not_recorded():
    recorder = Recorder(Container(0))
    ids = bytearray(struct.pack("<QQ", 1 << 48, 7))
    recorder._container.remove(1 << 48)

    for read in (recorder.request_noted, recorder.reply_noted):
        first, second = read(PEER, ids, [torch.ones(1), torch.ones(1)], (1,))
        assert (first.requires_grad, second.requires_grad) == (False, True)
        assert second.is_leaf
    assert not recorder._container.contexts
    assert current_context_id.get() is None
    assert recorder.note_reply(PEER, ids, leaf()) is None


@pytest.mark.parametrize("requiring", [(0, 1), (1,)])
async def test_a_reply_is_recorded_whatever_grad_mode_is_left_in(requiring):
    recorder = Recorder(Container(0))
    context = recorder._container.new()
    ids = bytearray(struct.pack("<QQ", context.id, 7))

    with torch.no_grad():
        received = recorder.reply_noted(PEER, ids, [torch.ones(1), torch.ones(1)], requiring)
        assert not torch.is_grad_enabled()
    assert [tensor.requires_grad for tensor in received] == [place in requiring for place in range(2)]
    assert type(received[1].grad_fn) is RecvNode
    assert context.recvs == {7: received[1].grad_fn}


async def test_recorded_without_tensors_is_a_protocol_error():
    recorder = Recorder(Container(0))
    ids = bytearray(struct.pack("<QQ", 1 << 48, 7))
    with pytest.raises(ProtocolError):
        recorder.request_noted(PEER, ids, [torch.ones(1)], ())
    assert current_context_id.get() == 1 << 48
    with pytest.raises(ProtocolError):
        recorder.reply_noted(PEER, ids, [torch.ones(1)], ())


async def test_a_request_with_a_note_that_nobody_can_read_fails(group, monkeypatch):
    x, y = leaf(), leaf()
    await learnt(mul_in_thread)
    monkeypatch.setattr(group[1].agent.codec, "noting", None)
    async with arpc.autograd.context():
        with pytest.raises(ProtocolError, match="nobody here can read"):
            await arpc.rpc_sync("worker1", mul_in_thread, (x, y))


async def test_a_reply_with_a_note_that_nobody_can_read_fails(group, monkeypatch):
    x, y = leaf(), leaf()
    await learnt(mul)
    read = Notes.request_noted

    def take_away(*args: Any) -> Any:
        monkeypatch.setattr(group[0].agent.codec, "noting", None)
        return read(*args)

    monkeypatch.setattr(Notes, "request_noted", take_away)
    async with arpc.autograd.context():
        with pytest.raises(arpc.SerializationError, match="malformed"):
            await arpc.rpc_sync("worker1", mul, (x, y))
    # which ends the connection, as all that is malformed does, and so the context is ended in another way
    await until(lambda: not group[1].autograd.container.contexts)
