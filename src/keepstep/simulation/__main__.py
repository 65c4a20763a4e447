"""`python -m keepstep.simulation SEED`: replay one seed and print what happened."""

from __future__ import annotations

import sys

from keepstep.simulation.truth import Violation
from keepstep.simulation.verdict import judge, transcript
from keepstep.simulation.world import World, draw_plan

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Replay the seed in `arguments`; 1 if a guarantee was broken."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        sys.stderr.write("usage: python -m keepstep.simulation SEED\n")
        return 2
    world = World(draw_plan(int(arguments[0])))
    broken = ""
    try:
        judge(world, ended=world.run())
    except Violation as error:
        broken = str(error)
    sys.stdout.write(f"{world.plan}\n" + "\n".join(transcript(world)) + "\n")
    sys.stdout.write(f"faults: {world.injector.struck}\n{broken or 'all is well'}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
