"""What every transport promises, as checks that any transport can be put through.

::

    @pytest.mark.parametrize("check", TransportConformance.names())
    async def test_conformance(check):
        await TransportConformance(MyTransport, "my://").run(check)

A check says what it found in an `AssertionError`. The contract itself is in `arpc.transport.connection`.
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
    """All checks, for the transport that ``make`` gives. ``address`` lets it choose where to listen: ``tcp://127.0.0.1:0``.

    They run on any loop. A transport is conformant on the loops it passes them on.
    """

    @classmethod
    def names(cls) -> list[str]:
        """What there is to check."""
        return [name.removeprefix(_PREFIX) for name in dir(cls) if name.startswith(_PREFIX)]

    async def run(self, name: str, *, limit_s: float = 30.0) -> None:
        """One check; `TimeoutError` if it takes longer than the limit."""
        async with asyncio.timeout(limit_s):
            await getattr(self, _PREFIX + name)()

    async def run_all(self) -> None:
        """Every check, one after the other."""
        for name in self.names():
            await self.run(name)
