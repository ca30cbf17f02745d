"""Backward passes over one or several workers: what they compute, how they fail, and how they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import arpc
from arpc.autograd.engine import run_policy
from arpc.autograd.passes.messages import Parcel, PassHeading, pack_parcel
from arpc.testing import cluster
from arpc.wire.messages import AutogradAbort
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left
from tests.autograd.test_backward import leaf

weight = torch.full((3,), 2.0, requires_grad=True)


@arpc.inline
def weigh(x):
    return x * weight


@arpc.inline
def give_weight():
    return weight


async def weigh_by_way_of(x, further):
    return await arpc.rpc_sync(further, weigh, (x,))


async def weigh_with_mine(x, owner):
    return x * await arpc.rpc_sync(owner, give_weight)


@arpc.inline
def weigh_in_vain(x):
    return Failing.apply(x)


class Failing(torch.autograd.Function):
    """Fails on its way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("weighed and found wanting")


def double(tensor: torch.Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(2)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch):
    """However slow the machine is, what takes next to nothing is not taken for long."""
    monkeypatch.setattr(run_policy, "SHORT_S", 60.0)


async def test_a_call_and_back(group):
    x = leaf()
    for _ in range(2):
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", weigh, (x,))
            await arpc.autograd.backward(ctx_id, [y.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
            assert group[1].autograd.gradients(ctx_id)[weight].tolist() == x.tolist()
    assert [worker.statistics()["autograd"]["passes_begun"] for worker in group[:2]] == [2, 2]


async def test_several_workers_and_results_that_nobody_uses(group):
    x, unused = leaf(), leaf()
    async with arpc.autograd.context() as ctx_id:
        first, second, _ = await asyncio.gather(
            arpc.rpc_sync("worker1", weigh, (x,)),
            arpc.rpc_sync("worker2", weigh, (x,)),
            arpc.rpc_sync("worker2", weigh, (unused,)),
        )
        await arpc.autograd.backward(ctx_id, [(first * 3 + second).sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert gradients[x].tolist() == [8.0] * 3
        assert unused not in gradients


async def test_a_pass_of_one_worker(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(x * x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == (2 * x).tolist()


async def test_a_second_pass_adds_to_the_first_and_the_graph_is_freed_with_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0] * 3
        with pytest.raises(arpc.AutogradError):
            await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0] * 3


@arpc.inline
def give_back(x):
    return x, weight, x * 2


async def test_tensors_that_are_returned_as_they_are(group):
    x, seen = leaf(), []
    hook = weight.register_hook(lambda gradient: seen.append(gradient.tolist()) or 5 * gradient)
    try:
        async with arpc.autograd.context() as ctx_id:
            same, given, doubled = await arpc.rpc_sync("worker1", give_back, (x,))
            await arpc.autograd.backward(ctx_id, [(same * 3 + given * 4 + doubled).sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [5.0] * 3
            assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [20.0] * 3
    finally:
        hook.remove()
    assert seen == [[4.0] * 3]


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
async def test_hooks_of_the_node_that_a_result_came_from_run(group, register):
    x, seen = leaf(), []
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        getattr(y.grad_fn, register)(lambda *gradients: seen.append(gradients))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
    assert len(seen) == 1


async def test_hooks_of_a_result_and_what_it_retains(group):
    x, seen = leaf(), []
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        y.register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
        y.retain_grad()
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3
        assert y.grad.tolist() == [3.0] * 3
    assert len(seen) == 1


@pytest.mark.parametrize("what", ["hook of a leaf", "hook after accumulation", "shared node", "too long"])
async def test_hooks_shared_nodes_and_long_runs(group, monkeypatch, what):
    x = leaf()
    sent, seen = x, []
    if what == "hook of a leaf":
        x.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    elif what == "hook after accumulation":
        x.register_post_accumulate_grad_hook(double)
    elif what == "shared node":
        sent = x * 2
    else:
        monkeypatch.setattr(group[0].autograd, "run_policy", run_policy.ThreadsOnly())
        sent = x.clone()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (sent,))
        if what == "shared node":  # which is to run once, with both its gradients
            sent.grad_fn.register_prehook(seen.append)
            y = (y + sent) * (2 / 3)
        await arpc.autograd.backward(ctx_id, [y.sum()])
        expected = 2.0 if what == "too long" else 4.0
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [expected] * 3
    assert len(seen) == (what in {"hook of a leaf", "shared node"})


async def weigh_and_pass_on(x, *further):
    """A row of workers, each with a node before the next and one behind it."""
    return 3 * await arpc.rpc_sync(further[0], weigh_and_pass_on, (x * weight, *further[1:])) if further else x * weight


@pytest.mark.parametrize("is_retained", [False, True])
async def test_nodes_before_the_call_and_workers_that_pass_it_on(group, is_retained):
    x, seen = leaf(), []
    for _ in range(2):
        async with arpc.autograd.context() as ctx_id:
            sent = x * 2
            sent.grad_fn.register_prehook(seen.append)
            y = await arpc.rpc_sync("worker1", weigh_and_pass_on, (sent, "worker2"))
            for _ in range(1 + is_retained):
                await arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=is_retained)
            scale = 1 + is_retained
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [24.0 * scale] * 3
            for worker in group[1:]:
                assert worker.autograd.gradients(ctx_id)[weight].tolist() == (12 * scale * x).tolist()
    assert len(seen) == 2 * (1 + is_retained)


async def pass_on_what_is_shared(x, further):
    return x + await arpc.rpc_sync(further, weigh, (x,))


async def pass_on_what_is_mine(x, further):
    return await arpc.rpc_sync(further, weigh, (weight,)) * x


async def pass_on_by_turns(x, first, second):
    return await arpc.rpc_sync(second, weigh, (await arpc.rpc_sync(first, weigh, (x,)),))


async def pass_on_to_itself(x, myself):
    return await arpc.rpc_sync(myself, weigh, (await arpc.rpc_sync(myself, weigh, (x,)),))


async def pass_on_in_vain(x, further):
    await arpc.rpc_sync(further, weigh, (x,))
    return x * weight


@pytest.mark.parametrize(
    ("function", "workers", "factor"),
    [
        (pass_on_what_is_shared, ["worker2"], 3.0),
        (pass_on_what_is_mine, ["worker2"], 4.0),
        (pass_on_by_turns, ["worker2", "worker0"], 4.0),
        (pass_on_by_turns, ["worker0", "worker2"], 4.0),
        (pass_on_to_itself, ["worker1"], 4.0),
        (pass_on_in_vain, ["worker2"], 2.0),
    ],
)
async def test_workers_in_the_middle(group, function, workers, factor):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", function, (x, *workers))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [factor] * 3


async def test_gradients_for_what_was_handed_out_on_request(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_with_mine, (x, "worker0"))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        gradients = arpc.autograd.get_gradients(ctx_id)
        assert gradients[x].tolist() == [2.0] * 3
        assert gradients[weight].tolist() == x.tolist()


@pytest.mark.parametrize("turns", range(8))
async def test_one_that_is_cancelled_at_any_moment_leaves_nothing(group, turns):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y], retain_graph=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert not any(worker.autograd.gradients(ctx_id) for worker in group[:2])
            await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == x.tolist()


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_one_that_is_passed_on_leaves_nothing_either(group, turns):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh_and_pass_on, (x * 2, "worker2"))).sum()
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y], retain_graph=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert not any(worker.autograd.gradients(ctx_id) for worker in group)
            assert [worker.statistics()["autograd"]["passes"] for worker in group] == [0, 0, 0]
            await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [24.0] * 3
        for worker in group[1:]:
            assert worker.autograd.gradients(ctx_id)[weight].tolist() == (12 * x).tolist()


