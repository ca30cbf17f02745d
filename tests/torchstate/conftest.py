"""Every test here begins and ends on a pristine thread, and runs its coroutines on each kind of event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Protocol, cast

import pytest
import torch

from arpc.torchstate import (
    Rooted,
    capture,
    install_task_factory,
    is_pristine,
    pristine_thread,
    rooted_task_factory,
)

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


def _run_rooted(main: Callable[[], Coroutine[Any, Any, Any]], *, isolating: bool = True) -> Any:
    """As `arpc.run` does it."""
    if not isolating:
        return _run(asyncio.new_event_loop, main, isolating=False)
    rooted = Rooted(main(), capture())
    with pristine_thread(), asyncio.Runner(debug=True, loop_factory=asyncio.new_event_loop) as runner:
        runner.get_loop().set_task_factory(rooted_task_factory)
        return runner.run(rooted)


RUNS: Final = {name: functools.partial(_run, factory) for name, factory in LOOP_FACTORIES.items()}


@pytest.fixture(params=[*RUNS.values(), _run_rooted], ids=[*RUNS, "rooted"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs ``main()`` on a new loop, with an isolating task factory installed unless told otherwise."""
    return cast("Run", request.param)


@pytest.fixture(autouse=True)
def pristine_before_and_after() -> Iterator[None]:
    assert is_pristine()
    yield
    assert is_pristine()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert torch.ones(1).device == torch.device("cpu")
