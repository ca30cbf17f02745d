"""Allow-list mode as workers see it: what is exported can be called, by those who may, and nothing else happens."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import functools
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import arpc
from arpc.agent.hooks import context_propagation as variables
from arpc.nn.owner import create_module
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType

ALLOW = RpcOptions(gc_freeze=False, allow="exported")
ran: list[str] = []


@arpc.register_type
@dataclass
class Order:
    number: int


class Unknown:
    pass


@arpc.export
async def total(orders: list[Order]) -> int:
    return sum(order.number for order in orders)


@arpc.export
def double(tensor):
    return tensor * 2


@arpc.export
async def first_order():
    return Order(1)


@arpc.export
async def unknown_result():
    return Unknown()


@arpc.export
async def fail(kind: str):
    raise {"plain": ValueError("plain"), "unknown": UnknownError("mine")}[kind]


@arpc.export
async def numbers(count: int):
    for number in range(count):
        yield number


@arpc.export
async def apply(function, value):
    return function(value)


async def hidden():
    ran.append("hidden")


class UnknownError(Exception):
    pass


@arpc.export
class Store:
    def __init__(self, start: int) -> None:
        self.value = start

    async def add(self, number: int) -> int:
        self.value += number
        return self.value

    def _wipe(self) -> None:
        ran.append("wiped")


@arpc.export
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, inputs):
        return self.linear(inputs)


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return ran.append, ("trapped",)


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


async def test_what_is_exported_can_be_called():
    async with cluster(2, options=ALLOW) as group:
        call = functools.partial(group[0].rpc_sync, "worker1")
        assert await call(total, args=([Order(1), Order(2)],)) == 3
        assert torch.equal(await call(double, args=(torch.ones(3),)), 2 * torch.ones(3))
        assert torch.equal(await call(double, args=(torch.ones(100_000),)), 2 * torch.ones(100_000))
        assert await call(first_order) == Order(1)
        assert [number async for number in group[0].stream("worker1", numbers, args=(3,))] == [0, 1, 2]
        assert await call(apply, kwargs={"function": double, "value": 4}) == 8
        assert await group[0].rpc_sync("worker0", total, args=([],)) == 0, "a worker may call itself"


async def test_what_is_not_exported_is_not_called():
    async with cluster(2, options=ALLOW) as group:
        with pytest.raises(arpc.NotAllowedError, match=r"test_guard\.hidden is not exported here.*@arpc\.export"):
            await group[0].rpc_sync("worker1", hidden)
        with pytest.raises(arpc.NotAllowedError, match="eval is not exported"):
            await group[0].rpc_sync("worker1", eval, args=("1",))
        with pytest.raises(arpc.NotAllowedError, match="not exported"):
            await group[0].remote("worker1", hidden).to_here()
        assert not ran


@pytest.mark.parametrize("function", [lambda: None, functools.partial(double, 1)], ids=["lambda", "partial"])
async def test_no_code_is_sent(function):
    async with cluster(2, options=ALLOW) as group:
        with pytest.raises((arpc.SerializationError, arpc.NotAllowedError)):
            await group[0].rpc_sync("worker1", function)


async def test_arguments_and_results_are_of_known_types():
    async with cluster(2, options=ALLOW) as group:
        with pytest.raises(arpc.NotAllowedError, match=r"Unknown is not on the list"):
            await group[0].rpc_sync("worker1", total, args=([Unknown()],))
        with pytest.raises(arpc.NotAllowedError, match="not on the list"):
            await group[0].rpc_sync("worker1", total, args=([Trap()],))
        with pytest.raises(arpc.SerializationError, match=r"result of unknown_result cannot be unpacked.*Unknown"):
            await group[0].rpc_sync("worker1", unknown_result)
        assert not ran


async def test_exceptions_are_rebuilt_within_the_lists():
    async with cluster(2, options=ALLOW) as group:
        with pytest.raises(ValueError, match="plain"):
            await group[0].rpc_sync("worker1", fail, args=("plain",))
        with pytest.raises(arpc.RemoteError, match="UnknownError on worker 'worker1': mine"):
            await group[0].rpc_sync("worker1", fail, args=("unknown",))


def pickled_trap() -> bytes:
    return pickle.dumps(Trap(), protocol=5)


def traps():
    """Messages with a pickle in each place where one can be."""
    meta = b"\x81\xa4vars\xc4" + bytes([len(pickled_trap())]) + pickled_trap()
    return {
        "function": [frame(MessageType.FUNCTION, 0, 0, 50, 0, pickled_trap())],
        "function in a request": [frame(MessageType.REQUEST, 0, 1, 0, 0, pickled_trap())],
        "function in a creation": [frame(MessageType.RREF_CREATE, 0, 1, 0, 0, pickled_trap())],
        "arguments": [frame(MessageType.REQUEST, 0, 1, 1, 0, pickled_trap())],
        "meta data": [frame(MessageType.REQUEST, 0, 1, 1, 0, pickle.dumps(([],)), meta)],
        "a message of RRefs": [frame(MessageType.RREF_FETCH, 0, 1, 1, 0, pickled_trap())],
        "a message of autograd": [frame(MessageType.AUTOGRAD_RELEASE, 0, 1, 1, 0, pickled_trap())],
    }


@pytest.mark.parametrize("place", traps())
async def test_a_pickle_does_nothing_wherever_it_is(place, monkeypatch):
    monkeypatch.setattr(variables, "_declared", {})
    arpc.propagate(contextvars.ContextVar("of_test_guard", default=1))
    async with cluster(2, options=ALLOW) as group:
        await group[0].rpc_sync("worker1", total, args=([],))  # so that function 1 is known
        connection = group[0].agent.known_peer("worker1").connection
        for data in traps()[place]:
            connection.send(data)
        assert await group[0].rpc_sync("worker1", total, args=([Order(2)],)) == 2
        assert not ran


@pytest.mark.parametrize("kind", [MessageType.REPLY, MessageType.FAILURE])
async def test_an_answer_does_nothing_either(kind):
    async with cluster(2, options=ALLOW) as group:
        pending = group[0].rpc_async("worker1", stay)
        await group[0].rpc_sync("worker1", total, args=([],))
        connection = group[1].agent.known_peer("worker0").connection
        (call_id,) = group[1].agent.connector.links[0].running
        payload = pickled_trap() if kind is MessageType.REPLY else pickle.dumps((pickled_trap(), "T", "text", "stack"))
        connection.send(frame(kind, 0, call_id, 0, 0, payload))
        with pytest.raises((arpc.SerializationError, arpc.RemoteError)):
            await pending
        assert not ran
        await group.shutdown(graceful=False)  # the handler waits still


@arpc.export
async def stay():
    await asyncio.Event().wait()


async def test_methods_of_values():
    async with cluster(2, options=ALLOW) as group:
        store = group[0].remote("worker1", Store, args=(5,))
        assert await store.rpc_async().add(2) == 7
        with pytest.raises(arpc.NotAllowedError, match=r"Store\._wipe may not be called on worker 'worker1'"):
            await store.rpc_async()._wipe()
        with pytest.raises(arpc.NotAllowedError):
            await store._call_method("__class__", arpc.UNSET)
        passed = await group[0].rpc_sync("worker1", keep, args=(store,))
        assert passed == 8
        assert not ran


@arpc.export
async def keep(store):
    return await store.rpc_async().add(1)


async def test_training_in_this_mode():
    arpc.export(torch.optim.SGD)
    async with cluster(2, options=ALLOW) as group:
        module = await arpc.nn.RemoteModule("worker1", Net)
        optimizer = await arpc.optim.DistributedOptimizer(torch.optim.SGD, await module.remote_parameters(), lr=0.1)
        async with arpc.autograd.context() as context_id:
            loss = (await module(torch.ones(4, 2))).sum()
            await arpc.autograd.backward(context_id, [loss])
            await optimizer.step(context_id)
        assert (await module.state_dict()).keys() == {"linear.weight", "linear.bias"}
        made = group[0].remote("worker1", create_module, args=(torch.nn.Linear, (1, 1), {}, torch.device("cpu")))
        with pytest.raises(arpc.NotAllowedError, match="Linear is not on the list"):
            await made.to_here()


# -- roles


async def test_roles_say_who_may_call_what():
    roles = {"worker1": ["*.total"], "*2": ["*.double", "*.total"]}
    async with cluster(3, options=ALLOW.replace(roles=roles)) as group:
        assert await group[1].rpc_sync("worker0", total, args=([],)) == 0
        assert await group[2].rpc_sync("worker0", double, args=(2,)) == 4
        with pytest.raises(arpc.NotAllowedError, match=r"worker 'worker1' may not call .*double on worker 'worker0'"):
            await group[1].rpc_sync("worker0", double, args=(Trap(),))
        with pytest.raises(arpc.NotAllowedError, match="no role allows it"):
            await group[0].rpc_sync("worker1", total, args=([],))
        assert await group[0].rpc_sync("worker0", double, args=(1,)) == 2, "to itself a worker may do anything"
        assert not ran, "arguments are not looked at before the role is"


async def test_roles_hold_for_functions_as_arguments():
    async with cluster(2, options=ALLOW.replace(roles={"*": ["*.apply"]})) as group:
        with pytest.raises(arpc.NotAllowedError, match="double"):
            await group[1].rpc_sync("worker0", apply, args=(double, 1))


@arpc.export
async def function_named():
    return double


@arpc.export
async def functions_named():
    yield double


@arpc.export
async def error_with_a_function():
    raise ValueError(double)


async def test_roles_hold_for_what_replies_items_and_errors_name():
    roles = {"*": ["*.function_named", "*.functions_named", "*.error_with_a_function"]}
    async with cluster(2, options=ALLOW.replace(roles=roles)) as group:
        with pytest.raises(
            arpc.SerializationError, match=r"worker 'worker1' may not call .*double on worker 'worker0'"
        ):
            await group[0].rpc_sync("worker1", function_named)
        with pytest.raises(arpc.SerializationError, match=r"worker 'worker1' may not call .*double"):
            _ = [item async for item in group[0].stream("worker1", functions_named)]
        with pytest.raises(arpc.RemoteError, match="ValueError"):  # described, and not rebuilt
            await group[0].rpc_sync("worker1", error_with_a_function)
        assert await group[0].rpc_sync("worker0", function_named) is double, "to itself a worker may do anything"


async def test_roles_hold_for_the_runtime_s_own_messages():
    roles = {"worker1": ["*.first_order"], "worker2": ["*.first_order", "arpc:*"]}
    async with cluster(3, options=ALLOW.replace(roles=roles, rref_grace=0.1, control_backoff=0.01)) as group:
        assert await group[2].remote("worker0", first_order).to_here() == Order(1)
        with pytest.raises(arpc.ArpcError, match="may not call arpc:RRef"):
            await group[1].remote("worker0", first_order).to_here()


async def test_roles_hold_for_autograd_contexts_which_their_caller_could_not_end():
    async with cluster(2, options=ALLOW.replace(roles={"*": ["*.total"]})) as group:
        async with arpc.autograd.context():
            with pytest.raises(arpc.NotAllowedError, match="may not call arpc:AutogradGradients"):
                await arpc.rpc_sync("worker1", total, args=([Order(3)],))
            assert not group[1].autograd.container.contexts
        assert await arpc.rpc_sync("worker1", total, args=([Order(3)],)) == 3


async def test_roles_that_allow_gradients_allow_contexts():
    async with cluster(2, options=ALLOW.replace(roles={"*": ["*.total", "arpc:*"]})) as group:
        async with arpc.autograd.context():
            assert await arpc.rpc_sync("worker1", total, args=([Order(3)],)) == 3
        assert not group[1].autograd.container.contexts


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"allow": "all"}, "allow must be None or 'exported'"),
        ({"roles": {"a": ["*"]}}, "roles need allow-list mode"),
        ({"allow": "exported", "roles": {"a": "*"}}, "must be a list of patterns"),
    ],
)
def test_options_that_cannot_be(options, complaint):
    with pytest.raises(arpc.ConfigurationError, match=complaint):
        RpcOptions(**options)


# -- nobody reads what a peer sent past the policy

READERS = {
    "arpc/wire/values/pickler.py": {"pickle.loads"},
    "arpc/wire/values/policy.py": {"loads", "restricted_loads", "read_name", "read_layout"},
    "arpc/wire/values/restricted.py": {"_QuickUnpickler", "_CarefulUnpickler", "_NameUnpickler", "pickle.Unpickler"},
    # tables of tensors hold no pickles; the agent passes the policy's own function
    "arpc/wire/protocol.py": {"read_layout"},
    "arpc/agent/peers/dialer.py": {"read_layout"},
    # what `_CarefulUnpickler` is built on
    "arpc/private/interpreter.py": {"pickle._Unpickler"},
    "arpc/wire/values/layouts.py": {"torch.load"},  # refused in allow-list mode
    # what this rebuilds is named by pickles that allow-list mode refuses
    "arpc/torchscript/programs.py": {"torch.export.load"},
    # between a launcher and its own children, and not with peers
    "arpc/launch/programs.py": {"pickle.loads"},
    "arpc/launch/ray_cluster.py": {"pickle.loads"},
    "arpc/launch/ray_worker.py": {"pickle.loads"},
    # a user's own buffers, by hand
    "arpc/compat/rpc/internal.py": {"_Unpickler", "pickle.Unpickler"},
    # a baseline of the benchmarks, which is no part of the runtime
    "arpc/bench/floor.py": {"pickle.loads"},
}
READING = {
    "loads",
    "read_layout",
    "restricted_loads",
    "read_name",
    "_QuickUnpickler",
    "_CarefulUnpickler",
    "_NameUnpickler",
    "_Unpickler",
    "pickle.loads",
    "pickle.load",
    "pickle.Unpickler",
    "pickle._Unpickler",
    "cloudpickle.loads",
    "cloudpickle.load",
    "marshal.loads",
    "marshal.load",
    "torch.load",
    "torch.jit.load",
    "torch.export.load",
    "torch.package.PackageImporter",
}


def test_what_peers_send_is_read_in_one_place():
    # mentions count and not only calls: a function may be called under another name
    root = Path(arpc.__file__).parent
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        path = file.relative_to(root.parent).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name | ast.Attribute) and (name := ast.unparse(node)) in READING:
                found.setdefault(path, set()).add(name)
    assert found == READERS, "read what peers sent with `agent.policy.read`, and say who sent it"
