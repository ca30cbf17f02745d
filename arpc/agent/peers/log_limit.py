"""Limits warnings that strangers can cause: a flood of them must not fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["LogLimit"]

_PERIOD_S: Final = 60.0
_MOST: Final = 20


class LogLimit:
    """Logs at most 20 messages a minute, and later how many more there were."""

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[logging.Logger],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._since = -_PERIOD_S
        self._logged = 0
        self._left_out = 0

    def log(self, level: int, message: str, *args: object) -> None:
        if not self._logger.isEnabledFor(level):
            return
        now = self._clock()
        if now - self._since >= _PERIOD_S:
            if self._left_out:
                self._logger.log(level, "%d more like these were not logged", self._left_out)
            self._since = now
            self._logged = self._left_out = 0
        if self._logged >= _MOST:
            self._left_out += 1
            return
        self._logged += 1
        self._logger.log(level, message, *args)
