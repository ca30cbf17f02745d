"""The kinds of torch callables besides plain functions: how each is pickled, and how its calls are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Final

from torch._ops import OpOverload, OpOverloadPacket
from torch.export import ExportedProgram

from arpc.agent.server.functions import Preparation
from arpc.torchjit import ScriptException, ScriptFunction, ScriptMethod, ScriptModule
from arpc.torchscript.calls import prepare_script_function, refuse_script_method
from arpc.torchscript.operators import reduce_overload, reduce_packet
from arpc.torchscript.programs import prepare_program, reduce_function, reduce_program
from arpc.torchscript.references import reduce_script_error, reduce_script_function, reduce_script_module
from arpc.wire.values.pickler import Reducer

__all__ = ["FAMILIES", "PREPARATIONS", "REDUCERS"]

REDUCERS: Final[Mapping[type, Reducer]] = {
    ScriptFunction: reduce_script_function,
    ScriptException: reduce_script_error,
    OpOverload: reduce_overload,
    OpOverloadPacket: reduce_packet,
    FunctionType: reduce_function,
}
FAMILIES: Final[Mapping[type, Reducer]] = {
    ScriptModule: reduce_script_module,
    ExportedProgram: reduce_program,
}
PREPARATIONS: Final[Mapping[type, Preparation]] = {
    ScriptFunction: prepare_script_function,
    ScriptMethod: refuse_script_method,
    ExportedProgram: prepare_program,
}
