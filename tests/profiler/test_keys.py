"""The keys of profiled calls."""

from __future__ import annotations

import asyncio

import pytest
import torch

import arpc
from arpc.errors import ProfilerError
from arpc.profiler import RemoteProfilerManager
from arpc.profiler.keys import function_name


@pytest.fixture
def manager() -> RemoteProfilerManager:
    return RemoteProfilerManager(worker_id=3)


def test_the_current_key_is_set_once(manager: RemoteProfilerManager) -> None:
    assert not manager.is_current_key_set()
    with pytest.raises(ProfilerError, match="no current"):
        manager.current_key()
    manager.set_current_key("one")
    assert manager.is_current_key_set()
    assert manager.current_key() == "one"
    with pytest.raises(ProfilerError, match="'one' already"):
        manager.set_current_key("two")
    manager.unset_current_key()
    manager.unset_current_key()
    manager.set_current_key("two")
    assert manager.current_key() == "two"
    manager.unset_current_key()


def test_ids_are_unique_over_the_group(manager: RemoteProfilerManager) -> None:
    first = manager.next_id()
    assert first == 3 << 48
    assert manager.next_id() == first + 1
    assert RemoteProfilerManager(worker_id=4).next_id() != first


def test_keys_of_calls_under_way(manager: RemoteProfilerManager) -> None:
    manager.save_key(7, "first")
    manager.save_key(7, "second")
    assert manager.key_of(7) == "first"
    manager.erase_key(7)
    for use in (manager.key_of, manager.erase_key):
        with pytest.raises(ProfilerError, match="no profiled call 7"):
            use(7)
    assert len(manager) == 0


async def test_tasks_do_not_see_each_others_key(manager: RemoteProfilerManager) -> None:
    async def use(key: str) -> str:
        manager.set_current_key(key)
        await asyncio.sleep(0)
        child = asyncio.create_task(asyncio.sleep(0, manager.current_key()))
        return f"{manager.current_key()} {await child} {await arpc.to_thread(manager.current_key)}"

    found = await asyncio.gather(*(asyncio.create_task(use(f"key{number}")) for number in range(5)))
    assert found == [f"key{number} key{number} key{number}" for number in range(5)]
    assert not manager.is_current_key_set()


def test_names_of_functions() -> None:
    assert function_name(torch.add) == "aten::add"
    assert function_name(test_names_of_functions) == "test_names_of_functions"
    assert function_name(torch.nn.Linear(1, 1)) == "Linear"
