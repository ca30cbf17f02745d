"""torch.distributed.nn, on arpc: a module on another worker, called from here. `arpc.nn.owner` runs it there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed import _remote_device  # type: ignore[attr-defined]
from torch.nn import Parameter

from arpc import torchjit
from arpc.agent.peers.peer import Peer
from arpc.compat import current
from arpc.compat.calls import call, call_async
from arpc.compat.drop_in import DropIn
from arpc.compat.rpc import api
from arpc.compat.rpc.internal import _internal_rpc_pickler
from arpc.compat.rref import RRef
from arpc.ids import address_of
from arpc.nn import owner

__all__ = ["RemoteModule"]

# These classes and functions belong together, and use each other's private names
# ruff: noqa: SLF001

logger = logging.getLogger("arpc.compat")

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
_NOT_HERE: Final = (
    "register_buffer register_parameter add_module apply cuda ipu xpu cpu type float double half bfloat16 to "
    "register_backward_hook register_forward_pre_hook register_forward_hook state_dict load_state_dict "
    "named_parameters buffers named_buffers children named_children modules named_modules requires_grad_ zero_grad "
    "share_memory extra_repr"
)


def _create_module(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    is_scripted: bool,
) -> nn.Module:
    """Make a module on the worker that will own it."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(  # noqa: TRY004 - what torch raises
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return torchjit.script(module) if is_scripted else module


# -- methods of a remote module, which are sent with it


def forward_async(self: _RemoteModule, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Call the module; return a future of the result."""
    drop_in, peer = self._way()
    return call_async(drop_in, peer, owner.call_module, self._inputs(args, kwargs), None, -1.0, anchor=self)


def forward(self: _RemoteModule, *args: Any, **kwargs: Any) -> Any:
    """Call the module and wait for the result."""
    drop_in, peer = self._way()
    return call(drop_in, peer, owner.call_module, self._inputs(args, kwargs), None, -1.0)


class _RemoteModule(nn.Module):
    """A module on another worker, made there by ``module_cls(*args, **kwargs)`` and called from here.

    ``remote_device`` is ``"<worker>/<device>"`` or ``"rank:<rank>/<device>"``, on the CPU if there is no device.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self._address(remote_device)
        is_scripted = _module_interface_cls is not None
        arguments = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device, is_scripted)
        self._refer_to(api.remote(self.on, _create_module, arguments), is_scripted)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a remote module for a module that exists already, from an RRef to it."""
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._address(remote_device)
        made._refer_to(module_rref, _module_interface_cls is not None)
        return made

    def _address(self, remote_device: str) -> None:
        parsed = _remote_device(remote_device)
        agent = current.get_agent()
        self.on = agent.get_worker_info(parsed.rank() if parsed.worker_name() is None else parsed.worker_name()).name
        self.device = str(parsed.device())
        self.is_device_map_set = bool(agent._get_device_map(agent.get_worker_info(self.on)))

    def _refer_to(self, module_rref: RRef[Any], is_scriptable: bool) -> None:
        self.is_scriptable = is_scriptable
        self.generated_methods = (forward_async, forward)
        self.module_rref = module_rref
        self._install_methods()

    def _install_methods(self) -> None:
        for method in self.generated_methods:
            self.__dict__[method.__name__] = MethodType(method, self)
        # only RPC can pickle it
        _drop_in().agent.codec.pickler.add_reducer(RemoteModule, lambda module, _: _reduce(module))

    # -- calls

    def _way(self) -> tuple[DropIn, Peer]:
        self.module_rref._check_creation()
        drop_in = _drop_in()
        return drop_in, drop_in.peer(address_of(self.module_rref.handle.owner()))

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        moves_to = None if torch.device(self.device).type == "cpu" else self.device
        return *self.module_rref.handle.target(), torch.is_grad_enabled(), moves_to, args, kwargs

    def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        drop_in, peer = self._way()
        arguments = (*self.module_rref.handle.target(), function, args)
        return call(drop_in, peer, owner.do_with_module, arguments, None, -1.0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``. There are no hooks, as none can be registered."""
        return self.forward(*args, **kwargs)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the RRef to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Parameter]]:
        """Return RRefs to the parameters of the module, for a `DistributedOptimizer`."""
        return list(self._do(owner.parameter_rrefs, recurse).values())

    def train(self, mode: bool = True) -> _RemoteModule:
        """Set the module's mode, on its worker."""
        self._do(owner.set_mode, mode)
        return self

    def eval(self) -> _RemoteModule:
        """``train(False)``."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Raise ValueError: the parameters are on another worker."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"RemoteModule({self.on}/{self.device})"

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"
        )


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    return refuse


for _name in _NOT_HERE.split():
    setattr(_RemoteModule, _name, _refusal(_name))


class RemoteModule(_RemoteModule):
    """A `_RemoteModule` without a TorchScript interface."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__) | {"forward", "forward_async"}


def _reduce(module: RemoteModule) -> tuple[Any, ...]:
    unknown = module.__dict__.keys() - _OF_EVERY_MODULE - {*_REMOTE_MODULE_PICKLED_ATTRIBUTES}
    if unknown:
        logger.warning("%r is sent without the attributes it was given: %s", module, ", ".join(sorted(unknown)))
    return _received, tuple(module.__dict__[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)


def _received(*attributes: Any) -> RemoteModule:
    """Make another handle to the same module."""
    made = RemoteModule.__new__(RemoteModule)
    made.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, attributes, strict=True))
    made._install_methods()
    return made


def _drop_in() -> DropIn:
    drop_in: DropIn = current.get_agent().drop_in
    return drop_in


_internal_rpc_pickler._register_reducer(RemoteModule, _reduce)
