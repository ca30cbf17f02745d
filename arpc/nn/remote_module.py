"""RemoteModule: an nn.Module on another worker, called from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn import Parameter

from arpc.agent.client.future import Future
from arpc.agent.server.functions import name_of
from arpc.api import remote
from arpc.errors import ArpcError, ConfigurationError, UnsupportedError
from arpc.log import get_logger
from arpc.nn import owner
from arpc.nn.address import Address, parse_device
from arpc.nn.refusals import RefusingModule
from arpc.options import UNSET, Unset
from arpc.rref.handle import RRef
from arpc.rref.user_ref import OwnerFuture

__all__ = ["RemoteModule", "parameter_rrefs"]

logger = get_logger("arpc.nn")

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Forward(Protocol[P, R_co]):
    """The part of a module's type that calls need: the parameters and the result of its ``forward``."""

    @property
    def forward(self) -> Callable[P, R_co]: ...


class Unknown(Protocol):
    """Stands for the module of a ``RemoteModule[Any]``: no class has this member, so only ``Any`` fits it.

    Without it mypy infers that no argument fits a ``forward`` that it does not know.
    """

    def is_unknown_to_arpc(self) -> None: ...


class _ModuleFuture(OwnerFuture):
    """The future of a call: errors about the worker or the RRef get a note that names the module."""

    module: RemoteModule[Any] | None = None

    def set_exception(self, exception: type | BaseException) -> None:
        if isinstance(exception, ArpcError):
            note = f"in a call of the {self.module!r}"
            if note not in getattr(exception, "__notes__", ()):  # an error may be raised at many uses
                exception.add_note(note)
        super().set_exception(exception)


