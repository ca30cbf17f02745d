from __future__ import annotations

import numpy as np
import pytest
import torch

from arpc.bench.payloads import array_arguments, bulk_array, bulk_tensor, same_content, tensor_arguments


def test_arguments_go_by_name() -> None:
    assert array_arguments("none") == ()
    (floats,) = array_arguments("floats16")
    assert isinstance(floats, np.ndarray)
    assert floats.shape == (16,)
    (many,) = array_arguments("dict50")
    assert isinstance(many, dict)
    assert len(many) == 50
    (some,) = array_arguments("list7")
    assert isinstance(some, list)
    assert len(some) == 7
    with pytest.raises(ValueError, match="floats17"):
        array_arguments("floats17")


@pytest.mark.parametrize("payload", ["floats16", "dict50", "list10"])
def test_tensors_have_what_the_arrays_have(payload: str) -> None:
    (arrays,), (tensors,) = array_arguments(payload), tensor_arguments(payload)
    assert same_content(arrays, tensors)
    assert isinstance(tensors, torch.Tensor | dict | list)


def test_wrong_echoes_are_told() -> None:
    (tensors,) = tensor_arguments("list3")
    assert isinstance(tensors, list)
    assert not same_content(tensors, tensors[:2])
    assert not same_content(tensors, [*tensors[:2], torch.zeros(16) - 1])
    assert not same_content({"a": tensors[0]}, {"b": tensors[0]})
    assert not same_content(None, tensors[0])
    assert same_content(None, None)


def test_the_large_array_is_the_same_as_long_as_its_size_is() -> None:
    first = bulk_array(4096)
    assert bulk_array(4096) is first
    assert bulk_tensor(4096).data_ptr() == first.ctypes.data
    assert bulk_array(8192).nbytes == 8192
