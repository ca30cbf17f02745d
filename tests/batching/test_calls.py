"""Batched functions: what is gathered, what each caller gets, and what a caller that goes away leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

import arpc
from arpc.batching.decorator import Queues
from arpc.testing.endpoints import turns_until
from tests.batching import functions


def rows(values):
    return [value.tolist() for value in values]


async def test_concurrent_calls_are_one(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.add, (torch.full((2,), float(n)), n)) for n in range(4)]
    assert rows(await asyncio.gather(*calls)) == [[0, 0], [2, 2], [4, 4], [6, 6]]
    assert sizes == [4]
    assert group[1].keep(Queues).statistics() == {"batches": 1, "batched_calls": 4}


async def test_calls_of_several_callers_and_of_oneself_are_one(group, sizes):
    calls = [
        worker.rpc_async("worker1", functions.add_async, (torch.zeros(1),), {"amount": number})
        for number, worker in enumerate([group[0], group[1], group[2], group[0]])
    ]
    assert rows(await asyncio.gather(*calls)) == [[0], [1], [2], [3]]
    assert sizes == [4]


async def test_a_batch_starts_when_it_has_waited_long_enough(group, sizes):
    assert await arpc.rpc_sync("worker1", functions.soon, (4,)) == 8
    assert await asyncio.gather(*[arpc.rpc_async("worker1", functions.soon, (n,)) for n in range(3)]) == [0, 2, 4]
    assert sum(sizes) == 4


async def test_calls_gather_while_another_batch_runs(group, sizes, gate):
    first = arpc.rpc_async("worker1", functions.held, (0,))
    await gate.reached.wait()
    others = [arpc.rpc_async("worker1", functions.held, (number,)) for number in range(1, 40)]
    (queue,) = group[1].keep(Queues).queues.values()
    await turns_until(lambda: sum(len(batch.slots) for batch in {*queue._due, *queue._open.values()}) == 39)
    gate.opened.set()
    assert await first == 0
    assert await asyncio.gather(*others) == list(range(1, 40))
    assert sizes == [1, 32, 7]


async def test_tensors_that_cannot_be_stacked_wait_apart(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.add, (torch.zeros(1 + n % 2), n)) for n in range(8)]
    await asyncio.gather(*calls)
    assert sizes == [4, 4]


async def test_several_results_are_taken_apart(group, sizes):
    first, second = await asyncio.gather(
        *[arpc.rpc_async("worker1", functions.several, (torch.tensor(float(number)),)) for number in (3, 5)]
    )
    assert sizes == [2]
    assert (first["pair"][0].item(), first["pair"][1], first["none"]) == (3, "3", None)
    assert type(second["named"]) is functions.Scored
    assert (second["named"].score.item(), second["named"].label) == (10, "5")


async def test_an_error_is_for_all_and_an_item_that_is_one_for_its_caller(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.picky, (number,)) for number in (1, 13, 2)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(error), error.args) for error in errors] == [(LookupError, ("no thirteen",))] * 3
    assert len({id(error) for error in errors}) == 3
    assert "no thirteen" in errors[0].__cause__.stack

    calls = [arpc.rpc_async("worker1", functions.picky, (number,)) for number in (1, -5, 2)]
    one, error, two = await asyncio.gather(*calls, return_exceptions=True)
    assert (one, two) == (1, 2)
    assert isinstance(error, ValueError)
    assert sizes == [3, 3]


@pytest.mark.parametrize("how", ["rows", "items", "number", "scalar"])
async def test_a_result_that_is_not_one_for_each_fails_all(group, how):
    calls = [arpc.rpc_async("worker1", functions.wrong, (torch.ones(1), how)) for _ in range(2)]
    for call in calls:
        with pytest.raises(arpc.BatchError, match="wrong was called for 2 calls"):
            await call


async def test_a_batch_belongs_to_no_caller(group):
    functions.request.set("mine")
    calls = [arpc.rpc_async("worker1", functions.circumstances, (1,), timeout=timeout) for timeout in (40, 50)]
    (thread, left, request, worker), _ = await asyncio.gather(*calls)
    assert thread.startswith("arpc-worker1")  # a plain function holds up no loop
    assert 40 < left <= 50  # the time of the caller that has most
    assert (request, worker) == ("", "worker1")
    calls = [arpc.rpc_async("worker1", functions.circumstances, (1,), timeout=timeout) for timeout in (40, 0)]
    (_, left, _, _), _ = await asyncio.gather(*calls)
    assert left is None


async def test_a_batch_makes_calls(group):
    assert await arpc.rpc_sync("worker1", functions.with_call, (5,), timeout=50) == 5


@pytest.mark.parametrize("function", [functions.ending, functions.ending_one])
@pytest.mark.parametrize("how", ["exit", "stop"])
async def test_whatever_is_raised_is_told(group, function, how):
    with pytest.raises(arpc.ArpcError if how == "exit" else RuntimeError, match=r"SystemExit|StopIteration"):
        await arpc.rpc_sync("worker1", function, (how,))


async def test_an_error_keeps_no_arguments(group):
    x = torch.ones(1)
    kept = weakref.ref(x)
    gc.disable()  # what only the collector finds may stay for long
    try:
        with pytest.raises(LookupError):
            await functions.failing(x)
        del x
        await arrived("worker0", 0)
        assert kept() is None
    finally:
        gc.enable()


# -- callers that go away


async def arrived(worker: str, count: int) -> None:
    """Calls that were sent before have come to their function."""
    while await arpc.rpc_sync(worker, functions.queues) != count:  # noqa: ASYNC110 - nobody can set an event for it
        await asyncio.sleep(0)


async def test_a_caller_that_is_cancelled_is_taken_out(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.add, (torch.zeros(1), number)) for number in range(3)]
    await arrived("worker1", 1)
    calls[1].cancel()
    calls += [arpc.rpc_async("worker1", functions.add, (torch.zeros(1), number)) for number in (3, 4)]
    assert rows(await asyncio.gather(calls[0], *calls[2:])) == [[0], [2], [3], [4]]
    assert sizes == [4]


async def test_the_last_caller_that_leaves_takes_the_batch_with_it(group, sizes):
    call = arpc.rpc_async("worker1", functions.add, (torch.zeros(1), 1))
    await arrived("worker1", 1)
    call.cancel()
    await arrived("worker1", 0)
    assert not sizes


async def test_a_batch_that_runs_goes_on_for_those_who_wait(group, sizes, gate):
    calls = [arpc.rpc_async("worker1", functions.held_until_full, (number,)) for number in range(2)]
    await gate.reached.wait()
    calls[0].cancel()
    await arpc.rpc_sync("worker1", functions.identity, (0,))  # the other worker knows
    gate.opened.set()
    assert await calls[1] == 1
    assert (sizes, gate.ends) == ([2], ["passed"])


async def test_a_batch_nobody_waits_for_is_cancelled(group, gate):
    calls = [arpc.rpc_async("worker1", functions.held_until_full, (number,)) for number in range(2)]
    await gate.reached.wait()
    for call in calls:
        call.cancel()
    await arrived("worker1", 0)
    assert gate.ends == ["cancelled"]


async def test_a_thread_that_nobody_waits_for_has_its_place_until_it_ends(group, sizes, bar):
    abandoned = arpc.rpc_async("worker1", functions.held_in_thread, (0,))
    await asyncio.to_thread(functions.reached.wait)
    abandoned.cancel()
    others = [arpc.rpc_async("worker1", functions.held_in_thread, (number,)) for number in (1, 2)]
    await arpc.rpc_sync("worker1", functions.identity, (0,))  # they have arrived, and the other has left
    (queue,) = group[1].keep(Queues).queues.values()
    while not next(iter(queue._running)).task.done():  # noqa: ASYNC110 - nobody can set an event for it
        await asyncio.sleep(0)
    others[0].cancel()
    bar.lifted.set()
    assert await others[1] == 2
    assert (sizes, bar.most_at_once) == ([1, 1], 1)
    await arrived("worker1", 0)


async def test_what_waits_for_a_place_can_be_cancelled(group, sizes, gate):
    first = arpc.rpc_async("worker1", functions.held, (0,))
    await gate.reached.wait()
    second = arpc.rpc_async("worker1", functions.held, (1,), timeout=0)
    await arpc.rpc_sync("worker1", functions.soon, (1,))  # the second has waited long enough
    second.cancel()
    await arpc.rpc_sync("worker1", functions.identity, (0,))
    gate.opened.set()
    assert await first == 0
    await arrived("worker1", 0)
    assert sizes == [1, 1]


async def test_a_deadline_ends_a_call_and_not_its_batch(group, sizes, gate):
    calls = [
        arpc.rpc_async("worker1", functions.held_until_full, (n,), timeout=limit) for n, limit in ((0, 50), (1, 0))
    ]
    await gate.reached.wait()
    runs = [run for link in group[1].agent.connector.links for run in link.running.values()]
    for run in runs:
        if run.timeout_ms:
            run.expire()  # its time is up
    with pytest.raises(arpc.RpcTimeoutError):
        await calls[0]
    gate.opened.set()
    assert await calls[1] == 1
    assert sizes == [2]


async def test_a_batch_does_not_wait_longer_than_its_calls_have_time(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.add, (torch.zeros(1), 2), timeout=limit) for limit in (0, 40, 0)]
    await arrived("worker1", 1)
    (queue,) = group[1].keep(Queues).queues.values()
    (batch,) = queue._open.values()
    assert len(batch.slots) == 3
    assert batch.due <= asyncio.get_running_loop().time() + 20
    queue._set_due(batch)  # as the timer would have done
    assert rows(await asyncio.gather(*calls)) == [[2]] * 3
    assert sizes == [3]


async def test_a_worker_that_is_shut_down_leaves_no_timer(sizes):
    async with arpc.testing.cluster(2) as group:
        call = arpc.rpc_async("worker1", functions.add, (torch.zeros(1), 1), timeout=0)
        await arrived("worker1", 1)
        (queue,) = group[1].keep(Queues).queues.values()
        (batch,) = queue._open.values()
        timer = batch.timer
        await group[1].shutdown(graceful=False)
        assert timer.cancelled()
        assert not group[1].keep(Queues).queues
        with pytest.raises(arpc.WorkerLostError):
            await call
        await group[0].shutdown(graceful=False)
    assert not sizes


# -- what can be batched


async def test_methods_of_objects_are_batched_by_object(group, sizes):
    models = [arpc.remote("worker1", functions.Model, (weight,)) for weight in (1.0, 2.0)]
    x = torch.ones(2)
    calls = [model.rpc_async().forward(x) for model in models * 2]
    assert [value.item() for value in await asyncio.gather(*calls)] == [2, 4, 2, 4]
    assert sizes == [2, 2]
    assert (await models[0].rpc_sync().alone(x)).item() == 2
    assert (await models[0].remote().alone(x)).item() == 2


async def test_class_methods_are_batched_by_class(group, sizes):
    models = (functions.Model, functions.BiasedModel)
    calls = [arpc.rpc_async("worker1", model.biased, (torch.zeros(1),)) for model in models * 2]
    assert rows(await asyncio.gather(*calls)) == [[1], [10], [1], [10]]
    assert sizes == [2, 2]
    model = arpc.remote("worker1", functions.BiasedModel, (1.0,))
    calls = [model.rpc_async().biased(torch.zeros(1)) for _ in range(2)]
    assert rows(await asyncio.gather(*calls)) == [[10], [10]]
    assert sizes == [2, 2, 2]
    assert rows(await asyncio.gather(*(functions.Model.biased(x=torch.zeros(1)) for _ in range(2)))) == [[1], [1]]


async def test_static_methods_are_batched(group, sizes):
    calls = [arpc.rpc_async("worker1", functions.Model.negated, (torch.ones(1),)) for _ in range(2)]
    assert rows(await asyncio.gather(*calls)) == [[-1], [-1]]
    assert sizes == [2]


async def test_a_class_may_be_an_argument(group, sizes):
    assert await arpc.rpc_sync("worker1", functions.names_of, (functions.Model,)) == "Model"


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_the_other_decorator_goes_above(kind):
    def method(x):
        return x

    with pytest.raises(TypeError, match=rf"method is a {kind.__name__}: write @{kind.__name__} above @arpc\.batched"):
        arpc.batched(kind(method))


async def test_a_worker_calls_its_own_directly(group, sizes):
    results = await asyncio.gather(*[functions.add(torch.zeros(1), number) for number in range(4)])
    assert rows(results) == [[0], [1], [2], [3]]
    assert sizes == [4]


async def test_remote_makes_an_rref_of_a_part(group, sizes):
    rrefs = [arpc.remote("worker1", functions.add, (torch.zeros(1), number)) for number in range(4)]
    assert rows([await rref for rref in rrefs]) == [[0], [1], [2], [3]]
    assert sizes == [4]


async def test_what_cannot_be_compared_leaves_no_queue(group):
    class Shapeless(torch.Tensor):
        @property
        def shape(self):
            raise RuntimeError("it has no shape")

    with pytest.raises(RuntimeError, match="it has no shape"):
        await functions.soon(torch.ones(1).as_subclass(Shapeless))
    assert not group[0].keep(Queues).queues


async def test_without_arguments_there_is_nothing_to_gather(group):
    with pytest.raises(TypeError, match="add is batched, and was called without arguments"):
        await arpc.rpc_sync("worker1", functions.add)


async def test_a_function_of_no_module_cannot_gather(group):
    with pytest.raises(arpc.SerializationError, match="define it at the top level of a module"):
        await arpc.rpc_sync("worker1", functions.local(), (1,))


async def test_it_takes_a_worker():
    with pytest.raises(arpc.NotInitializedError):
        await functions.soon(1)


@pytest.mark.parametrize(
    "limits", [{"max_size": 0}, {"max_wait_ms": -1}, {"max_wait_ms": float("nan")}, {"max_concurrent": 0}]
)
def test_limits_that_make_no_sense(limits):
    with pytest.raises(arpc.ConfigurationError, match="a batch has at least one call"):
        arpc.batched(**limits)


def test_what_cannot_be_batched():
    def numbers(x):
        yield x

    async def numbers_async(x):
        yield x

    for wrong in (numbers, numbers_async, int):
        with pytest.raises(TypeError, match="batched is for"):
            arpc.batched(wrong)
    assert repr(functions.add) == "<batched add>"
