"""Pickles that run code, or try to, as they are known from attacks on programs that unpickle what strangers send.

Each would touch a file if it had its way: `canary` is where. Those built by hand show what no `__reduce__` makes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import cloudpickle
import numpy as np
import torch

__all__ = ["GADGETS"]


class Reduce:
    """Pickles as whatever it is told."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def text(value: str) -> bytes:
    data = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data


def whole(*parts: bytes) -> bytes:
    return pickle.PROTO + b"\x05" + b"".join(parts) + pickle.STOP


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def dumped(*parts: Any) -> bytes:
    return pickle.dumps(Reduce(*parts), protocol=5)


def python_for(canary: str) -> str:
    return f"open({canary!r}, 'w').close()"


def made(canary: str) -> dict[str, bytes]:
    import builtins
    import functools
    import importlib
    import operator
    import os
    import pathlib
    import runpy
    import shutil
    import subprocess
    import timeit
    import types
    import webbrowser

    command, code = f"touch {canary}", python_for(canary)
    open_canary = text(canary) + text("w")

    def evil() -> None:
        open(canary, "w").close()  # noqa: PTH123

    return {
        # the classics
        "os.system": dumped(os.system, (command,)),
        "posix.system": whole(call(named("posix", "system"), text(command))),
        "os.popen": dumped(os.popen, (command,)),
        "os.spawnlp": dumped(os.spawnlp, (0, "touch", "touch", canary)),
        "subprocess.Popen": dumped(subprocess.Popen, (["touch", canary],)),
        "subprocess.check_output": dumped(subprocess.check_output, (["touch", canary],)),
        "eval": dumped(eval, (code,)),
        "exec": dumped(exec, (code,)),
        "compile": dumped(compile, (code, "x", "exec")),
        "__import__": dumped(__import__, ("antigravity",)),
        "importlib": dumped(importlib.import_module, ("antigravity",)),
        "open": dumped(open, (canary, "w")),
        "getattr": whole(call(named("builtins", "getattr"), named("os", "path"), text("os"))),
        "input": dumped(input, ("?",)),
        "breakpoint": dumped(breakpoint, ()),
        "print": dumped(print, ("hello",)),
        # by way of the standard library
        "runpy": dumped(runpy.run_path, (canary,)),
        "timeit": dumped(timeit.timeit, (code,)),
        "webbrowser": dumped(webbrowser.open, (f"file://{canary}",)),
        "shutil": dumped(shutil.copyfile, ("/etc/hostname", canary)),
        "pathlib": dumped(pathlib.Path.touch, (pathlib.PurePosixPath(canary),)),
        "types.CodeType": whole(named("types", "CodeType")),
        "types.FunctionType": whole(named("types", "FunctionType")),
        "marshal": whole(call(named("marshal", "loads"), pickle.SHORT_BINBYTES + b"\x01N")),
        "code": whole(call(named("code", "interact"))),
        "pty": whole(call(named("pty", "spawn"), text("true"))),
        "pdb": whole(call(named("pdb", "run"), text(code))),
        "ctypes": whole(call(named("ctypes", "CDLL"), text("libc.so.6"))),
        "logging.config": whole(call(named("logging.config", "listen"))),
        "asyncio": whole(call(named("asyncio", "create_subprocess_shell"), text(command))),
        "multiprocessing": whole(call(named("multiprocessing.util", "spawnv_passfds"))),
        "pip": whole(call(named("pip", "main"), pickle.EMPTY_LIST)),
        "pickle.loads": dumped(pickle.loads, (dumped(os.system, (command,)),)),
        "cloudpickle.loads": dumped(cloudpickle.loads, (dumped(os.system, (command,)),)),
        "cloudpickle function": cloudpickle.dumps(evil, protocol=5),
        "cloudpickle lambda": cloudpickle.dumps(lambda: None, protocol=5),
        "cloudpickle class": cloudpickle.dumps(type("Evil", (), {"__init__": evil}), protocol=5),
        "cloudpickle internals": whole(named("cloudpickle.cloudpickle", "_make_function")),
        # tools to build a call out of harmless parts
        "functools.partial": dumped(functools.partial, (os.system, command)),
        "functools.reduce": dumped(functools.reduce, (os.system, [command])),
        "partial by state": whole(
            named("functools", "partial") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.BUILD
        ),
        "operator.attrgetter": dumped(operator.attrgetter, ("system",)),
        "operator.methodcaller": dumped(operator.methodcaller, ("system", command)),
        "operator.itemgetter": dumped(operator.itemgetter, (0,)),
        "map": dumped(map, (os.system, [command])),
        "filter": dumped(filter, (os.system, [command])),
        "apply_along_axis": whole(named("numpy", "apply_along_axis")),
        "vars": dumped(vars, ()),
        "globals": dumped(globals, ()),
        "setattr": dumped(setattr, (1, "x", 2)),
        "type": dumped(type, ("Evil", (), {})),
        "memoryview": dumped(memoryview, (b"abc",)),
        "dotted name": whole(named("builtins", "Exception.__class__.__subclasses__")),
        "dotted through a listed type": whole(named("torch", "Size.__class__")),
        "dotted through main": whole(call(named("arpc.wire.values.reducers", "_from_main"), text("os.system"))),
        "main": whole(call(named("arpc.wire.values.reducers", "_from_main"), text("__builtins__"))),
        "sys.modules": whole(named("sys", "modules")),
        "builtins module": whole(named("__builtin__", "eval")),
        "python 2 name": whole(b"c__builtin__\neval\n"),
        # pickle's own machinery
        "copyreg": whole(named("copyreg", "_reconstructor")),
        "copyreg.__newobj__": whole(named("copyreg", "__newobj__")),
        "copyreg.add_extension": whole(call(named("copyreg", "add_extension"), text("os"), text("system"), b"K\x01")),
        "GLOBAL": whole(b"cos\nsystem\n" + text(command) + pickle.TUPLE1 + pickle.REDUCE),
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "EXT1": whole(b"\x82\x01"),
        "EXT4": whole(b"\x84\x01\x02\x03\x04"),
        "PERSID": b"Psomething\n.",
        "BINPERSID": whole(text("something") + b"Q"),
        "state setter": dumped(Reduce, (), {"x": 1}, None, None, os.system),
        "called exception": whole(call(named("builtins", "Exception"), text("x")) + pickle.EMPTY_TUPLE + pickle.REDUCE),
        "called data": whole(text("x") + pickle.EMPTY_TUPLE + pickle.REDUCE),
        "called class of a value": whole(call(named("builtins", "bytearray"), b"J\xff\xff\xff\x7f")),
        "called list": whole(call(named("builtins", "list"), call(named("builtins", "range"), b"J\xff\xff\xff\x7f"))),
        "called set": whole(call(named("builtins", "set"), call(named("builtins", "range"), b"J\xff\xff\xff\x7f"))),
        "called object": whole(call(named("builtins", "object"))),
        "size of a range": whole(call(named("torch", "Size"), call(named("builtins", "range"), b"J\xff\xff\xff\x7f"))),
        "deque of a range": whole(
            call(named("collections", "deque"), call(named("builtins", "range"), b"J\xff\xff\xff\x7f"))
        ),
        "counter of a range": whole(
            call(named("collections", "Counter"), call(named("builtins", "range"), b"J\xff\xff\xff\x7f"))
        ),
        "default factory": dumped(__import__("collections").defaultdict, (builtins.input,)),
        "far in the memo": whole(b"N" + pickle.LONG_BINPUT + b"\xff\xff\xff\xff" + text("rrrrrr") + b"\xff"),
        "far in the memo, in words": b"Np4000000000\n\xff.",
        "bytearray that is not there": whole(pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 60) + b"rrrrrr\xff"),
        # what is on the lists, changed: a class is everybody's
        "state of a class": whole(
            named("arpc.errors", "RemoteError") + b"N}" + text("__init__") + b"Ns" + pickle.TUPLE2 + pickle.BUILD
        ),
        "state of an exception class": whole(
            named("builtins", "ValueError") + b"N}" + text("__str__") + b"Ns" + pickle.TUPLE2 + pickle.BUILD
        ),
        "state of a group": whole(
            named("builtins", "ExceptionGroup") + b"N}" + text("split") + b"Ns" + pickle.TUPLE2 + pickle.BUILD
        ),
        "state of a function": whole(
            named("arpc.wire.values.reducers", "_fill")
            + b"N}"
            + text("__defaults__")
            + b"Ns"
            + pickle.TUPLE2
            + pickle.BUILD
        ),
        "state of a constructor": whole(
            named("arpc.wire.values.reducers", "_fill") + b"N}" + text("_call") + b"Ns" + pickle.TUPLE2 + pickle.BUILD
        ),
        "state of UNSET": whole(named("arpc.options", "UNSET") + b"}" + text("x") + b"Ns" + pickle.BUILD),
        "items of a class": whole(named("arpc.errors", "RemoteError") + b"(" + text("x") + b"Nu"),
        # torch and numpy
        "torch.load": whole(call(named("torch", "load"), text(canary))),
        "torch.serialization.load": whole(call(named("torch.serialization", "load"), text(canary))),
        "torch.storage": whole(call(named("torch.storage", "_load_from_bytes"), pickle.SHORT_BINBYTES + b"\x01N")),
        "torch.hub": whole(call(named("torch.hub", "load"), text("x"), text("y"))),
        "torch.jit": whole(call(named("torch.jit", "load"), text(canary))),
        "torch.utils": whole(call(named("torch.utils._config_module", "load_config"), text("x"))),
        "torch._utils": whole(named("torch._utils", "_rebuild_tensor_v2")),
        "torch.distributed.rpc": whole(named("torch.distributed.rpc.internal", "_run_function")),
        "torch.inductor": whole(call(named("torch._inductor.codecache", "compile_file"), text("x"))),
        "torch module": pickle.dumps(torch.nn.Linear(1, 1), protocol=5),
        "numpy objects": pickle.dumps(np.array([Reduce(os.system, (command,))], dtype=object), protocol=5),
        "numpy records": pickle.dumps(np.zeros(1, dtype=[("a", "O")]), protocol=5),
        "numpy.load": whole(call(named("numpy", "load"), text(canary))),
        "numpy.f2py": whole(call(named("numpy.f2py", "compile"), text("x"))),
        "numpy.testing": whole(call(named("numpy.testing._private.utils", "runstring"), text(code), b"}")),
        "numpy memmap": whole(call(named("numpy", "memmap"), open_canary)),
        "numpy dtype of objects": whole(call(named("numpy", "dtype"), text("O"))),
        "numpy array of addresses": whole(
            call(
                named("numpy._core.numeric", "_frombuffer"),
                pickle.SHORT_BINBYTES + b"\x08" + bytes(8),
                call(named("numpy", "dtype"), text("O8")),
                b"K\x01\x85",
                text("C"),
            )
        ),
        # arpc's own
        "arpc run": whole(named("arpc.runner", "run")),
        "arpc calls": whole(call(named("arpc.rref.calls", "call_method"), b"K\x01\x88", text("__class__"))),
        "arpc pickler": whole(named("arpc.wire.values.pickler", "loads")),
        "arpc executor": whole(named("arpc.agent.server.dispatcher", "Executor")),
        "bound method": pickle.dumps("".join, protocol=5),
        "class method": pickle.dumps(dict.fromkeys, protocol=5),
        "torch function": pickle.dumps(torch.add, protocol=5),
        "types.MethodType": pickle.dumps(types.SimpleNamespace(a=1), protocol=5),
    }


GADGETS: Callable[[str], dict[str, bytes]] = cache(made)
