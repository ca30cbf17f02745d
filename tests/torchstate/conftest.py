"""Every test here begins and ends on a pristine thread, and runs its coroutines on each kind of event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import pytest
import torch

from arpc.torchstate import install_task_factory, is_pristine

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if uvloop else {})


class Run(Protocol):
    def __call__(self, main: Callable[[], Coroutine[Any, Any, Any]], *, isolating: bool = True) -> Any: ...


def _run(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    main: Callable[[], Coroutine[Any, Any, Any]],
    *,
    isolating: bool = True,
) -> Any:
    with asyncio.Runner(debug=True, loop_factory=loop_factory) as runner:
        if isolating:
            install_task_factory(runner.get_loop())
        return runner.run(main())


@pytest.fixture(params=LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs ``main()`` on a new loop, with the isolating task factory installed unless told otherwise."""
    return functools.partial(_run, request.param)


@pytest.fixture(autouse=True)
def pristine_thread() -> Iterator[None]:
    assert is_pristine()
    yield
    assert is_pristine()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert torch.ones(1).device == torch.device("cpu")
