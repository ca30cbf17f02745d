"""A worker that is asked, and a group that is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import arpc
from arpc.metrics import service as module
from arpc.metrics.group import GroupView
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until


async def double(value):
    return 2 * value


async def fails():
    raise KeyError("nothing")


async def for_ever():
    await asyncio.Event().wait()


def options(**more):
    return arpc.RpcOptions(gc_freeze=False, **more)


async def test_nothing_is_counted_until_somebody_asks():
    async with cluster(2) as group:
        await arpc.rpc_sync("worker1", double, args=(1,))
        assert not any(worker.metrics.is_counting for worker in group)
        await group[0].metrics.summary(patience_s=30)
        assert all(worker.metrics.is_counting for worker in group)


async def test_counting_ends_when_nobody_has_asked_for_a_while(monkeypatch):
    monkeypatch.setattr(module, "_LEASE_S", 0.0)
    async with cluster(2) as group:
        await group[0].metrics.summary(patience_s=30)
        await turns_until(lambda: not any(worker.metrics.is_counting for worker in group))
        assert await arpc.rpc_sync("worker1", double, args=(2,)) == 4


async def test_an_option_keeps_it_on(monkeypatch):
    monkeypatch.setattr(module, "_LEASE_S", 0.0)
    async with cluster(1, options=options(metrics=True)) as group:
        assert group[0].metrics.is_counting
        await group[0].metrics.summary(patience_s=30)
        await asyncio.sleep(0)
        assert group[0].metrics.is_counting


async def test_the_summary_has_every_worker_function_and_pair():
    async with cluster(3, options=options(metrics=True)) as group:
        for number in range(4):
            assert await group[0].rpc_sync("worker1", double, args=(number,)) == 2 * number
        with pytest.raises(KeyError):
            await group[1].rpc_sync("worker2", fails)
        summary = await group[0].metrics.summary(patience_s=30)
        assert [(worker.name, worker.state) for worker in summary.workers] == [
            ("worker0", "ok"),
            ("worker1", "ok"),
            ("worker2", "ok"),
        ]
        functions = {row.function: row for row in summary.functions}
        assert (functions["double"].count, functions["double"].errors) == (4, 0)
        assert functions["double"].latency.p50_s > 0
        assert functions["fails"].error_types == {"KeyError": 1}
        series = {(row.caller, row.callee, row.function): row.count for row in summary.series}
        assert series == {("worker0", "worker1", "double"): 4, ("worker1", "worker2", "fails"): 1}
        pairs = {(row.caller, row.callee): row.count for row in summary.pairs}
        assert pairs["worker0", "worker1"] == 4
        assert pairs["worker1", "worker2"] == 1


async def test_what_is_in_flight_is_seen_though_it_has_not_ended():
    async with cluster(2) as group:
        future = arpc.rpc_async("worker1", for_ever)
        await turns_until(group[1].agent.connector.busy_links)
        summary = await group[0].metrics.summary(patience_s=30)
        (row,) = summary.functions
        assert (row.function, row.count, row.in_flight) == ("for_ever", 0, 1)
        assert summary.in_flight == 1
        assert {worker.name: worker.handlers for worker in summary.workers} == {"worker0": 0, "worker1": 1}
        future.cancel()


async def test_rrefs_and_contexts_are_told_with_their_age():
    async with cluster(2) as group:
        held = arpc.remote("worker1", dict)
        assert await held == {}
        async with arpc.autograd.context() as context:
            summary = await group[0].metrics.summary(patience_s=30)
            (row,) = summary.rrefs
            assert (row.owner, row.type, row.count, row.forks, row.users) == ("worker1", "dict", 1, 1, {"worker0": 1})
            assert row.oldest_s >= 0
            (found,) = summary.contexts
            assert (found.id, found.creator) == (context, "worker0")
            assert "worker0" in found.workers
            assert found.age_s >= 0
        del held


async def test_one_that_fails_to_answer_is_lost_until_it_does(monkeypatch):
    async with cluster(3) as group:
        monkeypatch.setattr(group[2].metrics, "snapshot", None)
        summary = await group[0].metrics.summary(patience_s=30)
        states = {worker.name: worker.state for worker in summary.workers}
        assert states == {"worker0": "ok", "worker1": "ok", "worker2": "lost"}
        assert "not callable" in summary.workers[2].error
        monkeypatch.undo()
        summary = await group[0].metrics.summary(patience_s=30)
        assert [worker.state for worker in summary.workers] == ["ok"] * 3


async def test_one_that_is_late_keeps_its_last_answer():
    async with cluster(2) as group:
        agent = group[0].agent

        async def meet():
            """Nobody comes."""

        view = GroupView(agent, ("group", 30.0), lambda _: "told", meet)
        # to ask for the group takes turns of the loop: with no patience at all nobody has answered
        answers = await view.refresh(0)
        assert {name: answer.value for name, answer in answers.items()} == {"worker0": None, "worker1": None}
        assert view.under_way == 2
        answers = await view.refresh(30)
        assert view.questions_asked == 2  # nobody is asked again before having answered
        await turns_until(lambda: not view.under_way)
        assert {name: answer.value for name, answer in answers.items()} == {"worker0": "told", "worker1": "told"}
        view.close()


async def test_an_answer_of_another_version_is_told_as_such():
    async with cluster(2) as group:

        async def meet():
            """Nobody comes."""

        def decode(_):
            raise msgspec.ValidationError("Object missing required field")

        view = GroupView(group[0].agent, ("snapshot",), decode, meet)
        answers = await view.refresh(30)
        assert {answer.state(0.0) for answer in answers.values()} == {"lost"}
        assert "another version" in answers["worker1"].error


async def test_a_worker_that_left_is_lost_and_says_why():
    async with cluster(3, elastic=True) as group:
        await group[0].metrics.summary(patience_s=30)
        await group[2].shutdown(graceful=False)
        summary = await group[0].metrics.summary(patience_s=30)
        gone = {worker.name: worker for worker in summary.workers}["worker2"]
        assert gone.state == "lost"
        assert "worker2" in gone.error


async def test_newcomers_of_an_elastic_group_are_found(monkeypatch):
    monkeypatch.setattr(module, "_MEET_S", 0.0)
    async with cluster(["a"], elastic=True) as group:
        await group[0].metrics.summary(patience_s=30)
        await group.add("b")
        summary = await group[0].metrics.summary(patience_s=30)
        assert [worker.name for worker in summary.workers] == ["a", "b"]


async def test_a_group_shuts_down_gracefully_while_somebody_looks():
    async with cluster(2) as group:
        looking = asyncio.create_task(look_on_and_on(group[0]))
        await turns_until(lambda: group[1].metrics.is_counting)
        await group.shutdown()
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


async def look_on_and_on(worker):
    while True:
        await worker.metrics.summary(0.01)
        await asyncio.sleep(0)


async def test_a_question_of_another_version_is_refused_in_words():
    async with cluster(2) as group:
        from arpc.wire.messages import Inspect

        with pytest.raises(ValueError, match="another version"):
            await group[0].agent.request(Inspect, "worker1", ("horoscope",))


async def test_the_last_minute_and_the_lag_are_kept():
    async with cluster(1, options=options(metrics=True)) as group:
        sampler = group[0].metrics._sampler
        for _ in range(20):
            sampler._timer.cancel()
            sampler._probe()
        snapshot = group[0].metrics.snapshot()
        assert set(snapshot.history) == {
            "calls",
            "handled",
            "errors",
            "sent_bytes",
            "received_bytes",
            "in_flight",
            "handlers",
            "lag_s",
            "cpu_s",
            "memory_bytes",
        }
        assert all(len(values) == 2 for values in snapshot.history.values())
        assert snapshot.loop.lag_max_s >= snapshot.loop.lag_s >= 0
