"""Reads falsified inputs in child processes; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import mmap
import os
import pprint
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import torch

from scripts.fuzz import opened_protocol
from scripts.metadata.lies import lie
from scripts.metadata.trial import Trial
from scripts.metadata.valid import Input, valid_inputs

_MAX_FOUND: Final = 20
_REPORTED: Final = 100_000
_PRINTED: Final = 200
_SECONDS_PER_INPUT: Final = 10
_MORE_ADDRESSES: Final = 4 << 30
_MORE_MEMORY_KB: Final = 1 << 20
_RARELY: Final = 150
_THOROUGH: Final = 16
_PROGRESS: Final = struct.Struct("<QQQ")
_SLOW: Final = frozenset(("nested", "quantized", "archive", "lanes"))


def input_number(seed: int, number: int, quick: list[Input], slow: list[Input]) -> Input:
    """Return the input of a number, always the same."""
    random = Random(seed << 40 | number)
    return lie(random.choice(slow if not random.randrange(_RARELY) else quick), random)


def main() -> int:
    """Run the requested inputs; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="how many inputs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="to repeat a run; 0 takes another one each time")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input, to repeat one of a run")
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"), help="where findings are kept (%(default)s)")
    options = parser.parse_args()
    seed = options.seed or time.time_ns() % (1 << 31)
    warnings.simplefilter("ignore")  # torch warns of layouts that it is still working on
    inputs = valid_inputs()
    slow = [given for given in inputs if given.way in _SLOW]
    quick = [given for given in inputs if given.way not in _SLOW]
    options.found.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {len(inputs)} kinds of messages", flush=True)
    faulthandler.enable()
    torch.set_num_threads(1)  # further threads would be missing after a fork
    trial = Trial(opened_protocol())
    for given in inputs:
        before = trial.built
        trial.run(given)
        if trial.built == before:
            print(f"what a worker really says was refused: {given}", flush=True)
            return 1
    shared = mmap.mmap(-1, _PROGRESS.size)
    number, end, found, built, peak = options.first, options.first + options.runs, 0, 0, 0
    while number < end and found < _MAX_FOUND:
        _PROGRESS.pack_into(shared, 0, number, 0, 0)
        process = os.fork()
        if not process:
            os._exit(run_child(trial, lambda place: input_number(seed, place, quick, slow), number, end, shared))
        _, status = os.waitpid(process, 0)
        number, built_there, peak_there = _PROGRESS.unpack_from(shared)
        built, peak = built + built_there, max(peak, peak_there)
        if status:
            found += 1
            code = os.waitstatus_to_exitcode(status)
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else "an error, see above"
            content = pprint.pformat(input_number(seed, number, quick, slow))
            text = f"seed {seed}, input {number}: {how}\n{content}\n"
            (options.found / f"metadata-found-{seed}-{number}").write_text(text)
            print(f"FOUND {text[:_PRINTED]}", flush=True)
            number += 1
    trial.close()
    print(f"{built} inputs were built, {number - options.first - built} refused", flush=True)
    print(f"stat::number_of_executed_units: {number - options.first}\nstat::peak_rss_mb: {peak >> 10}", flush=True)
    return 1 if found else 0


def run_child(trial: Trial, made: Callable[[int], Input], number: int, end: int, shared: mmap.mmap) -> int:
    """Run inputs until all are done, or one of them is a finding. ``shared`` has the number of the present input."""
    trial.built = 0
    gc.freeze()  # so that a collection takes no time
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MORE_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    limit_kb = peak_kb() + _MORE_MEMORY_KB
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for current in range(number, end):
        _PROGRESS.pack_into(shared, 0, current, trial.built, peak_kb())
        signal.alarm(_SECONDS_PER_INPUT)
        try:
            trial.run(made(current), is_thorough=current % _THOROUGH == 0)
        except BaseException:  # noqa: BLE001 - this is a finding
            traceback.print_exc()
            return 1
        if peak_kb() > limit_kb:
            print(f"{peak_kb() >> 10} MB of memory were taken", flush=True)
            return 1
        if current % _REPORTED == _REPORTED - 1:
            print(f"{current + 1} inputs", flush=True)
    signal.alarm(0)
    _PROGRESS.pack_into(shared, 0, end, trial.built, peak_kb())
    return 0


def peak_kb() -> int:
    """Return the peak memory of this process, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
