"""What two workers compare to know what they share: the script they run, and the machine they run on."""

from __future__ import annotations

import hashlib
import socket
import sys
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["host_fingerprint", "main_fingerprint"]


def main_fingerprint() -> str:
    """A hash of the script this process runs; empty for notebooks and interactive sessions, which no peer can share."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def host_fingerprint() -> str:
    """Equal for processes that see the same machine, and so each other's sockets."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}-{uuid.getnode():x}"