class RemoteModule(RefusingModule, Generic[M_co]):
    """A module that is made on another worker, stays there, and is called from here.

    ::

        m = arpc.nn.RemoteModule("ps/cpu", nn.Linear, args=(20, 30))
        y = await m(torch.ones(128, 20))                # runs on "ps"
        future = m.forward_async(torch.ones(128, 20))   # the same, started now
        params = await m.remote_parameters()            # RRefs, for arpc.optim.DistributedOptimizer

    The address is a worker, by name or as ``rank:<id>``, and a device there, the CPU if none is given. Inputs are moved
    to that device; results come back on the CPU. The constructor does not wait: an error while the module is created is
    raised at each use, or when the RemoteModule itself is awaited (``m = await RemoteModule(...)``). ``timeout``
    applies to the creation and to every call through this handle.

    It can be passed to other workers, and returned from them. All handles refer to one module, which lives as long as
    one of them does. A RemoteModule is an nn.Module, so a model can have it as a part. Methods that make no sense for a
    module on another worker, such as ``parameters()`` or hooks, raise `UnsupportedError` and say what to use instead.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., M_co],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | Unset = UNSET,
    ) -> None:
        if isinstance(module_cls, nn.Module) or not callable(module_cls):
            raise ConfigurationError(
                f"a RemoteModule is made of a class, or of a function that returns a module, not of {module_cls!r}"
            )
        address = Address.parse(remote_device)
        arguments = (module_cls, tuple(args or ()), dict(kwargs or {}), address.device)
        rref: RRef[Any] = remote(address.worker, owner.create_module, arguments, timeout=timeout)
        self._set_up(rref, address.device, timeout, name_of(module_cls))

    @staticmethod
    def at(remote_device: str, *, timeout: float | Unset = UNSET) -> Place:
        """Return an address to create modules at. Type checkers compare the call with the module's parameters.

        ::

            m = arpc.nn.RemoteModule.at("ps/cpu")(nn.Linear, 20, 30, bias=False)

        does what ``RemoteModule("ps/cpu", nn.Linear, (20, 30), {"bias": False})`` does.
        """
        return Place(remote_device, timeout)

    def _set_up(self, rref: RRef[M_co], device: torch.device, timeout: float | Unset, name: str) -> None:
        super().__init__()
        self._rref = rref
        self._device = device
        self._moves_to = None if device.type == "cpu" else str(device)
        self._timeout = timeout
        self._name = name

    @classmethod
    def from_module_rref(
        cls, module_rref: RRef[M_co], device: str | torch.device = "cpu", *, timeout: float | Unset = UNSET
    ) -> Self:
        """Make a RemoteModule for a module that exists already, on ``device`` of the worker that owns the RRef."""
        made = cls.__new__(cls)
        cls._set_up(made, module_rref, parse_device(device), timeout, "module")
        return made

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[M_co]) -> Self:
        """Call `from_module_rref` with torch's signature. The address must be that of the RRef's owner."""
        address = Address.parse(remote_device)
        if address.worker not in {module_rref.owner_name(), module_rref.owner().id}:
            raise ConfigurationError(
                f"the module is on worker {module_rref.owner_name()!r} and not at {remote_device!r}: a RemoteModule "
                f"calls it where it is"
            )
        return cls.from_module_rref(module_rref, address.device)

    # -- location

    @property
    def on(self) -> str:
        """The name of the worker that has the module."""
        return self._rref.owner_name()

    @property
    def device(self) -> torch.device:
        """The device of the module on that worker."""
        return self._device

    def get_module_rref(self) -> RRef[M_co]:
        """Return the RRef to the module: for calls of its other methods, and on its owner for the module itself."""
        return self._rref

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until the module has been made; raises the error if that failed."""
        return self._made().__await__()

    async def _made(self) -> Self:
        await self._do(owner.touch)
        return self

    # -- calls

    def _do(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._call(owner.do_with_module, name_of(function), function, args)

    def _call(self, handler: Callable[..., Any], name: str, *args: Any) -> Future[Any]:
        future = self._rref.owner_future(_ModuleFuture)
        future.module = self
        try:
            self._rref.call_on_owner(future, handler, args, None, self._timeout, name=f"{self._name}.{name}")
        except ArpcError as error:  # the RRef is known to have failed
            if not future.done():
                future.set_exception(error)
        return future

    @overload
    def forward_async(self: RemoteModule[Unknown], *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def forward_async(
        self: RemoteModule[Forward[P, Coroutine[Any, Any, R_co]]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R_co]: ...
    @overload
    def forward_async(self: RemoteModule[Forward[P, R_co]], *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def forward_async(self: RemoteModule[Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module now; return a `Future` of the result. Grad mode is that of the caller."""
        return self._call(owner.call_module, "forward", torch.is_grad_enabled(), self._moves_to, args, kwargs)

    @overload
    async def forward(self: RemoteModule[Unknown], *args: Any, **kwargs: Any) -> Any: ...
    @overload
    async def forward(
        self: RemoteModule[Forward[P, Coroutine[Any, Any, R_co]]], *args: P.args, **kwargs: P.kwargs
    ) -> R_co: ...
    @overload
    async def forward(self: RemoteModule[Forward[P, R_co]], *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    async def forward(self: RemoteModule[Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module, as ``await m(...)`` does."""
        return await self.forward_async(*args, **kwargs)

    @overload
    def __call__(self: RemoteModule[Unknown], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]: ...
    @overload
    def __call__(
        self: RemoteModule[Forward[P, Coroutine[Any, Any, R_co]]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R_co]: ...
    @overload
    def __call__(
        self: RemoteModule[Forward[P, R_co]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R_co]: ...
    def __call__(self: RemoteModule[Any], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that calls the module."""
        # without the hooks of an nn.Module, which would see a coroutine here
        return self.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Future[Self]:  # type: ignore[override]
        """Set the module's mode. The call starts now; await the `Future` to know that it is done.

        So ``model.train()`` and ``model.eval()`` of a model that has this as a part reach it too. Forward passes that
        this worker starts afterwards find the mode set.
        """
        self.training = mode
        return self._do(owner.set_mode, mode).then(self._after)

    def eval(self) -> Future[Self]:  # type: ignore[override]
        """Call ``train(False)``."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Future[Self]:  # type: ignore[override]
        """Set whether the module's parameters get gradients. The call starts now; await the `Future`."""
        return self._do(owner.set_requires_grad, requires_grad).then(self._after)

    def _after(self, done: Future[Any]) -> Self:
        done.result()
        return self

    # -- parameters and state

    async def remote_parameters(self, recurse: bool = True) -> list[RRef[Parameter]]:
        """Return RRefs to the parameters, in the order of ``module.parameters()``."""
        return list((await self.remote_named_parameters(recurse)).values())

    async def remote_named_parameters(self, recurse: bool = True) -> dict[str, RRef[Parameter]]:
        """Return RRefs to the parameters by their names."""
        return cast("dict[str, RRef[Parameter]]", await self._do(owner.parameter_rrefs, recurse))

    def state_dict(self, *args: Any, **kwargs: Any) -> Future[dict[str, Any]]:  # type: ignore[override]
        """Return a future of a copy of the module's state, on the CPU, made between two steps of an optimizer."""
        if args or kwargs:
            raise UnsupportedError(_STATE_OF_WHOLE)
        return self._do(owner.get_state)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Future[tuple[list[str], list[str]]]:
        """Load a state between two steps of an optimizer. Returns a future of the missing and unexpected keys."""
        return self._do(owner.load_state, dict(state_dict), strict)

    # -- representation and pickling

    def extra_repr(self) -> str:
        return f"{self._name} on {self.on}/{self._device}"

    def __repr__(self) -> str:
        return f"RemoteModule({self.extra_repr()})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. Those of the module are on worker "
            f"{self.__dict__['_rref'].owner_name() if '_rref' in self.__dict__ else '?'!r}: call its methods with "
            f"`await m.get_module_rref().rpc_sync().{name}(...)`"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        unknown = self.__dict__.keys() - _KNOWN
        if unknown:
            # its text instead of the handle, which would live as long as the log record
            logger.warning("%s is sent without the attributes it was given: %s", repr(self), ", ".join(sorted(unknown)))
        return _rebuild, (type(self), self._rref, self._device, self._timeout, self._name, self.training)


class Place:
    """A worker and a device there, to create modules at: the result of `RemoteModule.at`."""

    __slots__ = ("_remote_device", "_timeout")

    def __init__(self, remote_device: str, timeout: float | Unset) -> None:
        self._remote_device = remote_device
        self._timeout = timeout

    def __call__(self, module_cls: Callable[P, M], /, *args: P.args, **kwargs: P.kwargs) -> RemoteModule[M]:
        """Create ``module_cls(*args, **kwargs)`` there, and return its `RemoteModule` at once."""
        return RemoteModule(self._remote_device, module_cls, args, kwargs, timeout=self._timeout)

    def __repr__(self) -> str:
        return f"RemoteModule.at({self._remote_device!r})"


_KNOWN: Final = frozenset(nn.Module().__dict__) | {"_rref", "_device", "_moves_to", "_timeout", "_name"}
_STATE_OF_WHOLE: Final = (
    "the state of a remote module has to be awaited, so that of a model which has one as a part cannot be had at once: "
    "use `await m.state_dict()` for the remote part, and state_dict() of the local ones"
)


def _rebuild(
    cls: type[RemoteModule[Any]],
    rref: RRef[Any],
    device: torch.device,
    timeout: float | Unset,
    name: str,
    training: bool,
) -> RemoteModule[Any]:
    """Make another handle to the same module."""
    made = cls.__new__(cls)
    cls._set_up(made, rref, device, timeout, name)
    made.training = training
    return made


async def parameter_rrefs(module: nn.Module) -> list[RRef[Parameter]]:
    """Return RRefs to all parameters of a model, of its local parts and of each `RemoteModule` in it.

    ::

        class Hybrid(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = arpc.nn.RemoteModule("ps", nn.EmbeddingBag, (1000, 16))
                self.head = nn.Linear(16, 2)

            async def forward(self, x):
                return self.head(await self.embedding(x))

        model = Hybrid()
        opt = arpc.optim.DistributedOptimizer(torch.optim.SGD, await arpc.nn.parameter_rrefs(model), lr=0.1)
    """
    found: list[Parameter | RemoteModule[Any]] = []
    seen: set[int] = set()

    def visit(part: nn.Module) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        if isinstance(part, RemoteModule):
            found.append(part)
            return
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(parameter)
        for child in part.children():
            visit(child)

    visit(module)
    remote_parts = [part for part in found if isinstance(part, RemoteModule)]
    lists = dict(zip(remote_parts, await asyncio.gather(*(p.remote_parameters() for p in remote_parts)), strict=True))
    return [rref for part in found for rref in (lists[part] if isinstance(part, RemoteModule) else [RRef(part)])]
