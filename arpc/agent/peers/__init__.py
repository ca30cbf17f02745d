"""The other workers of the group: how each is reached, and the calls in flight to it."""
