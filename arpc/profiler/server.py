"""`server_profile`: everything that a worker runs for its callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch.autograd.profiler_util import EventList, FunctionEvent

from arpc.agent.hooks.observers import Handling, Kind, Observer
from arpc.errors import ProfilerError
from arpc.private.torch import build_event_tree
from arpc.profiler.operators import Operator, OperatorRecorder, RecorderConfig, recorder_of
from arpc.profiler.service import ProfilerService, current
from arpc.profiler.sessions import as_function_event

__all__ = ["server_profile"]


class _Request(NamedTuple):
    recorder: OperatorRecorder
    operators: list[Operator]


class _ServerObserver(Observer):
    """Keeps the operators that each handler ran."""

    key = "server profile"  # it sends no headers

    def __init__(self, node_id: int, config: RecorderConfig) -> None:
        self._node_id = node_id
        self._config = config
        self._running: dict[Handling, _Request] = {}
        self.requests: list[list[Operator]] = []

    def handler_begins(self, handling: Handling) -> OperatorRecorder | None:
        if handling.kind is Kind.CONTROL:
            return None
        recorder = recorder_of(handling, self._node_id)
        self._running[handling] = _Request(recorder, recorder.subscribe(self._config))
        return recorder

    def handler_ends(self, handling: Handling) -> None:
        request = self._running.pop(handling, None)
        if request is not None:
            request.recorder.collect()
            self.requests.append(request.operators)


class server_profile:  # noqa: N801 - used like a function, as torch's own
    """``with arpc.profiler.server_profile() as prof:`` records what this worker runs for other workers.

    ::

        with arpc.profiler.server_profile() as prof:
            await asyncio.sleep(10)
        print(prof.key_averages().table(sort_by="cpu_time_total"))

    Only requests that begin and end within the block are recorded. Blocks may overlap. To profile another worker,
    create the object on it, with ``rref = arpc.remote("worker1", arpc.profiler.server_profile)``, and call its methods:
    ``await rref.rpc_sync().start()``, and ``stop()`` later.
    """

    def __init__(self, *, record_shapes: bool = False, profile_memory: bool = False) -> None:
        self._config = RecorderConfig(record_shapes, profile_memory)
        self._service: ProfilerService | None = None
        self._observer: _ServerObserver | None = None
        self._started_ns = 0
        self._events: EventList | None = None
        self.by_request: list[list[FunctionEvent]] = []
        """The events of each request, in the order in which the requests ended."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy on another worker, which has the recorded events and records nothing there."""
        return {**self.__dict__, "_service": None, "_observer": None}

    def start(self) -> None:
        """Start recording, as ``with`` does. May be called in any thread, and so through an RRef.

        Raises `ProfilerError` if this profile was started before.
        """
        if self._service is not None:
            raise ProfilerError("this profile has been used already: make another one for each block")
        service = self._service = current()
        observer = self._observer = _ServerObserver(service.remote.info.id, self._config)
        self._started_ns = time.perf_counter_ns()
        _on_loop(service, lambda: service.tracer.agent.observe(observer))

    def stop(self) -> None:
        """Stop recording. A second call has no effect. Raises `ProfilerError` if this profile was never started."""
        service, observer = self._service, self._observer
        if service is None or observer is None:
            raise ProfilerError("this profile has not begun")
        if self._events is not None:
            return
        _on_loop(service, lambda: service.tracer.agent.unobserve(observer))
        for operators in list(observer.requests):
            events = [as_function_event(operator, self._started_ns, is_legacy=True) for operator in operators]
            self.by_request.append(events)
        self._events = EventList(itertools.chain.from_iterable(self.by_request))  # type: ignore[no-untyped-call]
        build_event_tree(self._events)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def function_events(self) -> EventList:
        """All recorded events, as in torch's profiles. Raises `ProfilerError` before the end of the block."""
        if self._events is None:
            raise ProfilerError("the profile is not finished: look at it after its block")
        return self._events

    def key_averages(self, group_by_input_shape: bool = False) -> EventList:
        """Return total times, like ``torch.profiler.profile.key_averages``."""
        averages: EventList = self.function_events.key_averages(group_by_input_shape)  # type: ignore[no-untyped-call]
        return averages


def _on_loop(service: ProfilerService, function: Callable[[], None]) -> None:
    """Run a function on the worker's loop, where observers belong, also from the thread of a call through an RRef."""
    loop = service.tracer.agent.loop
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if is_here:
        function()
        return
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            done.set_exception(error)
        else:
            done.set_result(None)

    loop.call_soon_threadsafe(run)
    done.result()
