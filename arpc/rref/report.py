"""RRefs as a table: for people, for the dashboard, and for the search for leaks."""

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
    """Of a user."""
    role: Literal["owner", "user"]
    owner: str
    state: str
    type: str
    """Of the value; a user does not know it."""
    forks: dict[str, int]
    """How many users of each worker the owner counts."""
    handles: int
    """Held on this worker."""
    made: str
    """The function it came from, or the lines of code that made it (`RpcOptions.rref_creation_stacks`)."""
    age_s: float = 0.0
    """How long this worker has known it."""

    def __str__(self) -> str:
        held = ", ".join(f"{count} on {worker}" for worker, count in sorted(self.forks.items())) or "no other worker"
        what = f"{self.type} of " if self.role == "owner" else "user of "
        separator = "\n" if "\n" in self.made else " "
        about = f"{self.state}; held by {held}; {self.handles} here"
        return f"{what}{self.owner} {self.id} ({about}), made by{separator}{self.made}"


def rref_rows(context: RRefContext) -> list[RRefRow]:
    """Those this worker owns, then those it uses."""
    if get_ident() == context.thread:  # values belong to the loop, and anybody may ask for a report
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
    """Counters, named as users of torch know them."""
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
    """What is still held when nothing is under way any more: users, and values of this worker that others hold."""
    return tuple(row for row in rref_rows(context) if row.role == "user" or row.forks)


def report_survivors(context: RRefContext, rows: tuple[RRefRow, ...]) -> None:
    """At a graceful shutdown: what was still held, and is let go of now. A warning only with `rref_creation_stacks`."""
    level = logging.WARNING if context.options.rref_creation_stacks else logging.DEBUG
    _log(level, context, rows, "RRefs are still held at shutdown")


def report_leaks(context: RRefContext) -> tuple[RRefRow, ...]:
    """After everyone has let go: values of this worker that others still hold all the same."""
    rows = tuple(row for row in find_survivors(context) if row.role == "owner")
    _log(logging.WARNING, context, rows, "RRefs leak: their users were never heard of again")
    return rows


def _log(level: int, context: RRefContext, rows: tuple[RRefRow, ...], what: str) -> None:
    if rows and logger.isEnabledFor(level):
        lines = "\n".join(f"  {row}" for row in rows)
        logger.log(level, "worker %s: %d %s\n%s", context.info.name, len(rows), what, lines)
