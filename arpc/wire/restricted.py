"""Reads pickles that may name what is on the lists of `wire.allowlist`, and nothing else.

Two readers. Nearly all pickles have nothing in them but data, holes for tensors and a few harmless names: these are
read by pickle's own, in C, which is told what each name means. It meets nothing that it could change, or whose call has
an effect. For a pickle with other names, such as those of registered classes, it gives up; then pickle's other reader
takes over, the one in Python, in which every step that does something is looked at: what is called must be on the
lists, and what is changed must be an instance, never a class.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from copyreg import _inverted_registry as _extensions  # type: ignore[attr-defined]
from typing import Any, ClassVar, Final

import numpy as np

from arpc.errors import NotAllowedError
from arpc.wire import reducing
from arpc.wire.allowlist import CONSTRUCTORS, HARMLESS, VALUES, Inert, Key, Names, callable_named, is_exported, trust

__all__ = ["read_name", "restricted_loads"]

Permit = Callable[[Key], None]
"""Raises `NotAllowedError` for an exported function that may not be named by whoever sent a pickle."""


class _BeyondHarmlessError(Exception):
    """There is a name that takes the careful reader."""


class _QuickUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = HARMLESS.get((module_name, global_name))
        if found is None:
            raise _BeyondHarmlessError
        return found


def restricted_loads(payload: bytes | bytearray | memoryview, slots: list[Any], permit: Permit) -> Any:
    """`pickling.loads`, within the lists. Raises `NotAllowedError`, or whatever reading a bad pickle raises."""
    data = bytes(payload)
    if not (_extensions or _is_out_of_proportion(data) or _may_nest_deeply(data) or (slots and _may_build(data))):
        try:
            return _QuickUnpickler(io.BytesIO(data), buffers=slots).load()
        except _BeyondHarmlessError:
            pass
    return _CarefulUnpickler(io.BytesIO(data), slots, permit).load()


def read_name(payload: bytes | bytearray | memoryview) -> Key:
    """The name in a pickle of a function, which is not looked up. Raises `NotAllowedError` if there is more in it."""
    found = _NameUnpickler(io.BytesIO(payload), [], lambda _: None).load()
    if not isinstance(found, _Name):
        raise NotAllowedError("in allow-list mode functions are called by their names")
    return found.key


# -- a pickle can say where in the memo something is put, and how long something is that is not there: the reader in C
# makes room for as much as that

_FAR: Final = re.compile(
    rb"r..(?:[^\0].|.[^\0])|p[\s\d_+]{5}|[\x8d\x8e\x96].{4}(?:[^\0]...|.[^\0]..|..[^\0].|...[^\0])", re.DOTALL
)
_FAR_INDEX: Final = 1 << 16
# how many bytes follow an opcode; or in how many the number of those is told
_FIXED: Final = {
    **dict.fromkeys(b"(.012NRabeltsud)]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Kqh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
}
_COUNTED: Final = {
    **dict.fromkeys(b"CU\x8c\x8a", 1),
    **dict.fromkeys(b"BTX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LONG_BINPUT: Final = b"r"[0]
_BUILD: Final = pickle.BUILD[0]
_STOP: Final = b"."[0]


def _is_out_of_proportion(payload: bytes) -> bool:
    """Whether a pickle may ask for much more memory than it has bytes, or has opcodes that today's pickles have not."""
    if _FAR.search(payload) is None:
        return False
    return any(
        opcode is None or (opcode == _LONG_BINPUT and int.from_bytes(payload[at : at + 4], "little") >= _FAR_INDEX)
        for opcode, at in _opcodes(payload)
    )


def _may_build(payload: bytes) -> bool:
    """Whether a pickle sets the state of anything. A tensor has one: its memory could be made any size with it."""
    if pickle.BUILD not in payload:
        return False
    return any(opcode is None or opcode == _BUILD for opcode, _ in _opcodes(payload))


def _opcodes(payload: bytes) -> Iterator[tuple[int | None, int]]:
    """Each opcode, and where what belongs to it begins; None, at last, where it cannot be told how it goes on."""
    at, end = 0, len(payload)
    while at < end:
        opcode = payload[at]
        at += 1
        if (fixed := _FIXED.get(opcode)) is not None:
            yield opcode, at
            if opcode == _STOP:
                return
            at += fixed
        elif (counted := _COUNTED.get(opcode)) is not None:
            yield opcode, at
            at += counted + int.from_bytes(payload[at : at + counted], "little")
            if at > end:
                yield None, end
        else:
            yield None, at
            return


# -- hashing a tuple in tuples takes stack for each, and Python does not look whether there is any left

_MAX_NESTED: Final = 1000
_MAX_TUPLES: Final = 10_000
_NESTING: Final = (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.REDUCE, pickle.NEWOBJ)


def _may_nest_deeply(payload: bytes) -> bool:
    """Whether there are so many tuples that they may be dangerous inside each other."""
    return len(payload) > _MAX_TUPLES and sum(map(payload.count, _NESTING)) > _MAX_TUPLES


