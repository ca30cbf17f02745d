"""The tables of `arpc top`: sorted rows of a summary, drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from arpc.console.numbers import age, bytes_, count, duration, rate
from arpc.metrics.summary import GroupSummary

__all__ = ["VIEWS", "Column", "View", "render", "sorted_rows"]

_STATE_STYLES: Final = {"ok": "green", "late": "yellow", "lost": "bold red"}
_SLOW_LOOP_S: Final = 0.05


class Column(NamedTuple):
    """One column: the value that it is sorted by, and the text that it shows."""

    key: str
    title: str
    value: Callable[[Any], Any]
    show: Callable[[Any], str]
    is_text: bool = False
    style: Callable[[Any], str] = lambda _: ""
    least_width: int = 0
    """The width of the narrowest terminal that has room for it."""


class View(NamedTuple):
    """One table."""

    name: str
    rows: Callable[[GroupSummary], Sequence[Any]]
    columns: tuple[Column, ...]
    sort: str


def _text(key: str, title: str) -> Column:
    return Column(key, title, lambda row: getattr(row, key), lambda row: getattr(row, key), is_text=True)


def _number(key: str, title: str, show: Callable[[float], str] = count, least_width: int = 0) -> Column:
    return Column(
        key, title, lambda row: getattr(row, key), lambda row: show(getattr(row, key)), least_width=least_width
    )


def _latency(name: str) -> Column:
    return Column(
        name,
        name,
        lambda row: getattr(row.latency, f"{name}_s") or 0.0,
        lambda row: duration(getattr(row.latency, f"{name}_s")),
    )


_ERRORS: Final = Column(
    "errors",
    "errors",
    lambda row: row.errors,
    lambda row: count(row.errors),
    style=lambda row: "red" if row.errors else "",
)

VIEWS: Final = {
    view.name: view
    for view in (
        View(
            "workers",
            lambda group: group.workers,
            (
                _text("name", "worker"),
                Column(
                    "state",
                    "state",
                    lambda row: row.state,
                    lambda row: row.state,
                    is_text=True,
                    style=lambda row: _STATE_STYLES.get(row.state, "yellow"),
                ),
                _number("handled_per_s", "in/s", rate),
                _number("calls_per_s", "out/s", rate),
                _latency("p50"),
                _latency("p99"),
                _number("in_flight", "in flight"),
                _number("handlers", "running"),
                _number("queued", "queue"),
                Column(
                    "threads", "threads", lambda row: row.threads_busy, lambda row: f"{row.threads_busy}/{row.threads}"
                ),
                Column(
                    "lag",
                    "lag",
                    lambda row: row.lag_max_s,
                    lambda row: duration(row.lag_max_s),
                    style=lambda row: "yellow" if row.lag_max_s > _SLOW_LOOP_S else "",
                ),
                _number("sent_bytes_per_s", "out B/s", bytes_, 120),
                _number("memory_bytes", "memory", bytes_, 130),
                Column(
                    "rrefs",
                    "rrefs",
                    lambda row: row.rrefs_owned + row.rrefs_used,
                    lambda row: f"{row.rrefs_owned}/{row.rrefs_used}",
                    least_width=140,
                ),
                _number("uptime_s", "up", age, 150),
            ),
            "handled_per_s",
        ),
        View(
            "functions",
            lambda group: group.functions,
            (
                _text("function", "function"),
                _number("per_s", "calls/s", rate),
                _latency("p50"),
                _latency("p90"),
                _latency("p99"),
                _number("busy", "load", rate),
                _number("in_flight", "in flight"),
                _number("count", "total"),
                _ERRORS,
            ),
            "per_s",
        ),
        View(
            "peers",
            lambda group: group.pairs,
            (
                _text("caller", "caller"),
                _text("callee", "callee"),
                _text("state", "connection"),
                _number("per_s", "calls/s", rate),
                _latency("p50"),
                _latency("p99"),
                _number("in_flight", "in flight"),
                _number("waiting", "waiting"),
                _number("sent_bytes", "sent", bytes_),
                _number("received_bytes", "received", bytes_, 120),
                _number("reconnects", "reconnects", least_width=130),
                _ERRORS,
            ),
            "per_s",
        ),
        View(
            "rrefs",
            lambda group: group.rrefs,
            (
                _text("owner", "owner"),
                _text("type", "type"),
                _text("state", "state"),
                _number("count", "values"),
                _number("forks", "held"),
                _number("oldest_s", "oldest", age),
            ),
            "count",
        ),
    )
}


def sorted_rows(view: View, group: GroupSummary, sort: str, *, is_reversed: bool = False) -> list[Any]:
    """Return the rows sorted: numbers largest first, texts from a to z; or the other way around."""
    column = next((one for one in view.columns if sort in {one.key, one.title}), view.columns[0])
    return sorted(view.rows(group), key=column.value, reverse=is_reversed == column.is_text)


def render(
    view: View,
    group: GroupSummary,
    sort: str,
    *,
    is_reversed: bool = False,
    limit: int | None = None,
    width: int | None = None,
) -> Any:
    """Return a table of rich, with at most ``limit`` rows, and the columns for which there is room."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = sorted_rows(view, group, sort, is_reversed=is_reversed)
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    table = Table(
        box=box.SIMPLE_HEAD,
        expand=True,
        padding=(0, 1),
        pad_edge=False,
        caption=f"and {left_out} more" if left_out else None,
        caption_justify="left",
    )
    columns = [column for column in view.columns if width is None or width >= column.least_width]
    for column in columns:
        is_chosen = sort in {column.key, column.title}
        arrow = ("▲" if is_reversed != column.is_text else "▼") if is_chosen else ""
        table.add_column(
            Text(f"{column.title}{arrow}", style="bold cyan" if is_chosen else "bold"),
            justify="left" if column.is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows[: len(rows) - left_out]:
        table.add_row(*(Text(str(column.show(row)), style=column.style(row)) for column in columns))
    return table
