"""The serving side of a worker: runs a handler for each request, and sends its outcome as one reply."""
