"""Strategies: streams of messages, and the pieces they come in."""

from __future__ import annotations

from itertools import cycle
from typing import Final

from hypothesis import strategies as st

from arpc.wire.frames import HEADER_BYTES, ONE_OFF
from arpc.wire.handshake import MAX_HANDSHAKE_BYTES
from tests.wire.connections import CALL_TYPES, Spoken, chunks_of, noise, schema_frame, table_of

SMALL_BUFFER: Final = HEADER_BYTES + MAX_HANDSHAKE_BYTES
"""The smallest receive buffer there can be, so that what is large for it need not be large."""

pickles = st.one_of(
    st.integers(0, 40),
    st.integers(SMALL_BUFFER - HEADER_BYTES - 3, SMALL_BUFFER - HEADER_BYTES + 3),
    st.integers(0, 3 * SMALL_BUFFER),
).map(noise)
spoken = st.builds(
    Spoken,
    st.sampled_from(CALL_TYPES),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=20),
    pickles,
    st.one_of(st.just(()), st.lists(st.integers(1, 2 * SMALL_BUFFER).map(noise), max_size=3).map(tuple)),
    st.one_of(st.none(), st.integers(0, 2 * SMALL_BUFFER).map(noise)),
)
sizes = st.one_of(st.integers(1, 9), st.integers(1, HEADER_BYTES + 1), st.integers(1, 2 * SMALL_BUFFER))
pieces = st.lists(sizes, min_size=1, max_size=30).map(cycle)
"""The sizes of the pieces that a stream is cut into."""


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Spoken]]:
    """A stream of messages whose large tensors come in chunks, in turns; and the messages in their order of arrival.

    Layouts of tensors are announced, or are part of their messages.
    """
    messages = draw(st.lists(spoken, max_size=6))
    chunk_bytes = draw(st.integers(500, 3 * SMALL_BUFFER))
    stream: list[bytes] = []
    arrived: list[Spoken] = []
    bulk: list[tuple[Spoken, list[bytes]]] = []
    numbers = iter(range(len(messages)))
    schemas: dict[int, int] = {}
    while messages or bulk:
        if messages and (not bulk or draw(st.booleans())):
            message = messages.pop(0)
            if message.inline is not None and len(message.inline) not in schemas and draw(st.booleans()):
                schemas[len(message.inline)] = number = len(schemas) + 1
                stream.append(schema_frame(number, table_of(len(message.inline))))
            stream.append(message.frame(schemas.get(len(message.inline or b""), ONE_OFF)))
            if message.buffers:
                bulk.append((message, chunks_of(next(numbers), message.buffers, chunk_bytes)))
            else:
                arrived.append(message)
        else:
            message, chunks = turn = bulk[draw(st.integers(0, len(bulk) - 1))]
            stream.append(chunks.pop(0))
            if not chunks:
                bulk.remove(turn)
                arrived.append(message)
    return b"".join(stream), arrived
