"""RRefs in another class, for the code of a worker that does not await."""

from __future__ import annotations

from typing import Any

import pytest

import arpc
from arpc.agent.scope import WorkerScope, current_scope
from arpc.rref.context import HandleClass
from arpc.rref.reducer import bare, reduce_rref
from arpc.testing import cluster


class Dressed:
    def __init__(self, handle: arpc.RRef[Any]) -> None:
        self.handle = handle


def kind_of(rref: object) -> str:
    return type(rref).__name__


async def value_of(rref: object) -> Any:
    return await bare(rref).to_here()


def dress(worker: arpc.Worker) -> None:
    context = worker.rref_context
    context.handle_class = HandleClass(Dressed, Dressed, lambda dressed: dressed.handle)
    reducers = worker.agent.codec.pickler._reducers
    reducers[Dressed] = lambda dressed, pickling: reduce_rref(context, dressed.handle, pickling)


async def test_each_worker_sees_rrefs_in_its_own_form() -> None:
    async with cluster(2) as group:
        dress(group[1])
        rref = arpc.RRef(5)
        assert await arpc.rpc_sync("worker1", kind_of, args=(rref,)) == "Dressed"
        assert await arpc.rpc_sync("worker0", kind_of, args=(rref,)) == "RRef"
        assert await arpc.rpc_sync("worker1", value_of, args=(rref,)) == 5
        token = current_scope.set(WorkerScope(group[1]))
        try:
            dressed = Dressed(arpc.RRef(6))
            assert await arpc.rpc_sync("worker0", kind_of, args=(dressed,)) == "RRef"
            assert bare(dressed) is dressed.handle
        finally:
            current_scope.reset(token)


async def test_only_rrefs_are_bared() -> None:
    async with cluster(1):
        rref = arpc.RRef(1)
        assert bare(rref) is rref
        with pytest.raises(TypeError, match="an RRef is needed here, not int"):
            bare(5)
