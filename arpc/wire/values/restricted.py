"""Reads pickles that name only objects on the lists of `wire.values.allowlist`.

Extension codes, which name objects of Python's registry, are refused, except for the one that pickles begin with: a
name replaces it first.

There are two readers. Nearly all pickles contain only data, holes for tensors and a few names. The quick reader,
pickle's own in C, reads these; it finds only `QUICK` names, so it makes no objects that have a state, and calls only
`Checked` functions and a few immutable builtin types. It gives up at any other name, such as that of a registered
class. Then the careful reader, pickle's own in Python, checks each step that calls or changes an object: a called
object must be on the lists, a changed object must be an instance, never a class, and only containers get items.

`wire.values.policy` is the only user of this module: everything that a peer sends is read through a policy.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np

from arpc.errors import NotAllowedError
from arpc.private.interpreter import PythonUnpickler
from arpc.wire.values import allowed_values
from arpc.wire.values import reducers as reducing
from arpc.wire.values.allowlist import (
    CLASSES,
    EXPORTED,
    MAKERS,
    NAMES,
    QUICK,
    TENSOR_CLASSES,
    Key,
    shown,
)
from arpc.wire.values.arrays import set_array_state, set_dtype_state
from arpc.wire.values.checked_functions import Checked, kind_of
from arpc.wire.values.pickle_costs import MAX_INTEGER_BYTES, ReadingCosts, check_proportion, needs_careful_reader
from arpc.wire.values.reducers import spelled_out
from arpc.wire.values.registered_classes import check_container, construct, make_bare, set_state

__all__ = ["read_name", "restricted_loads"]

assert allowed_values is not None  # it fills the lists

Permit = Callable[[Key], None]
"""Raises `NotAllowedError` for an exported function that the sender of a pickle may not name."""


class _NotQuickError(Exception):
    """The pickle has a name that only the careful reader finds."""


class _QuickUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = QUICK.get((module_name, global_name))
        if found is None:
            raise _NotQuickError
        return found


class _Whole:
    """A pickle as a file whose first read returns all of it, whatever size is requested.

    Pickle's reader in C first uses up what a read returned. From a file that returns just the requested size it gets
    one frame at a time, and drops the rest of a frame when a value goes beyond the end of it: then it would read other
    opcodes than those that were checked.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, _size_bytes: int = -1) -> bytes:
        data, self._data = self._data, b""
        return data

    readline = read


def restricted_loads(payload: bytes | bytearray | memoryview, slots: list[Any], permit: Permit) -> Any:
    """Unpickle as `pickler.loads` does, within the lists. Raises `NotAllowedError`, or any error of a bad pickle."""
    data = spelled_out(payload)
    check_proportion(data)
    if not needs_careful_reader(data, has_slots=bool(slots)):
        try:
            return _QuickUnpickler(_Whole(data), buffers=slots).load()
        except _NotQuickError:
            pass
    return _CarefulUnpickler(io.BytesIO(data), slots, permit).load()


def read_name(payload: bytes | bytearray | memoryview) -> Key:
    """Return the name in the pickle of a function, without a lookup. Raises `NotAllowedError` for any other pickle."""
    if len(payload) > _MAX_NAME_BYTES:
        raise NotAllowedError(f"the name of a function that takes {len(payload)} bytes")
    found = _NameUnpickler(io.BytesIO(spelled_out(payload)), [], lambda _: None).load()
    if not isinstance(found, _Name):
        raise NotAllowedError(_BY_NAME)
    return found.key


# -- the careful reader

_BY_NAME: Final = "in allow-list mode functions are called by their names"
_MAX_NAME_BYTES: Final = 4096
_MAIN: Final = object()
"""Stands for `reducers._from_main` in a restricted reader, which looks a name of ``__main__`` up like all others."""
_NEW: Final = object()
"""Stands for `reducers.make_instance` in a restricted reader, which does what pickle's NEWOBJ does."""
_OF_READER: Final = {(reducing.__name__, "_from_main"): _MAIN, (reducing.__name__, "make_instance"): _NEW}
_SEQUENCES: Final = frozenset((list, tuple))
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)


class _Name:
    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key


_OPCODES: Final = (
    b"\x80\x95."  # PROTO, FRAME, STOP
    b"(01"  # MARK, POP, POP_MARK
    b"N\x88\x89JKM\x8a\x8bG"  # None, booleans and numbers
    b"BC\x8e\x96X\x8c\x8d\x97\x98"  # bytes, strings and out-of-band buffers
    b"]}\x8f)t\x85\x86\x87\x91aesu\x90"  # containers and their items
    b"hjqr\x94"  # the memo
    b"\x93R\x81\x92b"  # names, calls, and the state of instances
)
_TUPLE_OPCODES: Final = pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
_Step = Callable[["_CarefulUnpickler"], None]


def _then_count(step: _Step) -> _Step:
    """Return a step that also counts the object that it has made, see `ReadingCosts.made`."""

    def load(reader: _CarefulUnpickler) -> None:
        step(reader)
        reader.costs.made(reader.stack[-1])

    return load


