"""Every exception arpc raises, in one tree.

::

    ArpcError
    ├── ConfigurationError (ValueError)        an option is wrong; the text says which and what to set
    ├── NotInitializedError (RuntimeError)     no worker in this context: call init_rpc first
    ├── AlreadyInitializedError (RuntimeError) this context has a worker already
    ├── UnknownWorkerError (LookupError)       no worker of that name or id in the group
    ├── RendezvousError (RuntimeError)         the group did not form
    │   ├── NameTakenError                     another live worker has this name or rank
    │   └── RendezvousTimeoutError (TimeoutError)  some workers did not arrive in time
    ├── NotReadyError (RuntimeError)           an object is still being created remotely: await it first
    ├── UnsupportedError (ValueError)          not possible on a remote object, or a dependency is missing
    ├── LaunchError (RuntimeError)             a launched group of processes failed
    ├── WorkersFailedError (ExceptionGroup)    an operation on several workers failed on some of them
    ├── TorchStateError (RuntimeError)         a grad mode would leak from its coroutine to other ones
    ├── ShutdownError (RuntimeError)           the worker is shutting down, or has shut down
    ├── SerializationError (TypeError)         a function, argument or result cannot be pickled or unpickled
    ├── NotAllowedError (PermissionError)      a worker in allow-list mode refused a call or a value
    ├── CallError                              a call ended without a reply from its function
    │   ├── RpcTimeoutError (TimeoutError)     its deadline passed
    │   ├── CallCancelledError                 its handler was cancelled on the callee, not by the caller
    │   ├── OverloadedError                    it was refused: too many calls wait, on the callee or to be sent
    │   └── WorkerLostError (ConnectionError)  the callee died, left or stopped responding
    │       └── OwnerLostError                 the callee owned an RRef, whose value is lost with it
    ├── RRefError (RuntimeError)               an RRef cannot be used: it was released, or its value is gone
    │   └── RRefCreationError                  it is not known whether its value was ever created
    ├── AutogradError (RuntimeError)           no such context, or roots that gradients cannot start from
    │   └── BackwardError                      a node raised in a backward pass; names the worker and the node
    ├── ProfilerError (RuntimeError)           a profile, or a profiling key, was used at the wrong time
    ├── ScriptError (RuntimeError)             a TorchScript function raised, or does not take these arguments
    ├── BatchError (ValueError)                a batched function did not return one result for each of its calls
    ├── RemoteError                            the function raised an exception that cannot be rebuilt here
    └── WireError (ConnectionError)            a connection failed, or cannot be used
        ├── ProtocolError                      the peer sent bytes that are not arpc's, or not valid at this time
        ├── HandshakeError                     one side refused the connection
        │   └── AuthenticationError            the secret or the certificate of one side was not accepted
        └── ConnectionClosedError              the connection is closed

    RemoteTraceback                            never raised: the ``__cause__`` of an exception raised remotely

An exception of a remote function arrives with its own type, so it is *not* an ``ArpcError``; its ``__cause__`` is a
`RemoteTraceback` that shows where it was raised. An error with a builtin in parentheses inherits from that builtin, and
can be caught as such.

An error that a call raises has ``may_have_run``, which is False only if the function certainly did not run. It refers
to the call that raised it: if a handler does not catch the error of a call of its own, the caller of the handler gets
the same type of error with ``may_have_run`` True, because the handler did run.
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
    """Of an error that a call raised: False if the function certainly did not run, so that a retry is safe."""

    def __setstate__(self, state: dict[str, typing.Any] | None, /) -> None:
        # Only the worker that made a call knows that it did not run: a copy, or an error that was sent, loses the mark
        if state is not None:
            super().__setstate__({name: value for name, value in state.items() if name != "may_have_run"})


def not_run(error: E) -> E:
    """Mark the error of a call whose function certainly did not run."""
    error.may_have_run = False
    return error


def set_may_have_run(error: BaseException, may_have_run: bool) -> None:
    """Set ``may_have_run`` of an error, and of the members of an exception group, for the call that raises it now."""
    left = [error]
    while left:
        error = left.pop()
        with contextlib.suppress(BaseException):  # a user's class may define it as a property
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
    """Some workers did not arrive in time: at the start, or at a graceful shutdown."""


class NotReadyError(ArpcError, RuntimeError):
    """An object is still being created on other workers: await it before it is used in this way."""


class UnsupportedError(ArpcError, ValueError):
    """An operation is not possible on a remote object, or a dependency is missing; the text says what to do instead."""


class WorkersFailedError(ArpcError, ExceptionGroup[Exception]):
    """An operation on several workers failed on some of them, or on all.

    Like the error of an `asyncio.TaskGroup` it holds one exception for each failure, even if there is only one:
    ``except* OwnerLostError:`` selects some of them. ``failed`` names the failed workers in the order of the
    exceptions, ``succeeded`` the workers on which the operation was done.
    """

    failed: tuple[str, ...] = ()
    succeeded: tuple[str, ...] = ()

    @classmethod
    def of(cls, what: str, errors: abc.Sequence[tuple[str, Exception]], succeeded: abc.Sequence[str]) -> Self:
        """Make the error of operation ``what``, from the failed workers with their errors and the other workers."""
        names = ", ".join(repr(name) for name, _ in errors)
        others = f"; done on {', '.join(map(repr, succeeded))}" if succeeded else ""
        made = cls(f"{what} failed on {names}{others}", [error for _, error in errors])
        made.failed = tuple(name for name, _ in errors)
        made.succeeded = tuple(succeeded)
        return made

    def derive(self, excs: abc.Sequence[Exception], /) -> WorkersFailedError:  # type: ignore[override]
        """Return a group of some of the exceptions, for ``except*`` and `split`."""
        made = WorkersFailedError(self.message, excs)
        by_error = {id(error): name for name, error in zip(self.failed, self.exceptions, strict=False)}
        made.failed = tuple(by_error.get(id(error), "") for error in excs)
        made.succeeded = self.succeeded
        return made


class LaunchError(ArpcError, RuntimeError):
    """A launched group of processes failed.

    ``worker`` is the name of the worker that failed first and so ended the group, ``exit_code`` the exit code of its
    process (negative for a signal), ``traceback`` the traceback that it ended with, if any. If ``worker`` is None, the
    launcher itself could not continue.
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
    """The worker is shutting down or has shut down, so it takes no new work."""


