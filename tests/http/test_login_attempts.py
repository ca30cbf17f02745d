from __future__ import annotations

import pytest

from arpc.http.login_attempts import LoginAttempts


def test_so_many_from_each_address_and_no_more():
    login_attempts = LoginAttempts(per_address=2)
    assert [login_attempts.begin("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert login_attempts.begin("192.0.2.2"), "others are not refused for it"
    login_attempts.end("192.0.2.1")
    assert login_attempts.begin("192.0.2.1")
    assert not login_attempts.begin("192.0.2.1")


def test_nothing_is_kept_of_those_that_have_ended():
    login_attempts = LoginAttempts()
    for address in ("192.0.2.1", "192.0.2.1", "2001:db8::1", None, "not an address"):
        assert login_attempts.begin(address)
    assert len(login_attempts) == 4
    for address in ("192.0.2.1", "192.0.2.1", "2001:db8::1", None, "not an address"):
        login_attempts.end(address)
    assert len(login_attempts) == 0


def test_the_table_is_bounded_and_its_being_full_keeps_nobody_out():
    login_attempts = LoginAttempts(per_address=1, addresses=10)
    for number in range(200):
        assert login_attempts.begin(f"192.0.2.{number}")
        assert len(login_attempts) <= 10
    assert not login_attempts.begin("192.0.2.199")
    for number in range(200):
        login_attempts.end(f"192.0.2.{number}")
    assert len(login_attempts) == 0


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(one, other, is_same):
    login_attempts = LoginAttempts(per_address=1)
    assert login_attempts.begin(one)
    assert login_attempts.begin(other) is not is_same