class _CarefulUnpickler(PythonUnpickler):  # type: ignore[misc]
    stack: list[Any]
    metastack: list[list[Any]]
    dispatch: ClassVar[dict[int, _Step]] = {opcode: PythonUnpickler.dispatch[opcode] for opcode in _OPCODES}

    def __init__(self, file: io.BytesIO, slots: list[Any], permit: Permit) -> None:
        super().__init__(file, buffers=slots)
        self._size_bytes = len(file.getbuffer())
        self.costs = ReadingCosts()
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
        for names in (QUICK, NAMES, CLASSES.by_key, TENSOR_CLASSES.by_key, _OF_READER):
            if (found := names.get(key)) is not None:
                return found
        if (found := EXPORTED.get(key)) is not None:
            self._permit(key)
            return found
        raise NotAllowedError(
            f"{shown(key)} is not on the list of what messages may name here: see arpc.register_type and arpc.export"
        )

    # -- steps that call, make or change objects

    def _call(self, called: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise NotAllowedError("a message that calls something with arguments that are no tuple")
        if called is _NEW and args:
            return self._make(args[0], args[1:], {})
        if called is _MAIN and len(args) == 1 and type(args[0]) is str:
            return self.find_class("__main__", args[0])
        if type(called) is Checked or _is_immutable(called):
            return called(*args)
        if (maker := MAKERS.get(id(called))) is not None:
            return maker(*args)
        if called in CLASSES:
            if issubclass(called, set | frozenset | dict):
                for items in args:
                    self.costs.add_keys(items, _keys_of(items, is_dict=issubclass(called, dict)))
            return construct(called, args)
        raise NotAllowedError(f"a message that calls {kind_of(called)} while it is read")

    def _make(self, cls: Any, args: Any, kwargs: Any) -> Any:
        if type(args) is not tuple or type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
            raise NotAllowedError("a message that makes an instance with arguments that are none")
        if (maker := MAKERS.get(id(cls))) is not None and not kwargs:
            return maker(*args)
        if _is_immutable(cls) and not kwargs:
            return cls(*args)
        if cls in CLASSES:
            return make_bare(cls, args, kwargs)
        raise NotAllowedError(f"a message that makes an instance of {kind_of(cls)} while it is read")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args, {})

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args, kwargs)

    def load_frozenset(self) -> None:
        self.costs.add_keys(self.stack, self.stack)  # the stack is the list of the items, and ends here
        PythonUnpickler.load_frozenset(self)

    def load_long4(self) -> None:
        size_bytes = int.from_bytes(self.read(4), "little")
        if size_bytes > MAX_INTEGER_BYTES:
            raise NotAllowedError(f"a message with an integer of {size_bytes} bytes")
        self.append(pickle.decode_long(self.read(size_bytes)))

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, np.dtype):
            set_dtype_state(made, state)
        elif type(made) is np.ndarray:
            set_array_state(made, state)
        else:
            set_state(made, state)

    def load_bytearray8(self) -> None:
        size_bytes = int.from_bytes(self.read(8), "little")
        if size_bytes > self._size_bytes:
            raise pickle.UnpicklingError("a bytearray that is larger than its pickle")  # it would be filled with zeros
        self.append(bytearray(self.read(size_bytes)))

    def load_append(self) -> None:
        check_container(self.stack[-2], list, deque)
        PythonUnpickler.load_append(self)

    def load_appends(self) -> None:
        check_container(self.metastack[-1][-1], list, deque)
        PythonUnpickler.load_appends(self)

    def load_setitem(self) -> None:
        check_container(self.stack[-3], *_DICTS)
        self.costs.add_keys(self.stack[-3], [self.stack[-2]])
        PythonUnpickler.load_setitem(self)

    def load_setitems(self) -> None:
        container = self.metastack[-1][-1]
        check_container(container, *_DICTS)
        self.costs.add_keys(container, self.stack[::2])
        PythonUnpickler.load_setitems(self)

    def load_additems(self) -> None:
        container = self.metastack[-1][-1]
        check_container(container, set)
        self.costs.add_keys(container, self.stack)
        PythonUnpickler.load_additems(self)

    dispatch.update(
        {
            **{opcode: _then_count(PythonUnpickler.dispatch[opcode]) for opcode in _TUPLE_OPCODES},
            pickle.REDUCE[0]: _then_count(load_reduce),
            pickle.NEWOBJ[0]: _then_count(load_newobj),
            pickle.NEWOBJ_EX[0]: _then_count(load_newobj_ex),
            pickle.FROZENSET[0]: _then_count(load_frozenset),
            pickle.BUILD[0]: load_build,
            pickle.LONG4[0]: load_long4,
            pickle.BYTEARRAY8[0]: load_bytearray8,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.ADDITEMS[0]: load_additems,
        }
    )


def _keys_of(items: Any, *, is_dict: bool) -> list[Any]:
    """Return the keys of a dict or a set that is made of a value."""
    if type(items) not in _SEQUENCES:
        return []  # the keys of a dict or a set were counted when it was made
    return [pair[0] for pair in items if type(pair) in _SEQUENCES and pair] if is_dict else list(items)


class _NameUnpickler(_CarefulUnpickler):
    """Reads a single name, without a lookup."""

    def find_class(self, module: str, name: str) -> Any:
        return _MAIN if _OF_READER.get((module, name)) is _MAIN else _Name((module, name))

    def _call(self, called: Any, args: Any) -> Any:
        if called is not _MAIN:
            raise NotAllowedError(_BY_NAME)
        return super()._call(called, args)

    def _make(self, cls: Any, args: Any, kwargs: Any) -> Any:
        raise NotAllowedError(_BY_NAME)


def _is_immutable(obj: object) -> bool:
    """Whether this is a builtin class that is called without checks. Compared by identity: it may be unhashable."""
    return obj is complex or obj is range or obj is slice
