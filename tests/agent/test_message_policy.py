"""Every type of message passes the policy before anything in it becomes an object, whoever sent it and in any form."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from contextlib import suppress

import pytest
import torch

import arpc
from arpc.agent.hooks import context_propagation as variables
from arpc.options import RpcOptions
from arpc.rref.service import KEY, pack_label
from arpc.testing import cluster
from arpc.wire import messages
from arpc.wire.frames import frame
from arpc.wire.messages import MESSAGE_CLASSES, Message
from arpc.wire.metadata import encode_metadata
from arpc.wire.values.policy import AllowList
from tests.wire.exchange import pack

ALLOW = RpcOptions(gc_freeze=False, allow="exported")
ran: list[str] = []

BARE = {
    # the handshake and the connection: msgpack of a known shape, numbers and texts
    messages.Hello,
    messages.Challenge,
    messages.Proof,
    messages.Welcome,
    messages.Refuse,
    messages.Data,
    messages.DropData,
    messages.Ping,
    messages.Pong,
    messages.Goodbye,
    messages.Arena,
    messages.Lent,
    messages.Freed,
    # the layout of tensors: msgpack of a known shape
    messages.Schema,
    # calls: numbers alone
    messages.Cancel,
    messages.Credit,
}
ANSWERS = {messages.Reply, messages.Failure, messages.Item}
NAMES = {messages.Function}
REQUESTS = {
    messages.Request,
    messages.RRefCreate,
    messages.RRefFetch,
    messages.RRefForkRequest,
    messages.RRefChildAccept,
    messages.RRefUserDelete,
    messages.RRefForkQuery,
    messages.AutogradGradients,
    messages.AutogradAbort,
    messages.AutogradRelease,
    messages.RRefCreationFailed,
    messages.RRefCreationQuery,
    messages.AutogradQuery,
    messages.AutogradBackward,
    messages.ProfilerControl,
    messages.Inspect,
}


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return ran.append, ("trapped",)


TRAP = pickle.dumps(Trap(), protocol=5)


@arpc.export
async def nothing():
    return None


@arpc.export
async def stay():
    await asyncio.Event().wait()


@arpc.export
async def stay_silent():
    await asyncio.Event().wait()
    yield 1


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()
    yield
    assert not ran


@pytest.fixture
def read(monkeypatch):
    """What was read by a policy, and who sent it."""
    seen: list[tuple[str, bytes]] = []
    restricted_read, function = AllowList.read, AllowList.function

    def watched_read(self, payload, slots, sender):
        seen.append((sender.name, bytes(payload)))
        return restricted_read(self, payload, slots, sender)

    def watched_function(self, payload, sender):
        seen.append((sender.name, bytes(payload)))
        return function(self, payload, sender)

    monkeypatch.setattr(AllowList, "read", watched_read)
    monkeypatch.setattr(AllowList, "function", watched_function)
    return seen


def was_read(read, sender):
    return any(name == sender and payload.startswith(TRAP) for name, payload in read)


def test_every_message_type_is_known_here():
    """A new one belongs into one of the sets above: does it carry objects, and who sends it?"""
    assert set(MESSAGE_CLASSES.values()) == BARE | ANSWERS | NAMES | REQUESTS
    assert all(issubclass(kind, Message) for kind in MESSAGE_CLASSES.values())


SCHEMA = 900
FORMS = ("pickle", "own layout", "announced layout")


def with_pickle(kind, id_, payload, form, meta=b""):
    """A message with a pickle in it: alone, or with tensors whose layout it brings along, or refers to by number."""
    arg = 0 if kind in ANSWERS else 1
    type_ = int(kind.type)
    if form == "pickle":
        return frame(type_, 0, id_, arg, 0, payload, meta)
    packed = pack([torch.ones(2)])
    assert not packed.buffers
    if form == "own layout":
        return frame(type_, 0, id_, arg, 0, payload, meta, packed.schema.table, packed.inline)
    announced = frame(int(messages.Schema.type), 0, 0, SCHEMA, 0, packed.schema.table)
    return announced + frame(type_, 0, id_, arg, 0, payload, meta, SCHEMA, packed.inline)


def payload_of(kind):
    return pickle.dumps((TRAP, "T", "text", "stack"), protocol=5) if kind is messages.Failure else TRAP


def metadata_of(kind, number):
    """What a creation brings along, see `rref.service.pack_label`."""
    if kind is not messages.RRefCreate:
        return b""
    return encode_metadata({KEY: pack_label(number, 0, (1 << 48) + number, (1 << 48) + 1000 + number, "")})


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=lambda kind: kind.type), ids=lambda kind: kind.__name__)
async def test_a_request_is_read_by_the_policy(kind, read):
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)  # so that function 1 is known
        connection = group[0].agent.known_peer("worker1").connection
        for number, form in enumerate(FORMS, 1):
            read.clear()
            connection.send(with_pickle(kind, 900 + number, TRAP, form, metadata_of(kind, number)))
            assert await group[0].rpc_sync("worker1", nothing) is None
            assert was_read(read, "worker0"), form
            assert not ran


async def test_a_function_is_read_by_the_policy(read):
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)
        connection = group[0].agent.known_peer("worker1").connection
        connection.send(frame(int(messages.Function.type), 0, 0, 50, 0, TRAP))
        await group[0].rpc_sync("worker1", nothing)
        assert was_read(read, "worker0")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", sorted(ANSWERS, key=lambda kind: kind.type), ids=lambda kind: kind.__name__)
async def test_an_answer_is_read_by_the_policy(kind, form, read):
    async with cluster(2, options=ALLOW) as group:
        if kind is messages.Item:
            stream = group[0].stream("worker1", stay_silent)
            pending = asyncio.ensure_future(anext(stream))
        else:
            pending = group[0].rpc_async("worker1", stay)
        await group[0].rpc_sync("worker1", nothing)
        connection = group[1].agent.known_peer("worker0").connection
        (call_id,) = group[1].agent.connector.links[0].running
        read.clear()
        connection.send(with_pickle(kind, call_id, payload_of(kind), form))
        with pytest.raises((arpc.SerializationError, arpc.RemoteError)):
            await pending
        assert was_read(read, "worker1")
        assert not ran
        await group.shutdown(graceful=False)  # the handler waits still


async def test_metadata_is_read_by_the_policy(read, monkeypatch):
    monkeypatch.setattr(variables, "_declared", {})
    arpc.propagate(contextvars.ContextVar("of_test_message_policy", default=1))
    meta = b"\x81\xa4vars\xc4" + bytes([len(TRAP)]) + TRAP
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)
        connection = group[0].agent.known_peer("worker1").connection
        connection.send(frame(int(messages.Request.type), 0, 900, 1, 0, pickle.dumps(()), meta))
        await group[0].rpc_sync("worker1", nothing)
        assert was_read(read, "worker0")


@pytest.mark.parametrize("kind", sorted(BARE, key=lambda kind: kind.type), ids=lambda kind: kind.__name__)
async def test_nothing_else_becomes_an_object(kind, read):
    """A message that carries no objects may close its connection, and runs nothing."""
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)
        read.clear()
        connection = group[0].agent.known_peer("worker1").connection
        connection.send(frame(int(kind.type), 0, 900, 1, 0, TRAP))
        with suppress(arpc.ArpcError):
            await group[0].rpc_sync("worker1", nothing)
        assert not any(TRAP in payload for _, payload in read)
        assert not ran
        await group.shutdown(graceful=False)


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=lambda kind: kind.type), ids=lambda kind: kind.__name__)
async def test_no_message_brings_its_function_along(kind):
    """Number 0 means that the function is in the payload. Nobody may call `bytearray` like that."""
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)
        connection = group[0].agent.known_peer("worker1").connection
        answered: list[Message] = []
        take = group[0].agent._handlers[messages.Failure]
        group[0].agent._handlers[messages.Failure] = lambda link, message: (
            answered.append(message),
            take(link, message),
        )
        payload = pickle.dumps((bytearray, (1 << 50,)), protocol=5)
        connection.send(frame(int(kind.type), 0, 900, 0, 0, payload, metadata_of(kind, 1)))
        await group[0].rpc_sync("worker1", nothing)
        assert any(b"functions are called by their names" in bytes(message.body) for message in answered)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (messages.RRefUserDelete, (1, 1, 0, range(3 << 40))),
        (messages.RRefForkRequest, (1, 1, 0, range(3 << 40))),
        (messages.RRefChildAccept, (1, 1, 0, range(3 << 40))),
        (messages.AutogradRelease, (range(1 << 40),)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_is_short_in_a_message_is_short_for_its_handler(kind, arguments):
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", nothing)
        connection = group[0].agent.known_peer("worker1").connection
        connection.send(frame(int(kind.type), 0, 900, 1, 0, pickle.dumps(arguments, protocol=5)))
        await group[0].rpc_sync("worker1", nothing)  # which waits for ever if the loop of the other one is busy
