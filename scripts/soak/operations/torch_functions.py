"""Functions of torch: TorchScript and operators of ``torch.ops``.

Torch reads the annotations of this module, so their evaluation is not postponed.
"""

import warnings

import torch

from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here, raises

__all__ = ["OPERATIONS"]


@torch.jit.ignore  # type: ignore[untyped-decorator]
def log_run(token: str) -> None:
    """Log a run from inside of TorchScript, which cannot write to the event log itself."""
    here().ledger.ran(token)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".torch.jit")  # torch deprecates TorchScript, and arpc supports it

    @torch.jit.script
    def scaled_by_script(token: str, x: torch.Tensor, factor: float) -> torch.Tensor:
        log_run(token)
        if factor < 0:
            raise ValueError("asked to fail")
        return x * factor


@torch.library.custom_op("arpc_soak::scaled", mutates_args=())
def scaled_by_operator(token: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    here().ledger.ran(token)
    return x * factor


async def _script(client: Client) -> None:
    to, factor = client.other(), client.random.uniform(-0.3, 1.0)
    x = torch.rand(100)
    async with client.call("torch-script", to) as token:
        call = client.worker.rpc_sync(to, scaled_by_script, args=(token, x, factor), timeout=TIMEOUT_S)
        if factor < 0:
            await raises(call, RuntimeError, ValueError)
            return
        got = await call
    assert torch.allclose(got, x * factor), "another tensor came back"


async def _operator(client: Client) -> None:
    to, factor = client.other(), client.random.random()
    x = torch.rand(100)
    async with client.call("torch-ops", to) as token:
        operator = torch.ops.arpc_soak.scaled
        got = await client.worker.rpc_sync(to, operator, args=(token, x, factor), timeout=TIMEOUT_S)
    assert torch.allclose(got, x * factor), "another tensor came back"


OPERATIONS = (Operation("torch-script", _script), Operation("torch-ops", _operator))
