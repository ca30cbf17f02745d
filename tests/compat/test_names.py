"""The drop-in and torch, name by name: what programs take from torch's modules, they find here."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import types
from typing import Any

import pytest

from arpc.compat import rpc
from arpc.compat.agents import RpcAgent, TensorPipeAgent
from arpc.compat.modules import REPLACED

native = pytest.importorskip("torch._C._distributed_rpc", reason="this torch has no RPC of its own to compare with")

LIMIT_S = 120

NOT_OFFERED = {
    # called by torch's own Python layer, which the drop-in replaces, to reach torch's C++ agent
    "_cleanup_python_rpc_handler",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_disable_server_process_global_profiler",
    "_enable_jit_rref_pickle",
    "_enable_rpc_profiler",
    "_enable_server_process_global_profiler",
    "_get_should_profile",
    "_handle_exception",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_local_invoke",
    "_local_invoke_async_execution",
    "_run_function",
    "_start_record_function",
    "_to_device",
    "_to_device_list",
    "_to_device_map",
    # the local half of torch's own DistributedOptimizer, renamed in torch 2.15
    "_FunctionalLocalOptimizer",
    "_functional_local_optimizer_step",
    "_new_functional_local_optimizer",
    # how torch's backend starts, and how it agrees on devices
    "_backend_type_doc",
    "_backend_type_repr",
    "_create_device_list",
    "_create_reverse_mapping",
    "_faulty_tensorpipe_construct_rpc_backend_options_handler",
    "_faulty_tensorpipe_init_backend_handler",
    "_get_device_infos",
    "_init_process_group",
    "_set_devices_and_reverse_device_map",
    "_tensorpipe_exchange_and_check_all_device_maps",
    "_tensorpipe_validate_devices",
    "_validate_device_maps",
    "_validate_rpc_args",
    # state of torch's own functions
    "_all_gather_dict_lock",
    "_all_gather_sequence_id",
    "_all_gather_sequence_id_to_states",
    "_init_counter",
    "_init_counter_lock",
    "_is_tensorpipe_available",
    "_pickler",
    "_thread_local_tensor_tables",
    "_unpickler",
    # left over from how torch builds its classes
    "GenericWithOneTypeVar",
    "docstring",
    "method",
    "method_factory",
    "method_name",
    "new_method",
    # of optimizers and modules inside of TorchScript, which know torch's agent alone
    "_LocalOptimizer",
    "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE",
    "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING",
    "_ScriptLocalOptimizer",
    "_ScriptLocalOptimizerInterface",
    "_SerializedRemoteModule",
    "_create_module_with_interface",
    "_instantiate_template",
    "_local_optimizer_step",
    "_new_local_optimizer",
    "_new_script_local_optimizer",
    "_param_rrefs",
    "_raise_not_supported",
    "_recursive_script_module_receiver",
    "_recursive_script_module_reducer",
    "_remote_module_receiver",
    "_remote_module_reducer",
    "_script_local_optimizer_step",
    "_wait_for_all",
    "functional_optim_map",
}
"""Names of torch's modules that the drop-in does not have."""

MODULES = [
    *REPLACED.items(),
    ("torch.distributed.rpc._testing", "arpc.compat.rpc._testing"),
    (
        "torch.distributed.rpc._testing.faulty_agent_backend_registry",
        "arpc.compat.rpc._testing.faulty_agent_backend_registry",
    ),
    ("torch.distributed.rpc._utils", "arpc.compat.rpc._utils"),
]


def own_names(module: types.ModuleType) -> set[str]:
    """What a module defines, and what the package itself offers of its parts; not what they import to work with."""
    is_package = module.__name__ == "torch.distributed.rpc"

    def is_own(name: str, value: Any) -> bool:
        if name.startswith("__") or isinstance(value, types.ModuleType):
            return False
        home = getattr(value, "__module__", module.__name__)
        if isinstance(value, float | int | str):  # a constant has no home: those in capitals come from elsewhere
            return is_package or module.__name__.endswith(("constants", "_distributed_rpc")) or not name.isupper()
        return home == module.__name__ or (is_package and "distributed.rpc" in str(home).replace("_C._", ""))

    return {name for name, value in vars(module).items() if is_own(name, value)}


