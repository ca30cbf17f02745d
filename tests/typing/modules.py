# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportPrivateUsage=false
"""What a type checker knows of remote modules. Never run: `test_typing` has mypy and pyright read it."""

# torch 2.8 does not annotate Module.__init__
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, assert_type

from torch import nn
from torch.nn import Parameter

import arpc
from arpc.nn import RemoteModule


class Batch:
    pass


class Encoder(nn.Module):
    def __init__(self, width: int, *, is_deep: bool = False) -> None:
        super().__init__()
        self.width = width
        self.is_deep = is_deep

    def forward(self, batch: Batch, *, depth: int = 1) -> tuple[int, str]:
        return depth, str(batch)


class Decoder(nn.Module):
    async def forward(self, batch: Batch) -> str:
        return str(batch)


async def results() -> None:
    encoder = RemoteModule("ps/cpu", Encoder, (3,))
    assert_type(encoder, RemoteModule[Encoder])
    assert_type(await encoder, RemoteModule[Encoder])
    assert_type(await encoder(Batch(), depth=2), tuple[int, str])
    assert_type(await encoder.forward(Batch()), tuple[int, str])
    assert_type(encoder.forward_async(batch=Batch()), arpc.Future[tuple[int, str]])
    assert_type(encoder.get_module_rref(), arpc.RRef[Encoder])
    assert_type(await encoder.remote_parameters(), list[arpc.RRef[Parameter]])
    assert_type(await encoder.train(), RemoteModule[Encoder])


async def coroutines(decoder: RemoteModule[Decoder]) -> None:
    assert_type(await decoder(Batch()), str)
    assert_type(await decoder.forward(Batch()), str)
    assert_type(decoder.forward_async(Batch()), arpc.Future[str])


async def arguments() -> None:
    assert_type(RemoteModule.at("ps/cpu")(Encoder, 3), RemoteModule[Encoder])
    assert_type(await RemoteModule.at("ps/cpu", timeout=5)(Encoder, width=3, is_deep=True), RemoteModule[Encoder])


async def unknown_modules(module: RemoteModule[nn.Module]) -> None:
    assert_type(await module(1, text=""), Any)
    assert_type(module.forward_async(), arpc.Future[Any])


async def modules_of_any_class(module: RemoteModule[Any]) -> None:
    assert_type(await module(1, text=""), Any)
    assert_type(await module.forward(1), Any)
    assert_type(module.forward_async(), arpc.Future[Any])


async def what_is_wrong(encoder: RemoteModule[Encoder]) -> None:
    _: str = await encoder(Batch())  # type: ignore[assignment]
    RemoteModule("ps/cpu", "Encoder")  # type: ignore[arg-type]
    RemoteModule.at("ps/cpu")(Encoder, "3")  # type: ignore[arg-type]
    RemoteModule.at("ps/cpu")(Encoder)  # type: ignore[call-arg]
    RemoteModule.at("ps/cpu")(Encoder, 3, is_depe=True)  # type: ignore[call-arg]
    await encoder(3)  # type: ignore[arg-type]
    await encoder()  # type: ignore[call-arg]
    await encoder.forward(Batch(), deep=1)  # type: ignore[call-arg]
    encoder.forward_async(Batch(), depth="1")  # type: ignore[arg-type]
