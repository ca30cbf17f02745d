"""Each pickle begins with an extension code, which is the only one that is taken in allow-list mode."""

from __future__ import annotations

import copyreg
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from arpc.errors import NotAllowedError
from arpc.wire.values import pickler as pickling
from arpc.wire.values.pickler import Pickler, loads
from arpc.wire.values.reducers import PREFIX, NamesOnlyPickler
from arpc.wire.values.restricted import read_name, restricted_loads

EXT1_240 = pickle.EXT1 + bytes([240])
STOP = pickle.STOP
START = pickle.PROTO + b"\5"


def restricted(payload: bytes, slots: list[object] | None = None) -> object:
    return restricted_loads(payload, slots or [], lambda _: None)


@pytest.fixture
def registered() -> Iterator[bytes]:
    """The code of an extension of somebody else."""
    copyreg.add_extension("os", "system", 241)
    yield pickle.EXT1 + bytes([241])
    copyreg.remove_extension("os", "system", 241)
    copyreg.clear_extension_cache()


def test_every_pickle_with_holes_begins_with_it():
    for value in ([torch.ones(1), 1], lambda: 3, {"a": 1}):
        payload, _ = Pickler().dumps(value)
        assert payload.startswith(PREFIX)
        assert payload.count(EXT1_240) == 1


@pytest.mark.parametrize("kind", [None, NamesOnlyPickler])
def test_both_readers_take_it(kind):
    pickler = Pickler(kind=kind) if kind else Pickler()
    sent = [torch.ones(1), OrderedDict(a=torch.ones(2)), np.arange(3), "text" * 100, 0.1, -130, "\x82\x83"]
    payload, slots = pickler.dumps(sent)

    assert str(restricted(payload, slots)) == str(loads(payload, slots)) == str(sent)
    payload, _ = pickler.dumps(OrderedDict)
    assert read_name(payload) == ("collections", "OrderedDict")


@pytest.mark.parametrize(
    "payload",
    [
        START + EXT1_240 + STOP,
        PREFIX + START + EXT1_240 + STOP,
        PREFIX + EXT1_240 + STOP,
        PREFIX + b"N0" + EXT1_240 + b"NN\x86R" + STOP,
        PREFIX + pickle.EXT2 + b"\xf0\0" + STOP,
        PREFIX + pickle.EXT4 + b"\xf0\0\0\0" + STOP,
        START + b"\x8c\x01a0" + EXT1_240 + b"." + STOP,
        START + b"G" + bytes(8) + b"0" + EXT1_240 + STOP,
        START + pickle.EXT1 + bytes([239]) + pickle.MEMOIZE + pickle.POP + b"h\0" + STOP,
        START + START + EXT1_240 + pickle.MEMOIZE + pickle.POP + b"h\0" + STOP,
    ],
)
def test_extension_codes_anywhere_else_are_refused(payload):
    loads(PREFIX + b"N.", [])  # Python remembers what it has looked up
    with pytest.raises(NotAllowedError):
        restricted(payload)
    with pytest.raises(NotAllowedError):
        read_name(payload)


def test_extensions_of_others_are_refused(registered):
    for start in (START, PREFIX):
        payload = start + registered + STOP
        assert loads(payload, []) is os.system
        with pytest.raises(NotAllowedError):
            restricted(payload)
        with pytest.raises(NotAllowedError):
            restricted(start + registered + b"\x8c\x04true\x85R.")


def test_bytes_that_look_like_extension_codes_are_data(registered):
    for value in (
        b"\x82\xf1" * 50,
        "\x82\x83\x84ä" * 20,
        [0x82, 0x8283, 0x82838485, -0x7E, 2.0**0.1],
        {"\x82": 1 << 90},
    ):
        payload, slots = Pickler().dumps(value)
        assert restricted(payload, slots) == value


def test_what_fills_holes_cannot_be_changed():
    with pytest.raises((NotAllowedError, AttributeError)):
        restricted(PREFIX + b"h\0N}\x8c\x0c__defaults__)s\x86b.")
    assert loads(PREFIX + b"h\0K\1\x85R.", []) == 1


def test_an_array_of_what_is_no_memory_is_refused():
    payload, _ = Pickler().dumps(np.arange(2000))
    for slot in (torch.ones(2000), "text"):
        with pytest.raises(NotAllowedError):
            restricted(payload, [slot])
    with pytest.raises(NotAllowedError, match="2000 items in 8 bytes"):
        restricted(payload, [memoryview(bytes(8))])


def test_a_small_array_whose_memory_is_of_another_size_is_refused():
    payload, slots = Pickler().dumps(np.arange(3))
    assert slots == []
    assert restricted(payload, []).tolist() == [0, 1, 2]
    with pytest.raises(NotAllowedError, match="4 items in 24 bytes"):
        restricted(payload.replace(b"K\x03\x85", b"K\x04\x85"), [])


def test_a_number_whose_memory_is_of_another_size_is_refused():
    payload, _ = Pickler().dumps(np.float32(1.5))
    number = restricted(payload)
    assert type(number) is np.float32
    assert number == 1.5
    with pytest.raises(NotAllowedError, match="1 items in 4 bytes"):
        restricted(payload.replace(b"<f4", b"<f8"))


def test_somebody_else_may_have_the_code(monkeypatch):
    """Then pickles are read by name."""
    value = {"a": torch.ones(2)}
    payload, slots = Pickler().dumps(value)
    monkeypatch.setattr(pickling, "IS_REGISTERED", False)
    copyreg.remove_extension("arpc.wire.values.reducers", "_fill", 240)
    copyreg.clear_extension_cache()
    try:
        assert loads(payload, slots) == value
        assert loads(memoryview(payload), slots) == value
    finally:
        copyreg.add_extension("arpc.wire.values.reducers", "_fill", 240)

    program = (
        "import copyreg, torch; copyreg.add_extension('os', 'system', 240)\n"
        "from arpc.wire.values.pickler import Pickler, loads\n"
        "payload, slots = Pickler().dumps([torch.ones(2), lambda: 3])\n"
        "tensor, function = loads(payload, slots)\n"
        "print(tensor.tolist(), function(), payload[:4])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.stdout.strip() == f"[1.0, 1.0] 3 {PREFIX[:4]!r}", done.stderr