@pytest.mark.parametrize(("original", "replacement"), MODULES)
def test_every_name(original: str, replacement: str) -> None:
    module = importlib.import_module(original)
    assert not module.__name__.startswith("arpc"), "this process is to have torch's own"
    here = importlib.import_module(replacement)
    loose = {"Store", "logger", "_logger", "T", "_P", "_R", "P", "R", "TYPE_CHECKING", "annotations", "rpc_contants"}
    missing = {name for name in own_names(module) if not hasattr(here, name)} - NOT_OFFERED - loose
    assert not missing


def test_no_module_of_torch_is_forgotten() -> None:
    package = importlib.import_module("torch.distributed.rpc")
    names = {f"{package.__name__}.{name}" for name in ("api", "backend_registry", "constants", "functions", "internal")}
    names |= {f"{package.__name__}.{name}" for name in ("options", "rref_proxy", "_utils", "_testing")}
    assert names <= {original for original, _ in MODULES}
    for name in names:
        assert importlib.util.find_spec(name) is not None, f"{name} is gone from torch: look at what came instead"


def test_the_methods_of_an_rref() -> None:
    methods = {name for name in dir(native.PyRRef) if not name.startswith(("__", "_pybind11"))}
    # it is rebuilt where a message is read, and nowhere else
    assert methods - set(dir(rpc.RRef)) == {"_deserialize"}


def test_the_methods_of_an_agent() -> None:
    assert issubclass(TensorPipeAgent, RpcAgent)
    methods = {name for name in dir(native.TensorPipeAgent) if not name.startswith(("__", "_pybind11"))}
    # the store and the kind of group are set when it is made
    offered = {*dir(TensorPipeAgent), "is_static_group", "store"}
    # it learns of members by itself
    assert methods - offered == {"_update_group_membership"}


CLIENTS = """
from arpc.compat.modules import install

install()
import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import PyRRef, TensorPipeAgent, _is_current_rpc_agent_set
from torch.distributed.rpc.rref_proxy import RRefProxy

# the classes and functions that libraries ask for, as they ask for them
assert not _is_current_rpc_agent_set()
import sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/group")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    assert _is_current_rpc_agent_set()
    assert torch._C._distributed_rpc._is_current_rpc_agent_set()
    rref = rpc.remote("worker0", list, args=((1, 2),))
    assert isinstance(rref, torch._C._distributed_rpc.PyRRef) and isinstance(rref, PyRRef)
    assert isinstance(rpc.api._get_current_rpc_agent(), TensorPipeAgent)
    assert isinstance(rpc.api._get_current_rpc_agent(), rpc.RpcAgent)
    assert rpc.api._rref_typeof_on_user(rref) is list
    proxy = rref.rpc_sync()
    assert isinstance(proxy, RRefProxy)
    proxy.append(3)
    assert RRefProxy(rref, rpc.rpc_async, 5.0).__len__().wait() == 3
    assert RRefProxy(rref, rpc.remote).copy().to_here() == [1, 2, 3]
    states = rpc.AllGatherStates()
    assert not states.proceed_signal.is_set() and states.gathered_objects == {}
    rpc.shutdown()
assert not _is_current_rpc_agent_set()

import torch.distributed.rpc._testing
import torch.distributed.rpc._testing.faulty_agent_backend_registry
import arpc.compat.rpc._testing
assert torch.distributed.rpc._testing is arpc.compat.rpc._testing, "a module is there once"
assert rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.timeout(LIMIT_S + 20)
def test_what_libraries_ask_torch_for() -> None:
    done = run(CLIENTS)
    assert done.returncode == 0, done.stderr


WITHOUT_RPC = """
import importlib.abc, importlib.util, sys, types


class Gone(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # torch imports its RPC while it is imported itself: there it finds what a build without RPC has
    is_torch_there = False

    def find_spec(self, name, path, target=None):
        if not name.startswith(("torch.distributed.rpc", "torch._C._distributed_rpc")):
            return None
        if self.is_torch_there:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.is_available = lambda: False
        return module

    def exec_module(self, module):
        if hasattr(sys.modules["torch"]._C, "_rpc_init"):
            del sys.modules["torch"]._C._rpc_init


gone = Gone()
sys.meta_path.insert(0, gone)
import torch
gone.is_torch_there = True
for name in [name for name in sys.modules if name.startswith("torch.distributed.rpc")]:
    del sys.modules[name]
if hasattr(torch.distributed, "rpc"):
    del torch.distributed.rpc
assert not hasattr(torch._C, "_distributed_rpc")

from arpc.compat.modules import install

install()
"""


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_torch_without_rpc_of_its_own() -> None:
    done = run(WITHOUT_RPC + CLIENTS)
    assert done.returncode == 0, done.stderr
