"""What a worker counts while somebody looks, and what it tells of itself: rates, latencies, memory, what waits."""
