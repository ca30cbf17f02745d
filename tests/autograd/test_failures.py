"""Passes that fail: everywhere, with a name for what failed, and without a trace in the gradients."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import arpc
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left, until
from tests.autograd.test_backward import leaf


async def made_on_all(x):
    """A value whose history goes through all workers."""
    y = await arpc.rpc_sync("worker1", functions.nested, (x, "worker2"))
    return await arpc.rpc_sync("worker2", functions.nested, (y, "worker1"))


def assert_no_pass(group):
    for worker in group:
        if not worker.is_shut_down:
            assert worker.autograd.statistics()["passes"] == 0


@pytest.mark.parametrize("to", ["worker1", "worker0"])
async def test_a_node_that_raises(group, to):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await made_on_all(x)
        await arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=True)
        before = [worker.autograd.gradients(ctx_id) for worker in group]
        z = await arpc.rpc_sync(to, functions.boom, (y,))
        with pytest.raises(
            arpc.BackwardError, match=rf"failed on worker '{to}'.*in node BoomBackward: .*boom"
        ) as caught:
            await arpc.autograd.backward(ctx_id, [(z + y + x).sum()])
        assert caught.value.worker == to
        assert caught.value.worker_id == int(to[-1])
        assert caught.value.node == "BoomBackward"
        assert caught.value.reason == "boom"
        assert caught.value.path == tuple(dict.fromkeys((0, caught.value.worker_id)))
        assert isinstance(caught.value, RuntimeError)
        assert_no_pass(group)
        for worker, gradients in zip(group, before, strict=True):
            now = worker.autograd.gradients(ctx_id)
            assert now.keys() == gradients.keys()
            assert all(torch.equal(now[key], gradients[key]) for key in now)
        # the context is as good as before
        again = await arpc.rpc_sync(to, functions.mul, (x, 2))
        await arpc.autograd.backward(ctx_id, [again.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [18.0] * 3


async def test_the_remote_stack_is_told(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.boom, (x,))
        with pytest.raises(arpc.BackwardError) as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
    cause = caught.value.__cause__
    assert isinstance(cause, arpc.RemoteTraceback)
    assert 'raise ValueError("boom")' in str(cause)


async def test_a_hook_that_raises(group):
    x = leaf()

    def hook(_):
        raise KeyError("hooked")

    async with arpc.autograd.context() as ctx_id:
        y = x * 2
        y.register_hook(hook)
        z = await arpc.rpc_sync("worker1", functions.mul, (y, 2))
        with pytest.raises(arpc.BackwardError, match=r"on worker 'worker0'.*KeyError: 'hooked'") as caught:
            await arpc.autograd.backward(ctx_id, [z.sum()])
        assert isinstance(caught.value.__cause__, KeyError)
        assert_no_pass(group)


async def test_a_wrong_gradient_of_torch_itself_is_named(group):
    x = leaf()

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.new_zeros(7)

    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.mul, (Wrong.apply(x), 2))
        with pytest.raises(arpc.BackwardError, match="in node WrongBackward"):
            await arpc.autograd.backward(ctx_id, [y.sum()])


@pytest.mark.filterwarnings("ignore:Error detected in BoomBackward")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
async def test_anomaly_mode_tells_where_the_forward_ran(group):
    x = leaf()
    with torch.autograd.detect_anomaly(check_nan=False):
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", functions.boom, (x,))
            with pytest.raises(arpc.BackwardError, match="Its forward ran on worker 'worker1' here") as caught:
                await arpc.autograd.backward(ctx_id, [y.sum()])
    assert "return Boom.apply(x)" in caught.value.forward_stack


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
async def test_anomaly_mode_names_a_node_of_torch(group):
    x = leaf(-1.0)
    with torch.autograd.detect_anomaly():
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", functions.mul, (x.sqrt(), 2))
            with pytest.raises(arpc.BackwardError, match=r"in node SqrtBackward0.*nan"):
                await arpc.autograd.backward(ctx_id, [y.sum()])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
async def test_a_pause_is_no_anomaly(group):
    x = leaf()
    with torch.autograd.detect_anomaly(check_nan=False):
        async with arpc.autograd.context() as ctx_id:
            y = x * 3
            total = y + await arpc.rpc_sync("worker1", functions.mul, (y, 2))
            await arpc.autograd.backward(ctx_id, [total.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [9.0] * 3


# -- what people get wrong


async def test_roots_that_cannot_be(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        for roots, error, text in [
            ([], arpc.AutogradError, "No tensors provided for gradient computation."),
            ([torch.ones(1)], arpc.AutogradError, "requires_grad not set on root"),
            ([x * 2], arpc.AutogradError, "is not a scalar, all roots need to be scalar"),
            ([leaf(1.0)], arpc.AutogradError, "does not have a valid gradient function"),
            (None, TypeError, "list of tensors"),
            (x.sum(), TypeError, "list of tensors"),
            ([3], TypeError, "are tensors, not int"),
        ]:
            with pytest.raises(error, match=text):
                await arpc.autograd.backward(ctx_id, roots)
        with pytest.raises(arpc.AutogradError, match="Could not find autograd context with id: 77"):
            await arpc.autograd.backward(77, [x.sum()])
        with pytest.raises(arpc.AutogradError, match="Could not find autograd context with id: 77"):
            arpc.autograd.get_gradients(77)
        with pytest.raises(arpc.AutogradError, match="Already have an autograd context id for this thread"):
            async with arpc.autograd.context():
                pass
    with pytest.raises(arpc.AutogradError, match="Could not find"):
        arpc.autograd.get_gradients(ctx_id)


async def test_torchs_own_backward_says_what_to_call(group):
    x = leaf()
    async with arpc.autograd.context():
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        with pytest.raises(arpc.AutogradError, match=r"arpc\.autograd\.backward"):
            y.sum().backward()


async def test_without_a_worker():
    with pytest.raises(arpc.NotInitializedError):
        async with arpc.autograd.context():
            pass
    with pytest.raises(arpc.NotInitializedError):
        arpc.autograd.get_gradients(1)


async def test_two_passes_at_once_in_one_context(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.mul, (x, 2))
        results = await asyncio.gather(
            arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=True),
            arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=True),
            return_exceptions=True,
        )
        assert results[0] is None
        assert isinstance(results[1], arpc.AutogradError)
        assert "under way already" in str(results[1])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3


# -- passes that are ended

gate = threading.Event()


class Wait(torch.autograd.Function):
    """Holds up a backward pass until the gate is opened."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gate.wait(30)
        return gradient


