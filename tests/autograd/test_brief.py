"""Passes that need no machinery, where it takes over all the same, and that nobody can tell the difference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import arpc
from arpc.autograd import pace, service
from arpc.autograd.brief import BriefPass
from arpc.autograd.passes import BackwardPass
from arpc.autograd.protocol import Parcel, pack_parcel
from arpc.testing import cluster
from tests.autograd import functions
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left, until
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
    monkeypatch.setattr(pace, "SHORT_S", 60.0)


@pytest.fixture
def full_passes(monkeypatch) -> list[BackwardPass]:
    """The passes that took all the machinery."""
    made: list[BackwardPass] = []

    class Counted(BackwardPass):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(service, "BackwardPass", Counted)
    return made


async def test_a_call_and_back_takes_no_machinery(group, full_passes):
    x = leaf()
    for _ in range(2):
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", weigh, (x,))
            await arpc.autograd.backward(ctx_id, [y.sum()])
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
            assert group[1].autograd.gradients(ctx_id)[weight].tolist() == x.tolist()
    assert full_passes == []
    assert [worker.statistics()["autograd"]["passes_begun"] for worker in group[:2]] == [2, 2]


async def test_nor_do_several_workers_and_results_that_nobody_uses(group, full_passes):
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
    assert full_passes == []


async def test_nor_does_a_pass_that_stays_here(group, full_passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        await arpc.autograd.backward(ctx_id, [(x * x).sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == (2 * x).tolist()
    assert full_passes == []


async def test_a_second_pass_adds_to_the_first_and_the_graph_is_freed_with_it(group, full_passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
        await arpc.autograd.backward(ctx_id, [y], retain_graph=True)
        await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0] * 3
        assert full_passes == []
        with pytest.raises(arpc.AutogradError):
            await arpc.autograd.backward(ctx_id, [y])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [4.0] * 3


@arpc.inline
def give_back(x):
    return x, weight, x * 2


async def test_what_is_returned_as_it_is_takes_none_either(group, full_passes):
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
    assert full_passes == []


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
async def test_hooks_of_the_node_that_a_result_came_from_run(group, full_passes, register):
    x, seen = leaf(), []
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        getattr(y.grad_fn, register)(lambda *gradients: seen.append(gradients))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
    assert len(seen) == 1
    assert len(full_passes) == 1


async def test_hooks_of_a_result_and_what_it_retains_are_no_matter(group, full_passes):
    x, seen = leaf(), []
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        y.register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
        y.retain_grad()
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [6.0] * 3
        assert y.grad.tolist() == [3.0] * 3
    assert len(seen) == 1
    assert full_passes == []


@pytest.mark.parametrize("what", ["hook of a leaf", "hook after accumulation", "shared node", "too long"])
async def test_what_is_special_takes_it(group, full_passes, monkeypatch, what):
    x = leaf()
    sent, seen = x, []
    if what == "hook of a leaf":
        x.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    elif what == "hook after accumulation":
        x.register_post_accumulate_grad_hook(double)
    elif what == "shared node":
        sent = x * 2
    else:
        monkeypatch.setattr(group[0].autograd, "pace", pace.ThreadsOnly())
        sent = x.clone()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (sent,))
        if what == "shared node":  # which is to run once, with both its gradients
            sent.grad_fn.register_prehook(seen.append)
            y = (y + sent) * (2 / 3)
        await arpc.autograd.backward(ctx_id, [y.sum()])
        expected = 2.0 if what == "too long" else 4.0
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [expected] * 3
    assert len(full_passes) == 1
    assert len(seen) == (what in {"hook of a leaf", "shared node"})


async def weigh_and_pass_on(x, *further):
    """A row of workers, each with a node before the next and one behind it."""
    return 3 * await arpc.rpc_sync(further[0], weigh_and_pass_on, (x * weight, *further[1:])) if further else x * weight


@pytest.mark.parametrize("is_retained", [False, True])
async def test_nor_do_nodes_before_the_call_and_workers_that_pass_it_on(group, full_passes, is_retained):
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
    assert full_passes == []
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
    ("function", "workers", "factor", "passes"),
    [
        (pass_on_what_is_shared, ["worker2"], 3.0, 1),
        (pass_on_what_is_mine, ["worker2"], 4.0, 1),
        (pass_on_by_turns, ["worker2", "worker0"], 4.0, 1),
        (pass_on_by_turns, ["worker0", "worker2"], 4.0, 2),
        (pass_on_to_itself, ["worker1"], 4.0, 1),
        (pass_on_in_vain, ["worker2"], 2.0, 1),
    ],
)
async def test_what_a_worker_in_the_middle_cannot_simply_pass_on(group, full_passes, function, workers, factor, passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", function, (x, *workers))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [factor] * 3
    assert len(full_passes) >= passes


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


async def test_an_error_of_what_runs_when_the_answers_are_there_ends_it(group, full_passes):
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
    assert full_passes == []


class Outcry(BaseException):
    """What is no error, as that of a test that fails, or of who ends the process."""


def cry_out(gradient):
    raise Outcry


@pytest.mark.parametrize("workers", [1, 2])
async def test_so_does_what_is_no_error(group, full_passes, workers):
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
    assert full_passes == []


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


async def test_an_error_of_a_node_there_ends_it(group, full_passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", functions.boom, (x,))
        with pytest.raises(arpc.BackwardError, match="boom") as caught:
            await arpc.autograd.backward(ctx_id, [y.sum()])
        assert caught.value.path == (0, 1)
        assert not any(worker.autograd.gradients(ctx_id) for worker in group[:2])
    assert full_passes == []


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


# -- the machinery takes over


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
async def test_it_goes_on_when_a_parcel_comes_that_is_no_answer(group, monkeypatch, full_passes, workers):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        results = [await arpc.rpc_sync(worker, weigh, (x,)) for worker in workers]
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [sum(results).sum()]))
        await asyncio.sleep(0)
        brief = group[0].autograd.container.find(ctx_id).active_pass
        assert isinstance(brief, BriefPass)
        # as from one who asks what is still open here
        answer = brief.receive(1, Parcel(asks=True), is_engaging=False)
        assert answer == Parcel(
            asks=True, gradients=[], ids=[]
        )  # which it was told already; and it is asked the same now
        assert [made.id for made in full_passes] == [brief.id]
        assert group[0].autograd.container.find(ctx_id).active_pass is full_passes[0]
        await postponed.let_go()
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0 * len(workers)] * 3


async def test_it_goes_on_when_an_answer_leaves_something_open(group, monkeypatch, full_passes):
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
        (full,) = full_passes
        full.receive(1, Parcel([(message_id, [torch.full((3,), 7.0)])]), is_engaging=False)
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [7.0] * 3


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("is_early", [True, False])
async def test_it_goes_on_with_what_runs_when_the_answers_are_there(group, monkeypatch, full_passes, who, is_early):
    x = leaf()
    postponed = Postponed(group[who], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_and_pass_on, (x * 2, "worker2"))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await postponed.has_sent.wait()
        brief = group[who].autograd.container.find(ctx_id).active_pass
        assert isinstance(brief, BriefPass)
        if is_early:  # somebody else asks
            brief.receive(2 - 2 * who, Parcel(asks=True), is_engaging=False)
        else:  # what is left seems to take long
            monkeypatch.setattr(group[who].autograd, "pace", pace.ThreadsOnly())
        await postponed.let_go()
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [24.0] * 3
        for worker in group[1:]:
            assert worker.autograd.gradients(ctx_id)[weight].tolist() == (12 * x).tolist()
    assert {made.id for made in full_passes} == {brief.id}


async def test_it_fails_with_what_has_taken_over(group, monkeypatch, full_passes):
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
    assert len(full_passes) == 1


@pytest.mark.parametrize("answer", ["too many gradients", "no gradient", [], [b"\0"], 7], ids=repr)
@pytest.mark.parametrize("workers", [("worker1",), ("worker1", "worker2")], ids=len)
@pytest.mark.parametrize("is_brief", [True, False])
async def test_an_answer_that_makes_no_sense_ends_it(group, monkeypatch, full_passes, is_brief, workers, answer):
    x = leaf()
    sent = x if is_brief else x * 1
    shared = 0 if is_brief else sent
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = sum([await arpc.rpc_sync(worker, weigh, (sent,)) for worker in workers]) + shared
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        (_, future, _), *others = postponed.sent
        context = group[0].autograd.container.find(ctx_id)
        if isinstance(answer, str):
            gradients = [torch.ones(3), torch.ones(3)] if answer == "too many gradients" else [answer]
            answer = pack_parcel(Parcel([(next(iter(context.sends)), gradients)], is_first=True))
        future.set_result(answer)
        for _, other, _ in others:
            other.set_result(pack_parcel(Parcel(is_first=True)))
        with pytest.raises((arpc.BackwardError, arpc.errors.ProtocolError)):
            async with asyncio.timeout(30):
                await task
        assert context.active_pass is None
        assert context.gradients == {}
    assert len(full_passes) == (not is_brief)


def deep(x: torch.Tensor, nodes: int) -> torch.Tensor:
    for _ in range(nodes):
        x = x + 1
    return x


async def test_large_graphs_are_not_looked_at_in_vain_each_time(group, monkeypatch):
    x, started = leaf(), []

    class Noted(BriefPass):
        def try_to_start(self, *args: Any) -> bool:
            started.append(super().try_to_start(*args))
            return started[-1]

    monkeypatch.setattr(service, "BriefPass", Noted)
    for nodes, passes, expected in ((2 * pace.SHORT_NODES, 1, [False]), (1, 15, []), (1, 1, [True]), (1, 1, [True])):
        for _ in range(passes):
            started.clear()
            async with arpc.autograd.context() as ctx_id:
                await arpc.autograd.backward(ctx_id, [deep(x, nodes).sum()])
                assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [1.0] * 3
            assert started == expected


@pytest.mark.parametrize("function", [weigh, weigh_in_vain])
async def test_who_asks_again_hears_no_less_than_by_the_answer_that_is_on_its_way(group, monkeypatch, function):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", function, (x,))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        context = group[0].autograd.container.find(ctx_id)
        # whatever comes from another worker has it ask again, now that it takes more
        context.active_pass.receive(2, Parcel(), is_engaging=False)
        (_, answered, send), (_, answered_again, send_again) = postponed.sent
        (answer,) = await asyncio.gather(send(), return_exceptions=True)
        # a message overtakes another that has more to carry
        answered_again.set_result(await send_again())
        await asyncio.sleep(0)
        if function is weigh:
            answered.set_result(answer)
            await task
            assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        else:
            answered.set_exception(answer)
            with pytest.raises(arpc.BackwardError, match="found wanting"):
                await task
            assert arpc.autograd.get_gradients(ctx_id) == {}
        assert context.active_pass is None


async def test_asking_again_may_overtake_what_was_told_first(group, monkeypatch):
    x = leaf()
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await asyncio.sleep(0)
        group[0].autograd.container.find(ctx_id).active_pass.receive(2, Parcel(), is_engaging=False)
        (_, answered, send), (_, answered_again, send_again) = postponed.sent
        answer_to_asking = send_again()
        await until(lambda: group[1].autograd.container.find(ctx_id).active_pass is not None)
        answered.set_result(await send())
        answered_again.set_result(await answer_to_asking)
        await task
        assert arpc.autograd.get_gradients(ctx_id)[x].tolist() == [2.0] * 3
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == x.tolist()


async def test_once_a_pass_is_over_only_those_are_told_so_who_have_not_been(group):
    service_of_callee = group[1].autograd
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (x,))
        await arpc.autograd.backward(ctx_id, [y.sum()])
        context = service_of_callee.container.find(ctx_id)
        numbers = (ctx_id, context.last_pass, 0)
        asking = Parcel(is_first=True, asks=True)
        assert service_of_callee._take(0, asking, numbers) is None
        assert service_of_callee._take(2, asking, numbers) is not None
        context.roll_back(context.last_pass, parent=0)
        assert service_of_callee._take(0, asking, numbers) is None
        with pytest.raises(arpc.AutogradError, match="has failed"):
            service_of_callee._take(2, asking, numbers)


async def test_who_waits_for_one_that_fails_after_it_was_taken_over_is_not_cancelled(group, monkeypatch, full_passes):
    postponed = Postponed(group[0], monkeypatch)
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh, (Failing.apply(leaf()),))
        task = asyncio.create_task(arpc.autograd.backward(ctx_id, [y.sum()]))
        await postponed.has_sent.wait()
        context = group[0].autograd.container.find(ctx_id)
        (message_id,) = context.sends
        context.active_pass.receive(1, Parcel([(message_id, [torch.ones(3)])]), is_engaging=False)
        assert len(full_passes) == 1
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
async def test_who_passes_on_and_has_leaves_alone_to_wait_for_frees_what_engaged_it(group, full_passes, is_retained):
    async with arpc.autograd.context() as ctx_id:
        y = await arpc.rpc_sync("worker1", weigh_only_mine, ("worker2",))
        assert group[1].autograd.statistics()["sends"] == 2
        await arpc.autograd.backward(ctx_id, [y.sum()], retain_graph=is_retained)
        assert group[1].autograd.gradients(ctx_id)[weight].tolist() == [6.0] * 3
        assert group[1].autograd.statistics()["sends"] == (2 if is_retained else 0)
    assert full_passes == []


async def test_gradients_of_several_passes_are_summed_up_as_if_by_nobody(group, full_passes):
    x = leaf()
    async with arpc.autograd.context() as ctx_id:
        for _ in range(2):
            y = (await arpc.rpc_sync("worker1", weigh, (x,))).sum()
            with torch.inference_mode():
                await arpc.autograd.backward(ctx_id, [y])
        gradient = arpc.autograd.get_gradients(ctx_id)[x]
        assert gradient.tolist() == [4.0] * 3
        assert not gradient.is_inference()
    assert full_passes == []


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
