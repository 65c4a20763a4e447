"""`python -m keepstep.cli` is the command `keepstep`."""

import sys

from keepstep.cli.entry import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
