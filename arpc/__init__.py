"""arpc: the asyncio-native RPC runtime for PyTorch.

``import arpc`` alone imports neither torch nor the runtime: the first use of a public name imports them all. So
``arpc --help`` answers at once. A process that is to have everything imported beforehand, such as a fork server,
imports `arpc._public`.

PYTEST_DONT_REWRITE: pytest would otherwise warn wherever arpc is imported before its pytest plugin is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from arpc._version import __version__

if sys.platform == "win32":
    raise ImportError("arpc runs on Linux and macOS, not on Windows. On a Windows machine, run it under WSL 2")

if TYPE_CHECKING:
    from arpc._public import *  # noqa: F403 - the names of __all__
else:

    def __getattr__(name: str) -> Any:
        if not name.startswith("_"):
            # import a submodule alone: `from arpc import errors` calls this before it looks for the submodule
            if importlib.util.find_spec(f"arpc.{name}") is not None:
                return importlib.import_module(f"arpc.{name}")
            if name in __all__:
                public = importlib.import_module("arpc._public")  # slow: imports torch
                globals().update({one: getattr(public, one) for one in public.__all__})
                return globals()[name]
        raise AttributeError(f"module 'arpc' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "TLS",
    "UNSET",
    "AlreadyInitializedError",
    "ArpcError",
    "AuthenticationError",
    "AutogradError",
    "BackwardError",
    "BatchError",
    "CallCancelledError",
    "CallError",
    "Callee",
    "ConfigurationError",
    "ConnectionClosedError",
    "Future",
    "HandshakeError",
    "LaunchError",
    "MemberEvent",
    "MemberJoined",
    "MemberLeft",
    "MemberLost",
    "MemberReturned",
    "MemberStream",
    "MemberSuspected",
    "NameTakenError",
    "NotAllowedError",
    "NotInitializedError",
    "NotReadyError",
    "OverloadedError",
    "OwnerLostError",
    "ProfilerError",
    "ProtocolError",
    "RRef",
    "RRefCreationError",
    "RRefError",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RpcOptions",
    "RpcTimeoutError",
    "ScriptError",
    "SerializationError",
    "ShutdownError",
    "Stream",
    "TorchStateError",
    "UnknownWorkerError",
    "UnsupportedError",
    "WireError",
    "Worker",
    "WorkerInfo",
    "WorkerLostError",
    "WorkersFailedError",
    "__version__",
    "autograd",
    "batched",
    "empty_shared",
    "enable_grad",
    "export",
    "functions",
    "futures",
    "get_worker_info",
    "get_worker_infos",
    "inference_mode",
    "init_rpc",
    "inline",
    "launch",
    "new_event_loop",
    "nn",
    "no_grad",
    "on",
    "one_at_a_time",
    "optim",
    "profiler",
    "propagate",
    "register_type",
    "remaining_time",
    "remote",
    "rpc_async",
    "rpc_sync",
    "run",
    "set_grad_enabled",
    "shared",
    "shutdown",
    "stream",
    "to_thread",
    "torchscript",
]
