"""``make bench``: runs ``arpc bench`` from a clone. The figures go to build/bench.json."""

import sys

from arpc.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--json", "build/bench.json", *sys.argv[1:]]))
