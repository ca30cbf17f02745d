"""The start of a connection: both sides identify, agree on a version, and prove that they belong to the group.

::

    connector                                acceptor
        HELLO      identity, nonce     ->
                                       <-    CHALLENGE  identity, nonce, proof
        PROOF      proof               ->
                                       <-    WELCOME
        either: REFUSE with a reason, instead of its next message

A proof is an HMAC-SHA256 under the group secret over both identities, both nonces, the versions and the role of the
prover. So it cannot be replayed (nonces), reflected (role), moved to another worker (identity) or used to downgrade
both sides to an older version. It covers the identities byte for byte as they were sent, and so also fields that the
other side does not know. Without a secret, proofs are empty. On a connection with TLS, the name in an identity must be
one that the sender's certificate is for.

Nothing is unpickled here: bodies are msgpack of a known shape and a limited size.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Container, Mapping
from enum import Enum, auto
from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, Raw

from arpc.errors import AuthenticationError, ConfigurationError, HandshakeError, ProtocolError
from arpc.wire.frames import frame
from arpc.wire.messages import Message, MessageType, Refusal

__all__ = ["MAX_HANDSHAKE_BYTES", "OLDEST_VERSION", "PROTOCOL_VERSION", "Handshake", "Identity", "Refused", "Role"]

PROTOCOL_VERSION: Final = 2
"""The version of the wire format. 1 (arpc 0.1.0): tables of tensors in every message, payloads of several kinds."""
OLDEST_VERSION: Final = 2
"""The oldest version that is still supported. The messages of the handshake itself are the same in all versions."""
MAX_HANDSHAKE_BYTES: Final = 4096
_MAX_IDENTITY_BYTES: Final = 2048
_MAX_REASON_BYTES: Final = 1024
_MAGIC: Final = "arpc"
_NONCE_BYTES: Final = 32

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


class Role(Enum):
    """The end of a connection that a worker is on. The names are part of the proofs."""

    CONNECTOR = auto()
    ACCEPTOR = auto()


class Identity(msgspec.Struct, frozen=True):
    """The identity that a worker sends. ``incarnation`` tells a restarted worker from its predecessor of that name."""

    name: str
    id: Annotated[int, Meta(ge=0, lt=1 << 16)]
    incarnation: int
    main: str = ""
    """A hash of the worker's script: workers with equal hashes share the functions of ``__main__``."""
    features: tuple[str, ...] = ()


