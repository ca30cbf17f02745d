"""The stage where tests of thread connections and their handlers meet, as for tests of the agent."""

from __future__ import annotations

from tests.agent.conftest import make_stage, stage

__all__ = ["make_stage", "stage"]
