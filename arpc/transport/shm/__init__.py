"""Shared memory between the processes of one host: large tensors cost one copy, or none.

Each worker has one *arena*, a sparse file in memory that has no name (`mapping`), cut into *blocks* (`blocks`). To send
a large tensor the sender copies it into a block and *lends* the block: the message says where it is, and the receiver,
which has mapped the whole arena once, builds its tensor there (`borrowing`). When the memory of that tensor is freed
the receiver gives the block back, and its pages, still warm, serve the next message. The sender keeps the books
(`loans`): a block is used again only when nobody who could see it has it any more.

`Arena` is a worker's own part, `Channel` what the two ends of a connection say to each other about it.
"""

from arpc.transport.shm.arena import Arena, open_arena
from arpc.transport.shm.channel import FEATURE, Channel
from arpc.transport.shm.tensors import empty_shared, shared

__all__ = ["FEATURE", "Arena", "Channel", "empty_shared", "open_arena", "shared"]
