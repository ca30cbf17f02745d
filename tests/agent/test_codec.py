from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from arpc.agent.codec import Codec
from arpc.ids import WorkerInfo
from arpc.wire.messages import Message, MessageType
from arpc.wire.pickling import JUST_A_TENSOR, ONE_TENSOR
from tests.wire.connections import feed, opened
from tests.wire.exchange import assert_same

INLINE_BYTES: Final = 8192
LABEL_BYTES: Final = 16
SENDER: Final = WorkerInfo("sender", 1)


def codec() -> Codec:
    return Codec({}, (), INLINE_BYTES)


def received(payload: bytes, slots: list[Any]) -> Message:
    """The message in which a codec sends them, as the peer receives it."""
    data, buffers = codec().frame(MessageType.REPLY, 0, 7, 0, 0, payload, slots)
    assert not buffers
    (message,) = feed(opened(), data)
    return message


def test_a_small_tensor_as_the_result_takes_no_pickle():
    sent = torch.arange(16.0)
    payload, slots = codec().pickler.dumps_result(sent, main_by_value=False)

    assert payload is JUST_A_TENSOR
    lone = codec().handful_of_result(payload, slots, None)

    assert lone is not None
    assert len(lone) == LABEL_BYTES + sent.nbytes
    assert_same(codec().content(received(lone, []), SENDER), sent)


def test_a_small_tensor_as_the_only_argument_takes_no_pickle():
    sent = torch.arange(16.0)
    payload, slots = codec().pickler.dumps_call(print, (sent,), None, main_by_value=False)

    assert payload is ONE_TENSOR
    lone = codec().handful_of_arguments(payload, slots, None, "peer")

    assert lone is not None
    assert len(lone) == LABEL_BYTES + sent.nbytes
    (arrived,) = codec().content(received(lone, []), SENDER)
    assert_same(arrived, sent)


def test_none_takes_nothing():
    message = received(*codec().pickler.dumps_result(None, main_by_value=False))

    assert not message.body
    assert codec().content(message, SENDER) is None


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
def test_everything_else_arrives_as_well(value):
    arrived = codec().content(received(*codec().pickler.dumps_result(value, main_by_value=False)), SENDER)

    assert type(arrived) is type(value)
    torch.testing.assert_close(arrived, value)
