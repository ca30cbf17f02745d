"""Training with a parameter server, three ways: a network learns to read handwritten digits.

    arpc launch --role driver=1,server=1,trainer=3 examples/parameter_server.py

The server keeps the parameters. Each trainer has a share of the images, pushes gradients to the server and goes on with
the parameters that come back.

- sync: the server waits for a gradient of every trainer and applies their mean, so that all continue alike;
- async: it applies each gradient when it comes, and no trainer waits for another;
- batch: it applies the mean of the gradients that came during the step before: many trainers cost no more than few.

The driver runs them one after the other and shows the progress. With --kill it ends one trainer by SIGKILL on the way.
The group is elastic, so a launcher that starts that trainer again is enough (`arpc launch --elastic` does): the driver
notices the loss at once, and the new process continues where the old one stopped.

Every process runs this file, and its rank determines its role, so that torchrun and srun do as well as `arpc launch`.
Without any of them it launches itself. The images are the digits of scikit-learn, which come with that package.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc
from arpc.log import get_logger

logger = get_logger("parameter_server")  # the dashboard shows the log, with the worker of each record
MODES = ("sync", "async", "batch")
DRIVER, SERVER = "driver0", "server0"  # the ranks 0 and 1; all others are trainers


def make_model() -> nn.Module:
    """Make the model: from the 64 pixels of an image to a score for each digit."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits and their labels, in a random order that is always the same."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


# -- the server -------------------------------------------------------------------------------------------------------


class Progressed(NamedTuple):
    """The progress of the server."""

    pushes: int
    steps: int
    weights: Tensor


