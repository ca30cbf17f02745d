"""What Prometheus reads, and what the Grafana dashboard asks of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import arpc
from arpc.http.exposition import BOUNDS_S, expose
from arpc.metrics.histogram import upper_bound_s
from arpc.testing import cluster

ROOT = Path(__file__).resolve().parents[2]


async def double(value):
    return 2 * value


async def fails():
    raise KeyError("nothing")


@pytest.fixture
async def families():
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False, metrics=True)) as group:
        held = arpc.remote("worker1", list)
        assert await held == []
        for number in range(3):
            await arpc.rpc_sync("worker1", double, args=(number,))
        with pytest.raises(KeyError):
            await arpc.rpc_sync("worker1", fails)
        text, content_type = expose(await group[0].metrics.snapshots(30))
        assert content_type.startswith("text/plain")
        del held
        return {family.name: family for family in text_string_to_metric_families(text.decode())}


def values(family, name=None, **labels):
    return [
        sample.value
        for sample in family.samples
        if (name is None or sample.name == name) and labels.items() <= sample.labels.items()
    ]


async def test_calls_are_counted_by_worker_peer_function_and_outcome(families):
    calls = families["arpc_calls"]
    assert values(calls, worker="worker0", peer="worker1", function="double", outcome="ok") == [3]
    assert values(calls, function="fails", outcome="error") == [1]
    assert values(families["arpc_call_errors"], function="fails", error="KeyError") == [1]
    assert values(families["arpc_handlers"], worker="worker1", peer="worker0", function="double", outcome="ok") == [3]


async def test_durations_are_a_cumulative_histogram_in_seconds(families):
    durations = families["arpc_call_duration_seconds"]
    buckets = values(durations, "arpc_call_duration_seconds_bucket", function="double")
    assert len(buckets) == len(BOUNDS_S) + 1
    assert buckets == sorted(buckets)
    assert buckets[-1] == 3
    assert values(durations, "arpc_call_duration_seconds_count", function="double") == [3]
    assert 0 < values(durations, "arpc_call_duration_seconds_sum", function="double")[0] < 60


def test_its_bounds_are_bounds_of_the_buckets_it_is_made_of():
    bounds = {upper_bound_s(index) for index in range(124)}
    assert set(BOUNDS_S) <= bounds


async def test_there_are_workers_rrefs_loops_threads_and_bytes(families):
    assert [s.labels["worker"] for s in families["arpc_worker_info"].samples] == ["worker0", "worker1"]
    assert values(families["arpc_rrefs"], worker="worker1", role="owner", type="list") == [1]
    for name in (
        "arpc_event_loop_lag_seconds",
        "arpc_executor_queue_length",
        "arpc_sent_bytes",
        "arpc_autograd_contexts",
        "arpc_uptime_seconds",
    ):
        assert families[name].samples, name


async def test_every_family_has_a_good_name_and_a_text(families):
    for family in families.values():
        assert re.fullmatch(r"arpc_[a-z_]+", family.name), family.name
        assert family.documentation
        assert not re.search(r"_(ms|us|kb|mb|percent)\b", family.name), family.name


async def test_openmetrics_is_spoken_to_those_who_ask(families):
    text, content_type = expose([], accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


async def test_the_grafana_dashboard_asks_for_metrics_that_there_are(families):
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    assert dashboard["panels"]
    known = set()
    for family in families.values():
        known |= {sample.name for sample in family.samples} | {family.name}
        if family.type == "histogram":
            known |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
        if family.type == "counter":
            known.add(f"{family.name}_total")
    asked = set()
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    for expression in expressions:
        asked |= set(re.findall(r"\barpc_[a-z_]+", expression))
    assert len(asked) >= 15
    assert asked <= known | {"arpc_shared_memory_used_bytes", "arpc_shared_memory_resident_bytes"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
