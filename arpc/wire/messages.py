"""The messages between two workers: `MessageType`, and one class per message.

All messages have the same fields, so that reading a frame is one constructor call: an ``id`` (of the call, the stream
or the ping), one number ``arg`` and the packed content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, cast

import msgspec

if TYPE_CHECKING:
    from arpc.wire.values.layouts import Layout

__all__ = [
    "MESSAGE_CLASSES",
    "Arena",
    "ArenaFlag",
    "AutogradAbort",
    "AutogradBackward",
    "AutogradGradients",
    "AutogradQuery",
    "AutogradRelease",
    "Cancel",
    "Challenge",
    "Credit",
    "Data",
    "DropData",
    "Failure",
    "FailureKind",
    "Freed",
    "Function",
    "Goodbye",
    "Hello",
    "Inspect",
    "Item",
    "ItemFlag",
    "Lent",
    "Message",
    "MessageType",
    "Ping",
    "Pong",
    "ProfilerControl",
    "Proof",
    "RRefChildAccept",
    "RRefCreate",
    "RRefCreationFailed",
    "RRefCreationQuery",
    "RRefFetch",
    "RRefForkQuery",
    "RRefForkRequest",
    "RRefUserDelete",
    "Refusal",
    "Refuse",
    "Reply",
    "Request",
    "RequestFlag",
    "Schema",
    "Welcome",
]


class MessageType(IntEnum):
    """The type byte of a frame, and the meaning of each message. Values are part of the wire format: never reuse one.

    Each type has a class of the same name; ``id``, ``arg`` and ``flags`` below are fields of that class.
    """

    # handshake: the body is msgpack, see wire.handshake
    HELLO = 1
    """The connector sends its identity. ``arg``: the newest protocol version that it supports."""
    CHALLENGE = 2
    """The acceptor sends its identity and its proof. ``arg``: the protocol version of the connection."""
    PROOF = 3
    """The connector sends its proof."""
    WELCOME = 4
    """The connection is open."""
    REFUSE = 5
    """The connection is refused; the body is the reason, ``arg`` a `Refusal`."""

    # the connection itself
    DATA = 8
    """A chunk of a large tensor. ``id``: the number of its frame, among those with large tensors, counted from 0."""
    DROP_DATA = 9
    """No more chunks of frame ``id`` will come: drop it."""
    PING = 10
    """A check that the peer is alive, to be answered by a PONG with the same ``id``."""
    PONG = 11
    """The answer to a PING."""
    GOODBYE = 12
    """The sender closes the connection on purpose; the body is the reason."""

    # shared memory, see transport.shm
    ARENA = 13
    """An offer of the sender's shared memory, or the answer to such an offer; ``flags`` is an `ArenaFlag`."""
    LENT = 14
    """The large tensors of frame ``id`` lie in the sender's shared memory, at the offsets in the body."""
    FREED = 15
    """``arg`` more LENT messages have been read, and the loans at the offsets in the body have ended."""

    # calls
    FUNCTION = 16
    """Later messages refer to the function in the payload by the number ``arg``."""
    REQUEST = 17
    """Run function ``arg`` (0: the one in the payload) as call ``id`` within ``timeout_ms`` (0: no limit)."""
    REPLY = 18
    """The payload is the result of call ``id``; an empty one means None."""
    FAILURE = 19
    """Call ``id`` failed with the exception in the payload; ``flags`` is a `FailureKind`.

    ``arg``: the number of items that a stream sent before.
    """
    CANCEL = 20
    """The caller cancels call ``id``."""
    SCHEMA = 21
    """Later messages refer to the tensor layout in the body by the number ``arg``, see `wire.values.schemas`."""
    ITEM = 24
    """An item of stream ``id``.

    ``arg``: its position, counted from 0, because later items can overtake one with large tensors.
    """
    CREDIT = 25
    """Stream ``id`` may send ``arg`` more items."""

    # remote references: request types of their own, answered like calls; see rref.service for their arguments
    RREF_CREATE = 32
    """Run function ``arg``, as a `Request` does, and keep its result under an id that the sender chose.

    The id is in the metadata, see `rref.service.pack_label`.
    """
    RREF_FETCH = 33
    """Reply with the value of an RRef, once it exists."""
    RREF_FORK_REQUEST = 34
    """To an owner, from a worker that received forks of its RRefs from other users: count these forks."""
    RREF_CHILD_ACCEPT = 35
    """To the worker that sent forks: their owners count them, so it need not keep its own forks for them any longer."""
    RREF_USER_DELETE = 36
    """To an owner: these forks have ended."""
    RREF_FORK_QUERY = 37
    """To a worker that was sent forks and has not accepted them: which did not arrive? It refuses these from now on."""
    RREF_CREATION_FAILED = 38
    """To an owner, from the creator of values: their creations were given up. The owner runs none that arrives late."""
    RREF_CREATION_QUERY = 39
    """From an owner to the creator of values whose creations have not arrived: which of these are not on their way?"""

    # distributed autograd: request types of their own, answered like calls; see autograd.service for their arguments
    AUTOGRAD_GRADIENTS = 40
    """Gradients of tensors that the receiver sent in a context's forward, for one backward pass."""
    AUTOGRAD_ABORT = 41
    """A backward pass has failed: drop its results, and notify the other workers in the context."""
    AUTOGRAD_RELEASE = 42
    """A context has ended: drop it, and notify the other workers in it."""
    AUTOGRAD_QUERY = 43
    """To the creator of contexts, from a worker that may have missed their end: which of them have ended?"""
    AUTOGRAD_BACKWARD = 44
    """To the owner of an RRef: run a backward pass from its value."""

    # profiling: a request type of its own, answered like a call; see profiler.tracer for its arguments
    PROFILER_CONTROL = 48
    """Start to record, return the clock's time, or return the records."""

    # inspection: each message is a call
    INSPECT = 56
    """Report the state of this worker or of the group, such as counters, stacks or logs."""


