"""Tools for tests: a whole group in one process, and a network that misbehaves on demand."""

from arpc.testing.faulty import Fault, FaultyTransport
from arpc.testing.in_process_cluster import Cluster, cluster

__all__ = ["Cluster", "Fault", "FaultyTransport", "cluster"]
