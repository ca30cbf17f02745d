"""The page in a real browser: what a person sees and does."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import arpc
from arpc.http.server import serve
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
