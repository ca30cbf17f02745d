"""torch's own RPC tests as classes that can be run, on `arpc.compat` or, to compare, on torch itself.

The wheel of torch has the tests, written for any backend; this module adds the classes that combine them with one. Each
rank of a test is a process that imports this module, so its settings come from the environment.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

FAMILY: Final = os.environ.get("ARPC_CONFORMANCE_FAMILY", "tp")
"""``tp``, or ``faulty`` for tests that lose messages: these register a backend, with which a few other tests fail.
``both`` for tests that work with or without it."""

if os.environ.get("ARPC_CONFORMANCE_BACKEND", "arpc") == "arpc":
    from arpc.compat.modules import install

    install()  # before the tests import torch's RPC

import torch  # noqa: E402 - see above
import torch.multiprocessing  # noqa: E402
from torch.testing._internal.distributed import rpc_utils  # noqa: E402

torch.set_num_threads(1)

_UNHEARD: Final = frozenset(("test_rpc_barrier_multithreaded", "test_async_dist_autograd"))
"""Tests that work in threads, whose errors would go unnoticed."""
_FAILED_IN_THREAD: Final = 11


class _Strict:
    """Forks ranks from a server that has imported torch, and makes every error fail the test."""

    processes: list[Any]

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        failures: list[threading.ExceptHookArgs] = []
        if test_name in _UNHEARD:
            threading.excepthook = failures.append
        super().run_test(test_name, parent_pipe)  # type: ignore[misc]
        if failures:
            sys.exit(_FAILED_IN_THREAD)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)  # type: ignore[misc]
        codes = {process.exitcode for process in self.processes}
        if len(codes) > 1:
            raise RuntimeError(f"the ranks ended with different codes: {sorted(map(str, codes))}")

    def _spawn_processes(self) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._start_processes(context.Process)  # type: ignore[attr-defined]


def _joined() -> Iterator[tuple[str, type]]:
    if FAMILY != "faulty":
        from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as plain

        fixture = plain.TensorPipeRpcAgentTestFixture
        yield from _with("TP", rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS, fixture)
        yield from _with("TPCuda", rpc_utils.GENERIC_CUDA_TESTS + rpc_utils.TENSORPIPE_CUDA_TESTS, fixture)
    if FAMILY != "tp":
        from torch.testing._internal.distributed.rpc import faulty_rpc_agent_test_fixture as faulty

        yield from _with("Faulty", rpc_utils.FAULTY_AGENT_TESTS, faulty.FaultyRpcAgentTestFixture)


def _with(prefix: str, suites: Sequence[type], fixture: type) -> Iterator[tuple[str, type]]:
    for suite in suites:
        name = f"{prefix}_{suite.__name__}"
        yield name, type(name, (_Strict, suite, fixture, rpc_utils.SpawnHelper), {"__module__": __name__})


CASES: Final[dict[str, Any]] = dict(_joined())
globals().update(CASES)  # ranks unpickle them by name


_WITHOUT_GPU: Final = "TPCuda_TensorPipeAgentCudaRpcTest.test_device_map_cpu"


def names() -> list[str]:
    """Return all tests, as ``class.test``. Without a GPU, tests for GPUs that would be skipped are left out."""
    found = [f"{case}.{test}" for case, made in CASES.items() for test in sorted(dir(made)) if test.startswith("test")]
    if torch.cuda.is_available():
        return found
    return [name for name in found if not name.startswith("TPCuda") or name == _WITHOUT_GPU]
