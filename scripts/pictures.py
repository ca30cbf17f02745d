"""Takes the pictures of docs/observability.md: starts a busy group, and shows it in a browser and in arpc top.

``python -m scripts.pictures docs/images``. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, Final

from playwright.async_api import async_playwright
from rich.console import Console

from arpc.console.attachment import attach
from arpc.console.top import Screen
from arpc.metrics.summary import GroupSummary

CHROMIUM: Final = "/usr/bin/chromium"
FLAGS: Final = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WARM_UP_S: Final = 45.0
"""Seconds until the charts of the last minute have enough points."""


async def take(folder: Path, chromium: str) -> None:
    """Take all pictures."""
    group = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scripts.busy_group",
        "--http",
        "127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert group.stdout is not None
    try:
        url = (await group.stdout.readline()).decode().strip()
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            pages = [
                (scheme, await browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme))
                for scheme in ("light", "dark")
            ]
            for _, page in pages:
                await page.goto(url)
            await asyncio.sleep(WARM_UP_S)
            for scheme, page in pages:
                await page.screenshot(path=folder / f"dashboard-{scheme}.png")
            where = argparse.Namespace(address=url, worker=None, pid=None, secret_file=None)
            async with attach(where) as attached:
                await draw_top(await attached.summary(), folder, browser)
            await browser.close()
    finally:
        os.killpg(group.pid, signal.SIGTERM)
        await group.wait()


async def draw_top(summary: GroupSummary, folder: Path, browser: Any) -> None:
    """Take a picture of arpc top: drawn by rich, and turned into a picture by the browser."""
    console = Console(record=True, width=160, file=Path(os.devnull).open("w"), force_terminal=True)  # noqa: SIM115, ASYNC230
    console.print(Screen().everything(summary, {"workers", "functions"}))
    drawing = folder / "top.svg"
    drawing.write_text(console.export_svg(title="arpc top"), encoding="utf-8")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing.read_text(encoding="utf-8"))
    assert size is not None
    width = 1280
    height = round(width * float(size[2]) / float(size[1]))
    page = await browser.new_page(viewport={"width": width, "height": height})
    await page.goto(drawing.resolve().as_uri())
    await page.screenshot(path=folder / "top.png")
    drawing.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chromium", default=CHROMIUM)
    arguments = parser.parse_args()
    asyncio.run(take(arguments.folder, arguments.chromium))
