"""``python -m arpc.compat script.py args...``: run a script of torch.distributed.rpc, unchanged, on arpc."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from arpc.compat.launching import run_module, run_script
from arpc.compat.modules import install
from arpc.compat.spawning import install_in_children

__all__ = ["main"]


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m arpc.compat",
        description="Run a script that was written for torch.distributed.rpc on arpc, without a change to it.",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say on stderr what was done")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as python -m has it")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="what the script gets as its own arguments")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Run it in this process, as its main program."""
    arguments = _arguments(sys.argv[1:] if given is None else given)
    install()
    install_in_children()
    if not arguments.quiet:
        sys.stderr.write(f"arpc.compat: torch.distributed.rpc is arpc in {arguments.script} and its children\n")
    run = run_module if arguments.is_module else run_script
    run(arguments.script, arguments.args)


if __name__ == "__main__":
    main()
