"""Every exception arpc raises, in one tree.

::

    ArpcError
    ├── ConfigurationError (ValueError)        an option is wrong; the text says which and what to set
    ├── NotInitializedError (RuntimeError)     no worker in this context: call init_rpc first
    ├── AlreadyInitializedError (RuntimeError) this context has a worker already
    ├── UnknownWorkerError (LookupError)       no worker of that name or id in the group
    ├── RendezvousError (RuntimeError)         the group did not form
    │   ├── NameTakenError                     another live worker has this name or rank
    │   └── RendezvousTimeoutError (TimeoutError)  some ranks never came
    ├── NotReadyError (RuntimeError)           asked for what is still being made remotely: await it first
    ├── UnsupportedError (ValueError)          what makes no sense for an object that is elsewhere
    ├── LaunchError (RuntimeError)             a group of processes that was launched did not end well
    ├── WorkersFailedError (ExceptionGroup)    something done on several workers failed on some of them
    ├── TorchStateError (RuntimeError)         a grad mode that would leak from its coroutine to others
    ├── ShutdownError (RuntimeError)           this worker is shutting down, or has shut down
    ├── SerializationError (TypeError)         a function, argument or result that cannot travel
    ├── NotAllowedError (PermissionError)      what a worker in allow-list mode does not let others do, or build
    ├── CallError                              a call that ended without an answer of its function
    │   ├── RpcTimeoutError (TimeoutError)     its deadline passed
    │   ├── CallCancelledError                 its handler was cancelled on the callee, not by the caller
    │   ├── OverloadedError                    the callee refused it: too many calls of this caller wait there
    │   └── WorkerLostError (ConnectionError)  the callee died, left or fell silent
    │       └── OwnerLostError                 it was the owner of an RRef, whose value is gone with it
    ├── RRefError (RuntimeError)               an RRef that cannot be used: released, or its value is gone
    │   └── RRefCreationError                  it is not known whether its value was ever created
    ├── AutogradError (RuntimeError)           no such context, or roots that gradients cannot start from
    │   └── BackwardError                      a node raised in a backward pass; names the worker and the node
    ├── ProfilerError (RuntimeError)           a profile, or a profiling key, that is used out of turn
    ├── ScriptError (RuntimeError)             a TorchScript function that raised, or cannot be called like that
    ├── BatchError (ValueError)                a batched function returned what is no result for each of its calls
    ├── RemoteError                            the function raised something that cannot be rebuilt here
    └── WireError (ConnectionError)            what a peer sent, or a connection that cannot be used
        ├── ProtocolError                      bytes that are no arpc, or not at this time
        ├── HandshakeError                     the peer refused us, or we refused it
        │   └── AuthenticationError            it could not prove that it knows the secret
        └── ConnectionClosedError              the connection is closed

    RemoteTraceback                            never raised: the ``__cause__`` of what was raised remotely

An exception of a remote function arrives with its own type, so it is *not* an ``ArpcError``; its ``__cause__`` is a
:class:`RemoteTraceback` that says where it happened. Whatever inherits a builtin (in parentheses) can be caught as
that.

An error that a call raises has ``may_have_run``, which is False only if the function certainly did not run. It is about
the call that raised it: if a handler makes a call of its own, and lets the error of that call pass, the caller of the
handler gets the same type of error with ``may_have_run`` True, because the handler did run.
"""

from __future__ import annotations

import contextlib
import typing
from collections import abc
from typing import Self

__all__ = [
    "AlreadyInitializedError",
    "ArpcError",
    "AuthenticationError",
    "AutogradError",
    "BackwardError",
    "BatchError",
    "CallCancelledError",
    "CallError",
    "ConfigurationError",
    "ConnectionClosedError",
    "HandshakeError",
    "LaunchError",
    "NameTakenError",
    "NotAllowedError",
    "NotInitializedError",
    "NotReadyError",
    "OverloadedError",
    "OwnerLostError",
    "ProfilerError",
    "ProtocolError",
    "RRefCreationError",
    "RRefError",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RpcTimeoutError",
    "ScriptError",
    "SerializationError",
    "ShutdownError",
    "TorchStateError",
    "UnknownWorkerError",
    "UnsupportedError",
    "WireError",
    "WorkerLostError",
    "WorkersFailedError",
]


E = typing.TypeVar("E", bound="ArpcError")


