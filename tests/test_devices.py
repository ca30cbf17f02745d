from __future__ import annotations

import pytest
import torch

from arpc.devices import DeviceClaims, check_device_maps, checked_device_map, checked_devices, merged_device_map
from arpc.errors import ConfigurationError
from arpc.options import RpcOptions


def named(mapping: object) -> dict[str, str]:
    return {str(here): str(there) for here, there in mapping.items()}


# -- what one worker says


@pytest.mark.parametrize("here", [0, "cuda:0", "cuda", torch.device("cuda", 0), torch.device("cuda")])
def test_a_device_has_many_names(here):
    assert named(checked_device_map("b", {here: torch.device("cuda", 1)})) == {"cuda:0": "cuda:1"}


def test_the_cpu_is_a_device_too():
    assert named(checked_device_map("b", {"cpu": "cuda:0", 0: "cpu:0"})) == {"cpu": "cuda:0", "cuda:0": "cpu"}


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({0: 1, 1: 1}, "'b' sends cuda:0 and cuda:1 to cuda:1: it must be one to one"),
        ({0: 1, "cuda": 2}, "'b' sends cuda:0 to cuda:1 and to cuda:2: it must be one to one"),
        ({"nowhere:0": 1}, "'b': 'nowhere:0' is not a device"),
        ({0: 1.5}, "'b': a device is a number, a name like 'cuda:0' or a torch.device, not 1.5"),
        ({0: True}, "'b': a device is a number, a name like 'cuda:0' or a torch.device, not True"),
        ([(0, 1)], "'b' must be a dict of devices here to devices there"),
    ],
)
def test_what_cannot_be_a_map_is_refused_at_once(mapping, text):
    with pytest.raises(ConfigurationError) as caught:
        checked_device_map("b", mapping)
    assert text in str(caught.value)
    with pytest.raises(ConfigurationError):
        RpcOptions(device_maps={"b": mapping})


def test_maps_grow():
    first = checked_device_map("b", {0: 1})

    assert named(merged_device_map("b", first, {1: 0, "cuda:0": 1})) == {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    with pytest.raises(ConfigurationError, match="sends cuda:0 and cuda:2 to cuda:1"):
        merged_device_map("b", first, {2: 1})


def test_devices_are_a_list_of_different_ones():
    assert checked_devices([0, "cuda:1"]) == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ConfigurationError, match="names one twice: cuda:0, cuda:0"):
        checked_devices([0, "cuda"])
    with pytest.raises(ConfigurationError, match="every worker has the CPU"):
        checked_devices(["cpu"])
    with pytest.raises(ConfigurationError, match="a list of devices"):
        checked_devices("cuda:0")


# -- options


def test_options_take_maps_and_devices_as_torch_does():
    options = RpcOptions(device_maps={"b": {0: 1}}, devices=[0])
    options.set_device_map("b", {1: 0})
    options.set_device_map("c", {"cpu": "cuda:0"})

    assert {to: named(mapping) for to, mapping in options.device_maps.items()} == {
        "b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"},
        "c": {"cpu": "cuda:0"},
    }
    assert options.devices == (torch.device("cuda:0"),)


def test_what_is_added_to_options_is_not_added_to_others():
    given = {"b": {0: 1}}
    first = RpcOptions(device_maps=given)
    second = first.replace(rpc_timeout=1.0)
    first.set_device_map("b", {1: 0})

    assert named(second.device_maps["b"]) == {"cuda:0": "cuda:1"}
    assert given == {"b": {0: 1}}
    assert RpcOptions().device_maps == {}


def test_a_map_that_was_refused_leaves_the_options_as_they_were():
    options = RpcOptions().set_device_map("b", {0: 1})

    with pytest.raises(ConfigurationError):
        options.set_device_map("b", {2: 0, 1: 1})

    assert named(options.device_maps["b"]) == {"cuda:0": "cuda:1"}


def test_options_with_maps_can_be_compared_and_hashed():
    first, second = RpcOptions(device_maps={"b": {0: 1}}), RpcOptions(device_maps={"b": {"cuda": "cuda:1"}})

    assert first == second
    assert hash(first) == hash(second)
    assert first != RpcOptions()


# -- what a group says

TWO = {"cuda": 2}


def check(is_complete: bool = True, **claims: DeviceClaims) -> None:
    check_device_maps(claims, is_complete=is_complete)


def test_maps_that_fit_are_fine():
    check(
        a=DeviceClaims(TWO, maps={"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "a": {"cuda:0": "cuda:0"}}),
        b=DeviceClaims(TWO, maps={"c": {"cuda:0": "cpu"}}),
        c=DeviceClaims(maps={"a": {"cpu": "cuda:1"}}),
    )


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        (
            {"a": DeviceClaims(TWO, maps={"x": {"cuda:0": "cuda:0"}}), "b": DeviceClaims(TWO)},
            "the device map of worker 'a' for worker 'x': there is no such worker; the group has 'a', 'b'",
        ),
        (
            {"a": DeviceClaims(TWO, maps={"b": {"cuda:2": "cuda:0"}}), "b": DeviceClaims(TWO)},
            "the device map of worker 'a' for worker 'b': worker 'a' has no device cuda:2; it has cuda:0 to cuda:1",
        ),
        (
            {"a": DeviceClaims(TWO, maps={"b": {"cuda:0": "cuda:2"}}), "b": DeviceClaims(TWO)},
            "the device map of worker 'a' for worker 'b': worker 'b' has no device cuda:2; it has cuda:0 to cuda:1",
        ),
        (
            {"a": DeviceClaims(TWO, maps={"b": {"cuda:0": "cuda:0"}}), "b": DeviceClaims()},
            "worker 'b' has no device cuda:0; it has none of type cuda",
        ),
        (
            {"a": DeviceClaims(TWO, ("cuda:1",), {"b": {"cuda:0": "cuda:0"}}), "b": DeviceClaims(TWO)},
            "worker 'a' does not use cuda:0; its RpcOptions.devices are cuda:1",
        ),
        (
            {"a": DeviceClaims(TWO, maps={"b": {"cuda:0": "cuda:0"}}), "b": DeviceClaims(TWO, ("cuda:1",))},
            "worker 'b' does not use cuda:0; its RpcOptions.devices are cuda:1",
        ),
        (
            {"a": DeviceClaims(TWO, ("cuda:5",))},
            "worker 'a' names in RpcOptions.devices: worker 'a' has no device cuda:5",
        ),
        (
            {"a": DeviceClaims(maps={"a": {"meta": "cpu"}})},
            "a tensor on 'meta' has no bytes that could be anywhere, and needs no map",
        ),
    ],
)
def test_maps_that_do_not_fit_the_group_are_refused(claims, text):
    with pytest.raises(ConfigurationError) as caught:
        check_device_maps(claims, is_complete=True)
    assert text in str(caught.value)


def test_a_group_that_grows_may_have_maps_for_workers_to_come():
    check(is_complete=False, a=DeviceClaims(TWO, maps={"later": {"cuda:0": "cuda:7"}}))
