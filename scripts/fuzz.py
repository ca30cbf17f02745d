"""Feeds arpc bytes that no benign peer would send: ``make fuzz``. Most are found by coverage (atheris).

Each target is a process of its own, seeded with messages of real workers. A target fails if it raises an error that is
not among those it may raise, if it takes more than ten seconds or 4 GB of memory, or if it crashes; the restricted
unpickler also fails if a pickle causes a forbidden action: a file is opened, a module imported, code compiled, a
process started. Findings are in ``build/fuzz``, and so are the inputs that reached new code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "fuzz"
RUNS: Final = 1_000_000
MAX_BYTES: Final = 4096
# audit events that a pickle must not cause; see `sys.addaudithook`
FORBIDDEN: Final = re.compile(
    r"open|import|exec|compile|os\.|subprocess\.|socket\.|ctypes\.|shutil\.|code\.|marshal\.|pty\.|cpython\.run|sys\."
)


@dataclass(frozen=True)
class Target:
    """One target of the fuzzer: the function that makes it, and its first inputs."""

    about: str
    make: Callable[[], Callable[[bytes], None]]
    seeds: Callable[[], Iterable[bytes]]


# -- frames: an open connection receives any bytes


def make_frames() -> Callable[[bytes], None]:
    """Return the receiving half of an open connection, which takes its input in pieces."""
    from arpc.errors import ProtocolError, SerializationError
    from arpc.wire.frames import Limits
    from arpc.wire.metadata import decode_metadata

    limits = Limits(1 << 16, 1 << 20, 1 << 14)
    open_protocol = opened_protocol()

    def feed(data: bytes) -> None:
        protocol = open_protocol(limits)
        step = 1 + (data[0] if data else 0) * 8
        try:
            for message in received(protocol, data[1:], step):
                _ = message.meta, message.body, message.size_bytes
                if message.layout is not None:
                    with contextlib.suppress(ProtocolError, SerializationError):
                        message.layout.build(message.memory, message.buffers)
                if message.meta:
                    decode_metadata(message.meta)
        except ProtocolError:
            pass
        protocol.close()

    return feed


def opened_protocol() -> Callable[[Any], Any]:
    """Return a function that makes an open connection from its limits."""
    from arpc.wire import protocol as wire

    handshake = finished_handshake()
    # so small that inputs of the fuzzer do not fit, and frames are read in every way
    wire.RECEIVE_BYTES = 512  # type: ignore[misc]

    def allocate(size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def open_protocol(limits: Any) -> Any:
        protocol = wire.Protocol(handshake, limits, allocate)
        protocol._open()  # noqa: SLF001 - as the end of the handshake does
        return protocol

    return open_protocol


def finished_handshake() -> Any:
    """Return the acceptor's side of a successful handshake."""
    from arpc.wire.frames import Limits
    from arpc.wire.handshake import Handshake, Identity, Role
    from arpc.wire.protocol import Protocol

    handshake = Handshake(Role.ACCEPTOR, Identity("far", 2, 2), None)
    near = Protocol(Handshake(Role.CONNECTOR, Identity("near", 1, 1), None), Limits(1, 1))
    far = Protocol(handshake, Limits(1, 1))
    for sender, receiver in ((near, far), (far, near), (near, far)):
        deliver(receiver, sender.take_output())
    assert handshake.done
    return handshake


def deliver(protocol: Any, data: bytes) -> list[Any]:
    """Put bytes into the buffers of a protocol; return the messages in them."""
    messages: list[Any] = []
    while data:
        target = protocol.get_buffer(-1)
        size = min(len(data), target.nbytes)
        target[:size] = data[:size]
        data = data[size:]
        messages += protocol.receive(size)
    return messages


def received(protocol: Any, data: bytes, step: int) -> list[Any]:
    """Return the messages that a protocol reads from data which arrive in pieces of ``step`` bytes."""
    messages: list[Any] = []
    for start in range(0, len(data), step):
        messages += deliver(protocol, data[start : start + step])
    return messages


