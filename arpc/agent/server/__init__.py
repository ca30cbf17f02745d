"""The answering side of a worker: from a request to a handler, and from its outcome to one reply."""
