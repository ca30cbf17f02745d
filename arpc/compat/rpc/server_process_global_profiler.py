"""`arpc.profiler.server_profile` under torch's name, with the interface of torch's profile."""

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
    """Records the functions that this worker runs for any caller. Use it as ``torch.autograd.profiler.profile``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.process_global_function_events: list[list[FunctionEvent]] = []
        """The events of each request."""
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
        """Return the state without the running profile: the results can be pickled, the profile cannot."""
        return {**self.__dict__, "_server": None}
