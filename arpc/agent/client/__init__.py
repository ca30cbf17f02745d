"""The calling side of a worker: from a call to a request on its way, and from its answer to the result."""
