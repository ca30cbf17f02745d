"""Tensors that are not memory with strides: sparse, meta, quantized, nested."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.wire.exchange import BUFFERS, both_ways, sent_bytes, travel_alone

# what torch says of features it still works on is not what is tested here
quietly = pytest.mark.filterwarnings("ignore::UserWarning")


def complex_tensor(dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.complex(torch.arange(6.0), torch.arange(6.0) + 10).to(dtype)


def sparse_tensors() -> dict[str, Tensor]:
    dense = torch.zeros(4, 6, dtype=torch.float64)
    dense[0, 1], dense[2, 3], dense[3, 5], dense[3, 0] = 1, 2, 3, 4
    return {
        "coo": dense.to_sparse_coo(),
        "coo, not coalesced": torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 0]], [1.0, 2.0, 3.0], (4, 6)),
        "coo, hybrid": torch.sparse_coo_tensor([[0, 2]], torch.arange(10.0).view(2, 5), (4, 5)),
        "coo, empty": torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (4, 6)),
        "coo, conjugate values": torch.sparse_coo_tensor([[0, 2]], complex_tensor()[:2].conj(), (4,)),
        "coo, requires grad": dense.to_sparse_coo().requires_grad_(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 3)),
        "bsc": dense.to_sparse_bsc((2, 3)),
        "csr, batched": torch.stack([dense, dense]).to_sparse_csr(),
        "csr, 32 bit indices": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), torch.ones(1), (2, 2)
        ),
    }


@quietly
@both_ways
@pytest.mark.parametrize(
    "name",
    [
        "coo",
        "coo, not coalesced",
        "coo, hybrid",
        "coo, empty",
        "coo, conjugate values",
        "coo, requires grad",
        "csr",
        "csc",
        "bsr",
        "bsc",
        "csr, batched",
        "csr, 32 bit indices",
    ],
)
def test_sparse_tensors_arrive(name, limit):
    sent = sparse_tensors()[name]

    arrived = travel_alone(sent, limit)

    assert arrived.layout is sent.layout
    assert arrived.dtype is sent.dtype
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense())
    if sent.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == sent.is_coalesced()
        assert arrived._indices().tolist() == sent._indices().tolist()
    elif sent.layout in {torch.sparse_csr, torch.sparse_bsr}:
        assert arrived.crow_indices().dtype is sent.crow_indices().dtype


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_meta_tensors_have_no_bytes(shape):
    sent = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    arrived = travel_alone(sent, BUFFERS)

    assert arrived.is_meta
    assert (arrived.shape, arrived.dtype, arrived.requires_grad) == (sent.shape, torch.bfloat16, True)
    assert travel_alone(torch.empty(2, 3, device="meta").t()).stride() == (1, 3)
    assert sent_bytes([sent]) == 0


@quietly
@both_ways
def test_quantized_tensors_arrive(limit):
    sent = torch.quantize_per_tensor(torch.arange(6.0).view(2, 3), 0.5, 1, torch.qint8)

    arrived = travel_alone(sent, limit)

    assert arrived.is_quantized
    assert (arrived.q_scale(), arrived.q_zero_point()) == (0.5, 1)
    assert torch.equal(arrived.dequantize(), sent.dequantize())


@quietly
@both_ways
def test_nested_tensors_arrive(limit):
    sent = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)])

    arrived = travel_alone(sent, limit)

    assert arrived.is_nested
    assert [part.tolist() for part in arrived.unbind()] == [[0.0, 1.0], [0.0, 1.0, 2.0]]


@both_ways
def test_indices_that_are_repeated_arrive(limit):
    indices = torch.tensor([[1]]).expand(2, 3)
    sent = torch.sparse_coo_tensor(indices, torch.ones(1).expand(3), (4, 4), check_invariants=True)

    arrived = travel_alone(sent, limit)

    assert arrived._indices().tolist() == indices.tolist()
    assert torch.equal(arrived.to_dense(), sent.to_dense())
