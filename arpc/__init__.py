"""arpc: the asyncio-native RPC runtime for PyTorch."""

from arpc import autograd, functions, futures
from arpc._version import __version__
from arpc.agent.functions import inline
from arpc.agent.future import Future
from arpc.agent.streams import Stream
from arpc.agent.variables import propagate
from arpc.api import get_worker_info, init_rpc, remaining_time, remote, rpc_async, rpc_sync, shutdown, stream
from arpc.errors import (
    AlreadyInitializedError,
    ArpcError,
    AuthenticationError,
    AutogradError,
    BackwardError,
    CallCancelledError,
    CallError,
    ConfigurationError,
    ConnectionClosedError,
    HandshakeError,
    NameTakenError,
    NotInitializedError,
    OverloadedError,
    OwnerLostError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    RendezvousError,
    RendezvousTimeoutError,
    RpcTimeoutError,
    RRefCreationError,
    RRefError,
    SerializationError,
    ShutdownError,
    TorchStateError,
    UnknownWorkerError,
    WireError,
    WorkerLostError,
)
from arpc.ids import WorkerInfo
from arpc.options import UNSET, RpcOptions
from arpc.rref.handle import RRef
from arpc.runner import new_event_loop, run
from arpc.runtime import Worker
from arpc.torchstate import enable_grad, inference_mode, no_grad, set_grad_enabled, to_thread

__all__ = [
    "UNSET",
    "AlreadyInitializedError",
    "ArpcError",
    "AuthenticationError",
    "AutogradError",
    "BackwardError",
    "CallCancelledError",
    "CallError",
    "ConfigurationError",
    "ConnectionClosedError",
    "Future",
    "HandshakeError",
    "NameTakenError",
    "NotInitializedError",
    "OverloadedError",
    "OwnerLostError",
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
    "SerializationError",
    "ShutdownError",
    "Stream",
    "TorchStateError",
    "UnknownWorkerError",
    "WireError",
    "Worker",
    "WorkerInfo",
    "WorkerLostError",
    "__version__",
    "autograd",
    "enable_grad",
    "functions",
    "futures",
    "get_worker_info",
    "inference_mode",
    "init_rpc",
    "inline",
    "new_event_loop",
    "no_grad",
    "propagate",
    "remaining_time",
    "remote",
    "rpc_async",
    "rpc_sync",
    "run",
    "set_grad_enabled",
    "shutdown",
    "stream",
    "to_thread",
]
