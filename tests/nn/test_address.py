from __future__ import annotations

import pytest
import torch

import arpc
from arpc.nn.address import Address, parse_device


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("ps", "ps", "cpu"),
        ("ps/cpu", "ps", "cpu"),
        ("ps0:a/cuda:1", "ps0:a", "cuda:1"),
        ("rank:3", 3, "cpu"),
        ("rank:12/meta", 12, "meta"),
        ("rank:x", "rank:x", "cpu"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_addresses(text, worker, device):
    assert Address.parse(text) == (worker, torch.device(device))


@pytest.mark.parametrize("text", ["", "/", "/cpu", "ps/", "ps/cuda:0/cuda:1"])
def test_what_is_no_address(text):
    with pytest.raises(arpc.ConfigurationError, match="no address of a module"):
        Address.parse(text)


@pytest.mark.parametrize("device", ["foo", "cpu2", "cuda:x"])
def test_what_is_no_device(device):
    with pytest.raises(arpc.ConfigurationError, match="is no device"):
        Address.parse(f"ps/{device}")
    with pytest.raises(arpc.ConfigurationError, match="is no device"):
        parse_device(device)
