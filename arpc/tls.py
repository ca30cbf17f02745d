"""Certificates of a worker: their files, which are read again when they change, and the worker names in them.

A certificate has the name of its worker as a URI, ``arpc:NAME``, or as a DNS name that equals it. In a URI ``*``
matches any text, so that ``arpc:trainer*`` is a certificate for all trainers. Hosts do not matter: a worker may move.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from arpc.errors import ConfigurationError

__all__ = ["TLS", "CertifiedNames", "name_uri"]

logger = logging.getLogger("arpc.tls")

_SCHEME: Final = "arpc:"
_LITERAL: Final = re.compile(r"[?[]")


def name_uri(name: str) -> str:
    """Return the URI in the certificate of a worker, or of all workers whose names match a pattern.

    >>> name_uri("trainer:0")
    'arpc:trainer%3A0'
    """
    return _SCHEME + quote(name, safe="*")


class CertifiedNames:
    """The names of workers that a certificate is for."""

    def __init__(self, certificate: Mapping[str, Any] | None) -> None:
        """``certificate`` is the result of `ssl.SSLObject.getpeercert`."""
        said = (certificate or {}).get("subjectAltName", ())
        self._exact = frozenset(value for kind, value in said if kind == "DNS")
        self._patterns = tuple(
            unquote(value.removeprefix(_SCHEME)) for kind, value in said if kind == "URI" and value.startswith(_SCHEME)
        )

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        # only `*` is a wildcard here: the other special characters of fnmatch are literal
        return name in self._exact or any(fnmatchcase(name, _LITERAL.sub(r"[\g<0>]", one)) for one in self._patterns)

    def __str__(self) -> str:
        return ", ".join(sorted({*self._exact, *self._patterns})) or "no worker"


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    stamp: tuple[Any, ...]


class _Cache:
    """The contexts that were made last, and the last complaint that was logged."""

    def __init__(self) -> None:
        self.contexts: _Contexts | None = None
        self.complaint = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class TLS:
    """Mutual TLS between workers of different hosts: both sides show a certificate, and both are checked.

    Either from files, which are checked at every new connection and read again when they have changed, so that
    certificates can be renewed while workers run; existing connections are not affected:

    >>> tls = TLS(cert="trainer0.pem", key="trainer0.key", ca="ca.pem")

    Or from your own SSL contexts, one for each side, both of which must require a certificate:

    >>> import ssl
    >>> server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    >>> client.check_hostname = False  # it is the worker's name that is checked
    >>> server.verify_mode = client.verify_mode = ssl.CERT_REQUIRED
    >>> tls = TLS(server=server, client=client)
    """

    cert: str | os.PathLike[str] | None = None
    """The file of the worker's certificate and of the certificates between it and the CA, in PEM."""
    key: str | os.PathLike[str] | None = None
    ca: str | os.PathLike[str] | None = None
    """The file of the certificate authorities that must have signed the certificates of peers."""
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False)

    def __post_init__(self) -> None:
        files = {"cert": self.cert, "key": self.key, "ca": self.ca}
        contexts = {"server": self.server, "client": self.client}
        given = [name for name, value in {**files, **contexts}.items() if value is not None]
        if given not in (list(files), list(contexts)):
            raise ConfigurationError(
                f"TLS takes the files cert, key and ca, or the contexts server and client, not {given}"
            )
        for name, context in contexts.items():
            if context is not None and context.verify_mode is not ssl.CERT_REQUIRED:
                raise ConfigurationError(
                    f"the {name} context must demand a certificate of the other side, or anyone could come in: set "
                    f"its verify_mode to ssl.CERT_REQUIRED"
                )
        if self.client is not None and self.client.check_hostname:
            raise ConfigurationError(
                "the client context would check the name of a host, and certificates are for workers, whose names are "
                "checked in the handshake: set its check_hostname to False"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_files, (self.cert, self.key, self.ca)

    @property
    def server_context(self) -> ssl.SSLContext:
        """The TLS context of the side that accepts. Raises `ConfigurationError` if the files were never usable."""
        return self.server if self.server is not None else self._current().server

    @property
    def client_context(self) -> ssl.SSLContext:
        """The TLS context of the side that connects. Raises `ConfigurationError` if the files were never usable."""
        return self.client if self.client is not None else self._current().client

    def _current(self) -> _Contexts:
        """Return contexts made from the files as they are now; the last contexts if the files are not usable now."""
        cache = self._cache
        before = cache.contexts
        try:
            stamp = tuple(_stamp(path) for path in (self.cert, self.key, self.ca))
            if before is not None and before.stamp == stamp:
                return before
            cache.contexts = _Contexts(self._made(ssl.PROTOCOL_TLS_SERVER), self._made(ssl.PROTOCOL_TLS_CLIENT), stamp)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            complaint = f"the TLS files cannot be used (cert={self.cert}, key={self.key}, ca={self.ca}): {error}"
            if before is None:
                raise ConfigurationError(complaint) from error
            # files are replaced one by one, and do not match in between: the next connection reads them again
            if complaint != cache.complaint:
                logger.warning("%s; new connections still use the ones before", complaint)
            cache.complaint = complaint
            return before
        if before is not None:
            cache.complaint = ""
            logger.info("the TLS files have changed: new connections use %s", self.cert)
        return cache.contexts

    def _made(self, side: int) -> ssl.SSLContext:
        assert self.cert is not None
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # without `password`, OpenSSL would ask for one on the terminal, and block the loop
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        context.load_verify_locations(self.ca)
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed: each connection shows its certificate
        return context


def _no_password() -> str:
    raise ValueError("the key has a password; workers need one without")


def _from_files(cert: Any, key: Any, ca: Any) -> TLS:
    return TLS(cert=cert, key=key, ca=ca)


def _stamp(path: str | os.PathLike[str] | None) -> tuple[int, int, int]:
    assert path is not None
    info = Path(path).stat()
    return info.st_mtime_ns, info.st_size, info.st_ino
