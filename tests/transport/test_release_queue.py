"""Items that are released in any thread, and taken on the loop."""

from __future__ import annotations

import asyncio
import threading

from arpc.testing.endpoints import turns_until
from arpc.transport.release_queue import Lease, ReleaseQueue


class Released:
    """A queue, and what was taken each time that it notified."""

    def __init__(self) -> None:
        self.taken: list[list[str]] = []
        self.queue: ReleaseQueue[str] = ReleaseQueue(
            asyncio.get_running_loop(), lambda: self.taken.append(self.queue.take())
        )


async def test_the_end_of_a_lease_releases_its_item():
    released = Released()
    lease = Lease(released.queue, "a")
    await asyncio.sleep(0)
    assert released.taken == []
    del lease
    await turns_until(lambda: released.taken)
    assert released.taken == [["a"]]
    assert released.queue.take() == []


async def test_what_ends_in_another_thread_is_taken_on_the_loop_together():
    released = Released()
    leases = [Lease(released.queue, name) for name in "abc"]
    thread = threading.Thread(target=leases.clear)
    thread.start()
    thread.join()
    await turns_until(lambda: released.taken)
    assert sorted(name for names in released.taken for name in names) == ["a", "b", "c"]
    assert len(released.taken) == 1


async def test_what_is_released_before_the_next_turn_needs_no_notification_of_its_own():
    released = Released()
    released.queue.notify_soon()
    released.queue.notify_soon()
    released.queue.release("a")
    await turns_until(lambda: released.taken)
    assert released.taken == [["a"]]
    released.queue.release("b")
    await turns_until(lambda: len(released.taken) > 1)
    assert released.taken == [["a"], ["b"]]


async def test_a_closed_queue_drops_what_is_released():
    released = Released()
    released.queue.release("a")
    released.queue.close()
    released.queue.release("b")
    assert released.queue.take() == []


async def test_a_closed_queue_drops_what_another_thread_was_about_to_release():
    released = Released()
    released.queue.close()
    released.queue._released.append("a")  # the thread looked before the queue was closed
    assert released.queue.take() == []
    assert released.queue.take() == []


def test_a_loop_that_is_closed_is_no_error():
    loop = asyncio.new_event_loop()
    loop.close()
    queue: ReleaseQueue[str] = ReleaseQueue(loop, lambda: None)
    Lease(queue, "a")
    assert queue.take() == ["a"]
