"""Copies tensors between the devices of one worker and the messages that it sends and receives.

The device map of the *caller* applies in both directions. A request names devices of the callee. A reply names devices
of the callee, too, and the caller inverts its own map. So no worker needs to know another worker's maps.

Copies between devices and host memory take a while, and the loop does not wait for them: an outgoing message waits
until its buffers are filled (`Placement.when_filled`), an incoming one until its buffers are where they belong
(`Placement.messages_received`). Other messages overtake it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.server.thread_pool import ThreadPool
from arpc.devices import DeviceClaims, DeviceMap, checked_device, checked_device_map, checked_devices
from arpc.errors import SerializationError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.connection import Connection
from arpc.wire.messages import Failure, Item, Message, Reply
from arpc.wire.values.device_staging import ACCELERATORS, AcceleratorBackend, DeviceBackend, Staged, Stager
from arpc.wire.values.layouts import Misplaced
from arpc.wire.values.packing import Slot

__all__ = ["PLACE", "DeviceStager", "Placement", "ResultPlacer", "find_backends"]

logger = get_logger("arpc.placement")

_CPU: Final = torch.device("cpu")
_ANSWERS: Final = frozenset((Reply, Item, Failure))
# Few are enough, because each waits for the driver most of the time
_THREADS: Final = 4

PLACE: Final = "place"
"""The key in the metadata of a request that asks for the places of tensors on the CPU, too."""

Dispatch = Callable[[Connection, list[Message]], None]


def find_backends() -> dict[str, DeviceBackend]:
    """Return the backends for the devices that this process can reach besides the CPU, by device type."""
    found: dict[str, DeviceBackend] = {type_: AcceleratorBackend(type_) for type_ in ACCELERATORS}
    return {type_: backend for type_, backend in found.items() if backend.count()}


class DeviceStager:
    """A `Stager` that copies the tensors of a message to host memory, and names the place where each belongs."""

    def __init__(
        self,
        backends: Mapping[str, DeviceBackend],
        place_of: Callable[[torch.device], str],
        *,
        moves_host_memory: bool,
    ) -> None:
        """``place_of`` returns the place to send for tensors of a device; an empty one stands for host memory."""
        self._backends = backends
        self._place_of = place_of
        self.moves_host_memory = moves_host_memory
        """Whether tensors on the CPU have a place, too."""

    def stage(self, tensor: Tensor) -> Staged | None:
        device = tensor.device
        if device == _CPU:
            return Staged(tensor.contiguous(), self._place_of(device), None) if self.moves_host_memory else None
        backend = self._backends.get(device.type)
        if backend is None:
            return None
        place = self._place_of(device)  # first, because it raises if there is none
        host, wait = backend.download(tensor)
        return Staged(host, place, wait)


class ResultPlacer(Interceptor):
    """The interceptor by which a caller asks for the places of *all* tensors of the reply, those on the CPU too.

    It does so if its inverted map has another place for these. The callee checks this when it replies, see
    `codec.Codec.stager_back`.
    """

    key = PLACE

    def __init__(self, back: Mapping[str, DeviceMap]) -> None:
        self.occasions: set[str] = {peer for peer, places in back.items() if places.get(_CPU, _CPU) != _CPU}

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> bytes | None:
        return b"" if peer.name in self.occasions else None


class Placement:
    """The device placement of one worker. Belongs to the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        options: RpcOptions,
        backends: Mapping[str, DeviceBackend],
    ) -> None:
        self._name = name
        self._backends = backends
        self._devices = checked_devices(options.devices)
        # copied, because the user may change the options later
        self._maps = {to: checked_device_map(to, mapping) for to, mapping in options.device_maps.items()}
        self._back = {to: {there: here for here, there in mapping.items()} for to, mapping in self._maps.items()}
        self.results = ResultPlacer(self._back)
        self.to_caller = DeviceStager(backends, str, moves_host_memory=False)
        """The stager for replies, which name the devices of their tensors: the caller maps these to its own."""
        self.all_to_caller = DeviceStager(backends, str, moves_host_memory=True)
        """The stager for replies to a caller that has asked about tensors on the CPU, too."""
        self._loop = loop
        self._pool: ThreadPool | None = None
        self.sent = 0
        self.placed = 0
        self.misplaced = 0

    @property
    def is_needed(self) -> bool:
        """Whether any tensor can be elsewhere than in host memory, here or on a peer."""
        return bool(self._backends or self._maps)

    @property
    def claims(self) -> DeviceClaims:
        """The devices and device maps that this worker reports to the group."""
        return DeviceClaims(
            {type_: backend.count() for type_, backend in self._backends.items()},
            tuple(map(str, self._devices)),
            {to: {str(here): str(there) for here, there in mapping.items()} for to, mapping in self._maps.items()},
        )

    @property
    def threads(self) -> ThreadPool:
        """The threads that wait for devices, created when they are first needed."""
        if self._pool is None:
            self._pool = ThreadPool(self._loop, _THREADS, f"{self._name}-devices")
        return self._pool

    def close(self) -> None:
        """End the threads; their results are not needed any more."""
        self.threads.close()  # created now if need be: a closed pool runs each later job in a new thread

    # -- out

    def stager(self, to: str) -> Stager:
        """Return the stager for calls to a worker."""
        mapping = self._map(to)
        return DeviceStager(
            self._backends,
            partial(self._place_there, to, mapping),
            moves_host_memory=mapping.get(_CPU, _CPU) != _CPU,
        )

    def _place_there(self, to: str, mapping: DeviceMap, device: torch.device) -> str:
        """Return the place of tensors of a device on a worker. Raises `SerializationError` if the map has none."""
        target = mapping.get(device)
        if target is None:
            raise SerializationError(
                f"worker {self._name!r} has a tensor on {device} for worker {to!r}, and no device map says where "
                f"it belongs there. Say so before init_rpc: options.set_device_map({to!r}, "
                f"{{{str(device)!r}: ...}}), or move it to the CPU"
            )
        return "" if target == _CPU else str(target)

    def _map(self, to: str) -> DeviceMap:
        mapping = self._maps.get(to)
        if mapping is None and to == self._name:
            # in calls to itself, tensors stay on their devices
            numbers = [(type_, n) for type_, backend in self._backends.items() for n in range(backend.count())]
            devices = [checked_device(f"{type_}:{n}", "devices") for type_, n in numbers]
            return {device: device for device in devices}
        return mapping or {}

    def when_filled(
        self, waits: Sequence[Callable[[], None]], then: Callable[[SerializationError | None], None]
    ) -> None:
        """Call ``then`` on the loop once copies from devices are done, or with the error that prevented one."""
        self.sent += len(waits)

        def job() -> Callable[[], None]:
            failure: SerializationError | None = None
            try:
                for wait in waits:
                    wait()
            except Exception as error:  # noqa: BLE001 - a driver may raise anything
                failure = SerializationError(f"a tensor could not be copied from its device: {error}")
                failure.__cause__ = error
            return partial(then, failure)

        self.threads.submit(job)

    # -- in

    def messages_received(self, dispatch: Dispatch, connection: Connection, messages: list[Message]) -> None:
        """Pass messages to ``dispatch``; those with tensors for devices only once these are there."""
        ready: list[Message] = []
        for message in messages:
            places = self._places(connection, message) if message.buffers else None
            if places:
                self._place(dispatch, connection, message, places)
            else:
                ready.append(message)
        if ready:
            dispatch(connection, ready)

    def _places(self, connection: Connection, message: Message) -> dict[int, torch.device | Misplaced]:
        """Return the place of each buffer of a message that does not stay in host memory, by number."""
        named = message.layout.placements if message.layout is not None else {}
        is_answer = type(message) in _ANSWERS
        return {
            number: self._result_place(connection.peer.name, name) if is_answer else self._argument_place(name)
            for number, name in named.items()
            if number < len(message.buffers)
        }

    def _argument_place(self, name: str) -> torch.device | Misplaced:
        try:
            device = torch.device(name)
        except RuntimeError:
            return Misplaced(f"a tensor came to worker {self._name!r} for {name!r}, which is no device")
        backend = self._backends.get(device.type)
        if backend is None or (device.index or 0) >= backend.count():
            return Misplaced(f"a tensor came to worker {self._name!r} for device {name}, which it does not have")
        return device

    def _result_place(self, peer: str, name: str) -> torch.device | Misplaced:
        if peer == self._name and peer not in self._back:
            return self._argument_place(name)
        for there, here in self._back.get(peer, {}).items():
            if str(there) == name:
                return here
        return Misplaced(
            f"worker {peer!r} answers with a tensor on its device {name}, and no device map of worker {self._name!r} "
            f"says where that belongs here. Say so before init_rpc: options.set_device_map({peer!r}, "
            f"{{...: {name!r}}}), or let the function move it to the CPU"
        )

    def _place(
        self, dispatch: Dispatch, connection: Connection, message: Message, places: dict[int, torch.device | Misplaced]
    ) -> None:
        buffers: list[Any] = list(message.buffers)

        def job() -> Callable[[], None]:
            for number, place in places.items():
                buffers[number] = self._uploaded(buffers[number], place)
            return arrived

        def arrived() -> None:
            for number in places:
                self._count(buffers[number])
            message.buffers = buffers
            # The connection may have been lost meanwhile, and then its calls have ended already
            if connection.is_open:
                try:
                    dispatch(connection, [message])
                except Exception as error:
                    logger.exception("an internal error on the connection to %s closes it", connection.address)
                    connection.abort(error)

        self.threads.submit(job)

    def _uploaded(self, memory: memoryview, place: torch.device | Misplaced) -> Tensor | Misplaced:
        """Return a buffer as a tensor on its device, or `Misplaced` if that fails. Called in a thread."""
        if isinstance(place, Misplaced):
            return place
        if place == _CPU:
            return torch.frombuffer(memory, dtype=torch.uint8)
        try:
            return self._backends[place.type].upload(memory, place)
        except Exception as error:  # noqa: BLE001 - no memory on the device, or any other error of its driver
            return Misplaced(f"worker {self._name!r} cannot take a tensor to {place}: {error}")

    def _count(self, buffer: Tensor | Misplaced) -> None:
        if isinstance(buffer, Misplaced):
            self.misplaced += 1
            return
        self.placed += 1
        if buffer.device != _CPU:
            self._backends[buffer.device.type].adopt(buffer)

    def statistics(self) -> dict[str, int]:
        return {"tensors_sent": self.sent, "tensors_placed": self.placed, "tensors_misplaced": self.misplaced}
