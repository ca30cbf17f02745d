from __future__ import annotations

import ast
import gc
import inspect
import pickle
import textwrap

import pytest

from arpc.wire import messages
from arpc.wire.messages import MESSAGE_CLASSES, Message, MessageType, Refusal, Reply, Request


def classes_of_the_module() -> set[type[Message]]:
    found = {cls for _, cls in inspect.getmembers(messages, inspect.isclass) if issubclass(cls, Message)}
    return found - {Message}


def test_every_type_has_one_class_and_every_class_is_known():
    assert set(MESSAGE_CLASSES) == set(MessageType)
    assert set(MESSAGE_CLASSES.values()) == classes_of_the_module()
    assert all(cls.type == type_ for type_, cls in MESSAGE_CLASSES.items())


def test_the_table_of_classes_is_final():
    with pytest.raises(TypeError):
        MESSAGE_CLASSES[99] = Request


def test_a_type_is_one_byte():
    assert all(0 < type_ < 256 for type_ in MessageType)


def test_reasons_of_a_refusal_travel_as_numbers():
    assert [Refusal(int(reason)) for reason in Refusal] == list(Refusal)


def test_every_type_says_what_it_means():
    (members,) = ast.parse(textwrap.dedent(inspect.getsource(MessageType))).body
    assert isinstance(members, ast.ClassDef)
    for member, following in zip(members.body, [*members.body[1:], None], strict=True):
        if isinstance(member, ast.Assign):
            assert isinstance(following, ast.Expr), ast.unparse(member)


@pytest.mark.parametrize("cls", sorted(classes_of_the_module(), key=lambda cls: cls.type))
def test_every_class_is_offered_under_the_name_of_its_type(cls):
    assert getattr(messages, cls.__name__) is cls
    assert cls.__name__ in messages.__all__
    assert cls.type.name.replace("_", "").lower() == cls.__name__.lower()
    assert not gc.is_tracked(cls(0, 1, 2, 3, b""))
    assert pickle.loads(pickle.dumps(cls)) is cls


def request(body: bytes = b"", buffers: tuple[memoryview, ...] = (), memory: bytes = b"") -> Message:
    return Request(0, 1, 2, 3, bytearray(body), b"", None, memory, buffers)


def test_size_counts_all_that_follows_the_header_and_buffers():
    assert request().size_bytes == 0
    assert request(b"12345").size_bytes == 5
    assert request(b"12345", (memoryview(b"abc"), memoryview(b"d"))).size_bytes == 9
    assert request(b"12345", (memoryview(b"abc"),), b"tensors12345").size_bytes == 15


def test_messages_are_no_burden_to_the_garbage_collector():
    assert not gc.is_tracked(request(b"x"))


def test_messages_of_a_type_compare_by_content():
    assert request(b"x") == request(b"x")
    assert request(b"x") != request(b"y")
    assert request() != Reply(0, 1, 2, 3, bytearray())