async def boom_and_pass_on(x, further):
    return await arpc.rpc_sync(further, weigh, (functions.Boom.apply(x * weight),))


async def test_an_error_after_the_answers_have_come_ends_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", boom_and_pass_on, (x, "worker2"))
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert caught.value.path == (0, 1)
        assert not any(worker.autograd.gradients(ctx_id) for worker in group)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (functions.Boom.apply(x * 2),))
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert caught.value.worker == "worker0"
        assert not any(worker.autograd.gradients(ctx_id) for worker in group[:2])


class Outcry(BaseException):
    """What is no error, as that of a test that fails, or of who ends the process."""


def cry_out(gradient):
    raise Outcry


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_exception_that_is_no_error_ends_it(group, workers):
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["exception"]))
    async with arpc.autograd.context() as ctx_id:
        x = leaf() * 2
        x.register_hook(cry_out)
        results = [await arpc.rpc_sync(worker.name, weigh, (x,)) for worker in group[1 : 1 + workers]]
        async with asyncio.timeout(30):
            with pytest.raises(arpc.BackwardError, match="Outcry") as caught:
                await arpc.autograd.backward(ctx_id, [torch.stack(results).sum()])
        assert isinstance(caught.value.__cause__, Outcry)
        assert not heard
        assert not any(worker.autograd.statistics()["passes"] for worker in group)
        assert not any(worker.autograd.gradients(ctx_id) for worker in group[: 1 + workers])


