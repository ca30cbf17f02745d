"""Messages that are sent again are handled once, and nothing is remembered for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arpc.rref.exactly_once import Numbers, Window


def test_a_message_is_admitted_once():
    window = Window()
    assert window.admit(1, 1)
    assert not window.admit(1, 1)
    assert window.admit(3, 1)
    assert not window.admit(3, 1)
    assert window.admit(2, 1)
    assert not window.admit(2, 1)
    assert len(window) == 0


def test_a_message_that_its_sender_gave_up_is_not_admitted():
    window = Window()
    assert window.admit(5, 4)
    assert not window.admit(3, 1)
    assert window.admit(4, 4)


def test_the_oldest_number_is_the_first_that_is_open():
    numbers = Numbers()
    first, second, third = (numbers.take()[0] for _ in range(3))
    assert numbers.oldest == first
    numbers.settle(second)
    assert numbers.oldest == first
    numbers.settle(first)
    assert numbers.oldest == third
    numbers.settle(third)
    assert numbers.oldest == third + 1
    numbers.settle(third)


@given(st.data())
def test_in_any_order_and_number_each_is_admitted_once(data):
    numbers, window = Numbers(), Window()
    sent = [numbers.take() for _ in range(data.draw(st.integers(1, 12)))]
    copies = data.draw(st.lists(st.sampled_from(sent), min_size=len(sent), max_size=40))
    arrived = [number for number, oldest in [*copies, *sent] if window.admit(number, oldest)]
    assert sorted(arrived) == [number for number, _ in sent]
    assert len(window) == 0


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_the_oldest_number_is_right_after_any_story(story):
    """None takes a number, others settle one of the open ones."""
    numbers, open_ = Numbers(), []
    taken = 0
    for step in story:
        if step is None:
            number, oldest = numbers.take()
            taken += 1
            open_.append(number)
            assert number == taken
            assert oldest == min(open_)
        elif open_:
            numbers.settle(open_.pop(step % len(open_)))
        assert numbers.oldest == min(open_, default=taken + 1)
