"""One tree of errors, as its docstring draws it, that travels between workers."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

import arpc
from arpc import errors
from arpc.errors import (
    ArpcError,
    RemoteError,
    RemoteTraceback,
    WorkerLostError,
    WorkersFailedError,
    not_run,
    set_may_have_run,
)
from arpc.testing import cluster

CLASSES = [getattr(errors, name) for name in errors.__all__]


def make(cls: type[BaseException]) -> BaseException:
    if cls is RemoteError:
        return RemoteError("module.Kind", "the text", "the stack", "the worker")
    if cls is RemoteTraceback:
        return RemoteTraceback("the worker", "the stack")
    if cls is WorkersFailedError:
        return WorkersFailedError("the text", [ValueError("one of them")])
    return cls("the text")


def test_all_are_public_in_the_package_too():
    for cls in CLASSES:
        assert getattr(arpc, cls.__name__) is cls


def test_all_are_listed():
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == set(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not RemoteTraceback])
def test_all_have_one_root(cls):
    assert issubclass(cls, ArpcError)


def test_the_docstring_draws_the_tree():
    """Each line of the drawing names a class; its depth tells the parent, the parentheses a builtin base."""
    parents: list[type] = []
    drawn = set()
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        if match is None or not hasattr(errors, match[2]):
            continue
        depth, cls = len(match[1]) // 4, getattr(errors, match[2])
        parents[depth:] = [cls]
        drawn.add(match[2])
        if depth:
            assert parents[depth - 1] in cls.__bases__, line
        builtin = match[3]
        assert builtin is None or builtin in [base.__name__ for base in cls.__mro__], line
    assert drawn == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_all_survive_pickling_and_copying(cls):
    error = make(cls)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert repr(twin.args) == repr(error.args)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_a_lost_worker_is_named():
    error = WorkerLostError("it is gone", "worker7", may_have_run=False)
    assert str(error) == "it is gone"
    assert (error.worker, error.may_have_run) == ("worker7", False)
    assert isinstance(error, ConnectionError)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(twin), twin.worker) == ("it is gone", "worker7")


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not RemoteTraceback])
def test_only_the_error_itself_says_that_a_call_did_not_run(cls):
    error = make(cls)
    assert error.may_have_run
    not_run(error)
    assert not error.may_have_run
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert twin.may_have_run
    set_may_have_run(ExceptionGroup("some", [ValueError(), ExceptionGroup("more", [error])]), may_have_run=True)
    assert error.may_have_run
    assert WorkerLostError("").may_have_run


def test_a_remote_error_tells_all_it_knows():
    error = make(RemoteError)
    assert str(error) == "module.Kind on worker 'the worker': the text"
    assert (error.type_name, error.message, error.stack, error.worker) == error.args


def test_a_remote_traceback_is_never_raised_but_printed():
    assert not issubclass(RemoteTraceback, ArpcError)
    text = str(RemoteTraceback("worker7", "line one\nline two\n"))
    assert text.startswith("raised on worker 'worker7'")
    assert text.endswith("line two\n")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.UnknownWorkerError, LookupError),
        (errors.RpcTimeoutError, TimeoutError),
        (errors.RendezvousTimeoutError, TimeoutError),
        (errors.WorkerLostError, ConnectionError),
        (errors.WireError, ConnectionError),
        (errors.SerializationError, TypeError),
        (errors.ShutdownError, RuntimeError),
        (errors.NotInitializedError, RuntimeError),
    ],
)
def test_they_can_be_caught_as_what_people_know(cls, builtin):
    assert issubclass(cls, builtin)


async def test_all_can_be_raised_by_a_handler():
    async with cluster(2) as group:
        for cls in CLASSES:
            if cls is RemoteTraceback:
                continue
            with pytest.raises(cls) as caught:
                await group[0].rpc_sync("worker1", throw, args=(make(cls),))
            assert type(caught.value) is cls
            assert str(caught.value) == str(make(cls))
            assert isinstance(caught.value.__cause__, RemoteTraceback)


async def throw(error: BaseException) -> None:
    raise error
