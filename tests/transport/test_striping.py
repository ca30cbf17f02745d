"""Which turn of the loop writes chunks to lanes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from arpc.transport.bulk import BulkQueue, BulkSend
from arpc.transport.striping import Lanes
from arpc.wire.frames import CHUNK_BYTES
from arpc.wire.protocol import State


class Main:
    """A main connection, and the loop that both use."""

    def __init__(self) -> None:
        self.loop = self
        self.callbacks: list[Callable[[], None]] = []
        self.call_soon = self.callbacks.append
        self.protocol = SimpleNamespace(state=State.OPEN)
        self.bulk = BulkQueue()
        self.owner = None
        self.is_full = self.is_congested = False

    def notify_bulk_left(self) -> None:
        pass

    def look_for_room(self) -> None:
        pass

    def end_if_last(self) -> None:
        pass

    def run(self) -> None:
        due, self.callbacks[:] = [*self.callbacks], []
        for callback in due:
            callback()


def test_no_turn_of_the_loop_is_taken_while_the_main_connection_is_full():
    main: Any = Main()
    written: list[int] = []
    lane: Any = SimpleNamespace(
        is_congested=False, is_open=True, write_chunk=lambda _, chunk: written.append(chunk.nbytes)
    )
    lanes = Lanes(main)
    lanes.attach(lane)
    bulk = BulkSend([memoryview(bytearray(3 * CHUNK_BYTES))])
    bulk.id = 0
    assert lanes.take(bulk)
    main.run()
    assert len(written) == 1
    main.is_full = main.is_congested = True
    main.run()
    assert len(written) == 1
    assert not main.callbacks, "it would be called again and again, until the peer reads"
    main.is_full = main.is_congested = False
    lanes.pump()  # as `Connection.resume_writing` does
    while main.callbacks:
        main.run()
    assert written == [CHUNK_BYTES] * 3
