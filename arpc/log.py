"""One tree of loggers, ``arpc.*``, whose records say on which worker something happened, for whom and in which call.

Quiet by default, as a library should be: nothing is written unless the program sets logging up, or ``ARPC_LOG`` asks
for it. Each record has the attributes ``worker``, ``peer`` and ``call_id``, None where there is none, so that a
formatter can name them and a JSON formatter finds them. They come from the context: a handler's own logging has them
too if it uses `get_logger`.

>>> import logging
>>> handler = logging.StreamHandler()
>>> handler.setFormatter(logging.Formatter("%(levelname)s %(worker)s %(peer)s %(message)s"))
>>> logging.getLogger("arpc").addHandler(handler)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

from arpc.errors import ConfigurationError

__all__ = ["FIELDS", "Tap", "configure_from_environment", "get_logger", "set_source", "tap"]

FIELDS: Final = ("worker", "peer", "call_id")
_NONE: Final[Mapping[str, Any]] = dict.fromkeys(FIELDS)
_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s [%(worker)s] %(message)s"

_root = logging.getLogger("arpc")
_root.addHandler(logging.NullHandler())


class _Source:
    """Tells what the running code belongs to. Set by the layer that knows."""

    read: Callable[[], Mapping[str, Any]] = staticmethod(lambda: _NONE)


def set_source(read: Callable[[], Mapping[str, Any]]) -> None:
    """Say where ``worker``, ``peer`` and ``call_id`` come from, unless a call of the logger gives them itself."""
    _Source.read = staticmethod(read)


class _Logger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**_NONE, **_Source.read(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of that name, whose records have the `FIELDS`. Names begin with ``arpc.`` for what is part of arpc."""
    return _Logger(logging.getLogger(name), {})


class _FieldsFilter(logging.Filter):
    """For records of the tree that were not made by `get_logger`."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, None)
        return True


Tap = Callable[[logging.LogRecord, Mapping[str, Any]], None]
"""Is told each record and the `FIELDS` of the code that logs, in the thread that logs. Must not raise, nor log."""


class _Taps:
    """Where records are made: `logging` has one place for that in a process, and taps share it.

    A handler at the root would do it too, but programs and `logging.basicConfig` take its presence for a setup of
    logging, and Python then does not print warnings by itself any more.
    """

    taps: tuple[Tap, ...] = ()
    before: Callable[..., logging.LogRecord] | None = None


def tap(told: Tap) -> Callable[[], None]:
    """Hear of every record that is made in this process; call what is returned to hear of no more."""
    _Taps.taps += (told,)
    if _Taps.before is None:
        _Taps.before = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_make_record)

    def untap() -> None:
        _Taps.taps = tuple(one for one in _Taps.taps if one is not told)
        # a program that has wrapped this in the meantime keeps what it has
        if not _Taps.taps and _Taps.before is not None and logging.getLogRecordFactory() is _make_record:
            logging.setLogRecordFactory(_Taps.before)
            _Taps.before = None

    return untap


def _make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    assert _Taps.before is not None
    record = _Taps.before(*args, **kwargs)
    if _Taps.taps:
        fields = _Source.read()
        for told in _Taps.taps:
            told(record, fields)
    return record


def configure_from_environment() -> None:
    """Write to stderr what ``ARPC_LOG`` asks for: DEBUG, INFO, WARNING or ERROR. Once for a process."""
    level = os.environ.get("ARPC_LOG", "").upper()
    if not level or any(isinstance(handler, _EnvironmentHandler) for handler in _root.handlers):
        return
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}:
        raise ConfigurationError(f"ARPC_LOG must be DEBUG, INFO, WARNING or ERROR, not {level!r}")
    handler = _EnvironmentHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_FieldsFilter())
    _root.addHandler(handler)
    _root.setLevel(level)


class _EnvironmentHandler(logging.StreamHandler[Any]):
    """Told from a program's own handlers by its class."""
