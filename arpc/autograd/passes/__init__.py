"""A backward pass on one worker: its plan, the protocol between workers, and its execution."""