def frame_seeds() -> Iterable[bytes]:
    """Yield messages as workers send them."""
    import torch

    from arpc.wire.frames import frame
    from arpc.wire.messages import MessageType
    from arpc.wire.metadata import encode_metadata
    from arpc.wire.values.schemas import Packer

    meta = encode_metadata({"window": b"four"})
    for type_ in MessageType:
        yield b"\xff" + frame(type_, 0, 1, 2, 3, b"pickle", meta)
    for tensors in ([torch.ones(3)], [torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(1)], [torch.ones(5)[::2]]):
        packed = Packer(1 << 12).pack(tensors)
        assert packed.schema is not None
        table = packed.schema.table
        announcement = frame(MessageType.SCHEMA, 0, 0, 1, 0, table)
        by_number = frame(MessageType.REQUEST, 0, 1, 1, 0, b"pickle", meta, 1, packed.inline)
        yield b"\xff" + announcement + by_number + by_number
        yield b"\x03" + frame(MessageType.REPLY, 0, 1, 0, 0, b"pickle", b"", table, packed.inline)
    bulk = frame(MessageType.REQUEST, 0, 1, 1, 0, b"pay", meta, buffer_sizes=(8, 4))
    data = struct.pack("<IBBHQIIII", 8, MessageType.DATA, 0, 0, 0, 0, 0, 0, 0) + bytes(8)
    yield b"\x04" + bulk + data + data
    yield (
        b"\xff" + bulk + frame(MessageType.DROP_DATA, 0, 0, 0, 0, b"") + frame(MessageType.GOODBYE, 0, 0, 0, 0, b"bye")
    )


# -- the handshake: both sides, with and without a secret


def make_handshake() -> Callable[[bytes], None]:
    """Return a target that feeds bytes of a stranger to both roles. Without the secret no handshake may succeed."""
    from arpc.errors import HandshakeError, ProtocolError
    from arpc.wire.frames import Limits
    from arpc.wire.handshake import Handshake, Identity, Role
    from arpc.wire.protocol import Protocol

    me = Identity("me", 1, 1)

    def feed(data: bytes) -> None:
        for role in Role:
            protocol = Protocol(Handshake(role, me, b"secret"), Limits(1 << 16, 1 << 20))
            try:
                messages = deliver(protocol, data)
            except (ProtocolError, HandshakeError):
                continue
            finally:
                assert protocol.peer is None, "a stranger came in"
            assert not messages

    return feed


def handshake_seeds() -> Iterable[bytes]:
    """Yield all four messages of a handshake, with and without a secret."""
    from arpc.errors import HandshakeError
    from arpc.wire.frames import Limits
    from arpc.wire.handshake import Handshake, Identity, Role
    from arpc.wire.protocol import Protocol

    for secret in (None, b"secret", b"another"):
        near = Protocol(Handshake(Role.CONNECTOR, Identity("near", 1, 1, features=("shm",)), secret), Limits(1, 1))
        far = Protocol(Handshake(Role.ACCEPTOR, Identity("far", 2, 2), secret), Limits(1, 1))
        said = [near.take_output()]
        try:
            for receiver in (far, near, far):
                deliver(receiver, said[-1])
                said.append(receiver.take_output())
        except HandshakeError:
            pass
        yield from said
        yield said[0] + said[2]


# -- tensors


def make_tensors() -> Callable[[bytes], None]:
    """Return a target that reads layouts of tensors that a peer announces, and messages that refer to them."""
    import torch

    from arpc.errors import ProtocolError, SerializationError
    from arpc.wire.values.layouts import read_layout

    def touch(value: Any) -> None:
        # a tensor that reaches beyond its memory shows here, or crashes
        if isinstance(value, torch.Tensor) and not value.is_meta and 0 < value.numel() < 1 << 16:
            with contextlib.suppress(RuntimeError):  # not all operators exist for all dtypes
                (value.to_dense() if value.layout is not torch.strided else value).clone()

    def feed(data: bytes) -> None:
        if len(data) < 3:
            return
        try:
            split = 2 + data[1]
            table, rest = data[2:split], data[split:]
            buffers = [memoryview(bytearray(64)), memoryview(bytearray(16))]
            layout = read_layout(table, is_restricted=bool(data[0] & 2))
            for _ in range(2):  # a layout is read once, and used for many messages
                for slot in layout.build(bytearray(rest), buffers):
                    touch(slot)
        except (ProtocolError, SerializationError):
            pass

    return feed


