"""The methods of an nn.Module that a remote module does not support, and what to use instead."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from torch import nn

from arpc.errors import UnsupportedError

__all__ = ["RefusingModule"]

_BY_METHOD: Final = "call a method of the module that does it, as in `await m.get_module_rref().rpc_sync().method()`"
_BY_CLASS: Final = "let `module_cls` make the module as it is to be"
_HOOKS: Final = "hooks run where the module does: let `module_cls` register them"
_DEVICE: Final = "the device is part of the address that the RemoteModule is made with, as in 'worker1/cuda:0'"
_PARAMETERS: Final = "use `await m.remote_parameters()`, or `await m.remote_named_parameters()` for the names too"
# torch calls this on a part of a model, when the program has asked the model for its parameters
_WHOLE: Final = "for all parameters of a model that has one as a part, use `await arpc.nn.parameter_rrefs(model)`"
_GRADIENTS: Final = "gradients belong to an autograd context and end with it"

_INSTEAD: Final = {
    **dict.fromkeys(("parameters", "named_parameters"), _PARAMETERS),
    **dict.fromkeys(("buffers", "named_buffers"), "use `await m.state_dict()`"),
    **dict.fromkeys(
        ("children", "named_children", "get_submodule", "get_parameter", "get_buffer"),
        _BY_METHOD,
    ),
    **dict.fromkeys(("modules", "named_modules"), _WHOLE),
    **dict.fromkeys(("apply", "compile", "set_submodule"), _BY_METHOD),
    **dict.fromkeys(("register_buffer", "register_parameter", "add_module", "register_module"), _BY_CLASS),
    **dict.fromkeys(("type", "float", "double", "half", "bfloat16"), _BY_CLASS),
    **dict.fromkeys(("to", "to_empty", "cuda", "cpu", "xpu", "ipu", "mtia", "share_memory"), _DEVICE),
    **dict.fromkeys(
        (
            "register_backward_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_state_dict_pre_hook",
            "register_state_dict_post_hook",
            "register_load_state_dict_pre_hook",
            "register_load_state_dict_post_hook",
        ),
        _HOOKS,
    ),
    "zero_grad": _GRADIENTS,
}


class RefusingModule(nn.Module):
    """An nn.Module whose methods raise `UnsupportedError` if they make no sense for a module on another worker."""


def _refusal(name: str, instead: str) -> Any:
    def refuse(_self: RefusingModule, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"a RemoteModule has no {name}(), the module is on another worker: {instead}")

    refuse.__name__ = name
    refuse.__qualname__ = f"RefusingModule.{name}"
    refuse.__doc__ = f"Not for a remote module: {instead}."
    return refuse


for _name, _instead in _INSTEAD.items():
    setattr(RefusingModule, _name, _refusal(_name, _instead))
