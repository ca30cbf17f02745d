"""TLS over a TCP connection of the operating system.

This does not use asyncio's TLS, for three reasons. The limits on strangers and on their time (`connection_limits`)
cover the TLS handshake and that of arpc together; each connection uses the certificates that are current when it is
made; and large tensors are decrypted right into their memory. Nothing else that asyncio offers is needed: a connection
ends with a GOODBYE, which is authenticated like all messages, so its end cannot be forged although TLS itself does not
announce it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

from arpc.errors import AuthenticationError, HandshakeError
from arpc.tls import TLS, CertifiedNames
from arpc.transport.connection import Phase
from arpc.transport.contract import Receiver
from arpc.transport.sockets import NO_RESOURCES, Resources, StreamConnection, TcpTransport
from arpc.wire.protocol import Protocol

__all__ = ["SecureConnection", "TlsTransport"]

_STRANGERS_BYTES: Final = 1 << 13
_CIPHERTEXT_BYTES: Final = 1 << 17
_WRITE_BYTES: Final = 1 << 20


class SecureConnection(StreamConnection):
    """A connection whose bytes are encrypted by TLS."""

    def __init__(
        self,
        protocol: Protocol,
        receiver: Receiver,
        resources: Resources,
        context: ssl.SSLContext,
        *,
        server_side: bool,
    ) -> None:
        super().__init__(protocol, receiver, resources)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._is_secure = False
        self._ciphertext = memoryview(bytearray(_STRANGERS_BYTES))

    # -- called by asyncio

    @property
    def get_buffer(self) -> Callable[[int], memoryview]:
        return self._get_ciphertext

    def _get_ciphertext(self, _: int) -> memoryview:
        return self._ciphertext

    def _begin(self, transport: asyncio.Transport) -> None:
        # the timeout of both handshakes counts from here
        self._expect_handshake()
        self._advance()

    def _received(self, size_bytes: int) -> None:
        """Process ciphertext that was read into the buffer of `get_buffer`."""
        self._incoming.write(self._ciphertext[:size_bytes])
        if self._is_secure or self._advance():
            self._decrypt()

    def _advance(self) -> bool:
        """Advance the TLS handshake by one step; returns whether it is done."""
        if self._phase is not Phase.SENDING:
            return False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_ciphertext()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._send_ciphertext()
        self._is_secure = True
        self._ciphertext = memoryview(bytearray(_CIPHERTEXT_BYTES))
        self.protocol.certify(CertifiedNames(self._tls.getpeercert()))
        self.start()
        return True

    def _decrypt(self) -> None:
        read = self._tls.read
        protocol = self.protocol
        while self._phase < Phase.ABORTED:
            target = protocol.get_buffer(-1)
            try:
                size_bytes = cast("int", read(target.nbytes, target))
            except ssl.SSLWantReadError:
                return
            except ssl.SSLError as error:
                self._fail(error)
                return
            if not size_bytes:
                return  # the end of the TLS stream; only the end of the socket counts
            super()._received(size_bytes)

    def _fail(self, error: ssl.SSLError) -> None:
        if self.protocol.peer is not None:
            self.abort(error)
            return
        self._error = self._error or _explained(self.address, error)
        self._send_ciphertext()  # the TLS alert, which notifies the peer
        self._stop_sending(Phase.CLOSING)
        self.protocol.close()
        self._shut()

    def share_writing(self) -> None:
        """Return None: threads cannot write, since all bytes are encrypted in one order."""

    def resume_writing(self) -> None:
        if self._is_secure:
            super().resume_writing()
        else:
            self.is_full = self.is_congested = False  # output waits for the end of the TLS handshake

    # -- called by Connection

    def _write(self, data: bytes) -> None:
        self._encrypt(memoryview(data))
        self._send_ciphertext()

    def _write_pieces(self, pieces: tuple[bytes, memoryview]) -> None:
        for piece in pieces:
            self._encrypt(memoryview(piece))
        self._send_ciphertext()

    def _encrypt(self, data: memoryview) -> None:
        write = self._tls.write
        try:
            for start in range(0, data.nbytes, _WRITE_BYTES):
                write(data[start : start + _WRITE_BYTES])
        except ssl.SSLError as error:
            self.abort(error)

    def _send_ciphertext(self) -> None:
        if self._outgoing.pending and self._is_made:
            self._transport.write(self._outgoing.read())


class TlsTransport(TcpTransport):
    """``tcp://host:port`` with mutual TLS: all bytes are encrypted, and both sides present a certificate."""

    def __init__(self, tls: TLS, resources: Resources = NO_RESOURCES) -> None:
        super().__init__(resources)
        self._tls = tls

    def make(self, protocol: Protocol, receiver: Receiver, *, is_accepted: bool = False) -> SecureConnection:
        context = self._tls.server_context if is_accepted else self._tls.client_context
        return SecureConnection(protocol, receiver, self.resources, context, server_side=is_accepted)


def _explained(address: str, error: ssl.SSLError) -> HandshakeError:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(f"the certificate of {address} is not accepted: {error.verify_message}")
    if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"}:
        return HandshakeError(f"{address} does not speak TLS ({reason}): set RpcOptions.tls on all workers, or on none")
    if "ALERT" in reason or "CERTIFICATE" in reason:
        return AuthenticationError(f"{address} does not accept the certificate of this worker: {reason}")
    return AuthenticationError(f"TLS with {address} failed: {reason}")
