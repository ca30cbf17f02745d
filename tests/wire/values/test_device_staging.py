from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from arpc.errors import ProtocolError, SerializationError
from arpc.wire.values.device_staging import AcceleratorBackend, Staged
from arpc.wire.values.layouts import Misplaced, read_layout
from arpc.wire.values.schemas import Packer
from arpc.wire.values.table import Code, Entry, Kind, encode_table
from tests.wire.exchange import INLINE, pack, unpack
from tests.wire.fake_devices import FakeDevice


class ToMeta:
    """Takes what is on the fake device to cuda:1 there."""

    def __init__(self, device: FakeDevice, *, moves_host_memory: bool = False) -> None:
        self.moves_host_memory = moves_host_memory
        self._device = device

    def stage(self, tensor: Tensor) -> Staged | None:
        if tensor.is_meta:
            host, wait = self._device.download(tensor)
            return Staged(host, "cuda:1", wait)
        return Staged(tensor.contiguous(), "cuda:0", None) if self.moves_host_memory else None


@pytest.mark.parametrize("repeats", [False, True])
def test_a_tensor_whose_memory_was_cut_short_is_not_staged(repeats):
    tensor = torch.ones(1 << 10).expand(3, -1) if repeats else torch.ones(1 << 10)
    tensor.untyped_storage().resize_(64)
    with pytest.raises(SerializationError, match="memory was freed"):
        Packer(1 << 16).pack([tensor], stager=ToMeta(FakeDevice(), moves_host_memory=True))


def test_what_is_staged_is_a_buffer_however_small_it_is():
    device = FakeDevice()
    packed = pack([device.put(torch.ones(2)), torch.zeros(3)], INLINE, ToMeta(device))

    assert [buffer.nbytes for buffer in packed.buffers] == [8]
    assert read_layout(packed.schema.table).placements == {0: "cuda:1"}
    assert bytes(packed.buffers[0]) != bytes(torch.ones(2).numpy())
    for wait in packed.waits:
        wait()
    assert bytes(packed.buffers[0]) == bytes(torch.ones(2).numpy())


def test_a_stager_that_moves_host_memory_sees_every_tensor():
    whole = torch.arange(8.0)
    packed = pack([whole[:4], whole[4:], whole.view(2, 4).t()], INLINE, ToMeta(FakeDevice(), moves_host_memory=True))

    assert read_layout(packed.schema.table).placements == dict.fromkeys(range(3), "cuda:0")
    assert packed.waits == []


def test_the_parts_of_a_sparse_tensor_are_staged():
    stager = ToMeta(FakeDevice(), moves_host_memory=True)
    packed = pack([torch.eye(3).to_sparse()], INLINE, stager)

    assert read_layout(packed.schema.table).placements == {0: "cuda:0", 1: "cuda:0"}