@arpc.inline
def hold_up(x):
    # large enough to run in a thread
    return Wait.apply(x.expand(200_000)).sum()


@pytest.fixture
def closed_gate():
    gate.clear()
    yield gate
    gate.set()


async def held_up(group, ctx_id, x):
    """A pass that waits in a thread of worker1, and has passed worker2."""
    y = await arpc.rpc_sync("worker1", hold_up, (x,))
    z = await arpc.rpc_sync("worker2", functions.mul, (y, 2))
    started = asyncio.create_task(arpc.autograd.backward(ctx_id, [z + 0]))
    await until(lambda: group[1].autograd.container.find(ctx_id).active_pass is not None)
    return started


async def test_cancelling_ends_it_everywhere(group, closed_gate):
    x = leaf(1.0)
    async with arpc.autograd.context() as ctx_id:
        started = await held_up(group, ctx_id, x)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started
        await until(lambda: not any(worker.autograd.statistics()["passes"] for worker in group))
        assert all(not worker.autograd.gradients(ctx_id) for worker in group)


async def test_a_deadline_ends_it_everywhere(group, closed_gate):
    x = leaf(1.0)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", hold_up, (x,))
        z = await arpc.rpc_sync("worker2", functions.mul, (y, 2))
        with pytest.raises(arpc.RpcTimeoutError, match=f"autograd context {ctx_id} did not end in time"):
            await arpc.autograd.backward(ctx_id, [z + 0], timeout=0.05)
        await until(lambda: not any(worker.autograd.statistics()["passes"] for worker in group))
        assert all(not worker.autograd.gradients(ctx_id) for worker in group)


