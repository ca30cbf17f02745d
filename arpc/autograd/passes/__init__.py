"""A backward pass on one worker: its plan, the protocol between workers, and what carries it out."""
