from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from arpc.private import torch as private
from arpc.private.torch import fits_like, fits_nothing, private_apis

pytestmark = pytest.mark.private_apis


def test_private_apis_are_on():
    assert private_apis() == {"TensorGuards": True}  # or tensors are compared one by one, which is slow


def test_an_environment_variable_turns_them_off():
    program = "from arpc.private.torch import private_apis; print(*private_apis().values())"
    for setting, expected in (("1", "False"), ("0", "True"), ("", "True")):
        environment = {**os.environ, "ARPC_PUBLIC_APIS": setting, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert done.stdout.strip() == expected


def test_tensors_fit_that_look_the_same():
    fits = fits_like([torch.ones(3), torch.ones(2, 2, dtype=torch.int64)])

    assert fits(torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64))
    assert fits(torch.zeros(6)[3:], torch.zeros(2, 2, dtype=torch.int64))
    assert not fits(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3))


@pytest.mark.parametrize(
    "unlike",
    [
        torch.ones(3),
        torch.ones(2, 3),
        torch.ones(2, 4)[:, ::2],
        torch.ones(2, 2).t(),
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(2, 2, requires_grad=True),
        torch.ones(2, 2, device="meta"),
        torch._neg_view(torch.ones(2, 2)),
        torch._efficientzerotensor(2, 2),
        Parameter(torch.ones(2, 2), requires_grad=False),
        "no tensor",
    ],
    ids=str,
)
def test_others_do_not(unlike):
    fits = fits_like([torch.ones(2, 2)])

    assert not fits(unlike)
    with torch.no_grad():
        assert not fits(unlike)


def test_one_that_is_there_twice_does_not():
    tensor = torch.ones(2)

    assert fits_like([tensor, torch.ones(2)])(tensor, torch.zeros(2))
    assert not fits_like([tensor, torch.ones(2)])(tensor, tensor)


def test_the_examples_are_not_kept():
    example = torch.ones(2)
    reference = weakref.ref(example)
    fits = fits_like([example])
    del example
    gc.collect(0)

    assert reference() is None
    assert fits(torch.ones(2))


def test_where_torch_does_otherwise_nothing_fits(monkeypatch):
    monkeypatch.setattr(private, "_guard", lambda _: lambda *_: True)
    assert not private._guards_are_reliable()
    monkeypatch.setattr(private, "_guard", lambda _: lambda *_: False)
    assert not private._guards_are_reliable()
    monkeypatch.delattr(private, "_guard")
    assert not private._guards_are_reliable()

    monkeypatch.setattr(private, "_uses_guards", False)
    assert fits_like([torch.ones(1)]) is fits_nothing
    assert not fits_nothing(torch.ones(1))


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (2, 0, 3), (1, 4), (4, 3, 2), (2, 1, 1)], ids=str)
def test_all_shapes_fit_and_whoever_watches_torch_sees_nothing_of_it(shape):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    example, other = torch.ones(shape), torch.zeros(shape)
    with Watch():
        fits_like([example])
    assert not seen
    assert fits_like([example])(other)
