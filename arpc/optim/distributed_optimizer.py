"""DistributedOptimizer: one optimizer over parameters that are on many workers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self

from torch import Tensor
from torch.optim import Optimizer

from arpc.agent.client.future import Future
from arpc.api import remote
from arpc.autograd import get_gradients
from arpc.errors import ConfigurationError, NotReadyError, UnsupportedError, WorkersFailedError
from arpc.optim.local_optimizer import TWICE, Description, Group, StepRules, copied, make_local_optimizer
from arpc.optim.parts import Part, check_state, joined_state, part_of_state
from arpc.options import UNSET, Unset
from arpc.rref.handle import RRef

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(Optimizer):
    """A torch optimizer over parameters that are on any number of workers.

    Each owner gets an optimizer of the given class over its parameters. `step` makes all of them update the parameters
    in place, with the gradients of a context::

        opt = await arpc.optim.DistributedOptimizer(torch.optim.SGD, await model.remote_parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=10)
        for x, y in batches:
            async with arpc.autograd.context() as context_id:
                loss = torch.nn.functional.mse_loss(await model(x), y)
                await arpc.autograd.backward(context_id, [loss])
                await opt.step(context_id)
            scheduler.step()

    ``params_rref`` are RRefs, or parameter groups: dicts whose ``"params"`` are RRefs. Further arguments go to the
    optimizer class. The constructor does not wait. ``await`` the optimizer to know that all owners have created their
    part; otherwise an error is raised at the first use.

    **Hyperparameters.** Once awaited, ``param_groups`` holds them as in any torch optimizer. Change them, or let a
    scheduler of torch do so: the next step sends the changes to the owners.

    **Concurrent steps** over the same parameter are made one after the other, whether one trainer or several make them.
    With ``serialize_steps=False`` that holds only for steps of one optimizer; different optimizers write into the same
    memory at the same time, as in Hogwild.

    **Stale gradients.** Another trainer may make a step between a forward pass and its backward pass, which then
    computes with some weights that are newer. With ``check_versions=True`` torch raises there, as it does in a single
    process.
    """

    # A subclass, because torch's schedulers accept nothing else. The base's __init__ cannot take remote parameters.

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Iterable[RRef[Tensor]] | Iterable[Mapping[str, Any]],
        *args: Any,
        serialize_steps: bool = True,
        check_versions: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_closures(optimizer_class)
        self._optimizer_class = optimizer_class
        self._args = args
        self._kwargs = kwargs
        self._rules = StepRules(serialize_steps, check_versions)
        self._parts: list[Part] = []
        self._rrefs: list[list[RRef[Any]]] = []
        groups = list(params_rref)
        if not groups:
            raise ConfigurationError("the optimizer got an empty list of parameters")
        if not isinstance(groups[0], Mapping):
            groups = [{"params": groups}]
        self._add([_checked(group) for group in groups])

    def _add(self, groups: Sequence[Group]) -> None:
        """Make an optimizer on each owner, over its share of some groups."""
        shares: dict[str, dict[int, tuple[list[RRef[Any]], list[int]]]] = {}
        count = sum(map(len, self._rrefs))
        first = len(self._rrefs)
        for number, group in enumerate(groups, first):
            for index, rref in enumerate(group["params"], count):
                share = shares.setdefault(rref.owner_name(), {}).setdefault(number, ([], []))
                share[0].append(rref)
                share[1].append(index)
            count += len(group["params"])
        parts: list[Part] = []
        for owner, share_of in shares.items():
            local = [{**groups[number - first], "params": rrefs} for number, (rrefs, _) in share_of.items()]
            earlier = [part.rref for part in self._parts if part.owner == owner]
            arguments = (self._optimizer_class, local, self._args, self._kwargs, self._rules, earlier)
            rref = remote(owner, make_local_optimizer, arguments)
            parts.append(Part(owner, rref, list(share_of), [indices for _, indices in share_of.values()]))
        # all or none: `remote` raises for arguments that cannot be sent
        self._parts += parts
        self._rrefs += [group["params"] for group in groups]

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until every owner has made its part; raises `WorkersFailedError` if some could not."""
        return self._ready().__await__()

    async def _ready(self, timeout: float | Unset = UNSET) -> Self:
        # again after each wait: a group may have been added meanwhile
        while new := [part for part in self._parts if part.known is None]:
            calls = [(part, part.rref.rpc_async(timeout).describe) for part in new]
            for part, description in await self._on_owners("making the optimizer", calls):
                self._described(part, description)
        return self

    def _described(self, part: Part, description: Description) -> None:
        part.known = description.groups
        groups: list[Group] = self.__dict__.setdefault("param_groups", [])
        self.__dict__.setdefault("defaults", description.defaults)
        while len(groups) < len(self._rrefs):
            groups.append({"params": self._rrefs[len(groups)]})
        for number, known in zip(part.groups, part.known, strict=True):
            for key, value in known.items():
                groups[number].setdefault(key, copied(value))

    async def step(  # type: ignore[override]
        self, context_id: int, *, timeout: float | Unset = UNSET
    ) -> None:
        """Make every owner take one step with the gradients that a context has for its parameters.

        A parameter without a gradient is unchanged. Returns when all owners have made the step. A step that an owner
        has begun is finished there, but owners do not wait for each other: if this is cancelled, or raises
        `WorkersFailedError`, some owners may have made the step. That error names them. Raises `AutogradError` if the
        context does not exist.
        """
        get_gradients(context_id)  # raises if the context is not known
        await self._ready(timeout)
        changes = {part: part.changes(self.param_groups) for part in self._parts}
        calls = [(part, _bound(part.rref.rpc_async(timeout).step, context_id, changes[part])) for part in changes]
        # a change that an owner may not have received is sent again
        await self._on_owners(f"the step of context {context_id}", calls, lambda part: part.record(changes[part]))

    async def state_dict(self, *, timeout: float | Unset = UNSET) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all owners' optimizers on the CPU, as one torch optimizer over all parameters has it.

        Each owner's part is copied between two steps.
        """
        await self._ready(timeout)
        parts, groups = list(self._parts), list(self.param_groups)  # copies: a group may be added during the wait
        calls = [(part, part.rref.rpc_async(timeout).state_dict) for part in parts]
        states = [state for _, state in await self._on_owners("state_dict()", calls)]
        return joined_state(parts, states, groups)

    async def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *, timeout: float | Unset = UNSET
    ) -> None:
        """Load a state that `state_dict` has returned, or that of a torch optimizer over the same parameters."""
        await self._ready(timeout)
        check_state(state_dict, self.param_groups)
        calls = [
            (part, _bound(part.rref.rpc_async(timeout).load_state_dict, part_of_state(part, state_dict)))
            for part in self._parts
        ]
        saved = [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]]

        def loaded(part: Part) -> None:
            part.known = [copied(saved[number]) for number in part.groups]

        groups = list(self.param_groups)
        await self._on_owners("load_state_dict()", calls, loaded)
        for group, old in zip(groups, saved, strict=True):
            params = group["params"]
            group.clear()
            group.update(copied(old), params=params)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of RRefs with the hyperparameters that differ. Like the constructor, this does not wait.

        It appears in ``param_groups`` with the next step, or when the optimizer is awaited again. A parameter that is
        in another group already is refused: at once if it is the same RRef, and with the next step if only the owner
        can find that out.
        """
        group = _checked(param_group)
        known = {id(rref) for rrefs in self._rrefs for rref in rrefs}
        if any(id(rref) in known for rref in group["params"]):
            raise ConfigurationError(TWICE)
        self._add([group])

    async def _on_owners(
        self,
        what: str,
        calls: Sequence[tuple[Part, Callable[[], Future[Any]]]],
        done: Callable[[Part], None] | None = None,
    ) -> list[tuple[Part, Any]]:
        """Make one call per part, concurrently, and wait until all have ended."""
        started: list[tuple[Part, Future[Any]]] = []
        errors: list[tuple[str, Exception]] = []
        results: list[tuple[Part, Any]] = []
        for part, call in calls:
            try:
                started.append((part, call()))
            except Exception as error:  # noqa: BLE001 - a lost owner must not stop the calls to the others
                errors.append((part.owner, error.with_traceback(None)))
        try:
            if started:
                await asyncio.wait([future for _, future in started])
        except asyncio.CancelledError:
            for _, future in started:
                future.cancel()
            raise
        for part, future in started:
            # not by raising it: its traceback would refer to this frame, and so to the optimizer
            failure = future.exception()
            if failure is None:
                results.append((part, future.result()))
                if done is not None:
                    done(part)
            else:
                assert isinstance(failure, Exception)
                errors.append((part.owner, failure))
        if errors:
            raise WorkersFailedError.of(what, errors, [part.owner for part, _ in results])
        return results

    # -- features of torch's optimizers that this one does not have

    def __getattr__(self, name: str) -> NoReturn:
        if name in {"param_groups", "defaults"}:
            raise NotReadyError(
                f"{name} is not known before the owners have made their optimizers: `await` this one first, as in "
                f"`opt = await DistributedOptimizer(...)`"
            )
        if name == "state":
            raise UnsupportedError("the state of the optimizer is with the owners: use `await opt.state_dict()`")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Raise `UnsupportedError`: gradients belong to a context, and end with it."""
        raise UnsupportedError(
            "there is nothing to zero: gradients belong to an autograd context, and end with it. Leave zero_grad() out"
        )

    def _no_hooks(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "hooks of a torch optimizer run where the optimizer does, and these are with the owners: call what is to "
            "run before and after a step around `await opt.step(...)`, or give a subclass of the optimizer with them"
        )

    register_step_pre_hook = _no_hooks
    register_step_post_hook = _no_hooks
    register_state_dict_pre_hook = _no_hooks
    register_state_dict_post_hook = _no_hooks
    register_load_state_dict_pre_hook = _no_hooks
    register_load_state_dict_post_hook = _no_hooks

    # -- representation and pickling

    def __repr__(self) -> str:
        name = getattr(self._optimizer_class, "__name__", repr(self._optimizer_class))
        owners = ", ".join(dict.fromkeys(part.owner for part in self._parts))
        return f"DistributedOptimizer({name} of {sum(map(len, self._rrefs))} parameters on {owners})"

    def __reduce__(self) -> tuple[Any, ...]:
        parts = [(part.owner, part.rref, part.groups, part.parameters) for part in self._parts]
        return _rebuild, (self._optimizer_class, self._args, self._kwargs, self._rules, self._rrefs, parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _rebuild(
    optimizer_class: Callable[..., Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rules: StepRules,
    rrefs: list[list[RRef[Any]]],
    parts: list[tuple[str, RRef[Any], tuple[int, ...], tuple[tuple[int, ...], ...]]],
) -> DistributedOptimizer:
    """Make another handle to the owners' optimizers."""
    made = DistributedOptimizer.__new__(DistributedOptimizer)
    made.__setstate__(
        {
            "_optimizer_class": optimizer_class,
            "_args": args,
            "_kwargs": kwargs,
            "_rules": rules,
            "_rrefs": rrefs,
            "_parts": [Part(*part) for part in parts],
        }
    )
    return made


