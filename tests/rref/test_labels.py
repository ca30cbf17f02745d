"""What a creation says of itself before it is unpickled."""

from __future__ import annotations

import pytest
import torch

from arpc.errors import ProtocolError
from arpc.rref.labels import LABEL_BYTES, Label, pack_label, take_label
from arpc.wire.frames import ALIGNMENT
from arpc.wire.handful import ARGUMENTS, handful_payload, unpack_arguments
from arpc.wire.messages import RRefCreate

LABEL = Label(1, 2, 3, (65535 << 48) + 4, 5, "")


def message(body: bytes, meta_size: int = 0, table_size: int = 0) -> RRefCreate:
    return RRefCreate(0, 1, 1, 0, meta_size, meta_size + table_size, 0, bytearray(body), ())


@pytest.mark.parametrize("made", ["", "train.py, line 5", "straße"])
def test_a_label_comes_back_and_leaves_the_payload(made):
    taken = message(pack_label(*LABEL[:5], made) + b"payload")
    assert take_label(taken) == LABEL._replace(made=made)
    assert taken.body == b"payload"
    assert taken.label_bytes == 0


@pytest.mark.parametrize("made_bytes", range(17))
def test_a_tensor_that_follows_at_once_is_aligned(made_bytes):
    sent = torch.arange(500.0)  # longer than the label: a bytearray that loses little of itself stays where it is
    payload = handful_payload(sent.nbytes, ARGUMENTS, [sent])
    assert payload is not None
    taken = message(pack_label(*LABEL[:5], "m" * made_bytes) + payload)
    take_label(taken)
    (tensor,) = unpack_arguments(taken.body)
    assert torch.equal(tensor, sent)
    assert tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("made", ["", "train.py, line 5"])
def test_behind_a_table_it_is_passed_over(made):
    packed = pack_label(*LABEL[:5], made)
    taken = message(b"metatable" + packed + b"payload", meta_size=4, table_size=5)
    assert take_label(taken) == LABEL._replace(made=made)
    assert taken.table == b"table"
    assert taken.body[taken.table_end + taken.label_bytes :] == b"payload"


@pytest.mark.parametrize("body", [b"", bytes(LABEL_BYTES - 1), pack_label(*LABEL[:5], "made")[:-1]])
def test_less_than_a_label_is_refused(body):
    with pytest.raises(ProtocolError):
        take_label(message(body))
