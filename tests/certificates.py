"""Certificates for tests: one authority for the whole run, and one that nobody trusts."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache

from arpc.certs import Authority
from arpc.tls import TLS

__all__ = ["authority", "tls_for"]


def authority() -> Authority:
    return _authority("ours")


@cache
def _authority(name: str) -> Authority:
    directory = tempfile.mkdtemp(prefix=f"arpc-{name}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Authority(directory)


@cache
def tls_for(name: str, signed_by: str = "ours") -> TLS:
    """Certificate, key and authority of workers with that name."""
    return _authority(signed_by).issue(name)