class Refused(HandshakeError):  # noqa: N818 - names the event, on either side
    """A connection that was refused, with the reason that is sent to the other side."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _Hello(msgspec.Struct, array_like=True):
    magic: str
    oldest_version: int
    identity: Raw
    nonce: bytes


class _Challenge(msgspec.Struct, array_like=True):
    identity: Raw
    nonce: bytes
    proof: bytes


class _State(Enum):
    START = auto()
    AWAIT_HELLO = auto()
    AWAIT_CHALLENGE = auto()
    AWAIT_PROOF = auto()
    AWAIT_WELCOME = auto()
    DONE = auto()
    FAILED = auto()


class Handshake:
    """One side of the handshake. `start` and `receive` return bytes to send.

    ``admit`` is called with the identity of a peer whose proof is valid, and raises `Refused` to reject it.
    """

    def __init__(
        self,
        role: Role,
        me: Identity,
        secret: bytes | None,
        admit: Callable[[Identity], None] = lambda _: None,
    ) -> None:
        self.role = role
        self.version = PROTOCOL_VERSION
        self._me = me
        self._my_bytes = _encode(me)
        if len(self._my_bytes) > _MAX_IDENTITY_BYTES:
            raise ConfigurationError(
                f"the name and features of worker {me.name[:50]!r} take {len(self._my_bytes)} bytes; "
                f"{_MAX_IDENTITY_BYTES} are allowed"
            )
        self._my_nonce = secrets.token_bytes(_NONCE_BYTES)
        self._secret = secret
        self._admit = admit
        # sent by the peer: untrusted until its proof is verified
        self._claimed: Identity | None = None
        self._their_bytes = b""
        self._their_nonce = b""
        self._offered = (PROTOCOL_VERSION, OLDEST_VERSION)
        self._refused_by_peer = False
        self._certified: Container[str] | None = None
        self._state = _State.AWAIT_HELLO if role is Role.ACCEPTOR else _State.START

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def peer(self) -> Identity | None:
        """The identity of the peer; None before the end of the handshake."""
        return self._claimed if self._state is _State.DONE else None

    def certify(self, names: Container[str]) -> None:
        """Record the names in the peer's certificate: the peer must identify itself by one of them."""
        self._certified = names

    def start(self) -> bytes:
        """Return the connector's first message. Raises `ProtocolError` if it was sent, or if this is the acceptor."""
        if self._state is not _State.START:
            raise ProtocolError(f"a handshake that is at {self._state.name} cannot start")
        self._state = _State.AWAIT_CHALLENGE
        body = _encode(_Hello(_MAGIC, OLDEST_VERSION, Raw(self._my_bytes), self._my_nonce))
        return _frame(MessageType.HELLO, body, PROTOCOL_VERSION)

    def receive(self, message: Message) -> bytes:
        """Handle the peer's next message.

        Raises `HandshakeError` (send what `farewell` returns, then close) or `ProtocolError` (close).
        """
        state, self._state = self._state, _State.FAILED  # unless the step succeeds
        step = self._STEPS.get((state, message.type))
        if step is None:
            raise ProtocolError(f"{message.type.name} is out of place in a handshake that is at {state.name}")
        if message.memory:
            raise ProtocolError(f"a {message.type.name} with parts it cannot have")
        return step(self, message)

    def farewell(self, error: HandshakeError) -> bytes:
        """Return the message for a peer that is refused because of this error; no bytes if the peer refused first."""
        if self._refused_by_peer:
            return b""
        if isinstance(error, Refused):
            return _frame(MessageType.REFUSE, str(error).encode()[:_MAX_REASON_BYTES], error.kind)
        # the details are for this worker's log, not for an unauthenticated peer
        return _frame(MessageType.REFUSE, b"authentication failed", Refusal.AUTHENTICATION)

    # -- steps

    def _on_hello(self, message: Message) -> bytes:
        hello = _decode(message.body, _Hello, message)
        if hello.magic != _MAGIC:
            raise ProtocolError("not an arpc handshake")
        claimed = self._hear(message, hello.identity, hello.nonce)
        newest, oldest = self._offered = (message.arg, hello.oldest_version)
        self.version = min(newest, PROTOCOL_VERSION)
        if self.version < max(oldest, OLDEST_VERSION):
            raise Refused(
                Refusal.VERSION,
                f"no common protocol version: worker {self._me.name!r} speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}, "
                f"worker {claimed.name!r} speaks {oldest} to {newest}",
            )
        self._state = _State.AWAIT_PROOF
        body = _encode(_Challenge(Raw(self._my_bytes), self._my_nonce, self._proof_of(Role.ACCEPTOR)))
        return _frame(MessageType.CHALLENGE, body, self.version)

    def _on_challenge(self, message: Message) -> bytes:
        challenge = _decode(message.body, _Challenge, message)
        claimed = self._hear(message, challenge.identity, challenge.nonce)
        self.version = message.arg
        if not OLDEST_VERSION <= self.version <= PROTOCOL_VERSION:
            raise Refused(Refusal.VERSION, f"the peer chose protocol version {self.version}, which was not offered")
        self._verify(Role.ACCEPTOR, claimed, challenge.proof)
        self._admit(claimed)
        self._state = _State.AWAIT_WELCOME
        return _frame(MessageType.PROOF, self._proof_of(Role.CONNECTOR))

    def _on_proof(self, message: Message) -> bytes:
        claimed = self._claimed
        assert claimed is not None
        self._verify(Role.CONNECTOR, claimed, bytes(message.body))
        self._admit(claimed)
        self._state = _State.DONE
        return _frame(MessageType.WELCOME)

    def _on_welcome(self, _: Message) -> bytes:
        self._state = _State.DONE
        return b""

    def _on_refuse(self, message: Message) -> bytes:
        self._refused_by_peer = True
        text = bytes(message.body[:_MAX_REASON_BYTES]).decode(errors="replace")
        # the text of an unauthenticated peer ends up in the log
        reason = "".join(character if character.isprintable() else "?" for character in text)
        if message.arg == Refusal.AUTHENTICATION:
            raise AuthenticationError(f"the peer refused the connection: {reason}")
        try:
            kind = Refusal(message.arg)
        except ValueError:
            raise HandshakeError(f"the peer refused the connection for reason {message.arg}: {reason}") from None
        raise Refused(kind, reason)

    def _hear(self, message: Message, identity: Raw, nonce: bytes) -> Identity:
        """Record the identity that the peer claims."""
        if len(nonce) != _NONCE_BYTES:
            raise ProtocolError(f"a {message.type.name} with a nonce of {len(nonce)} bytes")
        self._their_bytes = bytes(identity)
        self._their_nonce = nonce
        self._claimed = _decode(self._their_bytes, Identity, message)
        return self._claimed

    # -- proofs

    def _proof_of(self, prover: Role) -> bytes:
        if self._secret is None:
            return b""
        mine, theirs = (self._my_bytes, self._my_nonce), (self._their_bytes, self._their_nonce)
        connector, acceptor = (mine, theirs) if self.role is Role.CONNECTOR else (theirs, mine)
        transcript = _encode((_MAGIC, prover.name, self.version, self._offered, connector, acceptor))
        return hmac.digest(self._secret, transcript, "sha256")

    def _verify(self, prover: Role, claimed: Identity, proof: bytes) -> None:
        them, me = claimed.name, self._me.name
        if self._certified is not None and them not in self._certified:
            raise AuthenticationError(
                f"a peer claims to be worker {them!r}, with a certificate for {self._certified}: give each worker one "
                f"for its own name"
            )
        if self._secret is None:
            if proof:
                raise AuthenticationError(
                    f"worker {them!r} uses a group secret and {me!r} has none: set the same ARPC_SECRET for both"
                )
            return
        if not proof:
            raise AuthenticationError(
                f"worker {them!r} has no group secret and {me!r} asks for it: set the same ARPC_SECRET for both"
            )
        if not hmac.compare_digest(proof, self._proof_of(prover)):
            raise AuthenticationError(
                f"worker {them!r} has another group secret than {me!r}: set the same ARPC_SECRET for both"
            )

    _STEPS: ClassVar[Mapping[tuple[_State, MessageType], Callable[[Handshake, Message], bytes]]] = {
        (_State.AWAIT_HELLO, MessageType.HELLO): _on_hello,
        (_State.AWAIT_CHALLENGE, MessageType.CHALLENGE): _on_challenge,
        (_State.AWAIT_CHALLENGE, MessageType.REFUSE): _on_refuse,
        (_State.AWAIT_PROOF, MessageType.PROOF): _on_proof,
        (_State.AWAIT_PROOF, MessageType.REFUSE): _on_refuse,
        (_State.AWAIT_WELCOME, MessageType.WELCOME): _on_welcome,
        (_State.AWAIT_WELCOME, MessageType.REFUSE): _on_refuse,
    }


def _decode(data: bytes | bytearray | memoryview, shape: type[_T], message: Message) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=shape)
    except (ValueError, RecursionError) as error:  # msgspec's own errors, and those of bad text or deep nesting
        raise ProtocolError(f"a malformed {message.type.name}: {error}") from error


def _frame(type_: MessageType, body: bytes = b"", arg: int = 0) -> bytes:
    return frame(type_, 0, 0, arg, 0, body)
