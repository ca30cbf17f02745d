"""How a connection begins: who is there, which version is spoken, and proof that both belong to the group.

::

    connector                                acceptor
        HELLO      identity, nonce     ->
                                       <-    CHALLENGE  identity, nonce, proof
        PROOF      proof               ->
                                       <-    WELCOME, or REFUSE with a reason (at any time)

A proof is an HMAC-SHA256 under the cluster secret over both identities, both nonces, the versions and the role of the prover. So it
cannot be replayed (nonces), reflected (role), moved to another worker (identity) or used to talk both sides down to an older
version. Without a secret proofs are empty. Nothing is unpickled here: bodies are msgpack of a known shape.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, TypeVar

import msgspec

from arpc.errors import AuthenticationError, HandshakeError, ProtocolError
from arpc.wire.frames import frame
from arpc.wire.messages import Message, MessageType, Refusal

__all__ = ["MAX_HANDSHAKE_BYTES", "PROTOCOL_VERSION", "Handshake", "Identity", "Refused", "Role"]

PROTOCOL_VERSION: Final = 1
OLDEST_VERSION: Final = 1
MAX_HANDSHAKE_BYTES: Final = 4096
_MAGIC: Final = "arpc"
_NONCE_BYTES: Final = 32

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


class Role(Enum):
    CONNECTOR = auto()
    ACCEPTOR = auto()


class Identity(msgspec.Struct, frozen=True):
    """Who a worker says it is. ``incarnation`` tells a restarted worker from the one that had its name before."""

    name: str
    id: int
    incarnation: int
    main: str = ""
    """A hash of the script it runs: equal ones share the functions of ``__main__``."""
    features: tuple[str, ...] = ()


class Refused(HandshakeError):
    """A connection that was refused, with the reason that travels."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _Hello(msgspec.Struct, array_like=True):
    magic: str
    oldest_version: int
    identity: Identity
    nonce: bytes


class _Challenge(msgspec.Struct, array_like=True):
    identity: Identity
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