# Nothing that a message refers to refers back to it, so the garbage collector need not track them: many may be queued.
class Message(msgspec.Struct, gc=False):
    """The fields that all messages share; see `MessageType` for the meaning of ``id`` and ``arg``.

    ``body`` is the content: a pickle, or bytes that depend on the type. If there are tensors or metadata, they precede
    it in ``memory``, which holds all that follows the header. ``meta`` is the packed metadata, see `wire.metadata`.
    ``layout`` is that of the tensors, None if there are none. ``buffers`` holds the large tensors.
    """

    type: ClassVar[MessageType]

    flags: int
    id: int
    arg: int
    timeout_ms: int
    body: bytearray | memoryview
    meta: bytes | memoryview = b""
    layout: Layout | None = None
    memory: bytes | bytearray | memoryview = b""
    buffers: Sequence[memoryview] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the memory that the message holds."""
        return len(self.memory or self.body) + sum([buffer.nbytes for buffer in self.buffers])


def _class_of(type_: MessageType) -> type[Message]:
    name = "".join("RRef" if word == "RREF" else word.capitalize() for word in type_.name.split("_"))
    made = msgspec.defstruct(name, (), bases=(Message,), module=__name__, namespace={"type": type_}, gc=False)
    return cast("type[Message]", made)


Hello: Final = _class_of(MessageType.HELLO)
Challenge: Final = _class_of(MessageType.CHALLENGE)
Proof: Final = _class_of(MessageType.PROOF)
Welcome: Final = _class_of(MessageType.WELCOME)
Refuse: Final = _class_of(MessageType.REFUSE)
Data: Final = _class_of(MessageType.DATA)
DropData: Final = _class_of(MessageType.DROP_DATA)
Ping: Final = _class_of(MessageType.PING)
Pong: Final = _class_of(MessageType.PONG)
Goodbye: Final = _class_of(MessageType.GOODBYE)
Arena: Final = _class_of(MessageType.ARENA)
Lent: Final = _class_of(MessageType.LENT)
Freed: Final = _class_of(MessageType.FREED)
Function: Final = _class_of(MessageType.FUNCTION)
Request: Final = _class_of(MessageType.REQUEST)
Reply: Final = _class_of(MessageType.REPLY)
Failure: Final = _class_of(MessageType.FAILURE)
Cancel: Final = _class_of(MessageType.CANCEL)
Schema: Final = _class_of(MessageType.SCHEMA)
Item: Final = _class_of(MessageType.ITEM)
Credit: Final = _class_of(MessageType.CREDIT)
RRefCreate: Final = _class_of(MessageType.RREF_CREATE)
RRefFetch: Final = _class_of(MessageType.RREF_FETCH)
RRefForkRequest: Final = _class_of(MessageType.RREF_FORK_REQUEST)
RRefChildAccept: Final = _class_of(MessageType.RREF_CHILD_ACCEPT)
RRefUserDelete: Final = _class_of(MessageType.RREF_USER_DELETE)
RRefForkQuery: Final = _class_of(MessageType.RREF_FORK_QUERY)
RRefCreationFailed: Final = _class_of(MessageType.RREF_CREATION_FAILED)
RRefCreationQuery: Final = _class_of(MessageType.RREF_CREATION_QUERY)
AutogradGradients: Final = _class_of(MessageType.AUTOGRAD_GRADIENTS)
AutogradAbort: Final = _class_of(MessageType.AUTOGRAD_ABORT)
AutogradRelease: Final = _class_of(MessageType.AUTOGRAD_RELEASE)
AutogradQuery: Final = _class_of(MessageType.AUTOGRAD_QUERY)
AutogradBackward: Final = _class_of(MessageType.AUTOGRAD_BACKWARD)
ProfilerControl: Final = _class_of(MessageType.PROFILER_CONTROL)
Inspect: Final = _class_of(MessageType.INSPECT)


class ArenaFlag:
    """The kinds of `Arena` messages."""

    OFFER: Final = 0
    """The body is msgpack: process id, file descriptor and size of the sender's arena, and the token at its start."""
    MAPPED: Final = 1
    """The receiver's arena was mapped. msgpack: the sender's process id, and the offsets of loans it still holds."""
    REFUSED: Final = 2
    """The receiver's arena cannot be mapped; the body is the reason."""


