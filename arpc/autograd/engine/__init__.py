"""Torch's engine, as passes use it: in one go or up to a border, on the loop or in a thread."""
