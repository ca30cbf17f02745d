"""Runs of torch's engine in a pass: completely or up to a border, on the loop or in a thread."""
