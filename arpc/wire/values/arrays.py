"""Arrays and numbers of numpy that a pickle may make: of numbers, texts and times, never of objects.

The bytes of an array of objects would be addresses. Sizes are computed in Python's integers, and must match the number
of bytes that came.
"""

from __future__ import annotations

import re
from math import prod
from pickle import PickleBuffer
from typing import Any, Final

import numpy as np

from arpc.errors import NotAllowedError
from arpc.wire.values import reducers as reducing
from arpc.wire.values.allowlist import NAMES, QUICK
from arpc.wire.values.checked_functions import ANYTHING, FLAG, SIZES, Check, Checked, exactly, kind_of

__all__ = ["set_array_state", "set_dtype_state"]

_PLAIN_DTYPE: Final = re.compile(r"[<|=]?(?:[biufc]\d{1,2}|\?|[SU]\d{1,9}|[mM]8)")
_UNITS: Final = frozenset(b"Y M W D h m s ms us ns ps fs as generic".split())
_MAX_STEP: Final = 1_000_000
_MAX_CODE_POINT: Final = 0x10FFFF
_MAX_DIMENSIONS: Final = 32  # the limit of older versions of numpy


def _dtype(name: str, *_: Any) -> np.dtype[Any]:
    try:
        # a copy: `set_dtype_state` may change it
        return np.dtype(name, copy=True)
    except TypeError:
        raise NotAllowedError(f"an array of {name!r}, which numpy does not know") from None


def set_dtype_state(made: np.dtype[Any], state: Any) -> None:
    """Set the unit of a dtype of times; the name has the rest of a dtype. Only this machine's byte order is accepted.

    Raises `NotAllowedError`.
    """
    if type(state) is not tuple or len(state) < 5 or state[1] not in {"<", "|", "="} or any(state[2:5]):
        raise NotAllowedError("an array of another byte order, or of records, is not allowed")
    if made.kind not in "mM" or len(state) == 8:
        return
    match state[8:]:
        case [(None | {}, (bytes() as unit, int() as step, 1, 1))]:
            if unit in _UNITS and 1 <= step <= _MAX_STEP:
                made.__setstate__((4, "<", None, None, None, -1, -1, 0, (None, (bytes(unit), int(step), 1, 1))))  # type: ignore[attr-defined]
                return
    raise NotAllowedError("an array of times in a unit that is none")


def _check_extent(dtype: np.dtype[Any], shape: tuple[int, ...], memory: memoryview) -> None:
    _check_dtype(dtype)
    # a size of 0 must not hide an overflow of the others
    if len(shape) > _MAX_DIMENSIONS or prod(size or 1 for size in shape) * dtype.itemsize >= 1 << 62:
        raise NotAllowedError("an array with more dimensions, or larger ones, than there can be")
    if prod(shape) * dtype.itemsize != memory.nbytes:
        raise NotAllowedError(f"an array of {prod(shape)} items in {memory.nbytes} bytes")
    if dtype.kind == "U" and memory.nbytes and int(np.frombuffer(memory, "<u4").max()) > _MAX_CODE_POINT:
        raise NotAllowedError("an array of texts with characters that are none")


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or not dtype.itemsize:
        raise NotAllowedError("an array of objects, or of nothing, is not allowed")


def _from_buffer(memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: str, axes: Any = None) -> Any:
    view = memoryview(memory)
    if not view.c_contiguous:
        raise NotAllowedError("an array in memory with gaps")
    if order == "K" and (axes is None or sorted(axes) != list(range(len(shape)))):
        raise NotAllowedError("an array whose dimensions have no order")
    _check_extent(dtype, shape, view)
    if not view.nbytes:
        return np.empty(shape, dtype)
    flat = np.frombuffer(memory, dtype=dtype)
    if order == "K":
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order=order)  # type: ignore[call-overload]


def _fill(slot: Any, dtype: str = "", shape: tuple[int, ...] | None = ()) -> Any:
    """Return the content of a hole; with a dtype, an array over that memory; without a shape, the number in it."""
    if not dtype:
        return slot
    if type(slot) not in {bytes, bytearray, memoryview, PickleBuffer}:
        raise NotAllowedError(f"a message that makes a numpy array of {kind_of(slot)}")
    if shape is None:
        return _scalar(_dtype(dtype), slot)
    return _from_buffer(slot, _dtype(dtype), shape, "C")


def _empty_array(*_: Any) -> Any:
    return np.empty(0, np.int8)


def set_array_state(made: np.ndarray[Any, Any], state: Any) -> None:
    """Fill an array that was made empty. Raises `NotAllowedError` for an array of objects, or a malformed state."""
    match state:
        case (1, tuple() as shape, np.dtype() as dtype, bool() | int() as is_fortran, bytes() as data):
            if SIZES.holds(shape) and is_fortran in {0, 1} and type(data) is bytes and made.size == 0:
                _check_extent(dtype, shape, memoryview(data))
                made.__setstate__((1, shape, dtype, bool(is_fortran), data))  # type: ignore[arg-type]
                return
    raise NotAllowedError("an array of objects, or one that does not say what it is of")


def _scalar(dtype: np.dtype[Any], data: Any) -> Any:
    _check_extent(dtype, (), memoryview(data))
    return np.frombuffer(data, dtype)[0]


_DTYPE_NAME: Final = Check(
    "the name of a dtype of numbers, texts or times",
    lambda value: type(value) is str and _PLAIN_DTYPE.fullmatch(value) is not None,
)
_DTYPE: Final = Check("a dtype", lambda value: isinstance(value, np.dtype))
_ORDER: Final = Check("an order of dimensions", lambda value: type(value) is str and value in {"C", "F", "K"})
_AXES: Final = Check("an order of dimensions", lambda value: value is None or SIZES.holds(value))
_SHAPE: Final = Check("a shape", lambda value: value is None or SIZES.holds(value))
_EMPTY: Final = Check("the shape (0,)", lambda value: type(value) is tuple and value == (0,))
_ARRAY_CLASS: Final = Check("numpy.ndarray", lambda value: value is np.ndarray)


def _fill_lists() -> None:
    # in `QUICK`, because memory comes in a slot, and a pickle with slots that changes an object is read carefully
    QUICK[reducing.__name__, "_fill"] = Checked("tensor", _fill, ANYTHING, _DTYPE_NAME, _SHAPE, required=1)
    NAMES["numpy", "ndarray"] = np.ndarray
    NAMES["numpy", "dtype"] = Checked("numpy.dtype", _dtype, _DTYPE_NAME, FLAG, FLAG, required=1)
    memory = exactly(bytes, bytearray, memoryview, PickleBuffer)
    from_buffer = Checked("numpy array", _from_buffer, memory, _DTYPE, SIZES, _ORDER, _AXES, required=4)
    reconstruct = Checked("numpy array", _empty_array, _ARRAY_CLASS, _EMPTY, ANYTHING)
    scalar = Checked("number of numpy", _scalar, _DTYPE, exactly(bytes))
    for package in ("numpy._core", "numpy.core"):
        NAMES[f"{package}.numeric", "_frombuffer"] = from_buffer
        NAMES[f"{package}.multiarray", "_reconstruct"] = reconstruct
        NAMES[f"{package}.multiarray", "scalar"] = scalar


_fill_lists()
