"""``make bench``: the same as ``arpc bench``, from a clone."""

import sys

from arpc.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
