"""Options: defaults, the environment, and values that cannot work."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from arpc.errors import ConfigurationError
from arpc.options import UNSET, RpcOptions, Unset


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (
        "TIMEOUT",
        "INIT_TIMEOUT",
        "HEARTBEAT",
        "LISTEN",
        "SECRET",
        "SECRET_FILE",
        "TLS_CERT",
        "TLS_KEY",
        "TLS_CA",
    ):
        monkeypatch.delenv(f"ARPC_{name}", raising=False)
    for name in ("BYTES", "FROM_BYTES"):
        monkeypatch.delenv(f"ARPC_SHARED_MEMORY_{name}", raising=False)


def test_the_numbers_a_user_meets():
    options = RpcOptions()
    assert options.rpc_timeout == 60
    assert options.num_worker_threads == 16
    assert (options.control_retries, options.control_backoff) == (5, 1.0)
    assert options.secret is None
    assert not options.insecure
    assert options.listen == ()
    assert options.shutdown_timeout == 0, "as long as it takes: a server waits for its trainers"


def test_the_environment(monkeypatch):
    monkeypatch.setenv("ARPC_TIMEOUT", "5.5")
    monkeypatch.setenv("ARPC_INIT_TIMEOUT", "7")
    monkeypatch.setenv("ARPC_HEARTBEAT", "0.5")
    monkeypatch.setenv("ARPC_LISTEN", "unix:// , tcp://127.0.0.1:0")
    monkeypatch.setenv("ARPC_SECRET", "from the environment")
    monkeypatch.setenv("ARPC_SHARED_MEMORY_BYTES", "0")
    monkeypatch.setenv("ARPC_SHARED_MEMORY_FROM_BYTES", "4096")
    options = RpcOptions()
    assert options.shared_memory_bytes == 0
    assert options.shared_memory_from_bytes == 4096
    assert options.rpc_timeout == 5.5
    assert options.init_timeout == 7
    assert options.heartbeat_interval == 0.5
    assert options.listen == ("unix://", "tcp://127.0.0.1:0")
    assert options.secret == b"from the environment"
    assert RpcOptions(rpc_timeout=1, secret=b"mine").rpc_timeout == 1
    assert RpcOptions(secret=b"mine").secret == b"mine", "what the program says comes first"


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    for name in ("TIMEOUT", "LISTEN", "SECRET", "SECRET_FILE"):
        monkeypatch.setenv(f"ARPC_{name}", "")
    options = RpcOptions()
    assert options.rpc_timeout == 60
    assert options.secret is None


@pytest.mark.parametrize("name", ["ARPC_TIMEOUT", "ARPC_INIT_TIMEOUT", "ARPC_HEARTBEAT"])
def test_a_variable_that_is_no_number(monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigurationError, match=rf"{name} must be a number, not 'soon'"):
        RpcOptions()


def test_a_secret_from_a_file(monkeypatch, tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"from a file\n")
    monkeypatch.setenv("ARPC_SECRET_FILE", str(file))
    assert RpcOptions().secret == b"from a file"
    file.write_bytes(b"\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        RpcOptions()
    monkeypatch.setenv("ARPC_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match=r"missing: No such file"):
        RpcOptions()


def test_a_secret_is_never_shown():
    options = RpcOptions(secret=b"hush")
    assert "hush" not in repr(options)
    assert "secret" not in options.describe()
    assert options.describe()["rpc_timeout"] == 60


TIMES = [
    "rpc_timeout",
    "init_timeout",
    "connect_timeout",
    "heartbeat_interval",
    "heartbeat_timeout",
    "shutdown_timeout",
]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [-1, -0.001, math.nan, "5", None, True])
def test_a_time_that_cannot_be(name, value):
    with pytest.raises(ConfigurationError, match=name):
        RpcOptions(**{name: value})


@pytest.mark.parametrize(
    "name", ["num_worker_threads", "window_bytes", "max_handlers_per_peer", "max_body_bytes", "max_message_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, "5", None, 1.5, True])
def test_a_number_that_cannot_be(name, value):
    with pytest.raises(ConfigurationError, match=name):
        RpcOptions(**{name: value})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"connect_timeout": 0}, "connect_timeout must be more than 0"),
        ({"heartbeat_interval": 5, "heartbeat_timeout": 5}, "must be longer than"),
        ({"busy_poll": float("inf")}, "busy_poll must be at most"),
        ({"max_body_bytes": 4 << 30}, "less than 4 GiB"),
        ({"listen": "unix://"}, "tuple of addresses, not the string"),
        ({"secret": "text"}, "secret must be bytes, not str"),
        ({"secret": b""}, "secret must not be empty"),
    ],
)
def test_values_that_do_not_fit(changes, text):
    with pytest.raises(ConfigurationError, match=text):
        RpcOptions(**changes)


def test_without_heartbeats_their_timeout_does_not_matter():
    assert RpcOptions(heartbeat_interval=0, heartbeat_timeout=0).heartbeat_interval == 0


def test_options_do_not_change():
    options = RpcOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rpc_timeout = 5
    changed = options.replace(rpc_timeout=5)
    assert (options.rpc_timeout, changed.rpc_timeout) == (60, 5)
    assert changed == RpcOptions(rpc_timeout=5)
    with pytest.raises(ConfigurationError, match="no such option: colour, shape"):
        options.replace(shape=1, colour=2)
    with pytest.raises(ConfigurationError, match="rpc_timeout"):
        options.replace(rpc_timeout=-1)
    with pytest.raises(TypeError):
        RpcOptions(5)


def test_a_wrong_option_can_be_caught_as_a_value_error():
    with pytest.raises(ValueError, match="rpc_timeout"):
        RpcOptions(rpc_timeout=-1)


def test_unset_is_one_of_a_kind():
    assert Unset() is UNSET
    assert copy.copy(UNSET) is copy.deepcopy(UNSET) is pickle.loads(pickle.dumps(UNSET)) is UNSET
    assert not UNSET
    assert repr(UNSET) == "UNSET"
