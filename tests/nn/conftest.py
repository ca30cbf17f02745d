from __future__ import annotations

from tests.optim.conftest import group, quick_collections

__all__ = ["group", "quick_collections"]
