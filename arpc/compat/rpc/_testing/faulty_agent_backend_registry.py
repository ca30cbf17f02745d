"""The faulty backend under the name of torch's module. Importing it registers the backend."""

from __future__ import annotations

from arpc.compat.rpc import _testing

__all__ = ["is_available"]

is_available = _testing.is_available