class ArpcError(Exception):
    """The base class of all errors that arpc itself raises."""

    may_have_run: bool = True
    """Of an error that a call raised: False if the function certainly did not run, so that a retry is harmless."""

    def __setstate__(self, state: dict[str, typing.Any] | None, /) -> None:
        # Only the worker that made a call can say that it did not run: a copy, or one that was sent, does not say it.
        if state is not None:
            super().__setstate__({name: value for name, value in state.items() if name != "may_have_run"})


def not_run(error: E) -> E:
    """Mark the error of a call whose function certainly did not run."""
    error.may_have_run = False
    return error


def set_may_have_run(error: BaseException, may_have_run: bool) -> None:
    """Let an error, and the members of an exception group, speak of another call than the one that raised it first."""
    left = [error]
    while left:
        error = left.pop()
        with contextlib.suppress(BaseException):  # a class of a user may have made a property of it
            if isinstance(error, ArpcError):
                BaseException.__setattr__(error, "may_have_run", may_have_run)
            if isinstance(error, BaseExceptionGroup):
                left.extend(error.exceptions)


class ConfigurationError(ArpcError, ValueError):
    """An option has a value that cannot work."""


class NotInitializedError(ArpcError, RuntimeError):
    """There is no worker in this context."""


class AlreadyInitializedError(ArpcError, RuntimeError):
    """This context has a worker already."""


class UnknownWorkerError(ArpcError, LookupError):
    """No worker of that name or id is in the group."""


class RendezvousError(ArpcError, RuntimeError):
    """The group did not form."""


class NameTakenError(RendezvousError):
    """Another worker of the group has this name or this rank."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Some workers did not arrive in time."""


class NotReadyError(ArpcError, RuntimeError):
    """An object is still being created on other workers: await it before it is used in this way."""


class UnsupportedError(ArpcError, ValueError):
    """A method that makes no sense for an object that is on another worker; the text says what to use instead."""


class WorkersFailedError(ArpcError, ExceptionGroup[Exception]):
    """Something that was to be done on several workers failed on some of them, or on all.

    Like the error of an `asyncio.TaskGroup` it holds one exception for each that failed, however many there are:
    ``except* OwnerLostError:`` picks some of them. ``failed`` names their workers in the same order, ``succeeded``
    those on which it was done.
    """

    failed: tuple[str, ...] = ()
    succeeded: tuple[str, ...] = ()

    @classmethod
    def of(cls, what: str, errors: abc.Sequence[tuple[str, Exception]], succeeded: abc.Sequence[str]) -> Self:
        """The error for what was done, given the workers that failed and those that did not."""
        names = ", ".join(repr(name) for name, _ in errors)
        others = f"; done on {', '.join(map(repr, succeeded))}" if succeeded else ""
        made = cls(f"{what} failed on {names}{others}", [error for _, error in errors])
        made.failed = tuple(name for name, _ in errors)
        made.succeeded = tuple(succeeded)
        return made

    def derive(self, excs: abc.Sequence[Exception], /) -> WorkersFailedError:  # type: ignore[override]
        """A group of some of the exceptions, for ``except*`` and `split`."""
        made = WorkersFailedError(self.message, excs)
        by_error = {id(error): name for name, error in zip(self.failed, self.exceptions, strict=False)}
        made.failed = tuple(by_error.get(id(error), "") for error in excs)
        made.succeeded = self.succeeded
        return made


class LaunchError(ArpcError, RuntimeError):
    """A group of processes that was launched did not end well.

    ``worker`` is the name of the worker that failed first and so ended the group, ``exit_code`` how its process ended
    (negative for a signal), ``traceback`` what it wrote last. Without a worker, the launcher itself could not go on.
    """

    def __init__(
        self, message: str, worker: str | None = None, exit_code: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self.args[0], self.worker, self.exit_code, self.traceback)


class TorchStateError(ArpcError, RuntimeError):
    """A scope was used where it cannot keep torch's state to one coroutine; the text says what to do instead."""


class ShutdownError(ArpcError, RuntimeError):
    """The worker is shutting down, so it takes no new work."""


class SerializationError(ArpcError, TypeError):
    """Something that was to travel cannot be pickled or unpickled; the text names it.

    ``is_of_answer`` is True if the call has been answered, and it is only here that the answer cannot be unpickled.
    """

    is_of_answer = False


class NotAllowedError(ArpcError, PermissionError):
    """A worker in allow-list mode refused a call or a value: it is not exported, or not to this caller."""


