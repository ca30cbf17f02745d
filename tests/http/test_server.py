"""The server: paths, doors, and its end."""

from __future__ import annotations

import asyncio
import json
import logging

import aiohttp
import pytest
from torch.distributed import HashStore

import arpc
from arpc.errors import ConfigurationError
from arpc.http.guard import COOKIE, derive_token
from arpc.http.server import serve
from arpc.log import get_logger
from arpc.metrics.service import MetricsService
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until

SECRET = b"swordfish"


async def double(value):
    return 2 * value


async def for_ever():
    await asyncio.Event().wait()


def options(**more):
    return arpc.RpcOptions(gc_freeze=False, **more)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No answer of these tests shall be missing because the machine is slow."""
    snapshots = MetricsService.snapshots
    monkeypatch.setattr("arpc.http.feed._PATIENCE_S", 30.0)
    monkeypatch.setattr(MetricsService, "snapshots", lambda service: snapshots(service, 30.0))
    ask = MetricsService._ask
    monkeypatch.setattr(
        MetricsService,
        "_ask",
        lambda service, question, decode, _, worker="": ask(service, question, decode, 30.0, worker),
    )


@pytest.fixture
async def group():
    """Two workers, of which the first serves the page."""
    async with cluster(2, options=options(metrics=True)) as group:
        served = await serve(options(http="127.0.0.1:0"), group[0].metrics)
        group[0].http = served
        yield group


@pytest.fixture
async def guarded():
    """The same with a secret that is asked for. It is on loopback all the same: tests open no doors."""
    async with cluster(2, options=options(secret=SECRET, metrics=True)) as group:
        served = await serve(options(http="127.0.0.1:0", secret=SECRET), group[0].metrics)
        served._guard.needs_secret = True
        group[0].http = served
        yield group


@pytest.fixture
async def browser():
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def test_an_option_serves_the_page_and_says_where(browser):
    async with cluster(1, options=options(http="127.0.0.1:0")) as group:
        address = group[0].http_address
        assert address.startswith("http://127.0.0.1:")
        async with browser.get(address) as response:
            assert response.status == 200
            assert "<title>arpc</title>" in await response.text()
    with pytest.raises(aiohttp.ClientConnectorError):
        await browser.get(address)


async def test_without_the_option_nothing_is_served():
    async with cluster(1) as group:
        assert group[0].http_address is None


async def test_an_address_that_is_taken_costs_the_page_and_not_the_worker(group, caplog):
    taken = group[0].http_address.removeprefix("http://")
    async with cluster(["other"], options=options(http=taken)) as others:
        assert others[0].http_address is None
        (record,) = [record for record in caplog.records if record.name == "arpc.http"]
        assert record.levelno == logging.WARNING
        assert record.worker == "other"
        assert taken in record.message


async def test_a_worker_that_fails_to_start_serves_nothing(browser, monkeypatch):
    found = []

    def fail(_info, _addresses, http, *_):
        found.append(http)
        raise ZeroDivisionError

    monkeypatch.setattr("arpc.runtime.AttachFile.write", fail)
    with pytest.raises(ZeroDivisionError):
        await arpc.init_rpc("worker0", rank=0, world_size=1, store=HashStore(), options=options(http="127.0.0.1:0"))
    with pytest.raises(aiohttp.ClientConnectorError):
        await browser.get(found[0])


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "gpu7:27720"])
async def test_beyond_loopback_it_takes_a_secret(address):
    with pytest.raises(ConfigurationError, match="no secret"):
        await arpc.init_rpc("worker0", rank=0, world_size=1, store=HashStore(), options=options(http=address))


@pytest.mark.parametrize("address", ["27720", "127.0.0.1", "::1:80", "localhost:", "localhost:99999", ":80", "[]:1"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigurationError, match="address like"):
        arpc.RpcOptions(http=address)


async def test_health(group, browser):
    async with browser.get(f"{group[0].http_address}/healthz") as response:
        assert response.status == 200
        assert (await response.json())["status"] == "ok"
    group[0].agent.is_serving = False
    async with browser.get(f"{group[0].http_address}/healthz") as response:
        assert response.status == 503
    group[0].agent.is_serving = True


async def test_the_group_as_json(group, browser):
    await arpc.rpc_sync("worker1", double, args=(1,))
    async with browser.get(f"{group[0].http_address}/api/group") as response:
        told = await response.json()
    assert [worker["name"] for worker in told["workers"]] == ["worker0", "worker1"]
    assert [(row["function"], row["count"]) for row in told["functions"]] == [("double", 1)]


async def test_one_worker_as_json(group, browser):
    async with browser.get(f"{group[0].http_address}/api/workers/worker1") as response:
        assert (await response.json())["name"] == "worker1"
    async with browser.get(f"{group[0].http_address}/api/workers/nobody") as response:
        assert response.status == 404
        assert "nobody" in (await response.json())["error"]


async def test_the_stack_as_json(group, browser):
    future = arpc.rpc_async("worker1", for_ever)
    await turns_until(group[1].agent.connector.busy_links)
    async with browser.get(f"{group[0].http_address}/api/stack") as response:
        told = {worker["name"]: worker for worker in await response.json()}
    assert [handler["function"] for handler in told["worker1"]["handlers"]] == ["for_ever"]
    future.cancel()


async def fails(word):
    raise ValueError(f"no {word}")


async def logs(level, text):
    get_logger("test.handler").log(level, text)


async def test_the_logs_of_the_group(group, browser, monkeypatch):
    monkeypatch.setattr(logging.getLogger("test.handler"), "level", logging.DEBUG)
    await arpc.rpc_sync("worker1", logs, args=(logging.INFO, "a spade"))
    await arpc.rpc_sync("worker1", logs, args=(logging.WARNING, "a club"))
    await arpc.rpc_sync("worker0", logs, args=(logging.ERROR, "a heart"))
    address = f"{group[0].http_address}/api/logs"

    async def told(**query):
        async with browser.get(address, params={"search": "a ", **query}) as response:
            assert response.status == 200
            return [(row["worker"], row["level"], row["message"]) for row in await response.json()]

    spade, club, heart = [
        ("worker1", "INFO", "a spade"),
        ("worker1", "WARNING", "a club"),
        ("worker0", "ERROR", "a heart"),
    ]
    assert await told() == [spade, club, heart]
    assert await told(level="warning") == [club, heart]
    assert await told(search="SPADE") == [spade]
    assert await told(worker="worker0") == [heart]
    assert await told(limit="2") == [club, heart]
    assert await told(worker="nobody") == []
    async with browser.get(address, params={"limit": "many"}) as response:
        assert response.status == 400


async def test_errors_with_their_tracebacks(group, browser):
    for word in ("luck", "time"):
        with pytest.raises(ValueError, match=word):
            await arpc.rpc_sync("worker1", fails, args=(word,))
    async with browser.get(f"{group[0].http_address}/api/errors") as response:
        (row,) = await response.json()
    assert (row["worker"], row["function"], row["caller"]) == ("worker1", "fails", "worker0")
    assert (row["error"], row["count"]) == ("ValueError", 2)
    assert row["message"] == "no luck"  # the second came within a second of it
    assert row["traceback"].startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError(f"no {word}")' in row["traceback"]
    assert "arpc/agent" not in row["traceback"]
    async with browser.get(f"{group[0].http_address}/api/errors?worker=worker0") as response:
        assert await response.json() == []


async def test_the_last_hour(group, browser):
    for worker, calls in zip(group, (10.0, 20.0), strict=True):
        hour = worker.metrics._sampler.hour
        values = dict.fromkeys(hour.rows(), 0.0)
        hour.sample(values, 10.0)
        hour.sample({**values, "calls": calls, "lag_s": calls}, 10.0)
    async with browser.get(f"{group[0].http_address}/api/history") as response:
        told = await response.json()
    assert told["step_s"] == 10
    assert told["history"]["calls"] == [0.0, 3.0]  # of both, per second
    assert told["history"]["lag_s"] == [0.0, 20.0]  # the worst
    assert {"cpu_s", "memory_bytes"} <= told["history"].keys()
    async with browser.get(f"{group[0].http_address}/api/history?worker=worker1") as response:
        assert (await response.json())["history"]["calls"] == [0.0, 2.0]


async def test_cpu_and_memory_of_each_worker(group, browser):
    for worker in group:
        sampler = worker.metrics._sampler
        sampler.history.sample({**worker.metrics._read(), "lag_s": 0.0})
    async with browser.get(f"{group[0].http_address}/api/group") as response:
        rows = (await response.json())["workers"]
    assert all(row["cpus"] >= 0 and row["memory_bytes"] > 1e6 for row in rows)
    assert all(row["history"]["memory_bytes"][-1] > 1e6 for row in rows)


async def test_a_trace_is_kept_to_be_opened(group, browser):
    async def record_trace(seconds, form):
        return f"<p>{seconds:g} s of {form}".encode()

    group[0].metrics.record_trace = record_trace
    address = group[0].http_address
    async with browser.post(f"{address}/api/trace?seconds=2&keep=1") as response:
        assert response.status == 201
        first = (await response.json())["path"]
    async with browser.get(f"{address}/{first}") as response:
        assert await response.text() == "<p>2 s of html"
        assert "sandbox allow-scripts" in response.headers["Content-Security-Policy"]
        assert response.content_type == "text/html"
    async with browser.post(f"{address}/api/trace?seconds=1&keep=1") as response:
        second = (await response.json())["path"]
    for path, status in ((first, 404), (second, 200), ("traces/other", 404)):
        async with browser.get(f"{address}/{path}") as response:
            assert response.status == status
    async with browser.post(f"{address}/api/trace?keep=1&form=json") as response:
        assert response.status == 400
    group[0].http._drop_trace()  # as after ten minutes
    async with browser.get(f"{address}/{second}") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    "path", ["/api/logs", "/api/errors", "/api/history", "/traces/any", "/worker.html", "/worker.js", "/logs.js"]
)
async def test_what_workers_say_is_guarded_like_the_rest(guarded, browser, path):
    address = guarded[0].http_address
    async with browser.get(address + path) as response:
        assert response.status == 401
    async with browser.get(address + path, headers={"Authorization": f"Bearer {derive_token(SECRET)}"}) as response:
        assert response.status == (404 if path == "/traces/any" else 200)


async def test_no_page_of_another_origin_reads_the_logs(group, browser):
    async with browser.get(f"{group[0].http_address}/api/logs", headers={"Host": "evil.example"}) as response:
        assert response.status == 403


async def test_metrics_of_the_group_or_of_the_worker_alone(group, browser):
    async with browser.get(f"{group[0].http_address}/metrics") as response:
        assert 'arpc_uptime_seconds{worker="worker1"}' in await response.text()
    async with browser.get(f"{group[0].http_address}/metrics?scope=worker") as response:
        text = await response.text()
    assert 'arpc_uptime_seconds{worker="worker0"}' in text
    assert 'arpc_uptime_seconds{worker="worker1"}' not in text


async def test_events_come_one_after_another_and_end_with_the_viewer(group, browser):
    feed = group[0].http._feed
    async with browser.get(f"{group[0].http_address}/api/events") as response:
        assert response.content_type == "text/event-stream"
        for _ in range(2):
            line = await response.content.readline()
            assert line.startswith(b"data: ")
            assert len(json.loads(line[6:])["workers"]) == 2
            assert await response.content.readline() == b"\n"
        assert feed.viewers == 1
    await turns_until(lambda: not feed.viewers)


async def test_an_error_of_one_look_does_not_end_the_feed(group, browser, monkeypatch, caplog):
    summary = group[0].metrics.summary
    fails = [True]

    async def sometimes(patience_s):
        if fails:
            fails.clear()
            raise ZeroDivisionError
        return await summary(patience_s)

    async with browser.get(f"{group[0].http_address}/api/events") as response:
        await response.content.readline()
        monkeypatch.setattr(group[0].metrics, "summary", sometimes)
        await turns_until(lambda: not fails)
        for _ in range(4):
            await response.content.readline()
    assert any(record.exc_info for record in caplog.records if record.name == "arpc.http")


async def test_a_worker_closes_while_somebody_looks(browser):
    async with cluster(1, options=options(http="127.0.0.1:0")) as group:
        response = await browser.get(f"{group[0].http_address}/api/events")
        await response.content.readline()
        await group.shutdown()
    response.close()


async def test_pages_may_not_be_framed_and_run_nothing_from_elsewhere(group, browser):
    for path in ("/", "/app.js", "/style.css", "/api/group", "/nowhere"):
        async with browser.get(f"{group[0].http_address}{path}") as response:
            policy = response.headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in policy
            assert "script-src 'self'" in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_another_host_name_is_refused(group, browser):
    async with browser.get(f"{group[0].http_address}/api/group", headers={"Host": "evil.example"}) as response:
        assert response.status == 403


async def test_there_is_no_way_out_of_the_folder(group):
    host, port = group[0].http_address.removeprefix("http://").split(":")
    for path in (b"/../server.py", b"/%2e%2e/server.py", b"/static/../../options.py"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).split()[1] in {b"404", b"400"}
        writer.close()
        await writer.wait_closed()


async def test_a_guarded_page_asks_for_the_secret(guarded, browser):
    address = guarded[0].http_address
    for path in ("/api/group", "/api/stack", "/api/events", "/metrics", "/app.js", "/nowhere"):
        async with browser.get(f"{address}{path}") as response:
            assert response.status == 401, path
            assert "Bearer" in response.headers["WWW-Authenticate"]
    async with browser.get(f"{address}/healthz") as response:
        assert response.status == 200
    async with browser.get(address) as response:
        assert response.url.path == "/login"
        assert "Secret or token" in await response.text()


async def test_a_token_opens_it(guarded, browser):
    headers = {"Authorization": f"Bearer {derive_token(SECRET)}"}
    async with browser.get(f"{guarded[0].http_address}/metrics", headers=headers) as response:
        assert response.status == 200


async def test_the_login_gives_a_cookie_that_scripts_cannot_read(guarded, browser):
    address = guarded[0].http_address
    async with browser.post(f"{address}/login", data={"secret": "swordfish"}, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (303, "/")
        cookie = response.headers["Set-Cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
    async with browser.get(f"{address}/api/group") as response:
        assert response.status == 200
    async with browser.post(f"{address}/logout") as response:
        assert response.url.path == "/login"
    async with browser.get(f"{address}/api/group") as response:
        assert response.status == 401


async def test_a_wrong_secret_gives_none(guarded, browser, monkeypatch):
    monkeypatch.setattr("arpc.http.server._LOGIN_DELAY_S", 0.0)
    address = guarded[0].http_address
    async with browser.post(f"{address}/login", data={"secret": "guess"}, allow_redirects=False) as response:
        assert response.headers["Location"] == "/login?wrong"
        assert "Set-Cookie" not in response.headers


async def test_another_page_cannot_log_somebody_in_or_out(guarded, browser):
    address = guarded[0].http_address
    for path in ("/login", "/logout"):
        headers = {"Origin": "http://evil.example"}
        async with browser.post(f"{address}{path}", data={"secret": "swordfish"}, headers=headers) as response:
            assert response.status == 403


async def test_who_guesses_too_much_at_once_is_refused_and_nobody_else(guarded, browser):
    login_attempts, address = guarded[0].http._login_attempts, guarded[0].http_address
    while login_attempts.begin("127.0.0.1"):
        pass
    async with browser.post(f"{address}/login", data={"secret": "guess"}) as response:
        assert response.status == 429
        assert "from this address" in (await response.json())["error"]
    login_attempts._under_way["192.0.2.1"] = login_attempts._under_way.pop("127.0.0.1")  # it is another one who guesses
    async with browser.post(f"{address}/login", data={"secret": "swordfish"}, allow_redirects=False) as response:
        assert response.headers["Location"] == "/"
    assert list(login_attempts._under_way) == ["192.0.2.1"]


async def test_forms_that_never_come_keep_nobody_out(guarded, browser):
    address = guarded[0].http_address
    host, port = address.removeprefix("http://").split(":")
    head = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\nExpect: 100-continue\r\n"
    head += b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
    try:
        for reader, writer in silent:
            writer.write(head)
            assert b"100" in await reader.readline()  # it is waited for
        async with browser.post(f"{address}/login", data={"secret": "swordfish"}, allow_redirects=False) as response:
            assert (response.status, response.headers.get("Location")) == (303, "/")
    finally:
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("kind", "body"),
    [("application/x-www-form-urlencoded", b"secret=\xff"), ("multipart/form-data; boundary=x", b"no part at all")],
)
async def test_a_form_that_is_none_is_refused(guarded, browser, kind, body):
    headers = {"Content-Type": kind}
    async with browser.post(f"{guarded[0].http_address}/login", data=body, headers=headers) as response:
        assert response.status == 400
