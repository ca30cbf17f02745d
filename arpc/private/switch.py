"""The switch that turns all undocumented APIs off."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["PUBLIC_ONLY"]

PUBLIC_ONLY: Final = os.environ.get("ARPC_PUBLIC_APIS", "") not in {"", "0"}
"""``ARPC_PUBLIC_APIS`` is set: only documented APIs of torch and asyncio are used."""