async def test_an_error_of_a_node_here_ends_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = functions.Boom.apply(await arpc.rpc_sync("worker1", weigh, (x,)))
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert caught.value.worker == "worker0"
        assert arpc.autograd.get_gradients(ctx_id) == {}


async def test_gradients_that_cannot_be_sent_end_it(group, monkeypatch):
    x = leaf()

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("it cannot be packed")

    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        with monkeypatch.context() as patched:
            patched.setattr(group[0].agent.codec, "pack", break_down)
            with pytest.raises(arpc.BackwardError, match="cannot be packed"):
                await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        assert arpc.autograd.get_gradients(ctx_id) == {}
        assert group[0].statistics()["autograd"]["passes"] == 0
        await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3


async def test_an_error_of_a_node_there_ends_it(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.boom, (x,))
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert caught.value.path == (0, 1)
        assert not any(worker.autograd.gradients(ctx_id) for worker in group[:2])


async def test_a_context_that_is_left_during_a_pass_ends_it(group):
    x = leaf()
    begun = asyncio.Event()

    async def run() -> None:
        async with arpc.autograd.context() as ctx_id:
            y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
            task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y]))
            await asyncio.sleep(0)
            begun.set()
        with pytest.raises(arpc.AutogradError, match="was left while a backward pass"):
            await task

    await run()
    assert begun.is_set()


# -- parcels and answers in any order


class Postponed:
    """Holds back what a pass sends, so that a test decides what is answered, and when."""

    def __init__(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, asyncio.Future[Any], Callable[[], asyncio.Future[Any]]]] = []
        self.has_sent = asyncio.Event()
        self._send = worker.autograd.send
        monkeypatch.setattr(worker.autograd, "send", self._hold)

    def _hold(self, backward_pass: Any, to: int, parcel: Parcel) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self.sent.append((to, future, lambda: self._send(backward_pass, to, parcel)))
        self.has_sent.set()
        return future

    async def let_go(self) -> None:
        """Send it, and hand on the answers."""
        while self.sent:
            _, future, send = self.sent.pop(0)
            future.set_result(await send())


@pytest.mark.parametrize("workers", [("worker1",), ("worker1", "worker2")], ids=len)
async def test_a_worker_that_was_written_to_is_told_nothing_twice(group, monkeypatch, workers):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        results = [await arpc.rpc_sync(worker, weigh, (x,)) for worker in workers]
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [sum(results).sum()]))
        await asyncio.sleep(0)
        active = group[0].autograd.container.find(ctx_id).active_pass
        assert active.receive(1, Parcel(asks=(0, 0)), is_engaging=False) is None
        await postponed.let_go()
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 * len(workers)] * 3


