"""The options of a worker, with all their defaults and ``ARPC_*`` variables in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Self, cast

from arpc.devices import DeviceLike, DeviceMap, checked_device_map, checked_devices, merged_device_map
from arpc.errors import ConfigurationError
from arpc.tls import TLS

__all__ = ["UNSET", "RpcOptions", "Unset", "split_host_port"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_MAX_BUSY_POLL_S: Final = 0.01


class Unset:
    """The type of `UNSET`."""

    _instance: Unset | None = None

    def __new__(cls) -> Unset:  # noqa: PYI034 - a singleton
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()
"""A timeout that was not given: `RpcOptions.rpc_timeout` applies, up to the deadline of the calling handler."""


def _env(name: str) -> str | None:
    return os.environ.get(name) or None


def _env_float(name: str, default: float) -> float:
    text = _env(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"environment variable {name} must be a number, not {text!r}") from None


def _env_int(name: str, default: int) -> int:
    text = _env(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"environment variable {name} must be a whole number, not {text!r}") from None


def _env_flag(name: str) -> bool:
    text = (_env(name) or "").lower()
    if text in {"", "0", "false", "no", "off"}:
        return False
    if text in {"1", "true", "yes", "on"}:
        return True
    raise ConfigurationError(f"environment variable {name} must be 1 or 0, not {text!r}")


def split_host_port(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or of ``[host]:port`` for IPv6. Raises `ConfigurationError`.

    >>> split_host_port("[::1]:27720")
    ('::1', 27720)
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{address!r} is not an address like 127.0.0.1:27720 or [::1]:27720")
    return host, int(port)


def _env_listen() -> tuple[str, ...]:
    text = _env("ARPC_LISTEN")
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _env_secret() -> bytes | None:
    text = _env("ARPC_SECRET")
    if text is not None:
        return text.encode()
    path = _env("ARPC_SECRET_FILE")
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"ARPC_SECRET_FILE={path}: {error.strerror or error}") from error
    if not secret:
        raise ConfigurationError(f"ARPC_SECRET_FILE={path} is empty")
    return secret


def _env_tls() -> TLS | None:
    cert, key, ca = _env("ARPC_TLS_CERT"), _env("ARPC_TLS_KEY"), _env("ARPC_TLS_CA")
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigurationError("TLS takes all of ARPC_TLS_CERT, ARPC_TLS_KEY and ARPC_TLS_CA, and one is not set")
    return TLS(cert=cert, key=key, ca=ca)


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcOptions:
    """The options of a worker. `replace` makes a changed copy; only `set_device_map` changes the object itself.

    >>> RpcOptions(rpc_timeout=5).rpc_timeout
    5
    """

    rpc_timeout: float = field(default_factory=lambda: _env_float("ARPC_TIMEOUT", 60.0))
    """Seconds that a call without a ``timeout`` may take; 0 means no limit. ``ARPC_TIMEOUT``"""

    timeouts_travel: bool = True
    """Whether the deadline of a call is sent to the callee, which then cancels a handler that passes it, and the calls
    that the handler has made. With False only the caller stops waiting, and the function runs to its end, as in
    torch.distributed.rpc."""

    init_timeout: float = field(default_factory=lambda: _env_float("ARPC_INIT_TIMEOUT", 60.0))
    """Seconds to wait for the whole group at the start. ``ARPC_INIT_TIMEOUT``"""

    num_worker_threads: int = 16
    """Threads that run plain ``def`` functions. They are started when first needed."""

    listen: tuple[str, ...] = field(default_factory=_env_listen)
    """Addresses to listen on, such as ``("unix://", "tcp://0.0.0.0:0")``. Empty: a unix socket; with a secret or TLS
    also TCP, on loopback or, if the group's store is on another host, on the interface that reaches it.
    ``ARPC_LISTEN``, separated by commas"""

    secret: bytes | None = field(default_factory=_env_secret, repr=False)
    """The secret of the group: workers prove to each other that they know it when they connect. ``ARPC_SECRET`` or
    ``ARPC_SECRET_FILE``"""

    tls: TLS | None = field(default_factory=_env_tls)
    """Certificates: all TCP connections are encrypted, and both sides authenticated, with them.
    ``ARPC_TLS_CERT``, ``ARPC_TLS_KEY`` and ``ARPC_TLS_CA``"""

    insecure: bool = False
    """Allow listening beyond this host with neither a secret nor TLS. Any process that reaches the port can run code
    on this worker."""

    allow: str | None = None
    """``"exported"`` is allow-list mode: peers may call what is marked with `arpc.export` and send data, tensors and
    instances of classes registered with `arpc.register_type`, and nothing else; no code is sent. Set it on all workers
    alike."""

    roles: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    """Permissions in allow-list mode: for each pattern of worker names, the patterns of functions
    (``"shop.orders.*"``) and messages (``"arpc:*"``, for RRefs and gradients) that these workers may call. Empty: every
    worker may call all of them."""

    max_connections: int = 16_384
    """Connections that peers may have to this worker at once."""

    max_strangers: int = 1024
    """Connections that may be in their handshake at once; beyond that, the oldest of them is closed."""

    handshake_timeout: float = 10.0
    """Seconds within which a peer that has connected must complete the handshake."""

    connect_timeout: float = 10.0
    """Seconds for one attempt to connect, handshake included."""

    heartbeat_interval: float = field(default_factory=lambda: _env_float("ARPC_HEARTBEAT", 2.0))
    """Seconds of silence from a peer after which this worker sends it a ping; 0 turns heartbeats off.
    ``ARPC_HEARTBEAT``"""

    heartbeat_timeout: float = 10.0
    """Seconds of silence from a peer after which it counts as lost."""

    shutdown_timeout: float = 0.0
    """Seconds that a graceful shutdown without a ``timeout`` waits for the group; 0 means no limit."""

    window_bytes: int = 64 * MIB
    """Bytes of requests to one peer that may await a reply; further ones wait on this worker. One is always sent."""

    max_handlers_per_peer: int = 16_384
    """Requests of one peer that may run at once; further ones wait, not yet unpickled."""

    max_requests_waiting: int = 131_072
    """Requests of one peer that may wait to run; further ones are refused, and these calls of the peer raise
    `OverloadedError`."""

    max_calls_in_flight: int = 0
    """Calls to one peer that may await a reply; further ones wait on this worker, and cost the peer nothing if they are
    given up. It bounds how long a call waits on an overloaded peer. 0: as many as `window_bytes` allow."""

    max_calls_waiting: int = 1_048_576
    """Calls to one peer that may wait on this worker to be sent; further ones raise `OverloadedError` at once."""

    max_header_bytes: int = 32 * MIB
    """The most metadata of a message that is accepted. Features such as autograd add metadata to messages."""

    max_body_bytes: int = 1 * GIB
    """The largest message that is accepted, without its large tensors: pickle, small tensors, the description of its
    tensors, and metadata."""

    max_message_bytes: int = 64 * GIB
    """The largest total size of the large tensors of one message that is accepted."""

    inline_tensor_bytes: int = 8 * KIB
    """Tensors up to this size are part of the message; larger ones are sent from, and read into, their own memory."""

    shared_memory_bytes: int = field(default_factory=lambda: _env_int("ARPC_SHARED_MEMORY_BYTES", 4 * GIB))
    """Memory that this worker may share with other workers of its host to send them large tensors; 0 turns this off.
    ``ARPC_SHARED_MEMORY_BYTES``"""

    shared_memory_from_bytes: int = field(default_factory=lambda: _env_int("ARPC_SHARED_MEMORY_FROM_BYTES", 256 * KIB))
    """Messages with at least this many bytes of tensors that are not inline go through shared memory.
    ``ARPC_SHARED_MEMORY_FROM_BYTES``"""

    device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] = field(default_factory=dict, hash=False)
    """For each other worker, by name, a map from this worker's devices to that worker's; see `set_device_map`."""

    devices: Sequence[DeviceLike] = ()
    """Devices of this worker, besides the CPU, that device maps of this worker and its peers may name. Empty: all."""

    bulk_connections: int = 0
    """Additional TCP connections to a peer on another host, over which large tensors are sent in parallel. 0: they
    share the one connection with all other messages. The option of the connecting side applies. Useful where a single
    connection does not fill the network link, because of latency or because one CPU is the limit."""

    control_retries: int = 5
    """How often a lost control message is retried. The first delay is `control_backoff`, each further one 1.5 times
    longer."""

    control_backoff: float = 1.0

    rref_grace: float = 5.0
    """Seconds within which a disconnected worker can reconnect, before the RRefs that it holds are released and its own
    values count as lost. There is no grace for a worker that is known to be dead."""

    rref_creation_stacks: bool = False
    """Record where each RRef was created, for `Worker.rrefs` and the report of leaks. Costs some microseconds each."""

    metrics: bool = field(default_factory=lambda: _env_flag("ARPC_METRICS"))
    """Collect metrics from the start. Otherwise a worker collects them only while a dashboard, a scraper or `arpc top`
    reads them.
    ``ARPC_METRICS``"""

    http: str = field(default_factory=lambda: _env("ARPC_HTTP") or "")
    """The address at which this worker serves the dashboard, ``/metrics`` and the API of the whole group, such as
    ``"127.0.0.1:27720"``; port 0 lets the system choose, see `Worker.http_address`. Beyond loopback a secret is
    required. Empty: not served. ``ARPC_HTTP``"""

    busy_poll: float = field(default_factory=lambda: _env_float("ARPC_BUSY_POLL", 0.0004))
    """Seconds for which the loop busy-polls after a message has arrived, since the next one is likely to follow: waking
    up a CPU takes longer than replying. Polling gives way to other programs, stops while worker threads are busy, and
    becomes rare where it finds nothing. 0: the loop sleeps at once, which is slower and uses less CPU.
    ``ARPC_BUSY_POLL``"""

    switch_interval: float | None = None
    """`sys.setswitchinterval` for this process: how long a thread busy in Python may keep the loop waiting."""

    gc_freeze: bool = True
    """Call `gc.freeze` before the first worker of the process is built, so that collections skip the objects that torch
    loaded (45 ms each otherwise). Reference cycles that existed before are freed only after the shutdown."""

    gc_backoff: int = 16
    """How many times rarer than `gc.set_threshold` sets them Python's garbage collections may become, as long as they
    find nothing: thousands of calls in flight are many objects and no garbage. The first collection that finds garbage
    restores the usual threshold, and so does the worker's shutdown. 1: no change."""

    def __post_init__(self) -> None:
        for name in (
            "rpc_timeout",
            "init_timeout",
            "connect_timeout",
            "handshake_timeout",
            "heartbeat_interval",
            "heartbeat_timeout",
            "shutdown_timeout",
            "control_backoff",
            "rref_grace",
            "busy_poll",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigurationError(f"{name} must be a number of seconds, not {type(value).__name__}")
            if not value >= 0:
                raise ConfigurationError(f"{name} must be 0 or more, not {value!r}")
        self._check_seconds()
        for name in ("connect_timeout", "handshake_timeout"):
            if not getattr(self, name):
                raise ConfigurationError(f"{name} must be more than 0")
        for name, least in (
            ("num_worker_threads", 1),
            ("max_connections", 1),
            ("max_strangers", 1),
            ("window_bytes", 1),
            ("max_handlers_per_peer", 1),
            ("max_requests_waiting", 0),
            ("max_calls_in_flight", 0),
            ("max_calls_waiting", 0),
            ("max_header_bytes", 1),
            ("max_body_bytes", 1),
            ("max_message_bytes", 1),
            ("inline_tensor_bytes", 0),
            ("shared_memory_bytes", 0),
            ("shared_memory_from_bytes", 1),
            ("bulk_connections", 0),
            ("control_retries", 0),
            ("gc_backoff", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} must be a whole number, {least} or more, not {value!r}")
        if self.max_body_bytes >= 4 * GIB:
            raise ConfigurationError(f"max_body_bytes must be less than 4 GiB, not {self.max_body_bytes}")
        if isinstance(self.listen, str):
            raise ConfigurationError(f"listen must be a tuple of addresses, not the string {self.listen!r}")
        if not isinstance(self.http, str):
            raise ConfigurationError(f"http must be an address such as '127.0.0.1:27720', not {self.http!r}")
        if self.http:
            split_host_port(self.http)
        if self.secret is not None and not isinstance(self.secret, bytes):
            raise ConfigurationError(f"secret must be bytes, not {type(self.secret).__name__}")
        if self.secret == b"":
            raise ConfigurationError("secret must not be empty")
        self._check_roles()
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise ConfigurationError(f"tls must be an arpc.TLS, not {type(self.tls).__name__}")

        # copy the user's objects: they may change later, and may name the same device in different ways
        maps = {to: checked_device_map(to, mapping) for to, mapping in self.device_maps.items()}
        object.__setattr__(self, "device_maps", maps)
        object.__setattr__(self, "devices", checked_devices(self.devices))

    def _check_seconds(self) -> None:
        if self.busy_poll > _MAX_BUSY_POLL_S:
            raise ConfigurationError(
                f"busy_poll must be at most {_MAX_BUSY_POLL_S} s, not {self.busy_poll!r}: "
                f"no CPU takes that long to wake up"
            )
        if self.heartbeat_interval and self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigurationError(
                f"heartbeat_timeout ({self.heartbeat_timeout}) must be longer than "
                f"heartbeat_interval ({self.heartbeat_interval})"
            )

    def _check_roles(self) -> None:
        if self.allow not in {None, "exported"}:
            raise ConfigurationError(f"allow must be None or 'exported', not {self.allow!r}")
        if self.roles and self.allow is None:
            raise ConfigurationError(
                "roles need allow-list mode, since a peer that may send any pickle may run any code: "
                "set allow='exported'"
            )
        for peer, allowed in self.roles.items():
            if isinstance(allowed, str):
                raise ConfigurationError(f"roles[{peer!r}] must be a list of patterns, not the string {allowed!r}")
        object.__setattr__(self, "roles", {peer: tuple(allowed) for peer, allowed in self.roles.items()})

    @property
    def is_guarded(self) -> bool:
        """Whether peers that connect from other hosts must authenticate themselves."""
        return self.secret is not None or self.tls is not None

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> Self:
        """Map devices of this worker to devices of worker ``to``. Adds to the map that was set before.

        The map places arguments, and its inverse places results, so it must be one to one, else `ConfigurationError` is
        raised. Has no effect on a worker that was started already. Returns the options, so that calls can be chained.

        >>> options = RpcOptions().set_device_map("trainer", {"cuda:0": "cuda:1"})
        >>> {str(here): str(there) for here, there in options.device_maps["trainer"].items()}
        {'cuda:0': 'cuda:1'}
        """
        known = cast("dict[str, DeviceMap]", self.device_maps)
        known[to] = merged_device_map(to, known.get(to, {}), device_map)
        return self

    def replace(self, **changes: object) -> Self:
        """Return a copy with some options changed. Raises `ConfigurationError` for an unknown name or a bad value."""
        values: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        unknown = changes.keys() - values.keys()
        if unknown:
            raise ConfigurationError(f"no such option: {', '.join(sorted(unknown))}")
        return type(self)(**(values | changes))  # type: ignore[arg-type]

    def describe(self) -> Mapping[str, object]:
        """Return every option and its value, except the secret."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "secret"}