def _decode(message: Message, shape: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(message.body, type=shape)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a malformed {message.type.name}: {error}") from error


def _frame(type_: MessageType, body: bytes = b"", arg: int = 0) -> bytes:
    return frame(type_, 0, 0, arg, 0, body)


class Handshake:
    """One side of the handshake. `start` and `receive` return bytes to send; `peer` is set once it is done.

    ``admit`` is asked about a peer that has proven itself and raises `Refused` if it may not come in.
    """

    def __init__(
        self,
        role: Role,
        me: Identity,
        secret: bytes | None,
        admit: Callable[[Identity], None] = lambda _: None,
    ) -> None:
        self.role = role
        self.peer: Identity | None = None
        self.version = PROTOCOL_VERSION
        self._me = me
        self._secret = secret
        self._admit = admit
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._their_nonce = b""
        self._their_identity: Identity | None = None
        self._their_versions = (PROTOCOL_VERSION, OLDEST_VERSION)
        self._state = _State.AWAIT_HELLO if role is Role.ACCEPTOR else _State.START

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def start(self) -> bytes:
        """What the connector says first."""
        self._state = _State.AWAIT_CHALLENGE
        body = _encode(_Hello(_MAGIC, OLDEST_VERSION, self._me, self._nonce))
        return _frame(MessageType.HELLO, body, PROTOCOL_VERSION)

    def receive(self, message: Message) -> bytes:
        """Take the peer's next message. Raises `HandshakeError` (say `refusal` to the peer, then close)."""
        step = _STEPS.get((self._state, message.type))
        if step is None:
            state, self._state = self._state, _State.FAILED
            raise ProtocolError(f"{message.type.name} is out of place in a handshake that is at {state.name}")
        try:
            return step(self, message)
        except BaseException:
            self._state = _State.FAILED
            raise

    @staticmethod
    def refusal(error: HandshakeError) -> bytes:
        """The message that tells the peer why it was refused."""
        if isinstance(error, Refused):
            return _frame(MessageType.REFUSE, str(error).encode()[:1024], error.kind)
        return _frame(MessageType.REFUSE, b"authentication failed", Refusal.AUTHENTICATION)

    # -- steps

    def _on_hello(self, message: Message) -> bytes:
        hello = _decode(message, _Hello)
        if hello.magic != _MAGIC or len(hello.nonce) != _NONCE_BYTES:
            raise ProtocolError("not an arpc handshake")
        newest = message.arg
        self._their_versions = (newest, hello.oldest_version)
        self.version = min(newest, PROTOCOL_VERSION)
        if self.version < max(hello.oldest_version, OLDEST_VERSION):
            raise Refused(
                Refusal.VERSION,
                f"no common protocol version: {self._me.name} speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}, "
                f"{hello.identity.name} {hello.oldest_version} to {newest}",
            )
        self._their_identity = hello.identity
        self._their_nonce = hello.nonce
        self._state = _State.AWAIT_PROOF
        proof = self._proof(Role.ACCEPTOR)
        return _frame(MessageType.CHALLENGE, _encode(_Challenge(self._me, self._nonce, proof)), self.version)

    def _on_challenge(self, message: Message) -> bytes:
        challenge = _decode(message, _Challenge)
        if len(challenge.nonce) != _NONCE_BYTES:
            raise ProtocolError("not an arpc handshake")
        self.version = message.arg
        if not OLDEST_VERSION <= self.version <= PROTOCOL_VERSION:
            raise Refused(Refusal.VERSION, f"the peer chose protocol version {self.version}, which was not offered")
        self._their_identity = challenge.identity
        self._their_nonce = challenge.nonce
        self._verify(Role.ACCEPTOR, challenge.proof)
        self._admit(challenge.identity)
        self._state = _State.AWAIT_WELCOME
        return _frame(MessageType.PROOF, self._proof(Role.CONNECTOR))

    def _on_proof(self, message: Message) -> bytes:
        self._verify(Role.CONNECTOR, bytes(message.body))
        assert self._their_identity is not None
        self._admit(self._their_identity)
        self._finish()
        return _frame(MessageType.WELCOME)

    def _on_welcome(self, _: Message) -> bytes:
        self._finish()
        return b""

    def _on_refuse(self, message: Message) -> bytes:
        reason = bytes(message.body).decode(errors="replace")
        try:
            kind = Refusal(message.arg)
        except ValueError:
            raise ProtocolError(f"refused for an unknown reason {message.arg}: {reason}") from None
        if kind is Refusal.AUTHENTICATION:
            raise AuthenticationError(f"the peer refused the connection: {reason}")
        raise Refused(kind, reason)

    def _finish(self) -> None:
        self.peer = self._their_identity
        self._state = _State.DONE

    # -- proofs

    def _proof(self, prover: Role) -> bytes:
        if self._secret is None:
            return b""
        mine = (_encode(self._me), self._nonce)
        theirs = (_encode(self._their_identity), self._their_nonce)
        versions = (PROTOCOL_VERSION, OLDEST_VERSION)
        if self.role is Role.CONNECTOR:
            connector, acceptor, offered = mine, theirs, versions
        else:
            connector, acceptor, offered = theirs, mine, self._their_versions
        transcript = _encode((_MAGIC, prover.name, self.version, offered, connector, acceptor))
        return hmac.digest(self._secret, transcript, "sha256")

    def _verify(self, prover: Role, proof: bytes) -> None:
        name = self._their_identity.name if self._their_identity else "?"
        if self._secret is None:
            if proof:
                raise AuthenticationError(
                    f"worker {name!r} uses a cluster secret and {self._me.name!r} has none: "
                    f"set the same ARPC_SECRET for both"
                )
            return
        if not proof:
            raise AuthenticationError(
                f"worker {name!r} has no cluster secret and {self._me.name!r} asks for it: "
                f"set the same ARPC_SECRET for both"
            )
        if not hmac.compare_digest(proof, self._proof(prover)):
            raise AuthenticationError(f"worker {name!r} has another cluster secret than {self._me.name!r}")


_STEPS: Final[dict[tuple[_State, MessageType], Callable[[Handshake, Message], bytes]]] = {
    (_State.AWAIT_HELLO, MessageType.HELLO): Handshake._on_hello,
    (_State.AWAIT_CHALLENGE, MessageType.CHALLENGE): Handshake._on_challenge,
    (_State.AWAIT_CHALLENGE, MessageType.REFUSE): Handshake._on_refuse,
    (_State.AWAIT_PROOF, MessageType.PROOF): Handshake._on_proof,
    (_State.AWAIT_PROOF, MessageType.REFUSE): Handshake._on_refuse,
    (_State.AWAIT_WELCOME, MessageType.WELCOME): Handshake._on_welcome,
    (_State.AWAIT_WELCOME, MessageType.REFUSE): Handshake._on_refuse,
}
