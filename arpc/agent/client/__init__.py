"""The calling side of a worker: sends a request for each call, and turns the answer into the result."""
