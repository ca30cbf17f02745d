"""``make bench``: what ``arpc bench`` does, from a clone. The figures go to build/bench.json."""

import sys
from pathlib import Path

from arpc.bench.command import main

if __name__ == "__main__":
    sys.exit(main(json_path=Path("build/bench.json")))
