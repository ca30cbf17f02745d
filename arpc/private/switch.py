"""The switch that turns off all undocumented APIs that have a fallback."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["PUBLIC_ONLY"]

PUBLIC_ONLY: Final = os.environ.get("ARPC_PUBLIC_APIS", "") not in {"", "0"}
"""Whether ``ARPC_PUBLIC_APIS`` is set, and not to 0: undocumented APIs that have a fallback are not used then."""
