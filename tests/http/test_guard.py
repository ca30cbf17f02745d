"""Who may look."""

from __future__ import annotations

import doctest

import pytest

from arpc.http import guard as module
from arpc.http.guard import SESSION_S, Guard, derive_token

SECRET = b"swordfish"
LOCAL = {"Host": "127.0.0.1:27720"}
FAR = {"Host": "gpu7.example:27720"}


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


def test_the_examples_of_the_module_hold():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("host", ["127.0.0.1:27720", "localhost:1", "[::1]:27720", "127.9.9.9", "LOCALHOST:80"])
def test_on_loopback_whoever_is_here_may_look(host):
    assert Guard(None, needs_secret=False).judge("GET", {"Host": host}, None).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:27720", "10.0.0.1", "", "[::1", "localhost.evil"]
)
def test_on_loopback_a_name_that_somebody_made_to_mean_it_is_refused(host):
    assert Guard(SECRET, needs_secret=False).judge("GET", {"Host": host}, None).status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:27720"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_what_changes_something_comes_from_a_page_of_our_own(headers, status):
    assert Guard(None, needs_secret=False).judge("POST", {**LOCAL, **headers}, None).status == status


def test_beyond_loopback_one_needs_the_secret():
    guard = Guard(SECRET, needs_secret=True)
    assert guard.judge("GET", FAR, None).status == 401
    assert guard.judge("GET", {**FAR, "Authorization": f"Bearer {derive_token(SECRET)}"}, None).status == 200
    assert guard.judge("GET", {**FAR, "Authorization": f"bearer  {derive_token(SECRET)}"}, None).status == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer swordfish", f"Basic {derive_token(SECRET)}", "Bearer \xff", "Bearer \udcff"],
)
def test_anything_else_is_no_token(authorization):
    guard = Guard(SECRET, needs_secret=True)
    assert guard.judge("GET", {**FAR, "Authorization": authorization}, None).status == 401


@pytest.mark.parametrize("typed", ["swordfish", " swordfish\n", derive_token(SECRET)])
def test_the_secret_and_its_token_open_a_session(typed):
    guard = Guard(SECRET, needs_secret=True)
    cookie = guard.login(typed)
    assert guard.judge("GET", FAR, cookie).status == 200
    assert "swordfish" not in cookie


@pytest.mark.parametrize("typed", ["", "Swordfish", "swordfish2", "\x00", "ü", "\udcff"])
def test_nothing_else_does(typed):
    assert Guard(SECRET, needs_secret=True).login(typed) is None


def test_a_session_ends():
    clock = Clock()
    guard = Guard(SECRET, needs_secret=True, clock=clock)
    cookie = guard.login("swordfish")
    clock.now += SESSION_S - 1
    assert guard.is_session(cookie)
    clock.now += 2
    assert not guard.is_session(cookie)


def test_a_session_cannot_be_made_longer_or_moved_to_another_group():
    guard = Guard(SECRET, needs_secret=True)
    expiry, _, proof = guard.login("swordfish").partition(".")
    assert not guard.is_session(f"{int(expiry) + 1}.{proof}")
    assert not Guard(b"another", needs_secret=True).is_session(f"{expiry}.{proof}")


@pytest.mark.parametrize("cookie", [None, "", ".", "x.y", "9" * 400 + ".x", "١٢.x", "-1.x", "1.\udcff"])
def test_what_is_no_session_is_none(cookie):
    assert not Guard(SECRET, needs_secret=True).is_session(cookie)


def test_without_a_secret_nobody_can_log_in():
    guard = Guard(None, needs_secret=False)
    assert guard.login("") is None
    assert not guard.is_session("1.x")
    with pytest.raises(ValueError, match="has one"):
        Guard(None, needs_secret=True)
