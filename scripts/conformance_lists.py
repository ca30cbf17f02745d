"""Lists for torch's own RPC tests: their capabilities, the tests that cannot apply to arpc, and a sample of them."""

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
"""The capabilities with their patterns: a test belongs to the first whose pattern is found in its name."""

_INTERPRETER: Final = "the interpreter of TorchScript makes the call itself, and asks for torch's own agent in C++"
_SCRIPT_RREF: Final = "a TorchScript function takes, or a module holds, an RRef: TorchScript knows the one in C++ only"
_HANGS: Final = "asserts that a result nobody uses makes a backward pass hang, which arpc promises not to do"

EXCLUDED: Final = {
    "Faulty_JitFaultyAgentRpcTest.test_remote_timeout_to_here_in_jit": _SCRIPT_RREF,
    "Faulty_JitFaultyAgentRpcTest.test_rref_timeout_pickle_in_jit": _SCRIPT_RREF,
    "Faulty_JitFaultyAgentRpcTest.test_rref_to_here_timeout_in_jit": _SCRIPT_RREF,
    "Faulty_JitFaultyAgentRpcTest.test_timeout_in_python": _INTERPRETER,
    "Faulty_JitFaultyAgentRpcTest.test_timeout_in_torchscript_function": _INTERPRETER,
    "TP_DistAutogradTest.test_backward_unused_send_function": _HANGS,
    "TP_DistAutogradTest.test_trainer_ps_torchscript_functions": _INTERPRETER,
    "TP_JitDistAutogradTest.test_jit_fork_within_context": _INTERPRETER,
    "TP_JitDistAutogradTest.test_restore_context_after_swtich_to_jit_thread": _INTERPRETER,
    "TP_JitRpcTest.test_all_kwargs_are_populated_by_defaults": _INTERPRETER,
    "TP_JitRpcTest.test_args_and_kwargs_contain_different_types": _INTERPRETER,
    "TP_JitRpcTest.test_args_kwargs_are_neither_passed": _INTERPRETER,
    "TP_JitRpcTest.test_async_function_remote": _INTERPRETER,
    "TP_JitRpcTest.test_async_function_remote_multi": _INTERPRETER,
    "TP_JitRpcTest.test_async_function_simple": _INTERPRETER,
    "TP_JitRpcTest.test_call_python_function_remotely_from_script_not_supported": _INTERPRETER,
    "TP_JitRpcTest.test_call_rpc_with_profiling": _INTERPRETER,
    "TP_JitRpcTest.test_call_script_function_that_not_exists_remotely_from_script": _INTERPRETER,
    "TP_JitRpcTest.test_call_script_function_that_raises_remotely_from_script": _INTERPRETER,
    "TP_JitRpcTest.test_future_passed_between_python_and_jit": _INTERPRETER,
    "TP_JitRpcTest.test_kwargs_not_passed": _INTERPRETER,
    "TP_JitRpcTest.test_load_script_module_with_pickled_rref": _SCRIPT_RREF,
    "TP_JitRpcTest.test_local_rref_local_value": _SCRIPT_RREF,
    "TP_JitRpcTest.test_my_script_module_with_rrefs": _SCRIPT_RREF,
    "TP_JitRpcTest.test_no_kwargs_are_populated_by_defaults": _INTERPRETER,
    "TP_JitRpcTest.test_record_function_on_caller_rpc_async": _INTERPRETER,
    "TP_JitRpcTest.test_remote_script_module": _SCRIPT_RREF,
    "TP_JitRpcTest.test_return_local_script_class_rref_in_py_and_use_in_script": _SCRIPT_RREF,
    "TP_JitRpcTest.test_return_local_script_module_rref_in_py_and_use_in_script": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rpc_async_jit_profiled": _INTERPRETER,
    "TP_JitRpcTest.test_rpc_torchscript_record_function": _INTERPRETER,
    "TP_JitRpcTest.test_rref_as_arg_and_return": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rref_is_owner": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rref_jit_pickle_not_supported": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rref_list_mutate": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rref_local_value": _SCRIPT_RREF,
    "TP_JitRpcTest.test_rref_python_annotation": _SCRIPT_RREF,
    "TP_JitRpcTest.test_some_kwargs_are_populated_by_defaults": _INTERPRETER,
    "TP_JitRpcTest.test_user_rrefs_confirmed": _SCRIPT_RREF,
    "TP_JitRpcTest.test_user_rrefs_confirmed_remote": _SCRIPT_RREF,
    "TP_RemoteModuleTest.test_forward_async": _SCRIPT_RREF,
    "TP_RemoteModuleTest.test_forward_async_script": _SCRIPT_RREF,
    "TP_RemoteModuleTest.test_forward_sync": _SCRIPT_RREF,
    "TP_RemoteModuleTest.test_forward_sync_script": _SCRIPT_RREF,
    "TP_RemoteModuleTest.test_remote_module_py_pickle_not_supported_script": _SCRIPT_RREF,
    "TP_ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire_script_not_supported": _SCRIPT_RREF,
}
"""Tests that no runtime without torch's own agent can pass, with the reasons."""

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
    "TP_RemoteModuleTest.test_forward_with_kwargs",
    "TP_ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire",
    "TP_DdpComparisonTest.test_ddp_dist_autograd_local_vs_remote",
    "TP_ParameterServerTest.test_batch_updating_parameter_server",
    "TP_ReinforcementLearningRpcTest.test_rl_rpc",
    "Faulty_FaultyAgentRpcTest.test_rref_to_here_timeout",
    "Faulty_FaultyAgentRpcTest.test_remote_message_dropped_pickle_to_self",
)
"""Some tests of each capability, none that takes long, and none that fails with a backend that loses messages."""


def capability_of(test: str) -> str:
    """Return the capability that a test belongs to."""
    return next(name for name, pattern in _CAPABILITIES if re.search(pattern, test))