async def test_leaving_the_context_ends_it(group, closed_gate):
    x = leaf(1.0)
    async with arpc.autograd.context() as ctx_id:
        started = await held_up(group, ctx_id, x)
    with pytest.raises(arpc.AutogradError, match="was left while a backward pass"):
        await started
    assert_nothing_is_left(group)


async def test_a_deadline_of_the_handler_holds_for_its_pass(group, closed_gate):
    with pytest.raises(arpc.RpcTimeoutError):
        await arpc.rpc_sync("worker1", train_on, ("worker2",), timeout=0.2)
    await until(lambda: not any(worker.autograd.statistics()["contexts"] for worker in group))


async def train_on(other):
    x = leaf(1.0)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync(other, hold_up, (x,))
        await arpc.autograd.backward(ctx_id, [y], timeout=0)


# -- a bad network, and workers that are lost


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_cut_connection_fails_the_pass(after):
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=OPTIONS, transports={"memory": transport}) as group:
        x = leaf()
        async with arpc.autograd.context() as ctx_id:
            y = await made_on_all(x)
            transport.inject(Fault(MessageType.AUTOGRAD_GRADIENTS, "cut", count=1, after=after))
            with pytest.raises((arpc.WorkerLostError, arpc.AutogradError)):
                await arpc.autograd.backward(ctx_id, [y.sum()])
            await until(lambda: not any(worker.autograd.statistics()["passes"] for worker in group))
            assert all(not worker.autograd.gradients(ctx_id) for worker in group)
        await until(lambda: not any(worker.autograd.statistics()["contexts"] for worker in group))


async def test_gradients_that_get_lost_fail_the_pass_at_its_deadline():
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=OPTIONS, transports={"memory": transport}) as group:
        x = leaf()
        async with arpc.autograd.context() as ctx_id:
            y = await made_on_all(x)
            transport.inject(Fault(MessageType.AUTOGRAD_GRADIENTS, "drop", count=1, after=1))
            with pytest.raises(arpc.RpcTimeoutError):
                await arpc.autograd.backward(ctx_id, [y.sum()], timeout=0.2)
            await until(lambda: not any(worker.autograd.statistics()["passes"] for worker in group))
            assert all(not worker.autograd.gradients(ctx_id) for worker in group)


async def test_a_worker_that_leaves_fails_the_pass(closed_gate):
    async with cluster(3, options=OPTIONS, elastic=True) as group:
        x = leaf(1.0)
        async with arpc.autograd.context() as ctx_id:
            started = await held_up(group, ctx_id, x)
            await group[1].shutdown(graceful=False)
            with pytest.raises((arpc.WorkerLostError, arpc.AutogradError)):
                await started
            await until(lambda: not any(worker.autograd.statistics()["passes"] for worker in group))
            assert not group[2].autograd.gradients(ctx_id)
        assert_nothing_is_left(group)


async def test_a_pass_ends_with_the_coroutine_that_awaits_it(group):
    """As a task does whose loop ends, it closes the coroutine, which may not await anything then."""
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        roots = [(await made_on_all(x)).sum()]
        awaited = arpc.autograd.backward(ctx_id, roots, retain_graph=True)
        awaited.send(None)
        awaited.close()
        assert group[0].autograd.statistics()["passes"] == 0
        await arpc.autograd.backward(ctx_id, roots)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [16.0] * 3
        assert_no_pass(group)


async def test_a_coroutine_that_is_closed_when_its_pass_has_just_failed(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.boom, (await made_on_all(x),))
        awaited = arpc.autograd.backward(ctx_id, [y.sum()])
        awaited.send(None)
        await until(lambda: group[0].autograd.statistics()["passes"] == 0)
        awaited.close()
        assert arpc.autograd.get_gradients(ctx_id) == {}


async def test_a_pass_on_the_owner_of_a_root_ends_with_the_coroutine_that_awaits_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        root = arpc.remote("worker1", torch.sum, args=(x,))
        await root
        awaited = root.backward(ctx_id)
        awaited.send(None)
        awaited.close()
        await until(lambda: not any(worker.autograd.aborts.unacknowledged for worker in group))
        assert arpc.autograd.get_gradients(ctx_id) == {}
        assert_no_pass(group)