class SerializationError(ArpcError, TypeError):
    """A function, argument, result or other value to send cannot be pickled or unpickled; the text names it.

    ``is_of_answer`` is True if the callee has replied, and only the reply cannot be unpickled on the caller.
    """

    is_of_answer = False


class NotAllowedError(ArpcError, PermissionError):
    """A worker in allow-list mode refused a call or a value: it is not exported, or not to this caller."""


class CallError(ArpcError):
    """A call ended without a reply from its function."""


class RpcTimeoutError(CallError, TimeoutError):
    """The deadline of a call passed before its reply arrived."""


class CallCancelledError(CallError):
    """The handler was cancelled on the callee although the caller did not ask for it."""


class OverloadedError(CallError):
    """The call was refused before it ran, because a limit of the callee or of this worker was reached."""


class WorkerLostError(CallError, ConnectionError):
    """The worker that was called died, left the group or stopped responding.

    ``worker`` is its name; ``may_have_run`` is False if the call certainly never reached it. If a handler does not
    catch this error of a call of its own, its caller gets an error with the name of the worker that the handler called.
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
    """The owner of an RRef died, left the group or stopped responding, and the value is lost with it."""


class RRefError(ArpcError, RuntimeError):
    """An RRef cannot be used: it was released, or its value is gone."""


class RRefCreationError(RRefError):
    """The creation of an RRef timed out or was interrupted, so that its value may not exist."""


class AutogradError(ArpcError, RuntimeError):
    """A distributed autograd context, or a root of a backward pass, cannot be used in this way."""


class BackwardError(AutogradError):
    """An exception was raised while a backward pass ran its nodes on some worker; it is the ``__cause__``.

    ``worker`` is the name of that worker, ``worker_id`` its id, ``node`` the node of the graph as far as it is known,
    ``forward_stack`` the stack of its forward, if torch's anomaly mode was on there at that time. ``reason`` is the
    text of that exception alone, and ``path`` the ids of the workers that the error passed through: first the one that
    began the pass, last the one where it was raised.
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

    The text is torch's own. Unlike ``torch.jit.Error``, this is a RuntimeError.
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


class RemoteTraceback(Exception):  # noqa: N818 - it is a traceback, used as a cause
    """The traceback of an exception on a remote worker; the ``__cause__`` of the exception raised here."""

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
    """The peer sent bytes that are not arpc's protocol, or a message that is not valid at this time."""


class HandshakeError(WireError):
    """A connection was refused by either side."""


class AuthenticationError(HandshakeError):
    """A peer could not prove that it knows the group secret, or the certificate of one side was not accepted."""


class ConnectionClosedError(WireError):
    """The connection is closed."""
