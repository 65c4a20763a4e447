"""The GPT example, for measuring moves: `--no-gaps` sends state without waiting for gaps between collectives.

All other arguments are those of examples/gpt/train.py, which calls keepstep's join().
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from keepstep.training.leading import Leading

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"


def main() -> None:
    if "--no-gaps" in sys.argv:
        sys.argv.remove("--no-gaps")
        Leading.waits_for_gaps = False
    sys.path.insert(0, str(EXAMPLE))
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
