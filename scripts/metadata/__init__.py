"""Feeds arpc false descriptions of tensors: ``python -m scripts.metadata``, a target of ``make fuzz``.

Every input begins as a message of a real worker, of every kind there is, and then a few of its fields are changed:
sizes, strides, offsets, dtypes, flags, sources, lengths. Tensors that arpc builds from it are used, and must lie in the
memory of the message. This runs in a child process: one that is aborted, hangs or takes too much memory is a finding,
kept with the input that caused it, and the run goes on.
"""
