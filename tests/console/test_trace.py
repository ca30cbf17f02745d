"""``arpc trace``: a recording of the group becomes a file."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

import arpc
from arpc.errors import ConfigurationError, OverloadedError, UnsupportedError
from arpc.http.server import serve
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until


@pytest.fixture
async def worker():
    options = arpc.RpcOptions(gc_freeze=False)
    async with cluster(1, options=options) as group:
        group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)

        async def record(seconds, form):
            return f"{seconds:g} s of {form}".encode()

        group[0].metrics.record_trace = record
        yield group[0]


async def test_the_page_serves_a_trace_to_those_who_post(worker):
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{worker.http_address}/api/trace?seconds=0.5&form=html") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert "attachment" in response.headers["Content-Disposition"]
            assert await response.read() == b"0.5 s of html"
        async with session.get(f"{worker.http_address}/api/trace") as response:
            assert response.status == 405
        for query in ("seconds=0", "seconds=1e9", "seconds=long", "seconds=nan", "form=pdf"):
            async with session.post(f"{worker.http_address}/api/trace?{query}") as response:
                assert response.status == 400, query
        worker.metrics.record_trace = None
        async with session.post(f"{worker.http_address}/api/trace") as response:
            assert response.status == 501


async def test_one_is_recorded_at_a_time(worker):
    released = asyncio.Event()
    begun = []

    async def record(seconds, form):
        begun.append(seconds)
        await released.wait()
        return b"done"

    worker.metrics.record_trace = record
    first = asyncio.create_task(worker.metrics.trace(1.0))
    await turns_until(lambda: begun)
    with pytest.raises(OverloadedError, match="records a trace already"):
        await worker.metrics.trace(1.0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    released.set()
    assert await worker.metrics.trace(1.0) == b"done"


@pytest.mark.parametrize(("seconds", "form"), [(0, "json"), (1000, "json"), (float("nan"), "json"), (1, "pdf")])
async def test_what_cannot_be_recorded_is_refused(worker, seconds, form):
    with pytest.raises(ConfigurationError, match="at most"):
        await worker.metrics.trace(seconds, form)


async def test_without_a_profiler_there_is_none(worker):
    worker.metrics.record_trace = None
    with pytest.raises(UnsupportedError, match="no profiler"):
        await worker.metrics.trace(1.0)


async def double(value):
    return 2 * value


@pytest.mark.parametrize("form", ["json", "html"])
async def test_the_whole_group_is_recorded(form):
    async with cluster(["ps", "trainer"]) as group:
        recording = asyncio.create_task(group[0].metrics.trace(0.2, form))
        while not recording.done():
            await arpc.rpc_sync("trainer", double, args=(1,))
        text = (await recording).decode()
    assert "double" in text
    assert "trainer" in text
    if form == "json":
        assert json.loads(text)["traceEvents"]
