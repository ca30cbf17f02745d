"""RRefs as a table: for users, for the dashboard, and to find leaks."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from typing import Literal

from arpc.ids import GloballyUniqueId
from arpc.log import get_logger
from arpc.rref.context import RRefContext
from arpc.rref.states import UNANSWERED, UserState

__all__ = ["RRefRow", "find_survivors", "report_leaks", "report_survivors", "rref_rows", "rref_statistics"]

logger = get_logger("arpc.rref")


@dataclass(frozen=True, slots=True)
class RRefRow:
    """One RRef as one worker sees it."""

    id: GloballyUniqueId
    fork_id: GloballyUniqueId | None
    """The id of a user's fork; None for an owner."""
    role: Literal["owner", "user"]
    owner: str
    state: str
    type: str
    """The type of the value; empty for a user."""
    forks: dict[str, int]
    """The number of forks that the owner counts, by worker; empty for a user."""
    handles: int
    """The number of handles on this worker; for an owner, see `Owned.holds`."""
    made: str
    """The function or the worker it came from, or the code that made it (`RpcOptions.rref_creation_stacks`)."""
    age_s: float = 0.0
    """The seconds since this worker first recorded it."""

    def __str__(self) -> str:
        held = ", ".join(f"{count} on {worker}" for worker, count in sorted(self.forks.items())) or "no other worker"
        what = f"{self.type} of " if self.role == "owner" else "user of "
        separator = "\n" if "\n" in self.made else " "
        about = f"{self.state}; held by {held}; {self.handles} here"
        return f"{what}{self.owner} {self.id} ({about}), made by{separator}{self.made}"


def rref_rows(context: RRefContext) -> list[RRefRow]:
    """Return the RRefs that this worker owns, then those that it uses. May be called in any thread."""
    if get_ident() == context.thread:  # only the loop stores values
        context.service.keep_answered()
    now = monotonic()
    of_owner = (
        RRefRow(
            GloballyUniqueId.from_int(owned.rref),
            None,
            "owner",
            context.info.name,
            owned.state.name.lower(),
            owned.type_name,
            dict(Counter(holder.name for holder in owned.forks.values())),
            owned.holds,
            f"{owned.made} for worker {owned.creator}" if owned.creator else owned.made,
            now - owned.since,
        )
        for owned in context.forks.owned.values()
    )
    of_users = (
        RRefRow(
            GloballyUniqueId.from_int(user.rref),
            GloballyUniqueId.from_int(user.fork),
            "user",
            user.owner.name,
            user.state.name.lower(),
            "",
            {},
            user.handles,
            user.made,
            now - user.since,
        )
        for user in context.forks.users.values()
    )
    return [*of_owner, *of_users]


def rref_statistics(context: RRefContext) -> dict[str, int]:
    """Return counters, with torch's names where torch has them."""
    users = context.forks.users.values()
    return {
        "num_owner_rrefs": len(context.forks.owned),
        "num_forks": sum(len(owned.forks) for owned in context.forks.owned.values()),
        "num_pending_users": sum(user.state in UNANSWERED for user in users),
        "num_pending_futures": sum(user.state is UserState.CREATING for user in users),
        "num_users": len(users),
        "num_offers": len(context.forks.offers),
        "control_messages_sent": context.post.messages_sent,
        "control_items_sent": context.post.items_sent,
    }


def find_survivors(context: RRefContext) -> tuple[RRefRow, ...]:
    """Return the RRefs still held once nothing is in flight: users, and values of this worker that others hold."""
    return tuple(row for row in rref_rows(context) if row.role == "user" or row.forks)


def report_survivors(context: RRefContext, rows: tuple[RRefRow, ...]) -> None:
    """Log the RRefs that a graceful shutdown releases: as a warning with `rref_creation_stacks`, else for debugging."""
    level = logging.WARNING if context.options.rref_creation_stacks else logging.DEBUG
    _log(level, context, rows, "RRefs are still held at shutdown")


def report_leaks(context: RRefContext) -> tuple[RRefRow, ...]:
    """Log and return the values of this worker that are still held after all workers have released their RRefs."""
    rows = tuple(row for row in find_survivors(context) if row.role == "owner")
    _log(logging.WARNING, context, rows, "RRefs leak: their users were never heard of again")
    return rows


def _log(level: int, context: RRefContext, rows: tuple[RRefRow, ...], what: str) -> None:
    if rows and logger.isEnabledFor(level):
        lines = "\n".join(f"  {row}" for row in rows)
        logger.log(level, "worker %s: %d %s\n%s", context.info.name, len(rows), what, lines)
