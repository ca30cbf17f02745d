"""The page in a real browser: what a person sees and does."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

import arpc
from arpc.http.server import serve
from arpc.log import get_logger
from arpc.testing import cluster
from arpc.testing.endpoints import turns_until

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECRET = b"swordfish"

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
playwright.expect.set_options(timeout=30_000)
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")


@pytest.fixture
async def browser():
    asyncio.get_running_loop().set_debug(False)  # its transport is a subprocess that the debug mode makes slow
    async with playwright.async_playwright() as started:
        running = await started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        await running.close()


async def double(value):
    return 2 * value


async def fails():
    raise KeyError("nothing")


async def for_ever():
    await asyncio.Event().wait()


async def says():
    get_logger("test.page").warning("a quiet word")
    get_logger("test.page").error("a loud word")


async def overlapping(page):
    """Pairs of texts in the graph that lie over each other."""
    return await page.evaluate(
        """() => {
            const texts = [...document.querySelectorAll(".graph text")]
                .map((one) => [one.textContent, one.getBoundingClientRect()]);
            return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([, q]) =>
                p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
                .map(([b]) => [a, b]));
        }"""
    )


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, page):
        self.page = page
        self.problems = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        page.on("requestfailed", lambda request: self.problems.append(request.url))
        self.hosts = set()
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))


async def test_the_page_shows_a_group_at_work(browser):  # noqa: PLR0915 - one visit, from the first look to the last
    options = arpc.RpcOptions(gc_freeze=False, metrics=True)
    async with cluster(["ps", "trainer0", "trainer1"], options=options) as group:
        group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        held = arpc.remote("trainer0", list)
        assert await held == []
        for number in range(3):
            await arpc.rpc_sync("trainer0", double, args=(number,))
        with pytest.raises(KeyError):
            await arpc.rpc_sync("trainer1", fails)
        await arpc.rpc_sync("trainer0", says)
        waits = arpc.rpc_async("trainer1", for_ever)
        await turns_until(group[2].agent.connector.busy_links)

        page = await browser.new_page(color_scheme="light")
        watched = Watched(page)
        await page.goto(group[0].http_address)
        expect = playwright.expect
        await expect(page.locator("#live-text")).to_have_text("live")

        # workers, calls, RRefs
        rows = page.locator("#workers tbody tr")
        await expect(rows).to_have_count(3)
        await expect(rows.nth(0)).to_contain_text("ps")
        await expect(rows.nth(0).locator(".state")).to_have_text("ok")
        calls = page.locator("#calls-table tbody tr")
        await expect(calls.filter(has_text="double")).to_contain_text("3")
        await expect(calls.filter(has_text="fails").locator("td.bad")).to_have_text("1")
        await expect(page.locator("#rrefs tbody tr")).to_contain_text("list")
        await expect(page.locator("[data-tile=in_flight] .value")).to_have_text("1")

        # the graph has every worker, and an arrow for each pair that calls
        await expect(page.locator(".graph .node")).to_have_count(3)
        await expect(page.locator(".graph .edge")).to_have_count(2)

        # no label lies over another
        await expect(page.locator(".graph text.name")).to_have_count(3)
        assert await overlapping(page) == []

        # errors with their tracebacks, logs by level and text
        await page.locator("#errors").scroll_into_view_if_needed()  # what is out of sight is not refreshed
        failure = page.locator("#errors details").filter(has_text="KeyError")
        await failure.locator("summary").click()
        await expect(failure.locator("pre")).to_contain_text('raise KeyError("nothing")')
        lines = page.locator("#logs .log")
        await page.locator("#logs").scroll_into_view_if_needed()
        await expect(lines.filter(has_text="a quiet word")).to_have_count(1)
        await page.locator("#log-level").select_option("ERROR")
        await expect(lines).to_have_count(1)
        await expect(lines).to_contain_text("a loud word")
        await page.locator("#log-level").select_option("")
        await page.locator("#log-search").fill("QUIET")
        await expect(lines).to_have_count(1)
        await page.locator("#log-search").fill("")
        await page.get_by_role("button", name="last hour").click()
        await expect(page.locator("[data-tile=calls] svg")).to_have_attribute("aria-label", re.compile("last hour"))
        await page.get_by_role("button", name="last minute").click()

        # sorting, filtering, other tables
        head = page.locator("#calls-table thead th", has_text="Function")
        await head.locator("button").click()
        await expect(head).to_have_attribute("aria-sort", "ascending")
        await page.get_by_role("tab", name="by function and peer").click()
        await expect(page.locator("#calls-table thead")).to_contain_text("Callee")
        await page.locator("#filter").fill("FAIL")
        await expect(calls).to_have_count(1)
        await page.locator("#filter").fill("")
        await page.locator('.node[data-worker="trainer0"]').focus()
        await page.keyboard.press("Enter")
        await expect(page.locator('.node[data-worker="trainer0"]')).to_have_attribute("aria-pressed", "true")
        await expect(calls.filter(has_text="fails")).to_have_count(0)

        # what is awaited
        await page.get_by_role("button", name="Look now").click()
        await expect(page.locator("#stack")).to_contain_text("for_ever for ps")

        # dark and light, kept over a reload
        background = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(background)
        await page.get_by_role("button", name="Switch between dark and light").click()
        dark = await page.evaluate(background)
        assert dark != light
        await page.reload()
        await expect(page.locator("#live-text")).to_have_text("live")
        assert await page.evaluate(background) == dark

        # paused, it stands still
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator("#live-text")).to_have_text("paused")
        await arpc.rpc_sync("trainer0", double, args=(1,))
        await page.get_by_role("button", name="Resume").click()
        await expect(calls.filter(has_text="double")).to_contain_text("4")

        # everything came from this worker, and nothing went wrong
        assert watched.hosts == {group[0].http_address.removeprefix("http://")}
        assert [problem for problem in watched.problems if "api/events" not in problem] == []
        assert await unnamed(page) == []
        waits.cancel()
        del held
        await page.close()


async def unnamed(page):
    """Controls that a screen reader has no name for, and pictures without a text."""
    return await page.evaluate(
        """() => [...document.querySelectorAll("button, input, a, [role=img], img")].filter((one) =>
            !(one.textContent.trim() || one.getAttribute("aria-label") || one.hasAttribute("alt")
              || one.labels?.length || one.title)).map((one) => one.outerHTML)"""
    )


async def test_each_worker_has_a_page(browser):
    options = arpc.RpcOptions(gc_freeze=False, metrics=True)
    async with cluster(["ps", "trainer0"], options=options) as group:
        group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        await arpc.rpc_sync("trainer0", double, args=(1,))
        with pytest.raises(KeyError):
            await arpc.rpc_sync("trainer0", fails)
        await arpc.rpc_sync("ps", says)
        await arpc.rpc_sync("trainer0", says)
        page = await browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        watched = Watched(page)
        await page.goto(group[0].http_address)
        await page.locator("#workers").get_by_role("link", name="trainer0").click()
        expect = playwright.expect
        await expect(page).to_have_title("arpc · trainer0")
        await expect(page.locator("#about")).to_contain_text("ok id 1 · process")
        await expect(page.locator("#handled tbody tr").filter(has_text="double")).to_contain_text("ps")
        await expect(page.locator("#made tbody")).to_contain_text("it has called nobody yet")
        await expect(page.locator("[data-tile=memory] .value")).to_contain_text("iB")
        await expect(page.locator("[data-tile=cpu] .value")).to_contain_text("%")
        await page.locator("#errors").scroll_into_view_if_needed()
        await expect(page.locator("#errors summary")).to_contain_text("KeyError")
        await page.locator("#logs").scroll_into_view_if_needed()
        await expect(page.locator("#logs .log").filter(has_text="a quiet word")).to_have_count(1)  # not that of ps
        await page.get_by_role("button", name="Look now").click()
        await expect(page.locator("#stack .stack-worker h3")).to_have_count(1)
        await expect(page.locator("#stack .stack-worker h3")).to_contain_text("trainer0 process")
        # it fits a phone
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        assert await unnamed(page) == []
        assert [problem for problem in watched.problems if "api/events" not in problem] == []
        await page.goto(f"{group[0].http_address}/worker.html?name=nobody")
        await expect(page.get_by_role("alert")).to_have_text("There is no worker nobody in this group.")
        await page.close()


async def test_a_trace_is_recorded_and_opened(browser):
    options = arpc.RpcOptions(gc_freeze=False)
    async with cluster(["ps", "trainer0"], options=options) as group:
        group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        page = await browser.new_page()
        await page.goto(group[0].http_address)
        await page.locator("#trace-seconds").select_option("1")
        async with page.context.expect_page() as opening:
            await page.get_by_role("button", name="Record a trace").click()
            await turns_until(lambda: group[0].metrics._is_tracing)
            await arpc.rpc_sync("trainer0", double, args=(1,))
        opened = await opening.value
        expect = playwright.expect
        await expect(opened.locator("body")).to_contain_text("2 workers · ")
        await expect(page.locator("#trace-status").get_by_role("link")).to_have_attribute(
            "href", re.compile("^traces/")
        )
        await page.locator("#trace-form").select_option("json")
        async with page.expect_download() as downloading:
            await page.get_by_role("button", name="Record a trace").click()
        download = await downloading.value
        assert download.suggested_filename == "arpc-trace.json"
        assert "traceEvents" in json.loads((await download.path()).read_bytes())
        await opened.close()
        await page.close()


async def test_labels_of_many_workers_do_not_overlap(browser):
    options = arpc.RpcOptions(gc_freeze=False, metrics=True)
    names = ["driver", *(f"trainer-{number}" for number in range(19))]
    async with cluster(names, options=options) as group:
        group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        await asyncio.gather(*(arpc.rpc_sync(name, double, args=(1,)) for name in names))
        page = await browser.new_page()
        await page.goto(group[0].http_address)
        await playwright.expect(page.locator(".graph .node")).to_have_count(20)
        assert await page.locator(".graph text.name").count() >= 14
        assert await overlapping(page) == []
        await page.close()


async def test_a_guarded_page_lets_in_who_knows_the_secret(browser, monkeypatch):
    monkeypatch.setattr("arpc.http.server._LOGIN_DELAY_S", 0.0)
    options = arpc.RpcOptions(gc_freeze=False, secret=SECRET)
    async with cluster(1, options=options) as group:
        served = group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        served._guard.needs_secret = True
        page = await browser.new_page(color_scheme="dark")
        await page.goto(served.url)
        expect = playwright.expect
        await expect(page).to_have_url(re.compile("/login$"))
        await page.get_by_label("Secret or token").fill("a guess")
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_have_text("That is not the secret of this group.")
        await page.get_by_label("Secret or token").fill("swordfish")
        await page.keyboard.press("Enter")
        await expect(page.locator("#workers tbody tr")).to_have_count(1)
        assert await page.evaluate("document.cookie") == ""
        await page.close()


async def test_the_page_says_when_the_worker_is_gone(browser):
    options = arpc.RpcOptions(gc_freeze=False)
    async with cluster(["ps", "trainer"], options=options, elastic=True) as group:
        served = group[0].http = await serve(options.replace(http="127.0.0.1:0"), group[0].metrics)
        page = await browser.new_page()
        await page.goto(served.url)
        expect = playwright.expect
        await expect(page.locator("#workers tbody tr")).to_have_count(2)
        await group[1].shutdown(graceful=False)
        await expect(page.locator("#about")).to_contain_text("trainer lost")
        await served.aclose()
        group[0].http = None
        await expect(page.locator("#live-text")).to_contain_text("connection lost")
        await page.close()
