"""torch.export and torch.compile: as what is called, as values, and held remotely."""

from __future__ import annotations

import pytest
import torch

import arpc
from arpc.torchscript import programs
from tests.torchscript import functions

X = torch.ones(1, 2)


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return torch.export.export(torch.nn.Linear(2, 3), (X,))


async def test_a_program_is_called(group, program):
    expected = program.module()(X)
    assert torch.equal(await arpc.rpc_sync("worker1", program, (X,)), expected)
    named = torch.export.export(torch.nn.Identity(), (), {"input": X})
    assert torch.equal(await arpc.rpc_async("worker1", named, kwargs={"input": X}), X)
    assert torch.equal(await arpc.remote("worker1", program, (X,)), expected)
    # torch 2.8 raises another error than its successors
    with pytest.raises((AssertionError, RuntimeError), match=r"Guard failed|Expected input at"):
        await arpc.rpc_sync("worker1", program, (torch.ones(1, 5),))


async def test_a_program_is_a_value(group, program):
    assert await arpc.rpc_sync("worker1", functions.type_name, (program,)) == "ExportedProgram"
    back = await arpc.rpc_sync("worker1", functions.call, (tuple, [program]))
    assert torch.equal(back[0].module()(X), program.module()(X))


async def test_a_program_is_held_and_called_where_it_is(group, program):
    model = arpc.remote("worker1", arpc.torchscript.module_of, (program,))
    assert torch.equal(await model.rpc_sync().forward(X), program.module()(X))


def test_programs_that_were_called_are_kept_but_not_forever(program, monkeypatch):
    monkeypatch.setattr(programs, "_MODULES", 1)
    modules = programs._Modules()
    saved = programs._save(program)
    first = modules.get(saved)
    assert modules.get(bytes(saved)) is first  # by its content
    other = torch.export.export(torch.nn.Identity(), (X,))
    modules.get(programs._save(other))
    assert len(modules._loaded) == 1
    assert modules.get(saved) is not first


class Counter(torch.nn.Module):
    """Changes what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


async def test_a_program_that_changes_what_it_has_is_called_as_it_was_sent(group):
    counter = torch.export.export(Counter(), (X,))
    for _ in range(2):
        assert (await arpc.rpc_sync("worker1", counter, (X,))).tolist() == [[2, 2]]
    held = arpc.remote("worker1", arpc.torchscript.module_of, (counter,))
    assert [(await held.rpc_sync().forward(X)).tolist() for _ in range(2)] == [[[2, 2]], [[3, 3]]]


async def test_compiled_functions_are_found_under_their_names(group):
    x = torch.ones(2)
    assert (await arpc.rpc_sync("worker1", functions.compiled_here, (x,))).tolist() == [5, 5]
    assert (await arpc.rpc_sync("worker1", functions.compiled_double, (x,))).tolist() == [2, 2]
    found = await arpc.rpc_sync("worker1", functions.call, (functions.call, one_of, functions.compiled_double))
    assert found is functions.compiled_double


def one_of(value):
    return value


async def test_a_compiled_function_of_no_module_is_compiled_again(group):
    x = torch.ones(2)
    compiled = torch.compile(functions.triple, backend="eager", fullgraph=True, dynamic=True)
    assert (await arpc.rpc_sync("worker1", compiled, (x,))).tolist() == [3, 3]
    assert (await arpc.remote("worker1", compiled, (x,))).tolist() == [3, 3]
    # what the peer has compiled is used again
    first = await arpc.rpc_sync("worker1", one_of, (compiled,))
    assert first is await arpc.rpc_sync("worker1", one_of, (compiled,))
    assert first._torchdynamo_orig_callable is functions.triple
    factor = 4
    closure = torch.compile(lambda value: value * factor, backend="eager")
    assert (await arpc.rpc_sync("worker1", closure, (x,))).tolist() == [4, 4]


async def test_a_compiled_module_is_sent_and_held(group):
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 2)
    compiled = torch.compile(linear, backend="eager")
    with torch.no_grad():
        assert torch.equal(await arpc.rpc_sync("worker1", compiled, (X,)), linear(X))
        held = arpc.remote("worker1", one_of, (compiled,))
        assert torch.equal(await held.rpc_sync().forward(X), linear(X))
