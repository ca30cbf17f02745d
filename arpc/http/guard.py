"""Who may look. Everything that decides it, and nothing of aiohttp: requests in, verdicts out.

On loopback whoever is on this host may look, but no web page of another origin may, which could reach this port from
the browser of a person who has both open: the ``Host`` must be this host (a name that somebody made to mean 127.0.0.1
is another one), and what changes something must come from a page of our own.

Beyond loopback a request needs the cluster's secret, as a bearer token or as the cookie that the login gives. The token
is derived from the secret, so that whoever scrapes ``/metrics`` need not be able to run code on the workers.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from arpc.transport.stream import is_loopback

__all__ = ["COOKIE", "SESSION_S", "Guard", "Verdict", "derive_token"]

COOKIE: Final = "arpc_session"
SESSION_S: Final = 12 * 3600
_TOKEN_PURPOSE: Final = b"arpc http token v1"
_SESSION_PURPOSE: Final = b"arpc http session v1"


def derive_token(secret: bytes) -> str:
    """The bearer token for the HTTP API of a group with this secret. The secret cannot be found from it.

    >>> derive_token(b"a secret")[:8]
    '6bd325be'
    """
    return hmac.new(secret, _TOKEN_PURPOSE, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a request."""

    status: int
    """200: it may go on. 401: it lacks the secret. 403: never."""
    reason: str = ""


_ALLOWED: Final = Verdict(200)


class Guard:
    """Decides for one server."""

    def __init__(self, secret: bytes | None, *, needs_secret: bool, clock: Callable[[], float] = time.time) -> None:
        if needs_secret and secret is None:
            raise ValueError("a page that needs a secret is served by a worker that has one")
        self.needs_secret = needs_secret
        self._clock = clock
        self._secret = secret
        self._token = derive_token(secret) if secret is not None else ""
        self._session_key = hmac.digest(secret, _SESSION_PURPOSE, "sha256") if secret is not None else b""

    def judge(self, method: str, headers: Mapping[str, str], cookie: str | None) -> Verdict:
        """Whether a request may go on to what it asks for."""
        foreign = self.judge_origin(method, headers)
        if foreign.status != 200:
            return foreign
        if not self.needs_secret or self.is_session(cookie) or self._bears_token(headers.get("Authorization", "")):
            return _ALLOWED
        return Verdict(401, "this page needs the cluster's secret")

    def judge_origin(self, method: str, headers: Mapping[str, str]) -> Verdict:
        """Whether a request may come from where it does, whatever secret it has: for the login itself."""
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

    # -- sessions: nothing is kept, the cookie proves itself

    def login(self, typed: str) -> str | None:
        """The cookie for one who typed the secret, or its token; None for anything else."""
        if self._secret is None:
            return None
        given = _bytes(typed.strip())
        is_secret = hmac.compare_digest(given, self._secret)
        is_token = hmac.compare_digest(given, self._token.encode())
        return self._sign(int(self._clock()) + SESSION_S) if is_secret or is_token else None

    def is_session(self, cookie: str | None) -> bool:
        """Whether a cookie is one of ours, and not too old."""
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
    """Headers need not be text: what is none comes as lone surrogates."""
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