# -- the careful reader


class _Name:
    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key


_OPCODES: Final = (
    b"\x80\x95."  # PROTO, FRAME, STOP
    b"(01"  # MARK, POP, POP_MARK
    b"N\x88\x89JKM\x8a\x8bG"  # None, booleans and numbers
    b"BC\x8e\x96X\x8c\x8d\x97\x98"  # bytes, strings and what comes beside the pickle
    b"]}\x8f)t\x85\x86\x87\x91aesu\x90"  # containers and what is put into them
    b"hjqr\x94"  # the memo
    b"\x93R\x81\x92b"  # names, calls, and the state of what was made
)
# Both readers have it; that of Python is not documented, and has been the same since there is protocol 5
_Base: Any = pickle._Unpickler  # noqa: SLF001
_Step = Callable[["_CarefulUnpickler"], None]


class _CarefulUnpickler(_Base):  # type: ignore[misc]
    stack: list[Any]
    metastack: list[list[Any]]
    dispatch: ClassVar[dict[int, _Step]] = {opcode: _Base.dispatch[opcode] for opcode in _OPCODES}

    def __init__(self, file: io.BytesIO, slots: list[Any], permit: Permit) -> None:
        super().__init__(file, buffers=slots)
        self._size_bytes = len(file.getbuffer())
        self._depths: dict[int, int] = {}
        """How deep tuples are nested, by their ids. Whatever has the id of one that is gone is noted anew."""
        self._permit = permit

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError as error:
            if error.args and type(error.args[0]) is int and error.args[0] not in self.dispatch:
                raise NotAllowedError("a pickle with an opcode that is not allowed") from None
            raise

    # -- names

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        for names in (HARMLESS, CONSTRUCTORS, _ARRAYS, VALUES):
            if (found := names.get(key)) is not None:
                return found
        if key == _FROM_MAIN:
            return _OfMain(self)
        if is_exported(key):
            self._permit(key)
            return callable_named(key)
        raise NotAllowedError(
            f"{module}.{name} is not on the list of what messages may name here: see arpc.register_type and arpc.export"
        )

    # -- steps that do something

    def _check_call(self, called: Any) -> None:
        if not (type(called) is Inert or type(called) is _OfMain or called in HARMLESS or called in CONSTRUCTORS):
            raise NotAllowedError(f"a message that calls {_kind_of(called)} while it is read")

    def load_reduce(self) -> None:
        self._check_call(self.stack[-2])
        _Base.load_reduce(self)
        self._note_depth()

    def load_newobj(self) -> None:
        self._check_class(self.stack[-2])
        _Base.load_newobj(self)
        self._note_depth()

    def load_newobj_ex(self) -> None:
        self._check_class(self.stack[-3])
        _Base.load_newobj_ex(self)
        self._note_depth()

    def load_tuple(self) -> None:
        _Base.load_tuple(self)
        self._note_depth()

    def load_tuple1(self) -> None:
        _Base.load_tuple1(self)
        self._note_depth()

    def load_tuple2(self) -> None:
        _Base.load_tuple2(self)
        self._note_depth()

    def load_tuple3(self) -> None:
        _Base.load_tuple3(self)
        self._note_depth()

    def _note_depth(self) -> None:
        made = self.stack[-1]
        items = made if isinstance(made, tuple) else (made.start, made.stop, made.step) if type(made) is slice else None
        if items is None:
            return
        depths = self._depths
        inner = [depths.get(id(item), 0) for item in items if isinstance(item, tuple | slice)]
        depths[id(made)] = depth = 1 + max(inner, default=0)
        if depth > _MAX_NESTED:
            raise NotAllowedError(f"a message with more than {_MAX_NESTED} tuples inside each other")

    def _check_class(self, cls: Any) -> None:
        if not isinstance(cls, type) or not (cls in CONSTRUCTORS or cls in HARMLESS):
            raise NotAllowedError(f"a message that makes an instance of {_kind_of(cls)} while it is read")

    def load_build(self) -> None:
        made = self.stack[-2]
        if isinstance(made, np.dtype):
            _check_dtype_state(self.stack.pop())
            return
        if type(made) is np.ndarray:
            made.__setstate__(_checked_array_state(self.stack.pop()))
            return
        if not (type(made) in CONSTRUCTORS or type(made) in HARMLESS):
            raise NotAllowedError(f"a message that changes {type(made).__qualname__} while it is read")
        _Base.load_build(self)

    def _check_container(self, container: Any, *plain: type) -> None:
        kind = type(container)
        if kind not in plain and kind not in CONSTRUCTORS:
            raise NotAllowedError(f"a message that adds to {kind.__qualname__} while it is read")

    def load_bytearray8(self) -> None:
        size_bytes = int.from_bytes(self.read(8), "little")
        if size_bytes > self._size_bytes:
            raise pickle.UnpicklingError("a bytearray that is larger than its pickle")  # it would be filled with zeros
        self.append(bytearray(self.read(size_bytes)))

    def load_append(self) -> None:
        self._check_container(self.stack[-2], list, deque)
        _Base.load_append(self)

    def load_appends(self) -> None:
        self._check_container(self.metastack[-1][-1], list, deque)
        _Base.load_appends(self)

    def load_setitem(self) -> None:
        self._check_container(self.stack[-3], *_DICTS)
        _Base.load_setitem(self)

    def load_setitems(self) -> None:
        self._check_container(self.metastack[-1][-1], *_DICTS)
        _Base.load_setitems(self)

    def load_additems(self) -> None:
        self._check_container(self.metastack[-1][-1], set)
        _Base.load_additems(self)

    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.TUPLE[0]: load_tuple,
            pickle.TUPLE1[0]: load_tuple1,
            pickle.TUPLE2[0]: load_tuple2,
            pickle.TUPLE3[0]: load_tuple3,
            pickle.BYTEARRAY8[0]: load_bytearray8,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.ADDITEMS[0]: load_additems,
        }
    )


