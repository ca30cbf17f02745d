"""What the tests call on other workers."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.futures import Future

import arpc


class Point(NamedTuple):
    x: Tensor
    label: str


class Line(NamedTuple):
    start: Point
    end: Point


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".torch.jit")  # torch's, of all that is TorchScript

    @torch.jit.script
    def one_arg(value):
        return value + 1

    @torch.jit.script
    def no_arg():
        return 7

    @torch.jit.script
    def with_defaults(x: Tensor, factor: int = 3, name: str | None = None) -> tuple[Tensor, str]:
        return x * factor, "none" if name is None else name

    @torch.jit.script
    def of_self(self: Tensor, other: Tensor) -> Tensor:
        return self - other

    @torch.jit.script
    def containers(numbers: list[int], by_name: dict[str, Tensor], maybe: Tensor | None) -> dict[str, Tensor]:
        total = torch.tensor(0)
        for number in numbers:
            total = total + number
        made: dict[str, Tensor] = {}
        for name, tensor in by_name.items():
            made[name] = tensor + total if maybe is None else tensor + maybe
        return made

    @torch.jit.script
    def make_line(x: Tensor) -> tuple[Line, list[Point], dict[str, Point], Point | None, int]:
        point = Point(x, "a")
        return Line(point, Point(x + 1, "b")), [point], {"p": point}, point, 3

    @torch.jit.script
    def length_of(line: Line) -> Tensor:
        return line.end.x - line.start.x

    @torch.jit.script
    class Tally:
        def __init__(self, count: int):
            self.count = count

        def doubled(self) -> int:
            return self.count * 2

    @torch.jit.script
    def make_tally(count: int) -> Tally:
        return Tally(count)

    @torch.jit.script
    def read_tally(tally: Tally) -> int:
        return tally.doubled()

    @torch.jit.script
    def fails(x: Tensor) -> Tensor:
        if x.numel() == 2:
            raise ValueError("Expected error")
        return x

    @torch.jit.script
    def later(x: Tensor) -> Future[Tensor]:
        return torch.jit._fork(one_arg, x)

    @torch.jit.script
    def make_point(x: Tensor) -> Point:
        return Point(x, "made")

    @arpc.functions.async_execution
    @torch.jit.script
    def marked_later(x: Tensor) -> Future[Point]:
        return torch.jit._fork(make_point, x)

    @arpc.functions.async_execution
    @torch.jit.script
    def marked_wrongly() -> Tensor:
        return torch.zeros(2)

    @torch.jit.script
    def wait_in_script(future: Future[Tensor], more: int) -> Tensor:
        return future.wait() + more

    fast_double = torch.jit.script(double)

    @torch.jit.interface
    class Spinning(nn.Module):
        def spin(self) -> int:
            pass

        def stop(self) -> Tensor:
            pass

    class Spinner(torch.jit.ScriptModule):
        """Works, without a pause, until it is told to stop."""

        def __init__(self):
            super().__init__()
            self.flag = torch.zeros(1)

        @torch.jit.script_method
        def spin(self) -> int:
            turns = 0
            while bool(self.flag.sum() == 0):
                turns += 1
            return turns

        @torch.jit.script_method
        def stop(self) -> Tensor:
            return self.flag.fill_(1)

        @torch.jit.script_method
        def point(self, x: Tensor) -> Point:
            return Point(x, "method")

        @torch.jit.script_method
        def fail(self) -> int:
            raise RuntimeError("Expected error")

    @torch.jit.ignore
    def spinner() -> Spinning:
        return Spinner()

    @torch.jit.script
    def make_spinner() -> Spinning:
        return spinner()

    @torch.jit.script
    def scale(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight).sum()


def scripted(weight: int) -> torch.jit.ScriptFunction:
    """One that no module has under a name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        if weight == 1:

            @torch.jit.script
            def local(x: Tensor, more: int = 5) -> Tensor:
                return x + more

        else:

            @torch.jit.script
            def local(x: Tensor, more: int = 6) -> Tensor:
                return x * more

        return local


def call(function, *args):
    return function(*args)


def type_name(value) -> str:
    return type(value).__name__


compiled_double = torch.compile(double, backend="eager")


@torch.compile(backend="eager")
def compiled_here(x: Tensor) -> Tensor:
    return x * 5
