"""The part of a `DistributedOptimizer` that is on one owner: a torch optimizer over some of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from arpc.autograd import get_gradients
from arpc.errors import AutogradError, ConfigurationError
from arpc.optim.locks import run_alone
from arpc.rref.handle import RRef
from arpc.rref.reducer import bare
from arpc.runtime import current
from arpc.wire.values.allowlist import export, register_type

__all__ = ["TWICE", "Description", "Group", "LocalOptimizer", "StepRules", "copied", "make_local_optimizer"]

Group = dict[str, Any]

TWICE: Final = "some parameters appear in more than one parameter group: each would make two steps at once"


@register_type
class StepRules(NamedTuple):
    """The settings for every step of an optimizer."""

    serialize_steps: bool
    check_versions: bool


@register_type
class Description(NamedTuple):
    """The description of a local optimizer for the `DistributedOptimizer`."""

    groups: list[Group]
    """The hyperparameters of each group, without its parameters."""
    defaults: Group


@export
async def make_local_optimizer(
    optimizer_class: Callable[..., Optimizer],
    groups: Sequence[Group],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rules: StepRules,
    earlier: Sequence[RRef[LocalOptimizer]] = (),
) -> LocalOptimizer:
    """Make an optimizer over parameters of this worker, given as RRefs. Runs on their owner.

    ``earlier`` are the parts that the same optimizer has here for other groups: no parameter may be in both.
    """
    found = [{**group, "params": [await bare(rref).local_value() for rref in group["params"]]} for group in groups]
    taken = {id(parameter) for rref in earlier for parameter in (await bare(rref).local_value()).parameters}
    if any(id(parameter) in taken for group in found for parameter in group["params"]):
        raise ConfigurationError(TWICE)
    worker = current()
    # Torch's optimizers import it when they are first used, which takes most of a second: no step should wait for that
    await worker.agent.dispatcher.threads.call(import_module, "torch._dynamo")
    try:
        made: LocalOptimizer = await worker.rref_context.call(
            LocalOptimizer, (optimizer_class, found, args, kwargs, rules), {}
        )
    except Exception as error:
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        error.add_note(f"while worker {worker.name!r} made the optimizer {name} over its parameters")
        raise
    return made


@export
class LocalOptimizer:
    """A torch optimizer over *stand-ins* of parameters.

    A stand-in has the memory of its parameter and a ``.grad`` of its own. So gradients of a context never appear in the
    ``.grad`` of a parameter, where other code may be accumulating its own, and any number of optimizers can hold
    different gradients for the same parameter at the same time.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[Group],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rules: StepRules,
    ) -> None:
        self._rules = rules
        stand_ins: dict[int, Tensor] = {}  # one per parameter, so that torch detects duplicates
        self.parameters: list[Tensor] = []
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) not in stand_ins:
                    stand_ins[id(parameter)] = _stand_in(parameter)
                    self.parameters.append(parameter)
        self._stand_ins = list(stand_ins.values())
        placed = [{**group, "params": [stand_ins[id(parameter)] for parameter in group["params"]]} for group in groups]
        self._optimizer = optimizer_class(placed, *args, **kwargs)

    async def _alone(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread, with exclusive use of the parameters, or at least of the stand-ins."""
        return await run_alone(self.parameters if self._rules.serialize_steps else self._stand_ins, function)

    # -- called by the `DistributedOptimizer`

    async def step(self, context_id: int, changes: Sequence[Group]) -> None:
        """Take a step with the gradients of a context, after changing the hyperparameters."""
        try:
            gradients = get_gradients(context_id)
        except AutogradError:
            gradients = {}  # the caller has the context: it has not reached this worker
        await self._alone(lambda: self._step(gradients, changes))

    async def describe(self) -> Description:
        return await self._alone(self._describe)  # type: ignore[no-any-return]

    async def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state between two steps, numbered as torch does."""
        return await self._alone(lambda: copied(self._optimizer.state_dict()))  # type: ignore[no-any-return]

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        await self._alone(lambda: self._optimizer.load_state_dict(state))

    # -- in a thread

    def _step(self, gradients: Mapping[Tensor, Tensor], changes: Sequence[Group]) -> None:
        for group, changed in zip(self._optimizer.param_groups, changes, strict=True):
            for key, value in changed.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # captured graphs, and the optimizer itself, refer to the tensor
                else:
                    group[key] = value
        try:
            for parameter, stand_in in zip(self.parameters, self._stand_ins, strict=True):
                _follow(stand_in, parameter)
                stand_in.grad = gradients.get(parameter)
            self._optimizer.step()
        finally:
            for stand_in in self._stand_ins:
                stand_in.grad = None
        if self._rules.check_versions:
            for parameter in self.parameters:
                if parameter in gradients:
                    torch.autograd.graph.increment_version(parameter)

    def _describe(self) -> Description:
        groups = [
            {key: copied(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return Description(groups, copied(self._optimizer.defaults))


def _stand_in(parameter: Any) -> Tensor:
    if not isinstance(parameter, Tensor):
        raise ConfigurationError(f"an optimizer takes RRefs to tensors, not to {type(parameter).__qualname__}")
    if not parameter.is_leaf:
        raise ConfigurationError("an optimizer cannot change a tensor that was computed from others: it is no leaf")
    # .data and not .detach(): each has a version counter of its own, see StepRules.check_versions
    if isinstance(parameter, Parameter):
        return Parameter(parameter.data, requires_grad=parameter.requires_grad)
    return parameter.data.requires_grad_(parameter.requires_grad)


def _follow(stand_in: Tensor, parameter: Tensor) -> None:
    """Follow the parameter's memory, which is replaced when its module is moved or cast."""
    if stand_in.data_ptr() != parameter.data_ptr() or stand_in.dtype != parameter.dtype:
        stand_in.data = parameter.data


def copied(value: Any) -> Any:
    """Return a deep copy of plain containers and tensors. Tensors go to the CPU: the receiver may lack the device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    if type(value) is tuple:
        return tuple(copied(item) for item in value)
    return value