class _NameUnpickler(_CarefulUnpickler):
    """Reads a name and looks nothing up."""

    def find_class(self, module: str, name: str) -> Any:
        return _OfMain(self) if (module, name) == _FROM_MAIN else _Name((module, name))

    def _check_call(self, called: Any) -> None:
        if not isinstance(called, _OfMain):
            raise NotAllowedError("in allow-list mode functions are called by their names")

    def _check_class(self, cls: Any) -> None:
        raise NotAllowedError("in allow-list mode functions are called by their names")


class _OfMain:
    """What `reducing._from_main` is to a restricted reader: the same name, looked up like all others."""

    __slots__ = ("_reader",)

    def __init__(self, reader: _CarefulUnpickler) -> None:
        self._reader = reader

    def __call__(self, qualname: str) -> Any:
        return self._reader.find_class("__main__", qualname)


_FROM_MAIN: Final = (reducing.__name__, "_from_main")
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)


def _kind_of(obj: Any) -> str:
    # not its repr, which may be long, slow, or code of its own
    return f"the class {obj.__qualname__}" if isinstance(obj, type) else f"a {type(obj).__qualname__}"


# -- arrays: numbers only. One of objects would be made of addresses, or of anything


def _plain_dtype(name: Any, *_: Any) -> np.dtype[Any]:
    if type(name) is not str or _PLAIN_DTYPE.fullmatch(name) is None:
        raise NotAllowedError(f"an array of {name[:20]!r} is not allowed" if type(name) is str else "no such array")
    return np.dtype(name)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise NotAllowedError("an array of objects is not allowed")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _empty_array(kind: Any, shape: Any, _: Any) -> Any:
    if kind is not np.ndarray or type(shape) is not tuple or shape != (0,):
        raise NotAllowedError("an array that is not empty at first")
    return np.empty(0, np.int8)


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, bytes):
        raise NotAllowedError("a number of numpy that is none")
    return np.frombuffer(data, dtype)[0]


def _check_dtype_state(state: Any) -> None:
    """All there is to know of a plain dtype is in its name and the order of its bytes, and only ours is taken."""
    if not isinstance(state, tuple) or len(state) < 2 or state[1] not in {"<", "|", "="} or any(state[2:5]):
        raise NotAllowedError("an array of another byte order, or of records, is not allowed")


def _checked_array_state(state: Any) -> tuple[Any, ...]:
    if (
        not isinstance(state, tuple)
        or len(state) != 5
        or not isinstance(state[2], np.dtype)
        or state[2].hasobject
        or not isinstance(state[4], bytes)
    ):
        raise NotAllowedError("an array of objects is not allowed")
    return state


_PLAIN_DTYPE: Final = re.compile(r"[<|=]?(?:[biufc]\d{1,2}|\?|[SU]\d{1,9}|[mM]8(?:\[\d{0,9}\w{1,2}\])?)")
_ARRAYS: Final = Names()
_ARRAYS.add(("numpy", "dtype"), Inert(_plain_dtype))
_ARRAYS.add(("numpy", "ndarray"), np.ndarray)
for _package in ("numpy._core", "numpy.core"):
    _ARRAYS.add((f"{_package}.numeric", "_frombuffer"), Inert(_from_buffer))
    _ARRAYS.add((f"{_package}.multiarray", "_reconstruct"), Inert(_empty_array))
    _ARRAYS.add((f"{_package}.multiarray", "scalar"), Inert(_scalar))

# -- tensors

HARMLESS.add((reducing.__name__, "_fill"), Inert(reducing._fill))  # noqa: SLF001 - what pickles name
HARMLESS.add((reducing.__name__, "_fill_parameter"), Inert(reducing._fill_parameter))  # noqa: SLF001
trust(reducing._fill_subclass)  # noqa: SLF001
trust(reducing._fill_wrapper)  # noqa: SLF001
