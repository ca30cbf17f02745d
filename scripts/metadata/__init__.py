"""Feeds arpc descriptions of tensors that lie: ``python -m scripts.metadata``, a target of ``make fuzz``.

Every input begins as what a worker really sends, of every kind there is, and then a few of its fields are changed:
sizes, strides, offsets, dtypes, flags, sources, lengths. Whatever is built of it is used, and must lie in the memory
that came. All of it runs in a child process: one that is aborted, hangs or takes too much memory is a finding, kept
with the input that caused it, and the run goes on.
"""