async def test_gradients_may_come_after_the_answer(group, monkeypatch):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        ((_, future, _),) = postponed.sent
        context = group[0].autograd.container.find(ctx_id)
        (message_id,) = context.sends
        future.set_result(pack_parcel(Parcel(is_first=True, ids=(message_id,))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        context.active_pass.receive(1, Parcel([(message_id, [torch.full((3,), 7.0)])]), is_engaging=False)
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [7.0] * 3


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("is_asked", [True, False])
async def test_it_goes_on_when_it_is_asked_or_a_run_goes_to_a_thread(group, monkeypatch, who, is_asked):
    x = leaf()
    postponed = Postponed(group[who], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_and_pass_on, (x * 2, "worker2"))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await postponed.has_sent.wait()
        active = group[who].autograd.container.find(ctx_id).active_pass
        if is_asked:
            active.receive(2 - 2 * who, Parcel(asks=(3, 1 << 60)), is_engaging=False)
        else:
            monkeypatch.setattr(group[who].autograd, "run_policy", run_policy.ThreadsOnly())
        await postponed.let_go()
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [24.0] * 3
        for worker in group[1:]:
            assert worker.autograd.gradients(ctx_id)[weight].tolist() == (12 * x).tolist()


async def test_one_that_is_cancelled_lets_go_of_its_parcels(group, monkeypatch):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        context = group[0].autograd.container.find(ctx_id)
        context.active_pass.receive(1, Parcel(), is_engaging=False)
        ((_, future, _),) = postponed.sent
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert future.cancelled()
        assert context.active_pass is None
        assert context.gradients == {}


@pytest.mark.parametrize("answer", ["too many gradients", "no gradient", [], [b"\0"], 7], ids=repr)
@pytest.mark.parametrize("workers", [("worker1",), ("worker1", "worker2")], ids=len)
@pytest.mark.parametrize("is_shared", [True, False])
async def test_an_answer_that_makes_no_sense_ends_it(group, monkeypatch, is_shared, workers, answer):
    x = leaf()
    sent = x * 1 if is_shared else x
    shared = sent if is_shared else 0
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = sum([await arpc.rpc_sync(worker, weigh, (sent,)) for worker in workers]) + shared
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        (to, future, _), *others = postponed.sent
        context = group[0].autograd.container.find(ctx_id)
        if isinstance(answer, str):
            gradients = [torch.ones(3), torch.ones(3)] if answer == "too many gradients" else [answer]
            message_id = next(message_id for message_id, send in context.sends.items() if send.to == to)
            answer = pack_parcel(Parcel([(message_id, gradients)], is_first=True))
        future.set_result(answer)
        for _, other, _ in others:
            other.set_result(pack_parcel(Parcel(is_first=True)))
        with pytest.raises((arpc.BackwardError, arpc.errors.ProtocolError)):
            async with asyncio.timeout(30):
                await task
        assert context.active_pass is None
        assert context.gradients == {}


async def test_once_a_pass_is_over_workers_that_were_not_written_to_hear_so(group):
    service_of_callee = group[1].autograd
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        context = service_of_callee.container.find(ctx_id)
        heading = PassHeading(ctx_id, context.last_pass, False, 99)
        asking = Parcel(is_first=True, asks=(1, 1 << 60))
        assert service_of_callee._take(0, asking, heading) is None
        assert service_of_callee._take(2, asking, heading) is not None
        context.roll_back(context.last_pass, parent=0)
        assert service_of_callee._take(0, asking, heading) is None
        with pytest.raises(arpc.AutogradError, match="has failed"):
            service_of_callee._take(2, asking, heading)


async def test_a_later_pass_takes_back_one_that_failed_and_whose_end_was_not_heard(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        callee = group[1].autograd.container.find(ctx_id)
        failed = callee.last_pass
        # the caller was cancelled just before it heard of the end, say, and the news of that is still on its way
        group[0].autograd.container.find(ctx_id).roll_back(failed)
        assert callee.gradients[weight].tolist() == x.tolist()
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        assert callee.gradients[weight].tolist() == x.tolist()
        await group[0].autograd.lifetimes.request(AutogradAbort, "worker1", (ctx_id, failed), 15)  # here it is
        assert callee.gradients[weight].tolist() == x.tolist()


async def test_a_parcel_of_a_pass_that_failed_is_refused(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        old = group[0].autograd.container.new_pass_id()
        group[0].autograd.container.find(ctx_id).roll_back(old)
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        with pytest.raises(arpc.AutogradError, match="has failed"):
            group[1].autograd._take(0, Parcel(is_first=True), PassHeading(ctx_id, old, True, 99))
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == x.tolist()


async def test_a_pass_that_failed_makes_way_for_the_next_one(group, monkeypatch):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh_by_way_of, (x, "worker2"))).sum()
        with monkeypatch.context() as patched:
            postponed = Postponed(group[1], patched)
            task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y], retain_graph=True))
            await postponed.has_sent.wait()
        caller, middle = (worker.autograd.container.find(ctx_id) for worker in group[:2])
        monkeypatch.setattr(group[0].autograd.aborts, "send", lambda *_: None)  # nobody hears of it
        caller.active_pass.fail(arpc.AutogradError("it failed"))
        with pytest.raises(arpc.AutogradError, match="it failed"):
            await task
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        assert middle.active_pass is None


