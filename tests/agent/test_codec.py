"""The content of messages: objects become bytes and tensors, and objects again; interceptors add their metadata."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from arpc.agent.codec import Codec
from arpc.agent.hooks.interceptor import Interceptor
from arpc.errors import ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.wire.frames import HEADER_BYTES, ONE_OFF
from arpc.wire.messages import Message, MessageType
from arpc.wire.metadata import encode_metadata
from arpc.wire.values.content import Content
from tests.wire.connections import feed, opened
from tests.wire.exchange import assert_same

INLINE_BYTES: Final = 8192
SENDER: Final = WorkerInfo("sender", 1)


def make_codec(*interceptors: Any) -> Codec:
    return Codec({}, interceptors, INLINE_BYTES)


def content_of(value: Any, codec: Codec, meta: bytes = b"") -> Content:
    """What is sent for a result."""
    pickle, slots = codec.pickler.dumps_result(value, main_by_value=False)
    return codec.pack(slots, pickle, meta) if slots else Content(pickle, meta)


def received(content: Content) -> Message:
    """A message with this content, as the peer receives it. It has no large tensors."""
    assert not content.buffers
    number = ONE_OFF if content.schema is not None else 0
    (message,) = feed(opened(), content.framed(MessageType.REPLY, 0, 7, 0, 0, number))
    return message


def arrived(message: Message) -> Any:
    codec = make_codec()
    return codec.content(message, codec.slots(message), SENDER)


# -- values


def test_none_takes_nothing():
    message = received(content_of(None, make_codec()))
    assert not message.body
    assert arrived(message) is None


@pytest.mark.parametrize(
    "value",
    [
        1,
        torch.ones(2),
        [torch.ones(2)],
        (torch.ones(2), torch.ones(3)),
        {"a": torch.ones(2)},
        torch.ones(2, 2).t()[1:],
        torch.ones(0),
    ],
)
def test_values_arrive(value):
    came = arrived(received(content_of(value, make_codec())))
    assert type(came) is type(value)
    torch.testing.assert_close(came, value)


def test_metadata_stands_between_tensors_and_pickle():
    sent = torch.arange(16.0)
    meta = encode_metadata({"feature": b"its bytes"})
    message = received(content_of([sent, "text"], make_codec(), meta))
    assert bytes(message.memory[sent.nbytes :]) == bytes(message.meta) + bytes(message.body)
    assert make_codec().metadata(message) == {"feature": b"its bytes"}
    tensor, text = arrived(message)
    assert_same(tensor, sent)
    assert text == "text"


def test_a_message_without_metadata_has_none():
    assert make_codec().metadata(received(content_of(1, make_codec()))) == {}


def test_metadata_that_is_none_is_refused():
    message = received(Content(b"", b"\xc1 is no msgpack"))
    with pytest.raises(ProtocolError, match="malformed metadata"):
        make_codec().metadata(message)


def test_the_size_of_content_counts_all_that_travels():
    small, large = torch.ones(16), torch.ones(INLINE_BYTES)
    content = content_of([small, large], make_codec(), b"meta")
    assert [buffer.nbytes for buffer in content.buffers] == [large.nbytes]
    assert content.size_bytes() == HEADER_BYTES + len(content.pickle) + len(b"meta") + small.nbytes + large.nbytes
    assert Content(b"pickle").size_bytes() == HEADER_BYTES + len(b"pickle")


# -- limits


def test_small_tensors_that_do_not_fit_into_a_body_follow_as_large_ones():
    codec = Codec({}, (), INLINE_BYTES, max_body_bytes=4096)
    pickle, slots = codec.pickler.dumps_result([torch.ones(16) for _ in range(100)], main_by_value=False)
    packed = codec.pack(slots, pickle)
    assert len(packed.buffers) == 100
    assert not packed.inline


def test_more_tensors_than_a_body_can_describe_are_refused():
    codec = Codec({}, (), INLINE_BYTES, max_body_bytes=4096)
    pickle, slots = codec.pickler.dumps_result([torch.ones(16) for _ in range(1000)], main_by_value=False)
    with pytest.raises(SerializationError, match=r"1000 tensors .* 4096: send them in parts"):
        codec.pack(slots, pickle)


# -- interceptors


class Marker(Interceptor):
    """Remembers what it is given, and answers with its name."""

    occasions = ("always",)

    def __init__(self, key: str, answer: bytes | None = None) -> None:
        self.key = key
        self.answer = answer
        self.seen: list[tuple[str, bytes, list[Any]]] = []

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        self.seen.append(("request", meta, slots))

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> bytes | None:
        self.seen.append(("reply sent", meta, slots))
        return self.answer

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        self.seen.append(("reply", meta, slots))


def test_each_interceptor_gets_its_own_metadata():
    one, other, silent = Marker("one", b"answer"), Marker("other"), Marker("silent", b"never asked")
    codec = make_codec(one, other, silent)
    meta = {"one": b"1", "other": b"2"}
    slots: list[Any] = []
    codec.request_received(SENDER, meta, slots)
    assert codec.reply_sent(SENDER, meta, slots) == {"one": b"answer"}
    codec.reply_received(SENDER, {"one": b"answer"}, slots)
    assert one.seen == [("request", b"1", slots), ("reply sent", b"1", slots), ("reply", b"answer", slots)]
    assert other.seen == [("request", b"2", slots), ("reply sent", b"2", slots)]
    assert silent.seen == []


def test_metadata_of_a_feature_that_is_not_here_is_refused():
    codec = make_codec(Marker("known"))
    for receive in (codec.request_received, codec.reply_sent, codec.reply_received):
        with pytest.raises(ProtocolError, match="unknown feature 'unheard of'"):
            receive(SENDER, {"unheard of": b""}, [])


class InThreads(Marker):
    """Answers in threads what it answers on the loop."""

    replies_in_threads = True
    reply_sent_in_thread = Marker.reply_sent


def test_threads_ask_the_one_interceptor_that_can_answer_there():
    here, elsewhere, silent = InThreads("a", b"A"), Marker("b", b"B"), InThreads("c")
    codec = Codec({}, (here, elsewhere, silent), INLINE_BYTES)
    assert codec.replies_in_thread(None)
    assert codec.replies_in_thread({"a": b"1"})
    assert not codec.replies_in_thread({"b": b"1"})
    assert not codec.replies_in_thread({"a": b"1", "c": b"1"})  # one of them may need the loop after all
    assert codec.reply_sent_in_thread(SENDER, {"a": b"1"}, []) == {"a": b"A"}
    assert codec.reply_sent_in_thread(SENDER, {"c": b"1"}, []) is None
