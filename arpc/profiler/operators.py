"""Records the torch operators that a piece of work, such as a handler, runs on its worker.

Torch's profilers record threads or processes. A handler is neither: its steps are interleaved with those of other
handlers on the loop, and some run in threads. So the profiler of a thread (the one torch calls legacy) is switched on
for each step of a handler and off after it, and its records are joined. That takes a few microseconds a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import msgspec
from torch._C._autograd import _disable_profiler_legacy as _disable
from torch._C._autograd import _enable_profiler_legacy as _enable
from torch._C._autograd import _profiler_enabled as _is_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler_util import _filter_name, _rewrite_name

from arpc.agent.hooks.observers import Handling

__all__ = [
    "Operator",
    "OperatorRecorder",
    "RecorderConfig",
    "is_recording_thread",
    "pause_on_thread",
    "recorder_of",
    "resume_on_thread",
]

_now = time.perf_counter_ns


class RecorderConfig(NamedTuple):
    """The data to record of each operator, besides its name and time."""

    record_shapes: bool = False
    profile_memory: bool = False
    with_flops: bool = False


class Operator(msgspec.Struct, array_like=True):
    """One operator, or a labelled range, on the worker that ran it, in the form in which it is sent."""

    name: str
    start_ns: int
    """By ``time.perf_counter_ns`` of that worker, or of the receiver, once it has been received."""
    end_ns: int
    thread: int
    node_id: int
    handle: int = 0
    shapes: list[Any] = []
    memory_bytes: int = 0
    flops: int = 0
    sequence_nr: int = -1
    fwd_thread: int = 0
    scope: int = 0
    is_async: bool = False
    """Whether it covers an await, so that other code ran on its thread meanwhile."""

    def moved(self, by_ns: int, prefix: str = "") -> Operator:
        """Return this operator on another clock, with a prefix before its name."""
        return msgspec.structs.replace(
            self, name=prefix + self.name, start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns
        )


class _Piece(NamedTuple):
    """The records of one step."""

    began_ns: int
    ended_ns: int
    records: list[list[Any]]


class _OnThread(threading.local):
    """The recorder whose step runs on this thread, and since when it records; 0 while it does not."""

    recorder: OperatorRecorder | None = None
    began_ns: int = 0


_on_thread = _OnThread()


class OperatorRecorder:
    """Records the operators in the steps of one piece of work; implements `torchstate.Steps`.

    Each subscriber has a list of its own. Steps of another recorder in the middle of a step of this one belong to the
    other. A step on a thread that torch profiles already is not recorded here: that profile has it.
    """

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._config = RecorderConfig()
        self._torch_config: ProfilerConfig | None = None
        self._pieces: list[_Piece] = []
        self._listeners: list[list[Operator]] = []
        self.is_closed = False

    def subscribe(self, config: RecorderConfig) -> list[Operator]:
        """Return a list that each `collect` extends. All subscribers get the data that any of them asks for."""
        self._config = RecorderConfig(*(a or b for a, b in zip(self._config, config, strict=True)))
        self._torch_config = _torch_config(self._config)
        operators: list[Operator] = []
        self._listeners.append(operators)
        return operators

    def enter(self) -> tuple[OperatorRecorder | None] | None:
        outer = _on_thread.recorder
        if self.is_closed or outer is self or self._torch_config is None:
            return None
        if outer is not None and _on_thread.began_ns:
            outer.pause()
        elif _is_enabled():
            return None
        _on_thread.recorder = self
        self.resume()
        return (outer,)

    def leave(self, entered: tuple[OperatorRecorder | None] | None) -> None:
        if entered is None or _on_thread.recorder is not self:
            return
        self.pause()
        (outer,) = entered
        _on_thread.recorder = None if outer is None or outer.is_closed else outer
        resume_on_thread()

    def resume(self) -> None:
        """Start to record on this thread."""
        assert self._torch_config is not None
        _enable(self._torch_config)
        _on_thread.began_ns = _now()

    def pause(self) -> None:
        """Stop recording on this thread, until `resume`."""
        if _on_thread.began_ns:
            ended_ns = _now()
            records = _disable()
            self._pieces.append(_Piece(_on_thread.began_ns, ended_ns, records))
            _on_thread.began_ns = 0

    def close(self) -> None:
        """Stop recording. Operators recorded so far are added to the lists."""
        self.is_closed = True
        self.collect()

    def collect(self) -> None:
        """Add the operators recorded since the last call to the lists, in the order of their beginnings."""
        # threads may add pieces meanwhile
        count = len(self._pieces)
        pieces = self._pieces[:count]
        del self._pieces[:count]
        operators = sorted(
            _operators(pieces, self._node_id), key=lambda operator: (operator.start_ns, -operator.end_ns)
        )
        for listener in self._listeners:
            listener.extend(operators)


def recorder_of(handling: Handling, node_id: int) -> OperatorRecorder:
    """Return the recorder of a handler, which all observers of the handler share."""
    recorder = handling.shared.get(OperatorRecorder)
    if recorder is None:
        recorder = handling.shared[OperatorRecorder] = OperatorRecorder(node_id)
    return cast("OperatorRecorder", recorder)


def is_recording_thread() -> bool:
    """Return whether a step on this thread is being recorded."""
    return _on_thread.recorder is not None


def pause_on_thread() -> None:
    """Pause recording, because code in a recorded step profiles this thread itself: two profilers cannot."""
    if (recorder := _on_thread.recorder) is not None:
        recorder.pause()


def resume_on_thread() -> None:
    """Resume recording after `pause_on_thread`."""
    recorder = _on_thread.recorder
    if recorder is not None and not _on_thread.began_ns and not recorder.is_closed and not _is_enabled():
        recorder.resume()


def _torch_config(config: RecorderConfig) -> ProfilerConfig:
    shapes = config.record_shapes or config.with_flops
    experimental = _ExperimentalConfig()
    return ProfilerConfig(
        ProfilerState.CPU, shapes, config.profile_memory, False, config.with_flops, False, experimental
    )


class _Open(NamedTuple):
    """A range that has begun and not ended."""

    record: Any
    start_ns: int


def _operators(pieces: Iterable[_Piece], node_id: int) -> Iterator[Operator]:
    """Yield the ranges of all steps. One that began in a step may end in a later one: a label may cover an await."""
    opened: dict[int, _Open] = {}
    allocated: dict[int, int] = {}
    last_ns = 0
    for piece in pieces:
        last_ns = max(last_ns, piece.ended_ns)
        start = next(record for records in piece.records for record in records if record.name() == "__start_profile")
        for records in piece.records:
            previous = ""
            hidden: set[int] = set()
            for record in records:
                kind, name, handle = record.kind(), record.name(), record.handle()
                if kind == "push":
                    # torch's own wrappers record an operator a second time, directly after the first
                    if name == previous or _filter_name(name):  # type: ignore[no-untyped-call]
                        hidden.add(handle)
                        continue
                    previous = name
                    opened[handle] = _Open(record, _time_of(start, record, piece))
                    allocated[handle] = 0
                    continue
                if kind == "memory_alloc":
                    for open_handle in allocated:
                        allocated[open_handle] += record.cpu_memory_usage()
                elif kind == "pop" and handle not in hidden and (begun := opened.pop(handle, None)) is not None:
                    yield _operator(begun, _time_of(start, record, piece), node_id, allocated.pop(handle))
                if kind != "mark":
                    previous = ""
    for handle, begun in opened.items():
        yield _operator(begun, max(last_ns, begun.start_ns), node_id, allocated[handle])


def _time_of(start: Any, record: Any, piece: _Piece) -> int:
    # keep it within the step: the two clocks were not read at the same moment
    return min(piece.began_ns + int(start.cpu_elapsed_us(record) * 1000), piece.ended_ns)


def _operator(begun: _Open, end_ns: int, node_id: int, memory_bytes: int) -> Operator:
    record = begun.record
    return Operator(
        name=_rewrite_name(name=record.name(), with_wildcard=True),  # type: ignore[no-untyped-call]
        start_ns=begun.start_ns,
        end_ns=max(begun.start_ns, end_ns),
        thread=record.thread_id(),
        node_id=node_id,
        handle=record.handle(),
        shapes=record.shapes(),
        memory_bytes=memory_bytes,
        flops=record.flops(),
        sequence_nr=record.sequence_nr(),
        fwd_thread=record.fwd_thread_id(),
        scope=record.scope(),
    )