def tensor_seeds() -> Iterable[bytes]:
    """Yield packed tensors of all kinds."""
    import torch

    from arpc.wire.values.schemas import Packer

    base = torch.arange(12.0)
    slots: list[list[Any]] = [
        [torch.ones(3)],
        [torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)],
        [base[2:6], base[4:8]],
        [base.view(3, 4).t()],
        [torch.ones(1).expand(5)],
        [torch.eye(3).to_sparse()],
        [torch.eye(3).to_sparse_csr()],
        [torch.ones(2, dtype=torch.complex64).conj()],
        [torch.empty(3, device="meta")],
        [torch.ones(16), torch.zeros(0), torch.tensor(1)],
        [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)],
    ]
    for each in slots:
        packed = Packer(1 << 12).pack(each)
        assert packed.schema is not None
        table = packed.schema.table
        if len(table) < 256:
            yield bytes([0, len(table)]) + table + b"".join(packed.inline)


# -- pickles


def make_pickles() -> Callable[[bytes], None]:
    """Return a target for both variants of the restricted unpickler, and for the names of functions."""
    import torch

    from arpc.wire.values import restricted
    from arpc.wire.values.allowlist import callable_named

    forbidden: list[str] = []
    is_watching = False

    def watch(event: str, _: tuple[Any, ...]) -> None:
        if is_watching and not forbidden and FORBIDDEN.match(event):
            frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(limit=8)]
            forbidden.append("\n".join((event, *frames)))

    sys.addaudithook(watch)

    def permit(_: tuple[str, str]) -> None:
        """Permit everything that is exported."""

    def attempt(read: Callable[[], Any]) -> None:
        nonlocal is_watching
        is_watching = True
        # the kind of error does not matter, since the caller gets it; forbidden actions do
        with contextlib.suppress(Exception):
            read()
        is_watching = False
        if forbidden:
            raise AssertionError(f"a pickle caused {forbidden[0]}")

    slots = [torch.ones(2), memoryview(bytearray(16))]

    def feed(data: bytes) -> None:
        attempt(lambda: restricted.restricted_loads(data, slots, permit))
        attempt(lambda: restricted._CarefulUnpickler(io.BytesIO(data), slots, permit).load())  # noqa: SLF001
        if len(data) < 100:
            attempt(lambda: callable_named(restricted.read_name(data)))

    # imports on the way to the first error of each kind are not caused by the pickle
    for seed in pickle_seeds():
        with contextlib.suppress(Exception):
            restricted.restricted_loads(seed, [torch.ones(2)], permit)
    return feed


def pickle_seeds() -> Iterable[bytes]:
    """Yield pickles that may be sent, and pickles that are attacks."""
    import builtins
    import collections
    import datetime as dt
    import functools
    import os
    import pickle

    import cloudpickle
    import numpy as np
    import torch

    import arpc
    from arpc.wire.values.pickler import Pickler

    for value in (
        (1, 2.5, "text", b"bytes", None, True, 1 << 80),
        {"a": [1, {2}, frozenset({3})], "b": bytearray(b"x")},
        (torch.ones(1), [torch.nn.Parameter(torch.ones(1))]),
        (torch.float32, torch.Size([1]), torch.device("cpu"), torch.strided, 1j, range(3), slice(1)),
        (np.ones(3), np.ones((2, 2))[:, ::2], np.float32(1)),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("ab"),
        collections.deque([1], 3),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        ValueError("x"),
        ExceptionGroup("x", [KeyError(1)]),
        arpc.WorkerLostError("x", "y"),
        arpc.WorkerInfo("a", 1),
        functools.partial(print, 1),
        os.system,
        builtins.eval,
    ):
        yield Pickler().dumps(value)[0]
    yield pickle.dumps([1, "a", {2: (3,)}], protocol=2)
    yield cloudpickle.dumps(lambda: None, protocol=5)
    yield b"\x80\x05\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."
    yield b"\x80\x05\x8c\x13arpc.wire.reducing\x8c\x05_fill\x93N}\x8c\x05_call\x4e\x73\x86b."
    yield b"cbuiltins\neval\n(S'1'\ntR."


