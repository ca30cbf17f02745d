"""Profiles that reach over calls.

Inside ``torch.profiler.profile()`` and its older siblings, calls are recorded with all that they ran elsewhere.
`profile` makes one trace over all workers that a block touches, and `server_profile` tells what a worker runs for
others.
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