class ParameterServer:
    """The parameters of the model as one vector, and the optimizer that updates it."""

    def __init__(self, mode: str, trainers: list[str]) -> None:
        torch.manual_seed(0)  # all modes start from the same parameters
        self.weights = nn.Parameter(parameters_to_vector(make_model().parameters()))
        self.optimizer = torch.optim.Adam([self.weights], lr=1e-3)
        self.published = self.weights.detach().clone()
        self.mode = mode
        self.steps = 0
        self.pushes = dict.fromkeys(trainers, 0)
        self._pending: dict[str, Tensor] = {}
        self._changed = asyncio.Condition()

    async def pull(self) -> Tensor:
        """Return the current parameters."""
        return self.published

    async def pushes_of(self, trainer: str) -> int:
        """Return how many gradients of a trainer were applied."""
        return self.pushes[trainer]

    async def push(self, trainer: str, number: int, gradient: Tensor) -> Tensor:
        """Submit the gradient of step `number`; return the parameters after it was applied.

        A trainer that was killed may have submitted it already, unknown to its successor: it is applied once.
        """
        async with self._changed:
            if self.pushes[trainer] <= number:
                self._pending[trainer] = gradient
                self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: self.pushes[trainer] > number)
            finally:  # also if the trainer is lost, which cancels this handler
                if self._pending.get(trainer) is gradient:
                    del self._pending[trainer]
        return self.published

    async def serve(self) -> None:
        """Apply gradients, until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._is_ready)
                count = 1 if self.mode == "async" else len(self._pending)
                taken = {trainer: self._pending.pop(trainer) for trainer in list(self._pending)[:count]}
            await asyncio.to_thread(self._step, list(taken.values()))  # meanwhile the loop receives further gradients
            async with self._changed:
                for trainer in taken:
                    self.pushes[trainer] += 1
                self._changed.notify_all()

    def _is_ready(self) -> bool:
        return len(self._pending) >= (len(self.pushes) if self.mode == "sync" else 1)

    def _step(self, gradients: list[Tensor]) -> None:
        self.weights.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        # Tensors are sent from their own memory, so the published one must not change: it is a copy
        self.published = self.weights.detach().clone()
        self.steps += 1

    async def watch(self) -> AsyncIterator[Progressed]:
        """Yield the progress several times a second, until the reader closes the stream."""
        while True:
            yield Progressed(sum(self.pushes.values()), self.steps, self.published)
            await asyncio.sleep(0.1)


# -- the trainers -----------------------------------------------------------------------------------------------------


async def train(
    server: arpc.RRef[ParameterServer], images: Tensor, digits: Tensor, first: int, steps: int, pause_s: float
) -> None:
    """Train on a share of the images: called by the driver on every trainer."""
    model, name = make_model(), arpc.get_worker_info().name
    logger.info("trains with %d images, from step %d to %d", len(images), first, steps)
    dice = torch.Generator().manual_seed(first)
    weights = await server.rpc_sync().pull()
    for number in range(first, steps):
        vector_to_parameters(weights, model.parameters())
        batch = torch.randint(len(images), (64,), generator=dice)
        loss = cross_entropy(model(images[batch]), digits[batch])
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        weights = await server.rpc_sync().push(name, number, gradient)
        await asyncio.sleep(pause_s)


# -- the driver -------------------------------------------------------------------------------------------------------


class Trainer:
    """One trainer: its share of the images, and the process that has its name at present."""

    def __init__(self, name: str, images: Tensor, digits: Tensor) -> None:
        self.name, self.images, self.digits = name, images, digits
        self.arrivals = asyncio.Queue[int]()
        self.pid = 0


class Report(NamedTuple):
    """The progress of the training."""

    seconds: float
    pushes: int
    steps: int
    loss: float
    accuracy: float
    calls_per_s: float

    @property
    def mb_per_s(self) -> float:
        """The data rate: with every call a gradient is sent, and the parameters are returned."""
        size_bytes = 4 * sum(parameter.numel() for parameter in make_model().parameters())
        return 2 * size_bytes * self.calls_per_s / 1e6


class Driver:
    """Starts everything, and shows the progress."""

    def __init__(self, trainers: int, arguments: argparse.Namespace) -> None:
        images, digits = load_digits()
        self.test_images, self.test_digits = images[:400], digits[:400]  # no trainer sees these
        shares = zip(images[400:].chunk(trainers), digits[400:].chunk(trainers), strict=True)
        self.trainers = {f"trainer{n}": Trainer(f"trainer{n}", *share) for n, share in enumerate(shares)}
        self.arguments = arguments
        self.over = asyncio.Event()
        self.server_is_there = asyncio.Event()
        self.kills: dict[str, float] = {}
        # the launcher sets the width of a progress bar, if it has a terminal to show one
        columns = os.environ.get("ARPC_LAUNCH_COLUMNS")
        self.console = Console(width=int(columns), force_terminal=True) if columns else Console()

    async def take_part(self, name: str, pid: int) -> None:
        """Register a worker. Returns when the worker may leave."""
        if name == SERVER:
            self.server_is_there.set()
        else:
            self.trainers[name].arrivals.put_nowait(pid)
        await self.over.wait()

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> tuple[float, float]:
        """Return loss and accuracy on images that no trainer has seen."""
        model = make_model()
        vector_to_parameters(weights, model.parameters())
        scores = model(self.test_images)
        right = (scores.argmax(dim=1) == self.test_digits).double().mean().item()
        return cross_entropy(scores, self.test_digits).item(), right

    async def run_mode(self, mode: str) -> list[Report]:
        """Train a new model in one of the three ways, and show the progress."""
        server = arpc.remote(SERVER, ParameterServer, (mode, list(self.trainers)))
        for trainer in self.trainers.values():
            await self.arrive(trainer)
        async with asyncio.TaskGroup() as group:  # if one of them fails, the others are cancelled
            serving = group.create_task(self.serve(server))
            training = [group.create_task(self.keep_training(one, server)) for one in self.trainers.values()]
            reports = await self.show(mode, server, asyncio.gather(*training))
            serving.cancel()
        return reports

    async def serve(self, server: arpc.RRef[ParameterServer]) -> None:
        """Have the server apply gradients until this is cancelled, which cancels the handler there too."""
        await server.rpc_sync(timeout=0).serve()

    async def arrive(self, trainer: Trainer) -> None:
        """Wait until the process of a trainer has registered, if there is none."""
        if not trainer.pid:
            trainer.pid = await trainer.arrivals.get()

    async def keep_training(self, trainer: Trainer, server: arpc.RRef[ParameterServer]) -> None:
        """Make sure that all gradients of one trainer are computed, by as many processes as necessary."""
        steps, pause_s = self.arguments.steps, self.arguments.pause / 1e3
        while (done := await server.rpc_sync().pushes_of(trainer.name)) < steps:
            await self.arrive(trainer)
            if done:
                self.console.print(f"[green]{trainer.name} is back[/], as process {trainer.pid}, at step {done}")
            arguments = (server, trainer.images, trainer.digits, done, steps, pause_s)
            try:
                await arpc.rpc_sync(trainer.name, train, arguments, timeout=0)
            except arpc.WorkerLostError as error:
                trainer.pid = 0
                logger.warning("%s", error)
                self.console.print(f"[red]WorkerLostError[/]: {error}", soft_wrap=True, highlight=False)

    async def show(
        self, mode: str, server: arpc.RRef[ParameterServer], training: asyncio.Future[list[None]]
    ) -> list[Report]:
        """Draw a progress bar until the training ends, and take a report each time it moves by a twentieth."""
        total = self.arguments.steps * len(self.trainers)
        reports: list[Report] = []
        started = before = time.perf_counter()
        pushes_before, calls_per_s = 0, 0.0
        with Progress(*COLUMNS, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task(mode, total=total, loss=0.0, accuracy=0.0, calls_per_s=0.0, mb_per_s=0.0)
            async for now in server.stream(timeout=0, window=1).watch():
                is_over = training.done()
                seconds = time.perf_counter() - before
                if seconds > 0.5:
                    calls_per_s = (now.pushes - pushes_before) / seconds
                    before, pushes_before = time.perf_counter(), now.pushes
                elapsed_s = time.perf_counter() - started
                report = Report(elapsed_s, now.pushes, now.steps, *self.evaluate(now.weights), calls_per_s)
                progress.update(
                    bar,
                    completed=now.pushes,
                    loss=report.loss,
                    accuracy=report.accuracy,
                    calls_per_s=report.calls_per_s,
                    mb_per_s=report.mb_per_s,
                )
                if is_over or not reports or 20 * now.pushes // total > 20 * reports[-1].pushes // total:
                    reports.append(report)
                    if not self.console.is_terminal:
                        print(line_of(mode, report))
                if is_over:
                    break
                if self.arguments.kill and mode == self.arguments.kill_mode and now.pushes > 0.3 * total:
                    self.kill(mode, report)
        return reports

    def kill(self, mode: str, report: Report) -> None:
        """Kill the process of a trainer, as the failure of a machine would; once per mode."""
        victim = list(self.trainers.values())[-1]
        if victim.pid and mode not in self.kills:
            self.console.print(f"[yellow]kill -9 {victim.pid}[/]: {victim.name} dies in the middle of its work")
            self.kills[mode] = report.seconds
            os.kill(victim.pid, signal.SIGKILL)

    async def run(self) -> None:
        """Run the modes one after the other, and print their results."""
        arguments = self.arguments
        await self.server_is_there.wait()
        modes = MODES if arguments.mode == "all" else (arguments.mode,)
        results = {mode: await self.run_mode(mode) for mode in modes}
        print("mode    updates   seconds   calls/s   MB/s          loss             accuracy")
        for mode, reports in results.items():
            first, last = reports[0], reports[-1]
            mean = last._replace(calls_per_s=last.pushes / last.seconds)
            print(
                f"{mode:5}   {last.steps:7}   {last.seconds:7.1f}   {mean.calls_per_s:7,.0f}   {mean.mb_per_s:4,.0f}   "
                f"{first.loss:.3f} -> {last.loss:.3f}   {first.accuracy:6.1%} -> {last.accuracy:6.1%}"
            )
        if arguments.plot:
            draw(results, self.kills, arguments.plot)
            print(f"the picture is {arguments.plot}")
        print(NEXT)


COLUMNS = (
    TextColumn("[bold]{task.description:5}"),
    BarColumn(bar_width=None),
    TextColumn("{task.completed:5}/{task.total}"),
    TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:6.1%}"),
    TextColumn("{task.fields[calls_per_s]:5,.0f} calls/s  {task.fields[mb_per_s]:4,.0f} MB/s"),
)
NEXT = """what to try next, after `. .venv/bin/activate`:
  arpc launch --role driver=1,server=1,trainer=6 examples/parameter_server.py --mode batch   # more trainers
  arpc top                            # in another terminal, while it runs; or arpc stack, or arpc trace
  python examples/fault_tolerant.py   # the same idea in 200 lines, with two kills
  docs/examples.md                    # ten further examples"""