async def test_the_task_that_waits_for_one_that_fails_is_not_cancelled(group, monkeypatch):
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (Failing.apply(leaf()),))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await postponed.has_sent.wait()
        context = group[0].autograd.container.find(ctx_id)
        (message_id,) = context.sends
        context.active_pass.receive(1, Parcel([(message_id, [torch.ones(3)])]), is_engaging=False)
        with pytest.raises(arpc.BackwardError, match="found wanting"):
            await task
        assert postponed.sent[0][1].cancelled()


@pytest.mark.parametrize("is_cancelled_first", [True, False])
async def test_one_that_is_cancelled_as_its_context_ends_is_cancelled(group, monkeypatch, is_cancelled_first):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await postponed.has_sent.wait()
        if is_cancelled_first:
            task.cancel()
        else:
            asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task])
    assert task.cancelled()


async def weigh_only_mine(further):
    return 3 * await arpc.rpc_sync(further, functions.mul, (weight, 2))


@pytest.mark.parametrize("is_retained", [False, True])
async def test_who_passes_on_and_has_leaves_alone_to_wait_for_frees_what_engaged_it(group, is_retained):
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_only_mine, ("worker2",))
        assert group[1].autograd.statistics()["sends"] == 2
        await arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=is_retained)
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [6.0] * 3
        assert group[1].autograd.statistics()["sends"] == (2 if is_retained else 0)


async def test_gradients_of_several_passes_are_summed_up_as_if_by_nobody(group):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        for _ in range(2):
            y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
            with torch.inference_mode():
                await arpc.autograd.backward(ctx_id, [y])
        gradient = arpc.autograd.get_gradients(ctx_id)[x]
        assert gradient.tolist() == [4.0] * 3
        assert not gradient.is_inference()


# -- under `arpc.run`, where tasks are isolated


def run(main: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def in_a_group() -> None:
        async with cluster(3, options=OPTIONS) as group:
            await main(group)
            assert_nothing_is_left(group)

    arpc.run(in_a_group())


def test_a_task_goes_on_in_its_own_state_when_the_answer_is_there():
    async def main(group: Any) -> None:
        x = leaf()
        states: list[tuple[bool, bool]] = []

        async def pass_without_grad(ctx_id: int, loss: torch.Tensor) -> None:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                await arpc.autograd.backward(ctx_id, [loss])
                states.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
                await asyncio.sleep(0)
                states.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

        async with arpc.autograd.context() as ctx_id:
            for number in range(1, 3):
                loss = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
                task = asyncio.create_task(pass_without_grad(ctx_id, loss))
                while not task.done():
                    await asyncio.sleep(0)
                    assert torch.is_grad_enabled()
                    assert not torch.is_autocast_enabled("cpu")
                await task
                assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 * number] * 3
        assert states == [(False, True)] * 4

    run(main)


@pytest.mark.parametrize("function", [weigh, weigh_in_vain, weigh_and_pass_on], ids=lambda function: function.__name__)
def test_one_that_is_cancelled_there_leaves_nothing(function):
    async def main(group: Any) -> None:
        further = ("worker2",) if function is weigh_and_pass_on else ()
        for turns in range(12):
            async with arpc.autograd.context() as ctx_id:
                x = leaf()
                loss = (await arpc.rpc_sync("worker1", function, (x, *further))).sum()
                task = asyncio.create_task(arpc.autograd.backward(ctx_id, [loss]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                was_done = task.done()
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() != was_done
                has_gradients = was_done and task.exception() is None
                assert (x in arpc.autograd.get_gradients(ctx_id)) == has_gradients

    run(main)
