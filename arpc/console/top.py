"""``arpc top``: the contents of the dashboard, in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from arpc.console.attachment import Attachment, attach
from arpc.console.numbers import age, bytes_, count, duration, rate
from arpc.console.tables import VIEWS, View, render
from arpc.errors import ArpcError, UnsupportedError
from arpc.extras import install_command
from arpc.metrics.summary import GroupSummary

__all__ = ["Screen", "run"]

_BARS: Final = "▁▂▃▄▅▆▇█"


def run(arguments: argparse.Namespace) -> int:
    """Show the group until the user quits, or once; return the exit status."""
    try:
        return asyncio.run(_top(arguments))
    except ArpcError as error:
        sys.stderr.write(f"arpc top: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


async def _top(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
    except ImportError as error:
        raise UnsupportedError(f"arpc top needs rich: {install_command('cli')}") from error
    async with attach(arguments) as group:
        if arguments.json:
            summary = await group.summary()
            sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
            return 0
        screen = Screen(arguments.view, arguments.sort)
        if arguments.once or not sys.stdout.isatty():
            # a worker that has just begun to count has no rates yet
            await group.summary()
            await asyncio.sleep(min(2.0, max(0.0, arguments.interval)))
            console = Console(width=None if sys.stdout.isatty() else 160)
            console.print(screen.everything(await group.summary()))
            return 0
        return await _live(group, screen, arguments.interval)


class Screen:
    """The state of the display, and the effect of keys on it. Independent of the terminal."""

    def __init__(self, view: str = "workers", sort: str | None = None) -> None:
        self.view: View = VIEWS[view]
        self.sort = sort or self.view.sort
        self.is_reversed = False
        self.is_over = False

    def press(self, key: str) -> None:
        """Handle a key. Other keys have no effect."""
        names = list(VIEWS)
        if key in {"q", "\x03", "\x04"}:
            self.is_over = True
        elif key == "\t" or (key.isdigit() and 0 < int(key) <= len(names)):
            place = names.index(self.view.name) + 1 if key == "\t" else int(key) - 1
            self.view = VIEWS[names[place % len(names)]]
            self.sort, self.is_reversed = self.view.sort, False
        elif key in {">", ".", "<", ","}:
            keys = [column.key for column in self.view.columns]
            known = [column.key for column in self.view.columns if self.sort in {column.key, column.title}]
            place = keys.index(known[0]) if known else 0
            self.sort = keys[(place + (1 if key in {">", "."} else -1)) % len(keys)]
            self.is_reversed = False
        elif key == "r":
            self.is_reversed = not self.is_reversed

    def everything(self, group: GroupSummary, views: Collection[str] | None = None) -> Any:
        """Return all tables, or some, for output that is read later. Empty tables are left out."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [headline(group)]
        for view in VIEWS.values():
            if view.rows(group) and (views is None or view.name in views):
                sort = self.sort if view is self.view else view.sort
                parts += [Text(f"\n{view.name}", style="bold"), render(view, group, sort)]
        return Group(*parts)

    def page(self, group: GroupSummary, height: int, width: int) -> Any:
        """Return one table, as much of it as there is room for."""
        from rich.console import Group
        from rich.text import Text

        tabs = Text("  ")
        for number, name in enumerate(VIEWS, 1):
            tabs.append(f" {number} {name} ", style="bold reverse" if name == self.view.name else "")
        keys = Text("  1-4 or tab: table   < >: sort by   r: reverse   q: quit", style="dim")
        table = render(self.view, group, self.sort, is_reversed=self.is_reversed, limit=max(1, height - 9), width=width)
        return Group(headline(group), Text(), tabs, table, keys)


def headline(group: GroupSummary) -> Any:
    """Return the state of the group in two lines."""
    from rich.text import Text

    troubled = [worker for worker in group.workers if worker.state in {"late", "lost"}]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" arpc ", style="bold white on blue")
    line.append(f"  {len(group.workers)} workers", style="bold")
    for worker in troubled:
        line.append(f"  {worker.name} {worker.state}", style="bold red")
    line.append(f"  asked {group.served_by}, counting for {age(group.counting_s)}", style="dim")
    line.append("\n  ")
    for title, value, bars in (
        ("calls/s", rate(group.calls_per_s), "calls"),
        ("p50", duration(group.latency.p50_s), ""),
        ("p99", duration(group.latency.p99_s), ""),
        ("in flight", count(group.in_flight), "in_flight"),
        ("errors/s", rate(group.errors_per_s), ""),
        ("bytes/s", bytes_(group.sent_bytes_per_s), ""),
        ("lag", duration(group.lag_max_s), "lag_s"),
    ):
        line.append(f"{title} ", style="dim")
        line.append(value, style="bold")
        if bars:
            line.append(f" {sparkline(group.history.get(bars, [])[-12:])}", style="cyan")
        line.append("   ")
    return line


def sparkline(values: list[float]) -> str:
    """Return a chart of some values in one line of text.

    >>> sparkline([0, 1, 2, 4])
    '▁▂▄█'
    """
    most = max(values, default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(7, int(value / most * 7.999))] for value in values)


async def _live(group: Attachment, screen: Screen, interval_s: float) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    pressed = asyncio.Event()

    def press(key: str) -> None:
        screen.press(key)
        pressed.set()

    with _keys(press), Live(console=console, screen=True, auto_refresh=False) as live:
        summary = await group.summary()
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while not screen.is_over:
            live.update(screen.page(summary, console.height, console.width), refresh=True)
            pressed.clear()
            left_s = asked_at + max(0.1, interval_s) - loop.time()
            if left_s > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await pressed.wait()
                    continue
                except TimeoutError:
                    pass
            asked_at = loop.time()
            summary = await group.summary()
    return 0


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call a function for each key at once, and restore the terminal at the end."""
    try:
        import termios
        import tty
    except ImportError:  # Windows: without keys, the page still refreshes
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)

    def read() -> None:
        # not sys.stdin, whose buffer would hold back the keys that arrive together with the first
        for key in os.read(descriptor, 64).decode(errors="ignore"):
            press(key)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