TARGETS: Final = {
    "frames": Target("an open connection", make_frames, frame_seeds),
    "handshake": Target("the handshake, both sides", make_handshake, handshake_seeds),
    "tensors": Target("layouts of tensors", make_tensors, tensor_seeds),
    "pickles": Target("the restricted unpickler", make_pickles, pickle_seeds),
}
PROGRAMS: Final = {"metadata": "scripts.metadata"}
"""Targets with a program of their own: random changes of bytes would seldom falsify a single field."""
NAMES: Final = (*TARGETS, *PROGRAMS)


def fuzz_here(name: str, runs: int, seed: int) -> None:
    """Fuzz one target in this process, which exits at the end."""
    import atheris

    with atheris.instrument_imports(include=["arpc.wire", "pickle"]):
        import arpc.wire.protocol
        import arpc.wire.values.layouts
        import arpc.wire.values.restricted  # noqa: F401 - to be instrumented
    target = TARGETS[name]
    corpus = BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    feed = target.make()

    def feed_and_keep(data: bytes) -> None:
        try:
            feed(data)
        except BaseException:
            (BUILD / f"{name}-found").write_bytes(data)
            raise

    atheris.Setup(
        [
            name,
            str(corpus),
            f"-artifact_prefix={BUILD / name}-",
            f"-runs={runs}",
            f"-seed={seed}",
            f"-max_len={MAX_BYTES}",
            "-timeout=10",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            "-verbosity=1",
        ],
        feed_and_keep,
    )
    atheris.Fuzz()


def main() -> int:
    """Fuzz the requested targets, one after the other, and print a table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"any of {', '.join(NAMES)}; all of them if none is given")
    parser.add_argument("--runs", type=int, default=RUNS, help="inputs for each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="to repeat a run; 0 takes another one each time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.targets) - set(NAMES)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    seed = options.seed or time.time_ns() % (1 << 31)
    if options.here:
        fuzz_here(options.targets[0], options.runs, seed)
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}\n{'target':<12}{'inputs':>12}{'seconds':>10}{'inputs/s':>10}{'peak MB':>9}  result", flush=True)
    worst = 0
    for name in options.targets or NAMES:
        worst = max(worst, run_apart(name, options.runs, seed))
    return worst


def run_apart(name: str, runs: int, seed: int) -> int:
    """Fuzz one target in a process of its own; return 0 if nothing was found."""
    program = ["-m", PROGRAMS[name], "--found", str(BUILD)] if name in PROGRAMS else [__file__, name, "--here"]
    command = [sys.executable, *program, "--runs", str(runs), "--seed", str(seed)]
    log = BUILD / f"{name}.log"
    begin = time.monotonic()
    with log.open("wb") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - begin
    text = log.read_text(errors="replace")
    done = int(stat_of(text, "number_of_executed_units"))
    result = "nothing found" if status == 0 else f"FAILED, see {log}"
    peak = stat_of(text, "peak_rss_mb")
    print(f"{name:<12}{done:>12,}{seconds:>10.0f}{done / seconds:>10,.0f}{peak:>9}  {result}", flush=True)
    return 1 if status else 0


def stat_of(text: str, name: str) -> str:
    """Return a figure that the fuzzer prints at its end."""
    found = re.search(rf"stat::{name}:\s*(\d+)", text)
    return found.group(1) if found else "0"


if __name__ == "__main__":
    sys.exit(main())
