"""What a creation says of itself: metadata that the owner reads before it unpickles anything."""

from __future__ import annotations

import pytest

from arpc.errors import ProtocolError
from arpc.rref.create_on_owner import pack_label, unpack_label

LABEL = (1, 2, 3, (65535 << 48) + 4, 5, "")


@pytest.mark.parametrize("made", ["", "train.py, line 5", "straße"])
def test_a_label_comes_back(made):
    assert unpack_label(pack_label(*LABEL[:5], made)) == (*LABEL[:5], made)


def test_a_stack_that_is_no_text_is_read_all_the_same():
    assert unpack_label(pack_label(*LABEL[:5], "") + b"\xff")[-1] == "\ufffd"


@pytest.mark.parametrize("data", [None, b"", pack_label(*LABEL)[:-1]])
def test_less_than_a_label_is_refused(data):
    with pytest.raises(ProtocolError):
        unpack_label(data)
