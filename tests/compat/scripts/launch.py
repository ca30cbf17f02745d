"""Runs programs for torch.distributed.rpc, one after the other, each in three processes of its own::

    python -m tests.compat.scripts.launch rnn=29500 pipeline=29600                    # on torch
    python -m arpc.compat -m tests.compat.scripts.launch rnn=29500 pipeline=29600     # on arpc

Each is given the port where its processes meet. Every process prints a line of JSON: what `run` of the program
returned, and how much CPU time that took, with the time of its own children. The processes are forked from this one,
which has imported the programs, so that imports do not count. Nor does the work of Python's garbage collector on the
imported objects: a collection in a forked process copies all of their memory, and where it falls is chance.
"""

import gc
import importlib
import json
import os
import resource
import sys

import torch
import torch._dynamo  # the first optimizer imports it: here, so that it does not count
import torch.multiprocessing as mp

WORLD_SIZE = 3


def cpu_seconds():
    """What this process and those of its children that have ended took."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run_program(rank, name, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    program = importlib.import_module(f"tests.compat.scripts.{name}")
    begin = cpu_seconds()
    results = program.run(rank, WORLD_SIZE)
    cpu_s = cpu_seconds() - begin
    line = json.dumps({"program": name, "rank": rank, "cpu_s": cpu_s, "results": results})
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = [word.split("=") for word in sys.argv[1:]]
    for name, _ in chosen:
        importlib.import_module(f"tests.compat.scripts.{name}")
    gc.freeze()
    for name, port in chosen:
        mp.start_processes(run_program, args=(name, port), nprocs=WORLD_SIZE, start_method="fork")
