"""Profiles that include remote calls.

Inside ``torch.profiler.profile()`` and torch's older profilers, calls are recorded with the operators that they ran on
other workers. `profile` makes one trace of all workers that the calls of a block reach, and `server_profile` records
what a worker runs for its callers.
"""

from arpc.profiler.clocks import Clock
from arpc.profiler.group_profile import profile, record_group
from arpc.profiler.keys import RemoteProfilerManager
from arpc.profiler.operators import Operator
from arpc.profiler.server import server_profile
from arpc.profiler.service import current, use_opentelemetry
from arpc.profiler.spans import Span, WorkerRecord
from arpc.profiler.trace import Arrow, Trace

__all__ = [
    "Arrow",
    "Clock",
    "Operator",
    "RemoteProfilerManager",
    "Span",
    "Trace",
    "WorkerRecord",
    "current",
    "profile",
    "record_group",
    "server_profile",
    "use_opentelemetry",
]
