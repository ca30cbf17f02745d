"""ContextVars that travel with calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.hooks import context_propagation as variables
from arpc.errors import ConfigurationError, SerializationError
from arpc.wire.values.policy import UNRESTRICTED
from tests.agent.stage import call_on, call_on_in_thread, echo

request_id: ContextVar[str] = ContextVar("request_id", default="none")
tenant: ContextVar[Any] = ContextVar("tenant")


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ContextVar[Any]]]:
    """Declarations of one test only, and values of one test only."""
    declared: dict[str, ContextVar[Any]] = {}
    monkeypatch.setattr(variables, "_declared", declared)
    arpc.propagate(request_id)
    arpc.propagate(tenant)
    return declared


# -- what handlers see


async def see() -> tuple[str, Any]:
    return request_id.get(), tenant.get("unset")


async def see_later() -> tuple[str, Any]:
    await asyncio.sleep(0)
    return request_id.get(), tenant.get("unset")


def see_in_thread() -> tuple[str, Any]:
    return request_id.get(), tenant.get("unset")


@arpc.inline
def see_inline() -> tuple[str, Any]:
    return request_id.get(), tenant.get("unset")


async def see_in_stream() -> AsyncIterator[tuple[str, Any]]:
    for _ in range(3):
        yield request_id.get(), tenant.get("unset")


def see_in_thread_stream() -> Iterator[tuple[str, Any]]:
    for _ in range(3):
        yield request_id.get(), tenant.get("unset")


@pytest.mark.parametrize("function", [see, see_later, see_in_thread, see_inline])
async def test_a_handler_sees_the_values_of_its_caller(pair, function):
    assert await pair[0].rpc_sync("worker1", function) == ("none", "unset")
    request_id.set("r1")
    assert await pair[0].rpc_sync("worker1", function) == ("r1", "unset")
    tenant.set({"name": "t", "tags": [1, 2]})
    assert await pair[0].rpc_sync("worker1", function) == ("r1", {"name": "t", "tags": [1, 2]})
    assert await pair[0].rpc_async("worker1", function) == ("r1", {"name": "t", "tags": [1, 2]})


@pytest.mark.parametrize("generator", [see_in_stream, see_in_thread_stream])
async def test_a_stream_sees_them_too(pair, generator):
    request_id.set("r1")
    seen = [item async for item in pair[0].stream("worker1", generator, window=1)]
    assert seen == [("r1", "unset")] * 3


async def test_results_travel_beside_them(pair):
    request_id.set("r1")
    tensor = torch.ones(10_000)
    assert torch.equal(await pair[0].rpc_sync("worker1", echo, args=(tensor,)), tensor)
    assert await pair[0].rpc_sync("worker1", echo) is None
    with pytest.raises(LookupError):
        await pair[0].rpc_sync("worker1", fail)


async def fail() -> None:
    raise LookupError


@pytest.mark.parametrize("way", [call_on, call_on_in_thread])
async def test_they_travel_on_with_nested_calls(trio, way):
    request_id.set("r1")
    assert await trio[0].rpc_sync("worker1", way, args=("worker2", see)) == ("r1", "unset")


async def test_a_thread_that_calls_sends_its_own(pair):
    request_id.set("r1")

    def call() -> Any:
        request_id.set("r2")
        return pair[0].rpc_async("worker1", see).wait(30)

    assert await asyncio.to_thread(call) == ("r2", "unset")


async def test_concurrent_callers_keep_theirs_apart(pair):
    async def call(value: str) -> Any:
        request_id.set(value)
        return (await pair[0].rpc_sync("worker1", see_later))[0]

    values = [f"r{number}" for number in range(20)]
    assert await asyncio.gather(*map(call, values)) == values
    assert request_id.get() == "none"


async def test_a_handlers_change_does_not_come_back(pair):
    request_id.set("r1")
    assert await pair[0].rpc_sync("worker1", change) == "changed"
    assert request_id.get() == "r1"
    assert await pair[0].rpc_sync("worker1", see) == ("r1", "unset")


async def change() -> str:
    request_id.set("changed")
    return request_id.get()


async def test_other_variables_stay_at_home(pair):
    other.set("not propagated")
    assert await pair[0].rpc_sync("worker1", see_other) == "default"


other: ContextVar[str] = ContextVar("other", default="default")


async def see_other() -> str:
    return other.get()


# -- what can go wrong


async def test_a_value_that_cannot_be_sent_fails_the_call(pair):
    tenant.set(threading.Lock())
    with pytest.raises(SerializationError, match="a propagated ContextVar cannot be sent"):
        await pair[0].rpc_sync("worker1", see)


async def test_a_tensor_is_refused(pair):
    tenant.set(torch.ones(2))
    with pytest.raises(SerializationError, match="pass it as an argument instead"):
        await pair[0].rpc_sync("worker1", see)


async def test_a_variable_the_callee_does_not_know_is_ignored(pair, declared, monkeypatch):
    request_id.set("r1")
    tenant.set("t1")
    receive = variables.ContextPropagation.request_received

    def receive_without_tenant(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.delitem(declared, "tenant")
            receive(*args)

    monkeypatch.setattr(variables.ContextPropagation, "request_received", receive_without_tenant)
    assert await pair[0].rpc_sync("worker1", see) == ("r1", "unset")


def test_names_must_differ():
    assert arpc.propagate(request_id) is request_id, "again is not wrong"
    with pytest.raises(ConfigurationError, match=r"another ContextVar named 'request_id'"):
        arpc.propagate(ContextVar("request_id"))


async def test_without_any_nothing_is_added(pair, declared):
    declared.clear()
    carrier = variables.ContextPropagation(UNRESTRICTED)
    assert carrier.request_sent(pair[1].info, see, []) is None
    assert await pair[0].rpc_sync("worker1", see) == ("none", "unset")
