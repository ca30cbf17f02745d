"""RRefs: used, passed on to a third and a fourth worker, in containers and results, with and without timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import arpc
from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here
from scripts.soak.operations.calls import answer

__all__ = ["OPERATIONS"]

Box = dict[str, list[Any]]
"""A container in which RRefs are sent."""


class Total:
    """An object to which other workers have RRefs."""

    def __init__(self, token: str) -> None:
        here().ledger.ran(token)
        self.value = 0

    async def add(self, token: str, number: int) -> int:
        here().ledger.ran(token)
        self.value += number
        return self.value

    async def ask(self, token: str, third: str, number: int) -> int:
        """Call a plain function of a third worker. The loss of that worker is not a loss of this object's owner."""
        client = here()
        client.ledger.ran(token)
        async with client.call("rref-method-inner", third, depth=1) as inner:
            result: int = await client.worker.rpc_sync(third, answer, args=(inner, number))
        return result


async def add_for(token: str, path: list[str], box: Box, number: int, timeout_s: float) -> int:
    """Pass an RRef on to the next worker of the path. The last one uses it."""
    client = here()
    client.ledger.ran(token)
    total: arpc.RRef[Total] = box["totals"][0]
    owner, creator = total.owner_name(), box["creator"][0]
    if path:
        to, *rest = path
        async with client.call("rref-hand-on", to, owner, creator, *rest, depth=1) as inner:
            arguments = (inner, rest, box, number, timeout_s)
            result: int = await client.worker.rpc_sync(to, add_for, args=arguments, timeout=timeout_s)
        return result
    async with client.call("rref-use-chain" if timeout_s else "rref-use-untimed", owner, creator, depth=2) as inner:
        added: int = await total.rpc_sync(timeout_s).add(inner, number)
    return added


async def fetch_for(token: str, path: list[str], box: Box) -> Any:
    """Pass an RRef on to the next worker of the path. The last one returns a copy of the value."""
    client = here()
    client.ledger.ran(token)
    rref: arpc.RRef[Any] = box["values"][0]
    owner, creator = rref.owner_name(), box["creator"][0]
    if path:
        to, *rest = path
        async with client.call("rref-hand-on", to, owner, creator, *rest, depth=1) as inner:
            return await client.worker.rpc_sync(to, fetch_for, args=(inner, rest, box), timeout=0)
    async with client.call("rref-fetch", owner, creator, depth=2):
        return await rref.to_here(timeout=0)


def _begin_creation(
    client: Client, kind: str, owner: str, function: Callable[..., Any], *args: Any
) -> tuple[str, arpc.RRef[Any]]:
    """Begin a creation; return its token and its RRef. The caller logs the end, except if `remote` raises."""
    token = client.ledger.begin(kind, owner)
    try:
        return token, client.worker.remote(owner, function, args=(token, *args), timeout=TIMEOUT_S)
    except BaseException as error:
        client.ledger.end(token, error)
        raise


async def create_for(token: str, owner: str) -> Box:
    """Create an object on a third worker, and return the RRef before that worker has confirmed it."""
    client = here()
    client.ledger.ran(token)
    inner, total = _begin_creation(client, "rref-create-for", owner, Total)
    created = total._get_future()  # noqa: SLF001 - torch's name for it
    assert created is not None
    created.add_done_callback(partial(client.log_end, inner))
    return {"totals": [total], "creator": [client.worker.name]}


async def give_back(token: str, box: Box) -> Box:
    """Return the RRefs that came as arguments."""
    here().ledger.ran(token)
    return box


async def _created(rref: arpc.RRef[Any]) -> None:
    created = rref._get_future()  # noqa: SLF001 - torch's name for it
    assert created is not None
    await created


async def _use(client: Client) -> None:
    """Create an object, use it, and have another worker use it, several times."""
    owner, helper = client.other(), client.other()
    me = client.worker.name
    expected = 0
    async with client.call("rref-create", owner) as token:
        total: arpc.RRef[Total] = client.worker.remote(owner, Total, args=(token,), timeout=TIMEOUT_S)
        await _created(total)
    for number in range(1, 4):
        async with client.call("rref-use", owner) as token:
            got = await total.rpc_sync().add(token, number)
        expected += number
        assert got == expected, f"{got} instead of {expected}: the object was lost, or is another one"
        async with client.call("rref-pass", helper, owner) as token:
            box: Box = {"totals": [total], "creator": [me]}
            arguments: tuple[Any, ...] = (token, [], box, 1, TIMEOUT_S)
            got = await client.worker.rpc_sync(helper, add_for, args=arguments, timeout=TIMEOUT_S)
        expected += 1
        assert got == expected, f"{got} instead of {expected} after a use by {helper}"


