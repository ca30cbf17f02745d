"""Records of the tree ``arpc.*``."""

from __future__ import annotations

import doctest
import json
import logging
import os
import subprocess
import sys

import pytest

import arpc
from arpc import log
from arpc.errors import ConfigurationError
from arpc.log import FIELDS, configure_from_environment, get_logger
from arpc.testing import cluster


def speak():
    get_logger("arpc.test").warning("on a worker")


@arpc.inline
def speak_inline():
    speak()


async def speak_async():
    speak()


def fields(record):
    return {name: getattr(record, name) for name in FIELDS}


def test_the_examples_of_the_module_hold():
    root = logging.getLogger("arpc")
    before = list(root.handlers)
    assert doctest.testmod(log).failed == 0
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)


def test_outside_of_workers_the_fields_are_empty(caplog):
    get_logger("arpc.test").warning("nobody")
    assert fields(caplog.records[0]) == {"worker": None, "peer": None, "call_id": None}


@pytest.mark.parametrize("function", [speak, speak_inline, speak_async])
async def test_a_handler_says_where_it_runs_and_for_whom(caplog, function):
    async with cluster(2):
        await arpc.rpc_sync("worker1", function)
    (record,) = [record for record in caplog.records if record.name == "arpc.test"]
    told = fields(record)
    assert (told["worker"], told["peer"]) == ("worker1", "worker0")
    assert isinstance(told["call_id"], int)


async def test_code_of_a_worker_says_which(caplog):
    async with cluster(2):
        speak()
    (record,) = [record for record in caplog.records if record.name == "arpc.test"]
    assert fields(record) == {"worker": "worker0", "peer": None, "call_id": None}


def test_what_is_given_wins(caplog):
    get_logger("arpc.test").warning("there", extra={"peer": "ps", "more": 1})
    assert fields(caplog.records[0]) == {"worker": None, "peer": "ps", "call_id": None}
    assert caplog.records[0].more == 1


def test_the_line_of_the_caller_is_told(caplog):
    speak()
    assert caplog.records[0].funcName == "speak"


PROGRAM = """
import arpc.log, json, logging, os
arpc.log.configure_from_environment()
arpc.log.configure_from_environment()
arpc.log.get_logger("arpc.x").info("told", extra={"worker": "w"})
logging.getLogger("arpc.plain").warning("plain")
"""


@pytest.mark.parametrize(("level", "lines"), [("", []), ("warning", ["plain"]), ("INFO", ["[w] told", "plain"])])
def test_it_is_quiet_unless_the_environment_asks(level, lines):
    env = {**os.environ, "ARPC_LOG": level}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    written = done.stderr.splitlines()
    assert len(written) == len(lines), json.dumps(written)
    assert all(wanted in line for wanted, line in zip(lines, written, strict=True))


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("ARPC_LOG", "loud")
    with pytest.raises(ConfigurationError, match="ARPC_LOG"):
        configure_from_environment()
