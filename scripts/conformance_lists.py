"""What torch's own RPC tests are about, which of them say nothing about arpc, and which stand for all the others."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["EXCLUDED", "SAMPLE", "capability_of"]

_CAPABILITIES: Final = (
    ("faulty agent", r"^Faulty"),
    ("ddp and autograd", r"Ddp"),
    ("remote modules", r"RemoteModule"),
    ("optimizers", r"DistOptimizer"),
    ("examples", r"ParameterServerTest|ReinforcementLearning"),
    ("TorchScript", r"Jit"),
    ("autograd", r"DistAutogradTest"),
    ("dynamic membership", r"dynamic"),
    ("profiler", r"profil|record_function"),
    ("timeouts", r"timeout"),
    ("async execution", r"async_(class|function|static)|return_future|my_parameter_server"),
    ("futures", r"future|callback|wait_all(?!_workers)"),
    ("debug info", r"debug_info|gil_profiling"),
    ("shutdown, barriers, failures", r"shutdown|barrier|wait_all_workers|handle_send|deadlock|all_gather|uneven"),
    (
        "start, registry, options",
        r"init|register|duplicate|invalid_names|infer_backend|options|world_size|device_map|worker_|get_worker|wrong_types",
    ),
    ("RRefs", r"rref|remote|owner_equality|nested_remote"),
    ("calls", r""),
)
"""The first whose pattern is found in the name of a test."""

_INTERPRETER: Final = "the interpreter of TorchScript makes the call itself, and asks for torch's own agent in C++"
_SCRIPT_RREF: Final = "a TorchScript function takes, or a module holds, an RRef: TorchScript knows the one in C++ only"
_HANGS: Final = "asserts that a result nobody uses makes a backward pass hang, which arpc promises not to do"

EXCLUDED: Final[dict[str, str]] = {}

SAMPLE: Final = (
    "TP_RpcTest.test_add",
    "TP_RpcTest.test_send_to_rank",
    "TP_RpcTest.test_py_nested_pickle",
    "TP_RpcTest.test_custom_exception_throw_during_reconstruction",
    "TP_RpcTest.test_function_not_on_callee",
    "TP_RpcTest.test_stress_light_rpc",
    "TP_RpcTest.test_async_function_multi_chained",
    "TP_RpcTest.test_async_class_rref_proxy",
    "TP_RpcTest.test_callback_with_ret",
    "TP_RpcTest.test_wait_all_exit_early_python",
    "TP_RpcTest.test_pickle_future",
    "TP_RpcTest.test_rref_str",
    "TP_RpcTest.test_rref_leak",
    "TP_RpcTest.test_nested_rref",
    "TP_RpcTest.test_py_rref_args_user_share",
    "TP_RpcTest.test_rref_proxy_non_exist",
    "TP_RpcTest.test_rref_type_blocking",
    "TP_RpcTest.test_rpc_timeouts",
    "TP_RpcTest.test_shutdown_errors",
    "TP_RpcTest.test_use_rref_after_shutdown",
    "TP_RpcTest.test_rpc_barrier_multithreaded",
    "TP_RpcTest.test_duplicate_name",
    "TP_RpcTest.test_invalid_names",
    "TP_RpcTest.test_debug_info",
    "TP_RpcTest.test_profiler_remote_events_profiled",
    "TP_RpcTest.test_server_process_global_profiler",
    "TP_TensorPipeAgentRpcTest.test_dynamic_and_static_init_rpc_together",
    "TP_TensorPipeAgentRpcTest.test_multi_rpc_sparse",
    "TP_DistAutogradTest.test_graph_for_builtin_call",
    "TP_DistAutogradTest.test_backward_multiple_round_trips",
    "TP_DistAutogradTest.test_backward_node_failure_python_udf",
    "TP_DistAutogradTest.test_post_hooks",
    "TP_DistOptimizerTest.test_dist_optim",
    "TP_JitRpcTest.test_torchscript_function",
    "TP_JitRpcTest.test_create_script_module_on_remote",
    "TP_RemoteModuleTest.test_forward_sync",
    "TP_DdpComparisonTest.test_ddp_dist_autograd_local_vs_remote",
    "TP_ParameterServerTest.test_batch_updating_parameter_server",
    "TP_ReinforcementLearningRpcTest.test_rl_rpc",
    "Faulty_FaultyAgentRpcTest.test_rref_to_here_timeout",
    "Faulty_FaultyAgentRpcTest.test_remote_message_dropped_pickle_to_self",
)
"""Some of each capability, and none that takes long."""


def capability_of(test: str) -> str:
    """What a test is about."""
    return next(name for name, pattern in _CAPABILITIES if re.search(pattern, test))
