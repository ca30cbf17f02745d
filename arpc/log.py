"""One tree of loggers, ``arpc.*``, whose records have the worker, the caller and the call that they belong to.

Quiet by default, as a library should be: nothing is written unless the program configures logging, or ``ARPC_LOG`` is
set. Each record has the attributes ``worker``, ``peer`` and ``call_id``, None where there is none, so that a formatter
can name them and a JSON formatter finds them. They come from the context: a handler's own records have them too if it
logs through `get_logger`.

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
    """Holds the function that returns the `FIELDS` of the running code. Set by the layer that knows them."""

    read: Callable[[], Mapping[str, Any]] = staticmethod(lambda: _NONE)


def set_source(read: Callable[[], Mapping[str, Any]]) -> None:
    """Set the function that returns ``worker``, ``peer`` and ``call_id``; the ``extra`` of a log call overrides it."""
    _Source.read = staticmethod(read)


class _Logger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**_NONE, **_Source.read(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose records have the `FIELDS`. The names of arpc's own loggers begin with ``arpc.``."""
    return _Logger(logging.getLogger(name), {})


class _FieldsFilter(logging.Filter):
    """Adds the `FIELDS`, as None, to records of the tree that were not logged through `get_logger`."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, None)
        return True


Tap = Callable[[logging.LogRecord, Mapping[str, Any]], None]
"""A callback for each record and the `FIELDS` of the code that logs, in the thread that logs. Must not raise or log."""


class _Taps:
    """The taps of this process, which share the one record factory of `logging`.

    A handler of the root logger would work too, but programs and `logging.basicConfig` take its presence for a
    configuration of logging, and Python then does not print warnings by itself any more.
    """

    taps: tuple[Tap, ...] = ()
    before: Callable[..., logging.LogRecord] | None = None


def tap(callback: Tap) -> Callable[[], None]:
    """Call ``callback`` for every log record that is made in this process; call the returned function to stop."""
    _Taps.taps += (callback,)
    if _Taps.before is None:
        _Taps.before = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_make_record)

    def untap() -> None:
        _Taps.taps = tuple(one for one in _Taps.taps if one is not callback)
        # a program may have wrapped this factory meanwhile, and keeps its own
        if not _Taps.taps and _Taps.before is not None and logging.getLogRecordFactory() is _make_record:
            logging.setLogRecordFactory(_Taps.before)
            _Taps.before = None

    return untap


def _make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    assert _Taps.before is not None
    record = _Taps.before(*args, **kwargs)
    if _Taps.taps:
        fields = _Source.read()
        for callback in _Taps.taps:
            callback(record, fields)
    return record


def configure_from_environment() -> None:
    """Log to stderr at the level in ``ARPC_LOG``: DEBUG, INFO, WARNING or ERROR. Has an effect once per process.

    Raises `ConfigurationError` for an unknown level.
    """
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
    """The handler of ``ARPC_LOG``, distinguished from a program's own handlers by its class."""
