"""One trace over all workers that a block touches: its spans nest, its arrows connect, its clocks agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import arpc
from arpc.errors import ProfilerError
from arpc.profiler import Span, Trace, profile, record_group
from arpc.profiler.operators import RecorderConfig
from arpc.profiler.recorder import TraceHeader
from arpc.testing import Cluster, cluster
from tests.profiler.training import Stage, train_step


@pytest.fixture
async def trio() -> AsyncIterator[Cluster]:
    async with cluster(["trainer", "stage1", "stage2"]) as group:
        yield group
        for worker in group:
            assert worker.statistics()["profiler"]["traces"] == 0
            assert worker.agent.observers.installed == []


@pytest.fixture
async def trace(trio: Cluster) -> Trace:
    """Of a training step."""
    torch.manual_seed(1)
    first = arpc.remote("stage1", Stage, args=(8, 16))
    second = arpc.remote("stage2", Stage, args=(16, 4))
    await asyncio.gather(first, second)
    async with profile() as prof:
        await train_step(first, second, torch.randn(12, 8))
    return prof.trace


def assert_inside(inner: Any, outer: Any, error_ns: int = 0) -> None:
    assert outer.start_ns - error_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns + error_ns


def test_a_training_step_nests_and_connects(trace: Trace) -> None:
    assert [worker.name for worker in trace.workers] == ["trainer", "stage1", "stage2"]
    assert trace.missing == {}
    for worker in trace.workers:
        spans = {span.number: span for span in worker.spans}
        assert len(spans) == len(worker.spans)
        for span in worker.spans:
            assert 0 <= span.start_ns <= span.end_ns
            assert span.outcome in {"ok", ""}
            if span.parent and spans[span.parent].kind != "backward":  # whose parcels go on without it
                assert_inside(span, spans[span.parent])
            for operator in span.operators:
                assert_inside(operator, span)
                assert operator.node_id == worker.id
    arrows = trace.arrows()
    calls = [span for _, span in trace.spans(role="call")]
    handlers = [span for _, span in trace.spans(role="handler")]
    assert len(arrows) == len(calls) == len(handlers)
    for arrow in arrows:
        error_ns = trace.clocks[arrow.caller].error_ns + trace.clocks[arrow.callee].error_ns
        assert_inside(arrow.handler, arrow.call, error_ns)
        assert (arrow.handler.peer, arrow.call.peer) == (arrow.caller, arrow.callee)
        assert arrow.handler.kind == arrow.call.kind


def test_calls_fetches_and_backward_passes_have_spans_of_their_own(trace: Trace) -> None:
    def called(kind: str) -> list[str]:
        return [span.name for _, span in trace.spans(role="call", kind=kind)]

    assert called("call") == ["rpc_async#forward_both(trainer -> stage2)"] * 2
    assert called("remote") == ["remote#forward(trainer -> stage1)"] * 2 + [
        "remote#Stage.statistics(trainer -> stage1)"
    ]
    assert sorted(called("fetch")) == ["to_here#(stage2)->(stage1)"] * 2 + ["to_here#(trainer)->(stage1)"]
    passes = {worker.name: span for worker, span in trace.spans(role="activity")}
    assert set(passes) == {"trainer", "stage1", "stage2"}
    for name in ("stage1", "stage2"):
        assert "AddmmBackward0" in " ".join(operator.name for operator in passes[name].operators)
    ran = [operator.name for _, span in trace.spans(role="handler") for operator in span.operators]
    assert ran.count("aten::linear") == 4
    assert "aten::pow" in {operator.name for operator in trace.worker("trainer").operators}


def test_chrome_trace(trace: Trace, tmp_path: Path) -> None:
    trace.export_chrome_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    titles = {event["pid"]: event["args"]["name"] for event in found if event.get("name") == "process_name"}
    assert [titles[pid].partition(" ")[0] for pid in sorted(titles)] == ["trainer", "stage1", "stage2"]
    # within a thread of a process, things are beside or inside each other
    rows: dict[tuple[int, int], list[Any]] = {}
    for event in slices:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in rows.values():
        ends: list[float] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6
            ends.append(event["ts"] + event["dur"])
    # each arrow has two ends, and each of them is at a slice
    begins = {event["id"]: event for event in found if event["ph"] == "s"}
    ends_ = {event["id"]: event for event in found if event["ph"] == "f"}
    assert begins.keys() == ends_.keys()
    assert len(begins) == 2 * len(trace.arrows())
    for event in (*begins.values(), *ends_.values()):
        assert any(
            slice_["ts"] - 1e-6 <= event["ts"] <= slice_["ts"] + slice_["dur"] + 1e-6
            for slice_ in rows[event["pid"], event["tid"]]
        )


def test_html_and_averages(trace: Trace, tmp_path: Path) -> None:
    trace.export_html(tmp_path / "trace.html", title="a <step>")
    page = (tmp_path / "trace.html").read_text()
    assert "<title>a &lt;step&gt;</title>" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [worker["name"] for worker in data["workers"]] == ["trainer", "stage1", "stage2"]
    assert len(data["arrows"]) == len(trace.arrows())
    assert sum(lane["count"] for worker in data["workers"] for lane in worker["lanes"]) == len(data["bars"])
    averages = {(event.key, event.node_id): event.count for event in trace.key_averages()}
    assert averages["rpc_async#forward_both(trainer -> stage2)", 0] == 2
    assert averages["aten::linear", 1] == averages["aten::linear", 2] == 2


async def run_in_turns(operator: str, times: int) -> None:
    value = torch.full((3,), 0.5)
    for _ in range(times):
        getattr(torch, operator)(value)
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.001)


async def call_on(to: str, function: Any, *args: Any) -> Any:
    return await arpc.rpc_sync(to, function, args=args)


async def test_operators_of_concurrent_handlers_are_kept_apart(trio: Cluster) -> None:
    operators = ["sin", "cos", "exp", "tanh"]
    async with profile() as prof:
        await asyncio.gather(
            *(arpc.rpc_async("stage1", run_in_turns, args=(name, count)) for count, name in enumerate(operators, 2))
        )
    found = []
    for _, span in prof.trace.spans(role="handler"):
        ran = [operator.name.removeprefix("aten::") for operator in span.operators]
        found.append([(name, ran.count(name)) for name in operators if name in ran])
    assert sorted(found) == sorted([[(name, count)] for count, name in enumerate(operators, 2)])


async def test_workers_that_are_reached_by_others_take_part(trio: Cluster) -> None:
    async with profile(operators=False) as prof:
        await arpc.rpc_sync("stage1", call_on, args=("stage2", call_on, "stage1", run_in_turns, "sin", 1))
    assert [len(list(worker.spans)) for worker in prof.trace.workers] == [1, 3, 2]
    assert len(prof.trace.arrows()) == 3
    assert not list(prof.trace.operators())
    nested: list[Span] = [span for _, span in prof.trace.spans(role="call") if span.parent]
    assert len(nested) == 2


def sine_in_thread() -> None:
    torch.sin(torch.ones(2))


async def test_threads_of_the_block_are_part_of_it(trio: Cluster) -> None:
    async with profile() as prof:
        await arpc.to_thread(sine_in_thread)
    assert [operator.name for operator in prof.trace.worker("trainer").operators].count("aten::sin") == 1


async def test_two_traces_at_once(trio: Cluster) -> None:
    async def traced(operator: str) -> profile:
        async with profile() as prof:
            await arpc.rpc_sync("stage1", run_in_turns, args=(operator, 3))
        return prof

    first, second = await asyncio.gather(traced("sin"), traced("cos"))
    for prof, operator in ((first, "aten::sin"), (second, "aten::cos")):
        names = [found.name for _, found in prof.trace.operators()]
        assert names.count(operator) == 3


async def test_a_profile_of_torch_and_a_trace_at_once(trio: Cluster) -> None:
    async with profile() as outer:
        with torch.autograd.profiler.profile() as inner:
            await arpc.rpc_sync("stage1", torch.sin, args=(torch.ones(2),))
    assert "aten::sin" in [found.name for _, found in outer.trace.operators()]
    key = "rpc_sync#aten::sin(trainer -> stage1)"
    assert f"{key}#remote_op: aten::sin" in [event.name for event in inner.function_events]


async def test_who_is_gone_is_missing() -> None:
    async with cluster(2) as group:
        async with profile() as prof:
            await arpc.rpc_sync("worker1", run_in_turns, args=("sin", 1))
            await group[1].shutdown(graceful=False)
        assert list(prof.missing) == ["worker1"]
        assert [worker.name for worker in prof.trace.workers] == ["worker0"]
        await group[0].shutdown(graceful=False)


async def test_a_trace_nobody_asks_for_ends_by_itself() -> None:
    async with cluster(2) as group:
        async with profile(longest_s=0.05) as prof:
            await arpc.rpc_sync("worker1", run_in_turns, args=("sin", 1))
            await until(lambda: not group[1].profiler.tracer.recorders)
            assert group[1].agent.observers.installed == []
        assert [worker.name for worker in prof.trace.workers] == ["worker0"]
        assert list(prof.missing) == ["worker1"]


async def test_the_loss_of_its_maker_ends_a_trace() -> None:
    async with cluster(2) as group:
        prof = profile()
        await prof.__aenter__()
        await arpc.rpc_sync("worker1", run_in_turns, args=("sin", 1))
        assert group[1].profiler.tracer.recorders
        await group[0].shutdown(graceful=False)
        await until(lambda: not group[1].profiler.tracer.recorders)
        assert group[1].agent.observers.installed == []
        await group[1].shutdown(graceful=False)


async def test_the_whole_group_can_be_recorded_from_outside(trio: Cluster) -> None:
    begun = asyncio.Event()

    async def others() -> None:
        await begun.wait()
        for _ in range(5):
            await trio["stage2"].rpc_sync("stage1", run_in_turns, args=("sin", 1))

    async def recording() -> Trace:
        task = asyncio.create_task(record_group(trio["trainer"], 0.2))
        await until(lambda: bool(trio["stage1"].agent.observers.installed))
        begun.set()
        return await task

    trace, _ = await asyncio.gather(recording(), others())
    assert [worker.name for worker in trace.workers] == ["trainer", "stage1", "stage2"]
    assert len([arrow for arrow in trace.arrows() if arrow.caller == "stage2"]) >= 1


async def test_used_out_of_turn(trio: Cluster) -> None:
    prof = profile()
    with pytest.raises(ProfilerError, match="not finished"):
        prof.key_averages()
    async with prof:
        pass
    with pytest.raises(ProfilerError, match="used already"):
        await prof.__aenter__()


async def test_a_block_that_raises_or_is_cancelled_leaves_nothing(trio: Cluster) -> None:
    async def failing() -> None:
        async with profile():
            await arpc.rpc_sync("stage1", run_in_turns, args=("sin", 1))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await failing()

    async def endless() -> None:
        async with profile():
            await arpc.rpc_sync("stage1", run_in_turns, args=("sin", 1))
            await asyncio.Event().wait()

    task = asyncio.create_task(endless())
    await until(lambda: bool(trio["stage1"].agent.observers.installed))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_that_is_cancelled_before_it_begins_leaves_nothing(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def ask(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def block() -> None:
        async with profile(everyone=True):
            raise AssertionError("it never begins")

    monkeypatch.setattr(trio[0].profiler.tracer, "ask", ask)
    task = asyncio.create_task(block())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_worker_that_has_left_a_trace_does_not_join_it_again(trio: Cluster) -> None:
    """Another that still takes part in it may call, or let go of an RRef, after the trace was collected."""
    tracer = trio[1].profiler.tracer
    header = TraceHeader(trio[0].profiler.tracer.new_id(), "trainer", 60.0, RecorderConfig(), True)
    assert tracer.join(header) is not None
    assert tracer.leave(header.trace_id) is not None
    assert tracer.join(header) is None
    assert tracer.recorders == {}
