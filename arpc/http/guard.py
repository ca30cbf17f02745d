"""Access control of the dashboard, independent of aiohttp: requests in, verdicts out.

On loopback every user of this host has access, but web pages of other origins have none, although they could reach this
port from a browser on this host: the ``Host`` must be this host (other names that resolve to 127.0.0.1 are refused, as
in DNS rebinding), and requests that change something must come from a page of this server.

Beyond loopback a request needs the group's secret, as a bearer token or as the cookie that the login sets. The token
is derived from the secret, so that a scraper of ``/metrics`` need not be able to run code on the workers.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from arpc.transport.sockets import is_loopback

__all__ = ["COOKIE", "SESSION_S", "Guard", "Verdict", "derive_token"]

COOKIE: Final = "arpc_session"
SESSION_S: Final = 12 * 3600
_TOKEN_PURPOSE: Final = b"arpc http token v1"
_SESSION_PURPOSE: Final = b"arpc http session v1"


def derive_token(secret: bytes) -> str:
    """Return the bearer token for the HTTP API of a group with this secret. It does not reveal the secret.

    >>> derive_token(b"a secret")[:8]
    '6bd325be'
    """
    return hmac.new(secret, _TOKEN_PURPOSE, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a request."""

    status: int
    """200: allowed. 401: the secret is missing. 403: refused, with or without the secret."""
    reason: str = ""


_ALLOWED: Final = Verdict(200)


class Guard:
    """The access control of one server."""

    def __init__(self, secret: bytes | None, *, needs_secret: bool, clock: Callable[[], float] = time.time) -> None:
        if needs_secret and secret is None:
            raise ValueError("a page that needs a secret is served by a worker that has one")
        self.needs_secret = needs_secret
        self._clock = clock
        self._secret = secret
        self._token = derive_token(secret) if secret is not None else ""
        self._session_key = hmac.digest(secret, _SESSION_PURPOSE, "sha256") if secret is not None else b""

    def judge(self, method: str, headers: Mapping[str, str], cookie: str | None) -> Verdict:
        """Decide whether a request is allowed."""
        foreign = self.judge_origin(method, headers)
        if foreign.status != 200:
            return foreign
        if not self.needs_secret or self.is_session(cookie) or self._bears_token(headers.get("Authorization", "")):
            return _ALLOWED
        return Verdict(401, "this page needs the group's secret")

    def judge_origin(self, method: str, headers: Mapping[str, str]) -> Verdict:
        """Decide whether a request's origin is allowed, whatever secret it has: for the login itself."""
        host = headers.get("Host", "")
        if not self.needs_secret and not is_loopback(_hostname(host)):
            return Verdict(403, f"this page is served on loopback, and not as {host!r}")
        if method not in {"GET", "HEAD"}:
            origin = headers.get("Origin")
            if origin is not None and _netloc(origin) != host.lower():
                return Verdict(403, "the request comes from a page of another origin")
            if headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
                return Verdict(403, "the request comes from a page of another site")
        return _ALLOWED

    def _bears_token(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_bytes(token.strip()), self._token.encode())

    # -- sessions: no state is kept, the cookie is signed

    def login(self, typed: str) -> str | None:
        """Return the cookie for a user who typed the secret, or its token; None for any other text."""
        if self._secret is None:
            return None
        given = _bytes(typed.strip())
        is_secret = hmac.compare_digest(given, self._secret)
        is_token = hmac.compare_digest(given, self._token.encode())
        return self._sign(int(self._clock()) + SESSION_S) if is_secret or is_token else None

    def is_session(self, cookie: str | None) -> bool:
        """Return whether a cookie is one of this server's, and not too old."""
        if not cookie or self._secret is None:
            return False
        expiry, _, _ = cookie.partition(".")
        if not expiry.isascii() or not expiry.isdigit() or len(expiry) > 12:
            return False
        is_ours = hmac.compare_digest(self._sign(int(expiry)).encode(), _bytes(cookie))
        return is_ours and self._clock() < int(expiry)

    def _sign(self, expiry: int) -> str:
        return f"{expiry}.{hmac.new(self._session_key, str(expiry).encode(), hashlib.sha256).hexdigest()}"


def _bytes(said: str) -> bytes:
    """Encode a value of a request. It need not be text: other bytes arrive as lone surrogates."""
    return said.encode(errors="surrogatepass")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
