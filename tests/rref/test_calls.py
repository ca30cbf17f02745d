"""How methods of held values are run, and that nothing of a value stays behind for that."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

from arpc.agent.server.functions import Mode
from arpc.rref.calls import bound, template_of


class Numbers(list[int]):
    """A list that can be referred to weakly, and be called."""

    def __call__(self) -> int:
        return len(self)

    async def total(self) -> int:
        return sum(self)


def ways(numbers: Numbers) -> dict[str, Any]:
    return {
        "builtin": numbers.append,
        "instance": numbers,
        "partial": functools.partial(numbers.append, 1),
        "slot": numbers.__len__,
        "method": numbers.total,
    }


@pytest.mark.parametrize("way", ["builtin", "instance", "partial", "slot", "method"])
def test_what_is_remembered_keeps_no_value(way):
    numbers = Numbers()
    method = ways(numbers)[way]
    assert bound(method, template_of(method)).call is method
    gone = weakref.ref(numbers)
    del numbers, method
    gc.collect()
    assert gone() is None


def test_it_is_remembered_for_all_values_of_a_class():
    first, second = Numbers(), Numbers()
    assert template_of(first.append) is template_of(second.append)
    assert template_of(first.total) is template_of(second.total)
    assert template_of(first.append).mode is Mode.THREAD
    assert template_of(first.total).mode is Mode.COROUTINE
