"""``python -m arpc.compat script.py args...``: run a script of torch.distributed.rpc, unchanged, on arpc."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from arpc.compat.inheritance import install_in_children
from arpc.compat.launching import run_module, run_script
from arpc.compat.modules import install

__all__ = ["main"]


def _arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into our own arguments and those of the script, which are passed on unchanged."""
    parser = argparse.ArgumentParser(
        prog="python -m arpc.compat",
        usage="%(prog)s [-h] [-q] [-m] script [args ...]",
        description="Run a script that was written for torch.distributed.rpc on arpc, without a change to it.",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say on stderr what was done")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as python -m has it")
    parser.add_argument("script", help="the script, or with -m the module; what follows are its own arguments")
    own = next((number for number, word in enumerate(given, 1) if not word.startswith("-")), len(given))
    return parser.parse_args(given[:own]), list(given[own:])


def main(given: Sequence[str] | None = None) -> None:
    """Run the given script in this process, as its main program."""
    arguments, args = _arguments(sys.argv[1:] if given is None else given)
    install()
    where = f"{arguments.script} and the Python processes it starts"
    if not install_in_children():
        where = f"{arguments.script}, but not in processes it starts: Python ignores the environment (-E or -I)"
    if not arguments.quiet:
        sys.stderr.write(f"arpc.compat: torch.distributed.rpc is arpc in {where}\n")
    run = run_module if arguments.is_module else run_script
    run(arguments.script, args)


if __name__ == "__main__":
    main()
