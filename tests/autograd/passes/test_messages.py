"""Parcels on their way."""

from __future__ import annotations

import pytest
import torch

from arpc.autograd.passes.messages import NOTHING_LIVE, Parcel, PassHeading, pack_parcel, unpack_parcel
from arpc.errors import ProtocolError


@pytest.mark.parametrize(
    "parcel",
    [
        Parcel([(5, ["a", None]), (6, ["b"])], True, [7, 8], (3, 9)),
        Parcel([(1 << 63, ["a", None])], False, [7], leaves=True),
        Parcel([], True, [9]),
        NOTHING_LIVE,
    ],
)
@pytest.mark.parametrize("heading", [None, PassHeading(3, 4, True, -1, [1, 2])])
def test_parcels_survive_packing(parcel, heading):
    packed = pack_parcel(parcel, heading)
    unpacked, found = unpack_parcel(packed)
    assert unpacked == parcel
    assert found == heading
    assert packed == []  # nobody else has the gradients


@pytest.mark.parametrize(
    "packed", [[], [b""], [5], 7, [b"\x91\x01"], [b"\x92\xc3\x00"], [pack_parcel(NOTHING_LIVE)[0], "a"]], ids=repr
)
def test_a_malformed_parcel_is_refused(packed):
    with pytest.raises(ProtocolError):
        unpack_parcel(packed)


def test_small_gradients_are_laid_out_anew_and_large_ones_are_not():
    small, large = torch.ones(1).expand(8), torch.ones(1).expand(1 << 20)
    packed = pack_parcel(Parcel([(1, [small, large, None])]))
    assert packed[1].is_contiguous()
    assert packed[2] is large
    assert packed[3] is None
