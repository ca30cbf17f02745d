"""A thread's state as a value: every block shows in it, is taken away whole and comes back exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from arpc.torchstate import DEFAULTS, SavedState, capture, is_pristine, restore, save_and_reset
from arpc.torchstate import state as state_module
from tests.torchstate.blocks import BLOCKS, counting_hooks, observe

# On a pristine thread these two change nothing.
VISIBLE_BLOCKS = sorted(set(BLOCKS) - {"enable_grad", "no_inference_mode"})

stacks_of_blocks = st.lists(st.sampled_from(sorted(BLOCKS)), max_size=6)


def in_new_thread(func: Callable[[], Any]) -> Any:
    results = []
    thread = threading.Thread(target=lambda: results.append(func()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("name", VISIBLE_BLOCKS)
def test_every_block_makes_the_thread_not_pristine(name):
    with BLOCKS[name]():
        assert not is_pristine()
    assert is_pristine()


@given(names=stacks_of_blocks)
def test_state_is_taken_away_whole_and_comes_back_exactly(names):
    defaults = observe()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(BLOCKS[name]())
        inside = observe()
        saved = save_and_reset()
        assert is_pristine()
        assert observe() == defaults
        restore(saved)
        assert observe() == inside
        assert capture() == saved
    assert observe() == defaults
    assert is_pristine()


@given(names=stacks_of_blocks)
def test_state_can_be_put_in_place_on_another_thread_any_number_of_times(names):
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(BLOCKS[name]())
        inside = observe()
        saved = capture()

    def elsewhere() -> list[Any]:
        seen = []
        for _ in range(2):
            restore(saved)
            seen.append(observe())
            assert save_and_reset() == saved
            assert is_pristine()
        return seen

    assert in_new_thread(elsewhere) == [inside, inside]


def test_pristine_state_is_the_defaults_of_a_new_thread():
    assert capture() is DEFAULTS
    assert save_and_reset() is DEFAULTS
    assert in_new_thread(capture) is DEFAULTS


def test_discarded_state_has_no_late_effect():
    with torch.inference_mode():
        saved = save_and_reset()
        assert saved.inference
        del saved
        assert is_pristine()


def test_leaving_a_block_whose_state_was_taken_away_restores_what_was_before_it():
    with torch.no_grad():
        before = observe()
        with torch.inference_mode():
            saved = save_and_reset()
            restore(saved)
        assert observe() == before


def test_function_modes_see_nothing_of_the_swap():
    class Recorder(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), Recorder() as recorder:
        restore(save_and_reset())
        assert recorder.seen == []


def test_default_device_belongs_to_the_state():
    torch.set_default_device("meta")
    saved = save_and_reset()
    assert torch.ones(1).device.type == "cpu"
    with BLOCKS["function_mode"]():  # which torch would find where it looks for the device that was taken away
        torch.set_default_device("cpu")
        torch.set_default_device(None)
    assert is_pristine()
    restore(saved)
    assert torch.ones(1).device.type == "meta"
    torch.set_default_device(None)


def test_autocast_nesting_is_part_of_the_state():
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        saved = save_and_reset()
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        restore(saved)
        assert torch.autocast_increment_nesting() == 3
        assert torch.autocast_decrement_nesting() == 2


def test_weights_cast_before_the_swap_are_not_found_after_it():
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.mm(weight, weight)  # puts a cast without history in torch's cache
        saved = save_and_reset()
        with torch.autocast("cpu", dtype=torch.float16):
            product = torch.mm(weight, weight)
        assert product.dtype is torch.float16
        assert product.requires_grad
        restore(saved)


def test_negative_autocast_nesting_is_carried_too():
    torch.autocast_decrement_nesting()
    assert not is_pristine()
    saved = save_and_reset()
    assert is_pristine()
    restore(saved)
    assert torch.autocast_increment_nesting() == 0


def test_older_torch_without_readable_hooks_still_swaps_the_rest(monkeypatch):
    monkeypatch.setattr(state_module, "top_saved_hooks", state_module._unreadable_hooks)
    with torch.no_grad(), counting_hooks():
        assert save_and_reset() == SavedState(grad=False)
        assert is_pristine()
        assert observe().packed_tensors > 0
    assert is_pristine()


def test_older_torch_without_a_list_of_autocast_devices(monkeypatch):
    monkeypatch.delattr(torch._C, "_autocast_supported_devices", raising=False)
    assert "cpu" in state_module._autocast_device_types()
