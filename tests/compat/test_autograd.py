"""torch.distributed.autograd's names, by a worker that calls itself."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from arpc.compat import autograd as dist_autograd
from arpc.compat import rpc
from arpc.ids import LOCAL_BITS


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("boom")


class CallOn(torch.autograd.Function):
    """Makes a call in the middle of a backward pass, which only a thread other than the loop's can."""

    threads: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CallOn.threads.append(threading.get_ident())
        return rpc.rpc_sync("alone", double, (gradient.detach(),))


def boom(x: torch.Tensor) -> torch.Tensor:
    return Boom.apply(x)


def call_on(x: torch.Tensor) -> torch.Tensor:
    return CallOn.apply(x)


@pytest.mark.parametrize("rank", [-1, 1 << 16])
def test_a_rank_that_no_worker_can_have(rank: int) -> None:
    # -1 is what init_rpc gets if it is not given a rank, although env:// then finds one for the store
    with pytest.raises(RuntimeError, match=rf"worker_id needs to be in the range \[0, 65535\], not {rank}: pass rank"):
        dist_autograd._init(rank)


def test_a_pass(alone):
    x = leaf()
    with dist_autograd.context() as context_id:
        assert context_id >> LOCAL_BITS == 0
        loss = rpc.rpc_sync(alone, double, (x,)).sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [4.0] * 3
    assert x.grad is None
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        dist_autograd.get_gradients(context_id)


def test_the_graph_that_torch_shows(alone):
    x, y = leaf(), leaf()
    with dist_autograd.context() as context_id:
        result = rpc.rpc_sync(alone, torch.add, (x, y))
        context = dist_autograd._current_context()
        assert context._context_id() == context_id
        first, second = context._send_functions().values()
        assert first.name() == "torch::distributed::autograd::SendRpcBackward"
        assert [node.variable is leaf for (node, _), leaf in zip(first.next_functions, (x, y), strict=True)] == [
            True
        ] * 2
        ((add, _),) = second.next_functions
        assert add.name() == "AddBackward0"
        arrived, returned = context._recv_functions().values()
        assert {node for node, _ in add.next_functions} == {arrived}
        assert result.grad_fn is returned
        assert returned.name() == "torch::distributed::autograd::RecvRpcBackward"
        assert context._known_worker_ids() == set()


def test_contexts_belong_to_threads(alone):
    seen: list[object] = []

    def look() -> None:
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            dist_autograd._current_context()
        with dist_autograd.context() as own:
            seen.append(own)

    with dist_autograd.context() as context_id:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert len(seen) == 1
        assert seen != [context_id]
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
            dist_autograd._new_context()
    assert dist_autograd._get_max_id() == (1 << LOCAL_BITS) - 1
    assert dist_autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}


def test_a_context_may_be_released_by_hand(alone):
    context_id = dist_autograd._new_context()._context_id()
    dist_autograd._is_valid_context(context_id)
    dist_autograd._release_context(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        dist_autograd._is_valid_context(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        dist_autograd._release_context(context_id)
    with dist_autograd.context() as another:
        assert another != context_id


def test_errors_in_torchs_words(alone):
    x = leaf()
    with dist_autograd.context() as context_id:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            dist_autograd.backward(context_id, None)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            dist_autograd.backward(None, [x])
        for roots, text in (
            ([], "No tensors provided for gradient computation"),
            ([torch.ones(1)], "requires_grad not set on root"),
            ([x], "is not a scalar, all roots need to be scalar"),
            ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
        ):
            with pytest.raises(RuntimeError, match=text):
                dist_autograd.backward(context_id, roots)
        loss = rpc.rpc_sync(alone, boom, (x,)).sum()
        with pytest.raises(RuntimeError, match=r"^Error on Node 0: boom$"):
            dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id) == {}


def test_nodes_run_in_the_thread_that_waits_and_may_call_on(alone):
    x = leaf()
    CallOn.threads.clear()
    with dist_autograd.context() as context_id:
        loss = CallOn.apply(rpc.rpc_sync(alone, call_on, (x,))).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [4.0] * 3
    assert CallOn.threads == [threading.get_ident()] * 2


class Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyboardInterrupt


def test_a_pass_can_be_interrupted_and_the_context_used_on(alone):
    x = leaf()
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(alone, double, (x,)).sum()
        with pytest.raises(KeyboardInterrupt):
            dist_autograd.backward(context_id, [Interrupt.apply(loss)], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3


def test_a_profile_shows_the_cut(alone):
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(alone, double, (leaf(),)).sum()
        with torch.autograd.profiler.profile() as profile:
            dist_autograd.backward(context_id, [loss])
    names = [event.name for event in profile.function_events]
    assert names.count("torch::distributed::autograd::backward") == 1
    assert names.count("torch::distributed::autograd::SendRpcBackward") == 2
    assert sum("RecvRpcBackward" in name for name in names) >= 2


def test_backward_of_an_rref(alone):
    x = leaf()
    with dist_autograd.context() as context_id:
        rpc.RRef(rpc.rpc_sync(alone, double, (x,)).sum()).backward(context_id)
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3
    rpc.RRef(double(x).sum()).backward()
    assert x.grad.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
        rpc.RRef("no tensor").backward()


def test_hooks_of_accumulation_nodes_run_once(alone):
    x = leaf()
    runs: list[list[float]] = []
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_hook(lambda *_: runs.append(x.grad.tolist()))
    with dist_autograd.context() as context_id:
        loss = (rpc.rpc_sync(alone, double, (x,)) + rpc.rpc_sync(alone, double, (x,))).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [4.0] * 3
    assert runs == [[4.0] * 3]
    assert x.grad is None


def test_ddp_takes_part(alone, tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ddp", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        (weight,) = model.parameters()
        for _ in range(3):  # a reducer that was not run to its end refuses the next forward
            with dist_autograd.context() as context_id:
                loss = model(rpc.rpc_sync(alone, double, (leaf(),))).sum()
                dist_autograd.backward(context_id, [loss])
                assert dist_autograd.get_gradients(context_id)[weight].tolist() == [[2.0, 4.0, 6.0]]
            assert weight.grad is None
    finally:
        dist.destroy_process_group()


def gradients_by_script(context_id: int, loss: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    dist_autograd.backward(context_id, [loss])
    return dist_autograd.get_gradients(context_id)


def test_scripts_may_run_passes(alone):
    x = leaf()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        script = torch.jit.script(gradients_by_script)
    with dist_autograd.context() as context_id:
        found = script(context_id, rpc.rpc_sync(alone, double, (x,)).sum())
        assert found[x].tolist() == [2.0] * 3
