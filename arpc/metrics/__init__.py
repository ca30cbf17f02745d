"""The metrics of a worker, collected while they are read: rates, latencies, memory, and what it is waiting for."""
