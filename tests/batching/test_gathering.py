"""Arguments put together, and results taken apart."""

from __future__ import annotations

import pytest
import torch

import arpc
from arpc.batching.gathering import gather, kind_of, scatter
from tests.batching.functions import Scored


def test_tensors_are_stacked_and_the_rest_is_listed():
    calls = [((torch.full((2,), float(number)), number), {"name": str(number)}) for number in range(3)]
    args, kwargs = gather(calls)
    assert args[0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert args[1:] == [[0, 1, 2]]
    assert kwargs == {"name": ["0", "1", "2"]}


def test_a_lone_call_is_a_batch_without_a_copy():
    x = torch.ones(2)
    args, _ = gather([((x,), {})])
    assert args[0].shape == (1, 2)
    assert args[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((torch.ones(2),), {}), ((torch.ones(3),), {})),
        (((torch.ones(2),), {}), ((torch.ones(2, dtype=torch.int64),), {})),
        (((torch.ones(2),), {}), ((torch.ones(2, device="meta"),), {})),
        (((torch.ones(2),), {}), (("text",), {})),
        (((1,), {}), ((1, 2), {})),
        (((1,), {}), ((), {"x": 1})),
        (((), {"y": 1}), ((), {"x": 1})),
    ],
)
def test_calls_of_different_kinds_cannot_be_one(one, other):
    assert kind_of(*one) != kind_of(*other)
    assert kind_of(*one) == kind_of(*one)


def test_the_order_of_keywords_makes_no_difference():
    assert kind_of((), {"a": 1, "b": torch.ones(1)}) == kind_of((), {"b": torch.ones(1), "a": "text"})


def test_each_caller_gets_its_part():
    x = torch.arange(4.0).view(2, 2)
    assert [row.tolist() for row in scatter(x, 2, "f")] == [[0, 1], [2, 3]]
    assert scatter(["a", "b"], 2, "f") == ["a", "b"]
    assert scatter(None, 2, "f") == [None, None]
    assert scatter((["a", "b"], None), 2, "f") == [("a", None), ("b", None)]
    assert scatter((), 2, "f") == [(), ()]
    assert scatter({"k": ["a", "b"]}, 2, "f") == [{"k": "a"}, {"k": "b"}]
    named = scatter(Scored(x, ["a", "b"]), 2, "f")
    assert type(named[1]) is Scored
    assert (named[1].score.tolist(), named[1].label) == ([2, 3], "b")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(3), r"was called for 2 calls, and returned a tensor of shape \[3\]"),
        (torch.ones(()), r"a tensor of shape \[\]"),
        ([1], "a list of 1 items"),
        (5, "returned int: return a tensor whose rows"),
        ((torch.ones(2), 5), "returned int"),
    ],
)
def test_a_result_that_is_not_one_for_each_is_an_error(result, text):
    with pytest.raises(arpc.BatchError, match=text):
        scatter(result, 2, "f")
