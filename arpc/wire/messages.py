"""What two workers say to each other: `MessageType`, and one class per message.

All messages share one shape, so that reading a frame is one call of a class: an ``id`` (of the call, the stream or the
ping), one number ``arg`` and the packed content.
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
    """The type byte of a frame, and what each message means. Values are part of the wire format: never reuse one.

    Each type has a class, named as the type is, whose ``id`` and ``arg`` are those that are spoken of here.
    """

    # handshake: the body is msgpack, see wire.handshake
    HELLO = 1
    """The side that connected says who it is. ``arg``: the newest protocol version it speaks."""
    CHALLENGE = 2
    """The other side says who it is, and proves itself. ``arg``: the version both will speak."""
    PROOF = 3
    """The side that connected proves itself."""
    WELCOME = 4
    """The connection is open."""
    REFUSE = 5
    """The connection will not be; the body is the reason, ``arg`` a `Refusal`."""

    # the connection itself
    DATA = 8
    """Bytes for the next buffer of an earlier frame. ``id``: which frame, counted from 0."""
    DROP_DATA = 9
    """No more bytes will come for frame ``id``; forget it."""
    PING = 10
    """Are you there? To be answered with the same ``id``."""
    PONG = 11
    """Yes."""
    GOODBYE = 12
    """The sender closes on purpose; the body says why."""

    # shared memory, see transport.shm
    ARENA = 13
    """Where the sender's shared memory is, or what became of the receiver's; ``flags`` is an `ArenaFlag`."""
    LENT = 14
    """The large tensors of frame ``id`` lie in the sender's shared memory, at the offsets in the body."""
    FREED = 15
    """``arg`` more LENT messages were read, and the loans at the offsets in the body have ended."""

    # calls
    FUNCTION = 16
    """From now on ``arg`` means the function in the payload."""
    REQUEST = 17
    """Run function ``arg`` (0: the one in the payload) as call ``id`` within ``timeout_ms`` (0: no limit)."""
    REPLY = 18
    """Call ``id`` returned what is in the payload, or None if that is empty."""
    FAILURE = 19
    """Call ``id`` raised what is in the payload; ``flags`` is a `FailureKind`.

    ``arg``: how many items a stream had before.
    """
    CANCEL = 20
    """The caller no longer wants call ``id``."""
    SCHEMA = 21
    """From now on ``arg`` means the layout of tensors in the body, see `wire.values.schemas`."""
    ITEM = 24
    """An item of stream ``id``.

    ``arg``: its place, counted from 0, because one with large tensors is overtaken by others.
    """
    CREDIT = 25
    """Stream ``id`` may send ``arg`` more items."""

    # remote references: requests of their own, answered like calls; see rref.context for what is in them
    RREF_CREATE = 32
    """Run function ``arg``, as a `Request` does, and keep what it returns under an id that the sender chose.

    The metadata has it, see `rref.service.pack_label`.
    """
    RREF_FETCH = 33
    """Send the value of an RRef, once it is there."""
    RREF_FORK_REQUEST = 34
    """To an owner, from users that received forks of its RRefs from other users: count us."""
    RREF_CHILD_ACCEPT = 35
    """To the worker that sent forks: their owners count them, you need not keep yours for them any longer."""
    RREF_USER_DELETE = 36
    """To an owner: these forks have ended."""
    RREF_FORK_QUERY = 37
    """To a worker that forks were sent to, and that is silent since: did they arrive? If not, they never shall."""
    RREF_CREATION_FAILED = 38
    """To an owner, from the worker that wanted values created: their creations were given up. Run none that is late."""
    RREF_CREATION_QUERY = 39
    """To a worker whose creations are awaited by others, and do not arrive: say which are not on their way."""

    # distributed autograd: requests of their own, answered like calls; see autograd.service for what is in them
    AUTOGRAD_GRADIENTS = 40
    """Gradients of tensors that the receiver sent in a context's forward, for one backward pass."""
    AUTOGRAD_ABORT = 41
    """A backward pass has failed: forget what it computed, and tell those you know."""
    AUTOGRAD_RELEASE = 42
    """A context has ended: forget it, and tell those you know."""
    AUTOGRAD_QUERY = 43
    """To the creator of contexts, from a worker that may have missed their end: tell which have ended."""
    AUTOGRAD_BACKWARD = 44
    """To the owner of an RRef: run a backward pass from its value."""

    # profiling: a request of its own, answered like a call; see profiler.tracer for what is in it
    PROFILER_CONTROL = 48
    """Record, tell the time, or hand over what was recorded."""

    # looking at workers: a call each
    INSPECT = 56
    """Tell what this worker does, or what the group does: counters, or what waits."""


# Nothing that a message refers to can refer back to it, so the garbage collector need not follow them: many may wait.
class Message(msgspec.Struct, gc=False):
    """The common shape; see `MessageType` for what ``id`` and ``arg`` mean.

    ``body`` is what the message says: a pickle, or what belongs to its type. If it has tensors or metadata, they lie
    before that in ``memory``, which is all that follows the header. ``meta`` is what interceptors of the peer added,
    packed. ``layout`` says how the tensors are laid out, None if there are none. ``buffers`` holds the large tensors.
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
        """Memory it holds."""
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
    """What an `Arena` message says."""

    OFFER: Final = 0
    """msgpack: process, file descriptor and size of the sender's arena, and the token at its beginning."""
    MAPPED: Final = 1
    """The receiver's arena was mapped. msgpack: the process, and the offsets of loans it still has from before."""
    REFUSED: Final = 2
    """It cannot be mapped; the body says why."""


class RequestFlag:
    """Bits of ``flags`` in a `Request`."""

    KWARGS: Final = 1
    """The payload is (args, kwargs) and not args alone."""
    STREAM: Final = 2
    """The caller iterates: answer with items, at first as many as the metadata say, more by `Credit`."""
    VALUE: Final = 4
    """Of an `RRefCreate`: answer with the value, in a tuple if it is one, or with an empty tuple if it stays."""


class ItemFlag:
    """Bits of ``flags`` in an `Item`."""

    LAST: Final = 1
    """Not an item: the stream has ended, after ``arg`` of them."""


class FailureKind(IntEnum):
    """Why a call failed; decides which exception the caller sees."""

    RAISED = 0
    TIMEOUT = 1
    CANCELLED = 2
    OVERLOADED = 3
    SHUTDOWN = 4
    """It came too late to run."""
    LEFT = 5
    """The worker was shut down while it ran."""
    REFUSED = 6
    """What is in the payload was raised before the function was called, by the runtime of the callee."""


class Refusal(IntEnum):
    """Why a connection was refused."""

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
"""Type byte to class: every message there is. What a feature of the runtime says has its class in this file too."""
