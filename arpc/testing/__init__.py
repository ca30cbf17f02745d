"""For tests, ours and yours: a whole group in one process, and a network that misbehaves on demand."""

from arpc.testing.cluster import Cluster, cluster
from arpc.testing.faulty import Fault, FaultyTransport

__all__ = ["Cluster", "Fault", "FaultyTransport", "cluster"]
