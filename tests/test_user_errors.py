"""Looking at exceptions and values of users without running into what their own code does."""

from __future__ import annotations

import asyncio
from abc import ABC

import pytest

from arpc import user_errors
from tests.hostile import EXCEPTIONS, MESSAGE, VALUES, raise_specimen


@pytest.mark.parametrize("name", [name for name in EXCEPTIONS if "__del__" not in name])
def test_every_specimen_can_be_described(name):
    error = EXCEPTIONS[name]()
    kind = type.__dict__["__qualname__"].__get__(type(error))
    assert user_errors.type_name_of(error) == kind
    texts = {
        "text": user_errors.text_of(error),
        "stack": user_errors.stack_of(error),
        "summary": user_errors.summary_of(error),
        "repr": user_errors.repr_of(error),
    }
    assert {type(text) for text in texts.values()} == {str}
    assert kind in texts["summary"]
    assert all(len(text) <= user_errors.MAX_TEXT + 200 for text in texts.values())
    assert type(user_errors.fresh(error)) is type(error)
    assert user_errors.cause_of(user_errors.set_cause(error, None)) is None
    assert user_errors.with_traceback(error, None) is error
    assert not user_errors.is_coroutine(error)


@pytest.mark.parametrize("name", [name for name in VALUES if "__del__" not in name])
def test_no_specimen_is_taken_for_something_else(name):
    value = VALUES[name]()
    assert not user_errors.is_coroutine(value)
    assert user_errors.is_a(value, BaseException) == name.startswith("an exception")
    user_errors.close_coroutine(value)


def test_what_is_left_of_the_message_if_str_raises():
    text = user_errors.text_of(EXCEPTIONS["__str__-SystemExit"]())
    assert text == f"<its __str__ raised SystemExit> {MESSAGE}"


def test_the_stack_of_a_specimen_has_its_frames():
    try:
        raise_specimen("__notes__-KeyboardInterrupt")
    except Exception as error:  # noqa: BLE001 - the specimen
        stack = user_errors.stack_of(error)
    assert "in test_the_stack_of_a_specimen_has_its_frames" in stack
    assert MESSAGE in stack


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = user_errors.text_of(LookupError("a" * 100_000 + "b" * 100_000))
    assert text.startswith("a" * 1000)
    assert text.endswith("b" * 1000)
    assert f"{200_000 - user_errors.MAX_TEXT} characters are left out" in text


class PlainError(LookupError, ABC):
    """Of an abstract class, as some are."""


@pytest.mark.parametrize(
    ("error", "can"),
    [
        (LookupError(), True),
        (PlainError(), True),
        (SystemExit(), True),
        (EXCEPTIONS["__str__-SystemExit"](), True),
        (EXCEPTIONS["__setattr__-SystemExit"](), True),
        (EXCEPTIONS["lying class"](), False),
    ],
    ids=user_errors.type_name_of,
)
def test_which_exceptions_code_may_catch(error, can):
    assert user_errors.can_be_raised(error) is can


@pytest.mark.parametrize("hook", ["__class__", "__getattribute__", "type.__subclasscheck__", "type.__getattribute__"])
def test_exceptions_that_decide_what_isinstance_says_are_not_raised(hook):
    assert not user_errors.can_be_raised(EXCEPTIONS[f"{hook}-SystemExit"]())


async def test_coroutines_are_known_and_closed():
    coroutine = asyncio.sleep(0)
    assert user_errors.is_coroutine(coroutine)
    user_errors.close_coroutine(coroutine)
    assert coroutine.cr_frame is None
