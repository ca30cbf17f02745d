"""Splits one optimizer into parts, one for each owner, and joins their states. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arpc.errors import ConfigurationError
from arpc.optim.local_optimizer import Group, LocalOptimizer, copied
from arpc.rref.handle import RRef

__all__ = ["Part", "check_state", "joined_state", "part_of_state"]


class Part:
    """One `LocalOptimizer`, with its groups and parameters among those of the whole optimizer."""

    def __init__(
        self,
        owner: str,
        rref: RRef[LocalOptimizer],
        groups: Sequence[int],
        parameters: Sequence[Sequence[int]],
    ) -> None:
        self.owner = owner
        self.rref = rref
        self.groups = tuple(groups)
        """The numbers of its groups among those of the whole."""
        self.parameters = tuple(map(tuple, parameters))
        """For each of its groups, the numbers of the parameters, as torch would number them all."""
        self.known: list[Group] | None = None
        """The hyperparameters of its groups as the owner has them; None until the owner has described them."""

    def changes(self, groups: Sequence[Group]) -> list[Group]:
        """Return the changes that give the owner the hyperparameters of the whole optimizer."""
        assert self.known is not None
        return [
            {
                key: copied(value)
                for key, value in groups[number].items()
                if key != "params" and not (key in known and _equal(known[key], value))
            }
            for number, known in zip(self.groups, self.known, strict=True)
        ]

    def record(self, changes: Sequence[Group]) -> None:
        """Record that the owner has made these changes."""
        assert self.known is not None
        for known, changed in zip(self.known, changes, strict=True):
            known.update(changed)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# -- state dicts, as torch's own optimizers make and take them


def joined_state(parts: Sequence[Part], states: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the state of one optimizer over all parameters, from those of its parts and its hyperparameters."""
    joined: dict[Any, Any] = {}
    saved_groups: list[Group] = [{} for _ in groups]
    for part, state in zip(parts, states, strict=True):
        whole_number: dict[Any, int] = {}
        # changes that were made here are sent to the owners with the next step
        rows = zip(part.groups, part.parameters, state["param_groups"], part.changes(groups), strict=True)
        for number, indices, group, changes in rows:
            whole_number.update(zip(group["params"], indices, strict=True))
            saved = saved_groups[number]
            before = saved.pop("params", [])
            saved.update({**group, **changes, "params": sorted([*before, *indices])})
        for key, value in state["state"].items():
            joined[whole_number.get(key, key)] = value
    return {
        "state": dict(sorted(joined.items(), key=lambda item: (isinstance(item[0], str), item[0]))),
        "param_groups": saved_groups,
    }


def check_state(state: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Raise `ConfigurationError` if a state is not one of an optimizer with such groups."""
    saved = state["param_groups"]
    if len(saved) != len(groups):
        raise ConfigurationError(f"the state has {len(saved)} parameter groups, and the optimizer {len(groups)}")
    for number, (old, group) in enumerate(zip(saved, groups, strict=True)):
        if len(old["params"]) != len(group["params"]):
            raise ConfigurationError(
                f"the state has {len(old['params'])} parameters in group {number}, and the optimizer "
                f"{len(group['params'])}"
            )


def part_of_state(part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of the whole optimizer's state that one part has to load."""
    # The state may number its parameters in any way; their order in the groups is what counts
    whole = [key for group in state["param_groups"] for key in group["params"]]
    own: dict[Any, Any] = {}
    groups: list[Group] = []
    count = 0
    for number, indices in zip(part.groups, part.parameters, strict=True):
        local = list(range(count, count + len(indices)))
        count += len(indices)
        for index, key in zip(local, indices, strict=True):
            if whole[key] in state["state"]:
                own[index] = state["state"][whole[key]]
        groups.append({**state["param_groups"][number], "params": local})
    of_parameters = set(whole)
    own.update({key: value for key, value in state["state"].items() if key not in of_parameters})
    return {"state": own, "param_groups": groups}