def placed(tensor: Tensor) -> tuple[bytes, Any]:
    """The table of a message with a tensor for a device, and the bytes of its only buffer as they arrived there."""
    packed = pack([tensor], INLINE, ToMeta(FakeDevice(), moves_host_memory=True))
    return packed.schema.table, torch.frombuffer(bytearray(packed.buffers[0]), dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_is_made_of_what_was_taken_to_its_device(shape, dtype):
    sent = torch.ones(shape, dtype=dtype)
    table, there = placed(sent)

    (arrived,) = unpack(table, bytearray(), [there])

    assert arrived.dtype is dtype
    assert torch.equal(arrived, sent)
    assert arrived._base is None


def test_lazy_conjugates_are_lazy_again():
    sent = torch.tensor([1 + 2j]).conj()
    table, there = placed(sent)

    (arrived,) = unpack(table, bytearray(), [there])

    assert arrived.is_conj()
    assert torch.equal(arrived, sent)


def test_a_tensor_that_could_not_be_taken_to_its_device_says_why():
    table, _ = placed(torch.ones(2))

    with pytest.raises(SerializationError, match="the reason"):
        unpack(table, bytearray(), [Misplaced("the reason")])
    with pytest.raises(SerializationError, match="device cuda:0 came to a worker that has no such device"):
        unpack(table, bytearray(), [memoryview(bytearray(8))])


def test_a_description_that_does_not_fit_what_came_is_refused():
    table, there = placed(torch.ones(2))

    with pytest.raises(ProtocolError):
        unpack(table, bytearray(), [there[:4]])
    part = Entry(Kind.STRIDED, 0, 0, -1, (100,), (1,), span_bytes=8)
    entry = Entry(Kind.PLACED, 0, 0, 0, (), layout="cuda:0", parts=(part,))
    with pytest.raises(ProtocolError):
        unpack(encode_table((0, bytes([129]), [0], [()], [entry])), bytearray(), [there])
    plain = Entry(Kind.STRIDED, 0, 0, -1, (2,), (1,), span_bytes=8)
    with pytest.raises(ProtocolError, match="belongs on a device, and in host memory as well"):
        unpack(encode_table((0, bytes([129]), [0], [()], [plain])), bytearray(), [there])


def test_placements_without_a_part_are_none():
    entry = Entry(Kind.PLACED, 0, 0, 0, (), layout="cuda:0")
    table = encode_table((0, bytes([Code.ENTRY]), [0], [()], [entry]))
    assert read_layout(table).placements == {}


# -- an accelerator, as far as a machine without one can tell: what is done, and in which order


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    module = mock.MagicMock()
    monkeypatch.setattr(torch, "cuda", module)
    return module


def order_of(parent: mock.MagicMock) -> list[str]:
    return [name for name, _, _ in parent.mock_calls if not name.endswith("__")]


def test_a_download_is_ordered_behind_the_callers_stream_and_waited_for_elsewhere(torch_cuda, monkeypatch):
    events = mock.MagicMock()
    torch_cuda.Stream.return_value = events.side
    torch_cuda.Event.return_value = events.event
    tensor, host = events.tensor, events.host
    tensor.contiguous.return_value = events.source
    empty = mock.MagicMock(return_value=host)
    monkeypatch.setattr(torch, "empty", empty)

    copy, wait = AcceleratorBackend("cuda").download(tensor)

    assert copy is host
    assert empty.call_args.kwargs["pin_memory"] is True
    torch_cuda.current_stream.assert_called_once_with(tensor.device)
    assert order_of(events) == [
        "tensor.contiguous",
        "side.wait_stream",
        "host.copy_",
        "event.record",
        "source.record_stream",
    ]
    host.copy_.assert_called_once_with(events.source, non_blocking=True)
    torch_cuda.stream.assert_called_once_with(events.side)
    events.event.synchronize.assert_not_called()
    wait()
    events.event.synchronize.assert_called_once_with()


def test_an_upload_runs_on_a_stream_of_its_own_and_is_adopted_by_the_users(torch_cuda, monkeypatch):
    host = mock.MagicMock()
    monkeypatch.setattr(torch, "frombuffer", mock.MagicMock(return_value=host))
    backend = AcceleratorBackend("cuda")
    place = torch.device("cuda", 1)

    made = backend.upload(memoryview(bytearray(4)), place)
    backend.upload(memoryview(bytearray(4)), place)
    backend.adopt(made)

    torch_cuda.device.assert_called_with(place)
    torch_cuda.Stream.assert_called_once_with(place)  # made once
    torch_cuda.stream.assert_called_with(torch_cuda.Stream.return_value)
    host.to.assert_called_with(place)
    made.record_stream.assert_called_once_with(torch_cuda.current_stream.return_value)


def test_devices_are_counted_without_waking_the_driver(torch_cuda):
    torch_cuda.device_count.return_value = 3

    assert AcceleratorBackend("cuda").count() == 3
    torch_cuda.is_available.assert_not_called()
    torch_cuda.init.assert_not_called()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base[:1].expand(1 << 40, 1), id="expanded"),
        pytest.param(lambda base: base.as_strided((5, 4), (1, 1)), id="windows"),
    ],
)
def test_a_tensor_that_repeats_its_memory_takes_no_more_of_it(view):
    sent = view(torch.arange(8.0))
    packed = pack([sent], INLINE, ToMeta(FakeDevice(), moves_host_memory=True))
    there = torch.frombuffer(bytearray(packed.buffers[0]), dtype=torch.uint8)

    (arrived,) = unpack(packed.schema.table, bytearray(), [there])

    assert sum([buffer.nbytes for buffer in packed.buffers]) <= 32
    assert arrived.shape == sent.shape
    assert arrived.stride() == sent.stride()
    assert arrived[-1].tolist() == sent[-1].tolist()
