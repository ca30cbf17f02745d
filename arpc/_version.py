"""The version, defined only here; packaging reads it from this module."""

from __future__ import annotations

__version__ = "0.1.0"