def _bound(call: Callable[..., Future[Any]], *args: Any) -> Callable[[], Future[Any]]:
    return lambda: call(*args)


def _checked(group: Any) -> Group:
    """Return a copy of a group, with a list of RRefs as its parameters; raise `ConfigurationError` if it is invalid."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigurationError("a parameter group is a dict, with a list of RRefs as its 'params'")
    params = group["params"]
    rrefs = [params] if isinstance(params, RRef) else list(params)
    for rref in rrefs:
        if not isinstance(rref, RRef):
            raise ConfigurationError(
                f"DistributedOptimizer takes RRefs to parameters, not {type(rref).__qualname__}. Parameters of this "
                f"worker go as arpc.RRef(parameter), those of a RemoteModule as `await module.remote_parameters()`"
            )
    if not rrefs:
        raise ConfigurationError("a parameter group of an optimizer is empty: leave it out")
    return {**group, "params": rrefs}


def _refuse_closures(optimizer_class: Callable[..., Optimizer]) -> None:
    """Raise `ConfigurationError` for an optimizer like LBFGS, which computes the loss repeatedly within one step."""
    step = getattr(optimizer_class, "step", None)
    try:
        parameters = list(inspect.signature(step).parameters.values())[1:] if callable(step) else []
    except (TypeError, ValueError):
        return  # it has no signature
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}
    ]
    if needed:
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise ConfigurationError(
            f"{name}.step needs {', '.join(needed)}: it computes the loss of the whole model again within a step, "
            f"which no single owner can. Use an optimizer whose step() takes gradients only"
        )