class RequestFlag:
    """Bits of ``flags`` in a `Request`."""

    KWARGS: Final = 1
    """The payload is (args, kwargs) and not args alone."""
    STREAM: Final = 2
    """The caller iterates: reply with items, at first as many as the metadata allow, and more for each `Credit`."""
    VALUE: Final = 4
    """In an `RRefCreate`: reply with the value (in a tuple if it is one), or an empty tuple if it must be fetched."""


class ItemFlag:
    """Bits of ``flags`` in an `Item`."""

    LAST: Final = 1
    """Not an item: the end of the stream, after ``arg`` items."""


class FailureKind(IntEnum):
    """The reason why a call failed, which decides what exception the caller gets."""

    RAISED = 0
    TIMEOUT = 1
    CANCELLED = 2
    OVERLOADED = 3
    SHUTDOWN = 4
    """The call arrived too late to run."""
    LEFT = 5
    """The worker was shut down while the call ran."""
    REFUSED = 6
    """The runtime of the callee raised the exception in the payload before it called the function."""


class Refusal(IntEnum):
    """The reason why a connection was refused."""

    VERSION = 1
    AUTHENTICATION = 2
    UNKNOWN_WORKER = 3
    DUPLICATE = 4
    STALE = 5
    CLOSING = 6
    STARTING = 7


MESSAGE_CLASSES: Final[Mapping[int, type[Message]]] = MappingProxyType(
    {int(cls.type): cls for cls in Message.__subclasses__()}
)
"""The class of every message, by type byte. Messages of the runtime's features have their classes in this file, too."""
