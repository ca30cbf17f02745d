"""The conformance checks that every transport must pass.

::

    @pytest.mark.parametrize("check", TransportConformance.names())
    async def test_conformance(check):
        await TransportConformance(MyTransport, "my://").run(check)

A check that fails raises an `AssertionError` with its finding. The contract itself is in `arpc.transport.contract`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from arpc.testing.checks.ending import EndingChecks
from arpc.testing.checks.opening import OpeningChecks
from arpc.testing.checks.sending import SendingChecks

__all__ = ["TransportConformance"]

_PREFIX: Final = "check_"


class TransportConformance(OpeningChecks, SendingChecks, EndingChecks):
    """All checks. ``make`` gives a new transport; ``address`` lets it choose where to listen: ``tcp://127.0.0.1:0``.

    They run on any loop. A transport is conformant on those loops on which it passes.
    """

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all checks."""
        return [name.removeprefix(_PREFIX) for name in dir(cls) if name.startswith(_PREFIX)]

    async def run(self, name: str, *, limit_s: float = 30.0) -> None:
        """Run one check; raise `TimeoutError` if it takes longer than the limit."""
        async with asyncio.timeout(limit_s):
            await getattr(self, _PREFIX + name)()

    async def run_all(self) -> None:
        """Run every check, one after the other."""
        for name in self.names():
            await self.run(name)
