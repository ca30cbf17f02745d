"""``python -m arpc`` is the command ``arpc``."""

import sys

from arpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
