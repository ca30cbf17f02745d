"""What two workers say to each other: `MessageType`, and one small class per message.

All messages share one shape, so that reading a frame is one call of a class: an ``id`` (of the call, the stream or the
ping), one number ``arg`` and the packed content. Each class says what it means by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

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
    """The type byte of a frame. Values are part of the wire format: never reuse one."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    DATA = 8
    DROP_DATA = 9
    PING = 10
    PONG = 11
    GOODBYE = 12
    ARENA = 13
    LENT = 14
    FREED = 15
    FUNCTION = 16
    REQUEST = 17
    REPLY = 18
    FAILURE = 19
    CANCEL = 20
    SCHEMA = 21
    ITEM = 24
    CREDIT = 25
    RREF_CREATE = 32
    RREF_FETCH = 33
    RREF_FORK_REQUEST = 34
    RREF_CHILD_ACCEPT = 35
    RREF_USER_DELETE = 36
    RREF_FORK_QUERY = 37
    RREF_CREATION_FAILED = 38
    RREF_CREATION_QUERY = 39
    AUTOGRAD_GRADIENTS = 40
    AUTOGRAD_ABORT = 41
    AUTOGRAD_RELEASE = 42
    AUTOGRAD_QUERY = 43
    AUTOGRAD_BACKWARD = 44
    PROFILER_CONTROL = 48
    INSPECT = 56


_WORDS: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


# Nothing that a message refers to can refer back to it, so the garbage collector need not follow them: many may wait.
class Message(msgspec.Struct, gc=False):
    """The common shape; see the class docstrings for what ``id`` and ``arg`` mean. A class is named as its type is.

    ``body`` is what follows the header: small tensors, then metadata from ``meta_start``, then the pickle from
    ``meta_end`` on. ``layout`` says how the tensors are laid out, None if there are none. ``buffers`` holds the large
    tensors.
    """

    type: ClassVar[MessageType]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.type = MessageType[_WORDS.sub("_", cls.__name__).upper()]

    flags: int
    id: int
    arg: int
    timeout_ms: int
    body: bytearray | memoryview
    layout: Layout | None = None
    meta_start: int = 0
    meta_end: int = 0
    buffers: Sequence[memoryview] = ()

    @property
    def meta(self) -> memoryview:
        """What interceptors of the peer added, packed."""
        return memoryview(self.body)[self.meta_start : self.meta_end]

    @property
    def pickle(self) -> memoryview:
        """The last part of the body."""
        return memoryview(self.body)[self.meta_end :]

    @property
    def size_bytes(self) -> int:
        """Memory it holds."""
        size = len(self.body)
        for buffer in self.buffers:
            size += buffer.nbytes
        return size


# -- handshake: the body is msgpack, see wire.handshake


class Hello(Message):
    """The side that connected says who it is. ``arg``: the newest protocol version it speaks."""


class Challenge(Message):
    """The other side says who it is, and proves itself. ``arg``: the version both will speak."""


class Proof(Message):
    """The side that connected proves itself."""


class Welcome(Message):
    """The connection is open."""


class Refuse(Message):
    """The connection will not be; the body is the reason, ``arg`` a `Refusal`."""


# -- the connection itself


class Data(Message):
    """Bytes for the next buffer of an earlier frame. ``id``: which frame, counted from 0."""


class DropData(Message):
    """No more bytes will come for frame ``id``; forget it."""


class Ping(Message):
    """Are you there? To be answered with the same ``id``."""


class Pong(Message):
    """Yes."""


class Goodbye(Message):
    """The sender closes on purpose; the body says why."""


# -- shared memory, see transport.shm


class Arena(Message):
    """Where the sender's shared memory is, or what became of the receiver's; ``flags`` is an `ArenaFlag`."""


class Lent(Message):
    """The large tensors of frame ``id`` lie in the sender's shared memory, at the offsets in the body."""


class Freed(Message):
    """``arg`` more LENT messages were read, and the loans at the offsets in the body have ended."""


# -- calls


class Function(Message):
    """From now on ``arg`` means the function in the payload."""


class Request(Message):
    """Run function ``arg`` (0: the one in the payload) as call ``id`` within ``timeout_ms`` (0: no limit)."""


class Reply(Message):
    """Call ``id`` returned what is in the payload, or None if that is empty."""


class Failure(Message):
    """Call ``id`` raised what is in the payload; ``flags`` is a `FailureKind`.

    ``arg``: how many items a stream had before.
    """


class Cancel(Message):
    """The caller no longer wants call ``id``."""


class Schema(Message):
    """From now on ``arg`` means the layout of tensors in the body, see `wire.values.schemas`."""


class Item(Message):
    """An item of stream ``id``.

    ``arg``: its place, counted from 0, because one with large tensors is overtaken by others.
    """


class Credit(Message):
    """Stream ``id`` may send ``arg`` more items."""


# -- remote references: requests of their own, answered like calls; see rref.context for what is in them


class RRefCreate(Message):
    """Run function ``arg``, as a `Request` does, and keep what it returns under an id that the sender chose.

    The metadata has it, see `rref.create_on_owner.pack_label`.
    """


class RRefFetch(Message):
    """Send the value of an RRef, once it is there."""


class RRefForkRequest(Message):
    """To an owner, from users that received forks of its RRefs from other users: count us."""


class RRefChildAccept(Message):
    """To the worker that sent forks: their owners count them, you need not keep yours for them any longer."""


class RRefUserDelete(Message):
    """To an owner: these forks have ended."""


class RRefForkQuery(Message):
    """To a worker that forks were sent to, and that is silent since: did they arrive? If not, they never shall."""


class RRefCreationFailed(Message):
    """To an owner, from the worker that wanted values created: their creations were given up. Run none that is late."""


class RRefCreationQuery(Message):
    """To a worker whose creations are awaited by others, and do not arrive: say which are not on their way."""


# -- distributed autograd: requests of their own, answered like calls; see autograd.service for what is in them


class AutogradGradients(Message):
    """Gradients of tensors that the receiver sent in a context's forward, for one backward pass."""


class AutogradAbort(Message):
    """A backward pass has failed: forget what it computed, and tell those you know."""


class AutogradRelease(Message):
    """A context has ended: forget it, and tell those you know."""


class AutogradQuery(Message):
    """To the creator of contexts, from a worker that may have missed their end: tell which have ended."""


class AutogradBackward(Message):
    """To the owner of an RRef: run a backward pass from its value."""


# -- profiling: a request of its own, answered like a call; see profiler.tracer for what is in it


class ProfilerControl(Message):
    """Record, tell the time, or hand over what was recorded."""


# -- looking at workers: a call each


class Inspect(Message):
    """Tell what this worker does, or what the group does: counters, or what waits."""


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
    """Of an `RRefCreate`: answer with a tuple of the value, if it can be sent."""
    SCALAR: Final = 8
    """Of an `RRefCreate`: answer with a tuple of the value, if it is one of `pickling.SCALARS`."""


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
