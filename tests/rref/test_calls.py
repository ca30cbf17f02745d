"""How methods of held values are run, and that nothing of a value stays behind for that."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

from arpc.agent.server.functions import Mode
from arpc.rref.calls import runnable


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
    function, arguments = runnable(method, ())
    assert function.call is method or (function.call, *arguments) == (method.__func__, numbers)
    gone = weakref.ref(numbers)
    del numbers, method, function, arguments
    gc.collect()
    assert gone() is None


def test_it_is_remembered_for_all_values_of_a_class():
    first, second = Numbers(), Numbers()
    total, of_first = runnable(first.total, (1,))
    assert runnable(second.total, (2,)) == (total, (second, 2))
    assert of_first == (first, 1)
    assert total.mode is Mode.COROUTINE
    append, of_first = runnable(first.append, (1,))
    assert runnable(second.append, (2,))[0].results is append.results
    assert of_first == (1,)
    assert append.mode is Mode.THREAD
