"""Remote calls in profiles of torch: spans of calls, and the operators that they ran on other workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from arpc.agent.hooks.observers import Handling, Kind, Observer, Outgoing
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.profiler.keys import REMOTE_OP, RemoteProfilerManager, call_key
from arpc.profiler.operators import Operator, OperatorRecorder, RecorderConfig, recorder_of
from arpc.profiler.sessions import Session, current_session, open_sessions

__all__ = ["RemoteProfiler"]

logger = get_logger("arpc.profiler")

_now = time.perf_counter_ns
_SPANS: Final = frozenset((Kind.CALL, Kind.STREAM, Kind.REMOTE, Kind.FETCH))
_Reply = tuple[int, int, int, list[Operator]]
"""The id of the call, the beginning and end of its handler by the callee's clock, and the operators that it ran."""


class _Call(NamedTuple):
    """A profiled call in flight."""

    session: Session
    key: str
    profiling_id: int
    began_ns: int


class _Handler(NamedTuple):
    session: Session
    recorder: OperatorRecorder
    operators: list[Operator]


class RemoteProfiler(Observer):
    """Inactive until a profile of torch is on, or a request comes from a worker where one is on."""

    key = "profile"

    def __init__(self) -> None:
        self.info = WorkerInfo("", -1)
        self.manager = RemoteProfilerManager()
        self.includes_kineto = True
        """Whether a kineto profile records calls too. torch.distributed.rpc supports only the legacy profiler."""
        self._calls: dict[Outgoing, _Call] = {}
        self._by_id: dict[int, _Call] = {}
        self._handlers: dict[Handling, _Handler] = {}

    def identify(self, info: WorkerInfo) -> None:
        """Set the name and the id that this worker has in its group."""
        self.info = info
        self.manager = RemoteProfilerManager(info.id)

    @property
    def occasions(self) -> list[Session]:
        return open_sessions

    # -- the caller

    def request_begins(self, request: Outgoing) -> None:
        session = current_session.get()
        if session is None or not session.is_open or request.kind not in _SPANS:
            return
        if session.is_kineto and not self.includes_kineto:
            return
        if self.manager.is_current_key_set():
            key = self.manager.current_key()
            self.manager.unset_current_key()
        else:
            key = call_key(request, self.info.name)
        call = self._calls[request] = _Call(session, key, self.manager.next_id(), request.began_ns)
        if request.kind is not Kind.FETCH:  # a fetch runs no function on the owner
            self.manager.save_key(call.profiling_id, key)
            self._by_id[call.profiling_id] = call
            request.headers[self.key] = [call.profiling_id, *session.config]

    def reply_came(self, peer: WorkerInfo, header: Any) -> None:
        try:
            profiling_id, began_ns, ended_ns, operators = msgspec.convert(header, _Reply)
        except msgspec.ValidationError as error:
            logger.warning("worker %s sent a malformed profile: %s", peer.name, error)
            return
        call = self._by_id.get(profiling_id)
        if call is None or not call.session.is_open:
            return
        # The peer's clock is another one: assume that the way there and the way back took the same time
        now_ns = _now()
        by_ns = (call.began_ns + now_ns - began_ns - ended_ns) // 2
        prefix = self.manager.key_of(profiling_id) + REMOTE_OP
        for operator in operators:
            moved = operator.moved(by_ns, prefix)
            moved.start_ns = min(max(moved.start_ns, call.began_ns), now_ns)
            moved.end_ns = min(max(moved.end_ns, moved.start_ns), now_ns)
            call.session.operators.append(moved)

    def request_ends(self, request: Outgoing) -> None:
        call = self._calls.pop(request, None)
        if call is None:
            return
        if self._by_id.pop(call.profiling_id, None) is not None:
            self.manager.erase_key(call.profiling_id)
        if call.session.is_open:
            thread = threading.get_native_id()
            span = Operator(call.key, call.began_ns, request.ended_ns, thread, self.info.id, is_async=True)
            call.session.operators.append(span)

    # -- the callee

    def handler_begins(self, handling: Handling) -> OperatorRecorder | None:
        try:
            _, *flags = msgspec.convert(handling.headers[self.key], tuple[int, bool, bool, bool])
        except msgspec.ValidationError as error:
            logger.warning("worker %s wants a malformed profile: %s", handling.peer.name, error)
            return None
        config = RecorderConfig(*flags)
        recorder = recorder_of(handling, self.info.id)
        handler = self._handlers[handling] = _Handler(Session(config), recorder, recorder.subscribe(config))
        handler.session.open()  # calls that the handler makes are part of the profile
        return recorder

    def reply_leaves(self, handling: Handling) -> list[Any] | None:
        handler = self._handlers.get(handling)
        if handler is None:
            return None
        handler.recorder.collect()
        operators = [*handler.operators, *handler.session.operators]
        handler.operators.clear()
        handler.session.operators.clear()
        return [handling.headers[self.key][0], handling.began_ns, _now(), operators]

    def handler_ends(self, handling: Handling) -> None:
        handler = self._handlers.pop(handling, None)
        if handler is not None:
            handler.recorder.close()
            handler.session.close()

    # -- the end

    def close(self) -> None:
        """Close the sessions of handlers that have not ended."""
        closed: list[Callable[[], None]] = [handler.session.close for handler in self._handlers.values()]
        for close in closed:
            close()
        self._handlers.clear()

    def statistics(self) -> dict[str, int]:
        return {"profiled_calls": len(self._calls), "profiled_handlers": len(self._handlers)}