def line_of(mode: str, report: Report) -> str:
    """Format a report as the line that is printed where no bar can be drawn."""
    return (
        f"{mode:5} {report.pushes:6} gradients   loss {report.loss:.3f}   accuracy {report.accuracy:6.1%}   "
        f"{report.calls_per_s:5,.0f} calls/s   {report.mb_per_s:4,.0f} MB/s"
    )


def draw(results: dict[str, list[Report]], kills: dict[str, float], path: Path) -> None:
    """Draw a picture of all modes: how fast each of them learns."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for mode, reports in results.items():
        seconds = [one.seconds for one in reports]
        (line,) = left.plot(seconds, [one.loss for one in reports], marker=".", label=mode)
        right.plot(seconds, [100 * one.accuracy for one in reports], marker=".", label=mode)
        if mode in kills:
            for axes in (left, right):
                axes.axvline(kills[mode], color=line.get_color(), linestyle=":", label=f"{mode}: a trainer is killed")
    left.set(title="Loss on images that no trainer has seen", xlabel="seconds", ylabel="cross-entropy", yscale="log")
    right.set(title="Accuracy on the same images", xlabel="seconds", ylabel="percent", ylim=(0, 100))
    right.legend(loc="lower right")
    figure.suptitle("A parameter server and its trainers learn scikit-learn's digits, three ways")
    figure.savefig(path)
    plt.close(figure)


# -- every process ----------------------------------------------------------------------------------------------------

driver: Driver  # exists in the driver's process only, where the function below runs


async def take_part(name: str, pid: int) -> None:
    """Register a worker: called by the server and the trainers when they have joined."""
    await driver.take_part(name, pid)


async def work(arguments: argparse.Namespace) -> None:
    """Run one process: the driver runs the training, the other workers serve calls until they may leave."""
    global driver  # noqa: PLW0603 - one process, one driver
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
    name = (DRIVER, SERVER)[rank] if rank < 2 else f"trainer{rank - 2}"
    if rank == 0:
        driver = Driver(size - 2, arguments)
    async with arpc.init_rpc(name, world_size=None) as worker:  # workers of an elastic group come and go
        if rank > 0:
            await joined(worker, DRIVER)
            await arpc.rpc_sync(DRIVER, take_part, (name, os.getpid()), timeout=0)
            return
        await driver.run()
        if arguments.keep:
            print(f"the group stays up, its dashboard is {worker.http_address}: Ctrl-C ends it")
            await asyncio.Event().wait()
        driver.over.set()


async def joined(worker: arpc.Worker, name: str) -> None:
    """Wait until a worker of that name has joined."""
    async for event in worker.membership():
        if event.worker.name == name:
            return


def main() -> None:
    """Parse the command line, and run a worker of a group, or launch a group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all", help="how gradients are applied (all)")
    parser.add_argument("--steps", type=int, default=400, help="how many gradients each trainer pushes (400)")
    parser.add_argument("--pause", type=float, default=0, metavar="MS", help="what a trainer waits between two (0)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw how it went, such as build/ps.png")
    parser.add_argument("--kill", action="store_true", help="kill -9 a trainer on the way: see who starts it again")
    parser.add_argument("--keep", action="store_true", help="stay up at the end, to look at the dashboard")
    parser.add_argument("--trainers", type=int, default=3, help="how many processes train, if this launches them (3)")
    arguments = parser.parse_args()
    arguments.kill_mode = "async" if arguments.mode == "all" else arguments.mode
    torch.set_num_threads(1)
    logging.getLogger("parameter_server").setLevel(logging.INFO)
    logging.getLogger("parameter_server").addHandler(logging.NullHandler())  # nothing of the log is printed
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        arpc.run(work(arguments))
        return
    roles = {"driver": 1, "server": 1, "trainer": arguments.trainers}
    try:
        arpc.run(arpc.launch.local(__file__, sys.argv[1:], workers=roles, elastic=True, max_restarts=1))
    except KeyboardInterrupt:
        sys.exit(130)
    except arpc.LaunchError as error:
        sys.exit(f"\n{error.traceback}\n\n{error}")


if __name__ == "__main__":
    main()
