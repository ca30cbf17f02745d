"""The order of chunks: messages take turns, and small ones do not wait for all the large ones."""

from __future__ import annotations

import weakref

import numpy as np

from arpc.transport.bulk import SMALL_MESSAGE_BYTES, BulkQueue, BulkSend
from arpc.wire.frames import CHUNK_BYTES


def message(number: int, size_bytes: int) -> BulkSend:
    made = BulkSend([memoryview(bytearray(size_bytes))])
    made.id = number
    return made


def drain(queue: BulkQueue) -> list[int]:
    sent = []
    while queue:
        number, chunk = queue.next_chunk()
        assert 0 < chunk.nbytes <= CHUNK_BYTES
        sent.append(number)
    return sent


def test_large_messages_take_turns():
    queue = BulkQueue()
    for number in range(3):
        queue.append(message(number, 2 * CHUNK_BYTES))
    assert drain(queue) == [0, 1, 2, 0, 1, 2]


def test_a_small_message_waits_for_one_chunk_of_all_large_ones_at_most():
    queue = BulkQueue()
    for number in range(100):
        queue.append(message(number, 2 * CHUNK_BYTES))
    queue.next_chunk()
    queue.append(message(1000, SMALL_MESSAGE_BYTES))
    assert 1000 in [queue.next_chunk()[0] for _ in range(2)]


def test_many_small_messages_leave_every_second_turn_to_large_ones():
    queue = BulkQueue()
    queue.append(message(0, 3 * CHUNK_BYTES))
    for number in range(1, 6):
        queue.append(message(number, 100))
    assert drain(queue) == [1, 0, 2, 0, 3, 0, 4, 5]
    assert queue.small_bytes == 0


def test_what_is_removed_is_not_sent():
    queue = BulkQueue()
    large, small = message(0, CHUNK_BYTES), message(1, 100)
    queue.append(large)
    queue.append(small)
    assert queue.small_bytes == 100
    assert queue.remove(small)
    assert not queue.remove(small)
    assert queue.small_bytes == 0
    assert queue.remove(large)
    assert not queue


def test_a_message_that_was_sent_keeps_no_memory():
    """The record of a reply outlives it, until the next large one."""
    owners = [np.zeros(size, np.uint8) for size in (CHUNK_BYTES + 1, 10)]
    memory = [weakref.ref(owner) for owner in owners]
    bulk = BulkSend([owner.data for owner in owners])
    del owners
    queue = BulkQueue()
    queue.append(bulk)
    while queue:
        assert not bulk.is_sent
        queue.next_chunk()
    assert bulk.is_sent
    assert not any(reference() is not None for reference in memory)
