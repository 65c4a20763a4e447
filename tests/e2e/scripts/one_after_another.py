"""Runs several scripts in one process, each through dying.py: `one_after_another.py WEIGHTS SCRIPT... [-- arguments]`.

The weights of each go to WEIGHTS/NAME. For undisturbed runs under torchrun, where starting a process takes longest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dying import main

if __name__ == "__main__":
    weights, *scripts = sys.argv[1:]
    arguments: list[str] = []
    if "--" in scripts:
        at = scripts.index("--")
        scripts, arguments = scripts[:at], scripts[at + 1 :]
    for script in scripts:
        directory = Path(weights) / Path(script).stem
        directory.mkdir(parents=True, exist_ok=True)
        sys.argv = ["dying.py", "--weights", str(directory), script, *arguments]
        main()
