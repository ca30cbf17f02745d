"""`arpc.profiler.server_profile` under torch's name, as the profile that torch makes of it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import FunctionEvent

from arpc.compat import current
from arpc.compat.drop_in import DropIn
from arpc.profiler import server_profile

__all__: list[str] = []


class _server_process_global_profile(profile):  # noqa: N801 - torch's name
    """Records what this worker runs for others, whoever they are. Use it as ``torch.autograd.profiler.profile``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.process_global_function_events: list[list[FunctionEvent]] = []
        """What each request ran."""
        self._server: server_profile | None = None

    def __enter__(self) -> Self | None:
        if not self.enabled:
            return None
        if self._server is not None:
            raise RuntimeError("autograd profiler traces are not reentrant")
        drop_in: DropIn = current.get_agent().drop_in
        self._server = server_profile(record_shapes=self.record_shapes, profile_memory=self.profile_memory)
        drop_in.thread.caller_context().run(self._server.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server = self._server
        if server is not None:
            server.stop()
            self.function_events = server.function_events
            self.process_global_function_events = server.by_request

    def __getstate__(self) -> dict[str, Any]:
        """What it has found may go elsewhere; what looks for more stays here."""
        return {**self.__dict__, "_server": None}