async def _hand_on(client: Client) -> None:
    """Pass an RRef on before its creation is confirmed; the worker that receives it passes it on as well."""
    owner, *path = client.path(3)
    timeout_s = client.random.choice((0.0, TIMEOUT_S))
    me, number = client.worker.name, client.random.randrange(1, 100)
    creation, total = _begin_creation(client, "rref-create-handed-on", owner, Total)
    created = asyncio.ensure_future(_created(total))
    created.add_done_callback(partial(client.log_end, creation))
    try:
        async with client.call("rref-pass-unconfirmed", path[0], owner, *path) as token:
            arguments = (token, path[1:], {"totals": [total, total], "creator": [me]}, number, timeout_s)
            got = await client.worker.rpc_sync(path[0], add_for, args=arguments, timeout=timeout_s)
    finally:
        del total
        await asyncio.wait([created])
    assert got == number, f"{got} instead of {number}, which the {len(path)}th worker added"


async def _hand_on_and_fetch(client: Client) -> None:
    """Have a fourth worker fetch the value of an RRef that was passed on to it, without any timeout."""
    owner, *path = client.path(3)
    me, number = client.worker.name, client.random.randrange(1000)
    creation, rref = _begin_creation(client, "rref-create-handed-on", owner, answer, number)
    created = asyncio.ensure_future(_created(rref))
    created.add_done_callback(partial(client.log_end, creation))
    try:
        async with client.call("rref-pass-unconfirmed", path[0], owner, *path) as token:
            box: Box = {"values": [rref], "creator": [me]}
            got = await client.worker.rpc_sync(path[0], fetch_for, args=(token, path[1:], box), timeout=0)
    finally:
        del rref
        await asyncio.wait([created])
    assert got == number, f"{got} instead of {number}"


async def _share_own(client: Client) -> None:
    """Pass an RRef to a value of this worker on to other workers, which fetch it."""
    path = client.path(2)
    me, number = client.worker.name, client.random.randrange(1000)
    async with client.call("rref-pass-own", path[0], *path) as token:
        box: Box = {"values": [arpc.RRef(number)], "creator": [me]}
        got = await client.worker.rpc_sync(path[0], fetch_for, args=(token, path[1:], box), timeout=TIMEOUT_S)
    assert got == number, f"{got} instead of {number}"


async def _get_result(client: Client) -> None:
    """Get an RRef as part of a result, before its owner has confirmed it; have the owner or the helper return it."""
    helper, owner = client.path(2)
    async with client.call("rref-result", helper, owner) as token:
        box = await client.worker.rpc_sync(helper, create_for, args=(token, owner), timeout=TIMEOUT_S)
    to = client.random.choice((helper, owner))
    if to != client.worker.name:
        async with client.call("rref-give-back", to, owner, helper) as token:
            box = await client.worker.rpc_sync(to, give_back, args=(token, box), timeout=TIMEOUT_S)
    async with client.call("rref-use", owner, helper) as token:
        got = await box["totals"][0].rpc_sync().add(token, 7)
    assert got == 7, f"{got} instead of 7"
    await box["totals"][0].release()


async def _method_calls_on(client: Client) -> None:
    """Call a method that calls a third worker: the loss of that worker is not a loss of the owner."""
    owner, third = client.path(2)
    number = client.random.randrange(1000)
    async with client.call("rref-create", owner) as token:
        total: arpc.RRef[Total] = client.worker.remote(owner, Total, args=(token,), timeout=TIMEOUT_S)
        await _created(total)
    for _ in range(5):
        async with client.call("rref-method-calls-on", owner, third) as token:
            got = await total.rpc_sync(TIMEOUT_S).ask(token, third, number)
        assert got == number, f"{got} instead of {number}"


OPERATIONS = (
    Operation("rref-use", _use),
    Operation("rref-hand-on", _hand_on),
    Operation("rref-hand-on-and-fetch", _hand_on_and_fetch),
    Operation("rref-share-own", _share_own),
    Operation("rref-result", _get_result),
    Operation("rref-method-calls-on", _method_calls_on),
)