class CallError(ArpcError):
    """A call ended without an answer of its function."""


class RpcTimeoutError(CallError, TimeoutError):
    """The deadline of a call passed before its answer came."""


class CallCancelledError(CallError):
    """The handler was cancelled on the callee although the caller did not ask for it."""


class OverloadedError(CallError):
    """The callee refused the call before running it."""


class WorkerLostError(CallError, ConnectionError):
    """The worker a call went to died, left the group or stopped answering.

    ``worker`` is its name; ``may_have_run`` is False if the call certainly never reached it. An error that a handler
    passed on from a call of its own names the worker that the handler called.
    """

    def __init__(self, message: str, worker: str = "", *, may_have_run: bool = True) -> None:
        super().__init__(message)
        self.worker = worker
        self.may_have_run = may_have_run

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild_worker_lost, (type(self), str(self), self.worker)


def rebuild_worker_lost(cls: type[WorkerLostError], message: str, worker: str) -> WorkerLostError:
    return cls(message, worker)


class OwnerLostError(WorkerLostError):
    """The owner of an RRef died, left the group or stopped answering, and the value is lost with it."""


class RRefError(ArpcError, RuntimeError):
    """An RRef that cannot be used: it was released, or its value is gone."""


class RRefCreationError(RRefError):
    """The creation of an RRef timed out or was cut off, so that its value may not exist."""


class AutogradError(ArpcError, RuntimeError):
    """A distributed autograd context, or a root of a backward pass, cannot be used in this way."""


class BackwardError(AutogradError):
    """Something raised while a backward pass ran its nodes on some worker; that error is the ``__cause__``.

    ``worker`` is the name of that worker, ``worker_id`` its id, ``node`` the node of the graph as far as it is known,
    ``forward_stack`` where its forward ran, if torch's anomaly mode was on there then. ``reason`` is the text of that
    error alone, and ``path`` the ids of the workers that it came by: first the one that began the pass, last the one
    where it was raised.
    """

    def __init__(
        self,
        message: str,
        worker: str = "",
        worker_id: int = -1,
        node: str = "",
        forward_stack: str = "",
        reason: str = "",
        path: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.worker_id = worker_id
        self.node = node
        self.forward_stack = forward_stack
        self.reason = reason
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return BackwardError, (
            str(self),
            self.worker,
            self.worker_id,
            self.node,
            self.forward_stack,
            self.reason,
            self.path,
        )


class ProfilerError(ArpcError, RuntimeError):
    """A profile, or a profiling key, was used at the wrong time."""


class ScriptError(ArpcError, RuntimeError):
    """A TorchScript function raised, or does not take the arguments that it was called with.

    The text is torch's own. Where ``torch.jit.Error`` is no RuntimeError, this is one.
    """


class BatchError(ArpcError, ValueError):
    """A batched function returned a value that cannot be divided among its calls."""


class RemoteError(ArpcError):
    """A remote function raised an exception that cannot be rebuilt here.

    ``type_name`` is the qualified name of its type, ``message`` its text, ``stack`` the formatted remote traceback.
    """

    def __init__(self, type_name: str, message: str, stack: str = "", worker: str = "") -> None:
        super().__init__(type_name, message, stack, worker)
        self.type_name = type_name
        self.message = message
        self.stack = stack
        self.worker = worker

    def __str__(self) -> str:
        return f"{self.type_name} on worker {self.worker!r}: {self.message}"


class RemoteTraceback(Exception):  # noqa: N818 - it is a traceback, worn as a cause
    """Where an exception was raised on a remote worker; the ``__cause__`` of the exception raised here."""

    is_of_handler = True
    """False if the runtime of that worker ended the handler: by its deadline, a cancellation or a shutdown."""

    def __init__(self, worker: str, stack: str) -> None:
        super().__init__(worker, stack)
        self.worker = worker
        self.stack = stack

    def __str__(self) -> str:
        return f"raised on worker {self.worker!r}\n\n{self.stack.rstrip()}\n"


class WireError(ArpcError, ConnectionError):
    """A connection failed, or cannot be used."""


class ProtocolError(WireError):
    """The peer sent something that is not arpc, or not at this time."""


class HandshakeError(WireError):
    """A connection was refused by either side."""


class AuthenticationError(HandshakeError):
    """A peer could not prove that it knows the cluster secret."""


class ConnectionClosedError(WireError):
    """The connection is closed."""
