"""Types of TorchScript as text, and back."""

from __future__ import annotations

import pytest

import arpc
from arpc.torchscript import parse_type, text_of
from arpc.torchscript.types import python_class
from tests.torchscript import functions

HERE = f"__torch__.{functions.__name__}"


@pytest.mark.parametrize(
    "text",
    [
        "Tensor",
        "int",
        "float",
        "bool",
        "str",
        "complex",
        "NoneType",
        "Any",
        "List[int]",
        "Dict[str, List[Optional[Tensor]]]",
        "Optional[Dict[int, Tensor]]",
        "Tuple[int, Tuple[str, Tensor], List[float]]",
        "Tuple[()]",
        "Future[List[Tensor]]",
        "RRef[Tensor]",
        f"{HERE}.Tally",
        f"{HERE}.Point",
        f"{HERE}.Spinning",
        f"List[{HERE}.Line]",
    ],
)
def test_texts_are_parsed_back(text):
    assert text_of(parse_type(text)) == text


@pytest.mark.parametrize(
    "function", [functions.with_defaults, functions.make_line, functions.later, functions.containers]
)
def test_the_types_of_schemas_are_parsed_back(function):
    for part in (*function.schema.arguments, *function.schema.returns):
        assert parse_type(text_of(part.type)) == part.type


def test_unions_are_parsed_back():
    assert text_of(parse_type("Union[int, str]")) in {"Union[int, str]", "Union[str, int]"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "List",
        "List[int",
        "List[int, int]",
        "Dict[str]",
        "int]",
        "Array[int]",
        "__torch__.nowhere.Nothing",
        "Tuple[(]",
    ],
)
def test_what_is_no_type_is_refused(text):
    with pytest.raises(arpc.ScriptError, match="is no type of TorchScript"):
        parse_type(text)


def test_classes_are_found_by_their_names():
    assert python_class(f"{HERE}.Point") is functions.Point
    assert python_class(f"{HERE}.___torch_mangle_3.Point") is functions.Point
    assert python_class("__torch__.nowhere.Nothing") is None
