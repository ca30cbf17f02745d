"""The other workers of the group: how each is reached, and what is under way to it."""
