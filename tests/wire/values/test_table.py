from __future__ import annotations

import numpy as np
import torch

from arpc.wire.values.table import (
    DTYPE_CODES,
    DTYPES,
    NUMPY_DTYPES,
    Code,
    Entry,
    Kind,
    decode_table,
    encode_table,
)


def test_codes_of_dtypes_are_part_of_the_wire_format():
    assert {
        torch.float32: 0,
        torch.float64: 1,
        torch.float16: 2,
        torch.uint8: 3,
        torch.int8: 4,
        torch.int16: 5,
        torch.int32: 6,
        torch.int64: 7,
        torch.bool: 8,
        torch.complex64: 9,
        torch.complex128: 10,
        torch.uint16: 11,
        torch.uint32: 12,
        torch.uint64: 13,
        torch.bfloat16: 32,
        torch.complex32: 33,
        torch.float8_e4m3fn: 34,
        torch.float8_e5m2: 35,
        torch.float8_e4m3fnuz: 36,
        torch.float8_e5m2fnuz: 37,
        torch.float8_e8m0fnu: 38,
        torch.float4_e2m1fn_x2: 39,
    } == DTYPE_CODES


def test_every_dtype_of_torch_has_a_way():
    names = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}
    by_memory = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
    aliases = {"double", "float", "half", "int", "long", "short", "cdouble", "cfloat", "chalf"}
    # quantized ones go by torch.save, the rest are names without operators
    without_memory = {name for name in names if name.startswith(("q", "bit", "int", "uint"))} - by_memory
    experimental = {"bcomplex32"}  # of torch 2.15, which says so wherever one is made
    assert names - by_memory - aliases - without_memory - experimental == set()


def test_so_are_the_kinds_of_entries():
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("STRIDED", 1),
        ("SHARED", 2),
        ("META", 3),
        ("COO", 4),
        ("COMPRESSED", 5),
        ("SAVED", 6),
        ("PLACED", 7),
    ]


def test_a_code_fits_its_column():
    assert max(DTYPES) < Code.REQUIRES_GRAD
    assert max(DTYPES) | Code.REQUIRES_GRAD < Code.BYTES < Code.ENTRY < 256


def test_numpy_reads_items_of_the_same_size():
    for code, dtype in DTYPES.items():
        assert NUMPY_DTYPES[code].itemsize == dtype.itemsize
        assert NUMPY_DTYPES[code | Code.REQUIRES_GRAD] == NUMPY_DTYPES[code]
        if code < Code.FIRST_STAND_IN:
            assert torch.from_numpy(np.zeros(1, NUMPY_DTYPES[code])).dtype is dtype


def test_a_table_is_read_as_it_was_written():
    part = Entry(Kind.STRIDED, 7, 0, 0, (2,), (1,), span_bytes=16)
    entry = Entry(Kind.COMPRESSED, 0, 1, 0, (2, 2), layout="torch.sparse_csr", parts=(part, part))

    table = decode_table(encode_table((48, bytes([0, 129]), [16, 0], [torch.Size((2, 3)), ()], [entry])))

    assert table.inline_bytes == 48
    assert table.codes == bytes([0, 129])
    assert table.sources == [16, 0]
    assert table.shapes == [(2, 3), ()]
    assert table.entries == [entry]


def test_a_small_tensor_takes_few_bytes():
    shapes = [torch.Size((16,))] * 50
    table = encode_table((3200, bytes(50), [64 * index for index in range(50)], shapes, ()))

    assert len(table) <= 50 * 7
