from __future__ import annotations

import pytest

from arpc.http.guesses import Guesses


def test_so_many_from_each_address_and_no_more():
    guesses = Guesses(per_address=2)
    assert [guesses.begin("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert guesses.begin("192.0.2.2"), "others are not refused for it"
    guesses.end("192.0.2.1")
    assert guesses.begin("192.0.2.1")
    assert not guesses.begin("192.0.2.1")


def test_nothing_is_kept_of_those_that_have_ended():
    guesses = Guesses()
    for address in ("192.0.2.1", "192.0.2.1", "2001:db8::1", None, "not an address"):
        assert guesses.begin(address)
    assert len(guesses) == 4
    for address in ("192.0.2.1", "192.0.2.1", "2001:db8::1", None, "not an address"):
        guesses.end(address)
    assert len(guesses) == 0


def test_the_table_is_bounded_and_its_being_full_keeps_nobody_out():
    guesses = Guesses(per_address=1, addresses=10)
    for number in range(200):
        assert guesses.begin(f"192.0.2.{number}")
        assert len(guesses) <= 10
    assert not guesses.begin("192.0.2.199")
    for number in range(200):
        guesses.end(f"192.0.2.{number}")
    assert len(guesses) == 0


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
    guesses = Guesses(per_address=1)
    assert guesses.begin(one)
    assert guesses.begin(other) is not is_same
