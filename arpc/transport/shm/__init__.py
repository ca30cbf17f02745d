"""Shared memory between the processes of one host: sending a large tensor costs one copy, or none.

Each worker has one *arena*, a sparse anonymous file in memory (`mapping`), cut into *blocks* (`blocks`). To send a
large tensor, the sender copies it into a block and *lends* the block: the message carries its offset, and the receiver,
which has mapped the whole arena once, builds its tensor there (`borrowing`). When the memory of that tensor is freed,
the receiver gives the block back, and its pages, still warm, serve the next message. The sender records all loans
(`loans`): it reuses a block only when neither this worker nor any peer holds it any more.

`Arena` is a worker's own memory, `Channel` the protocol about it between the two ends of a connection.
"""

from arpc.transport.shm.arena import Arena, open_arena
from arpc.transport.shm.channel import FEATURE, Channel
from arpc.transport.shm.tensors import empty_shared, shared

__all__ = ["FEATURE", "Arena", "Channel", "empty_shared", "open_arena", "shared"]
