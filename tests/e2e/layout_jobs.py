"""Jobs of the examples' layouts: undisturbed under plain torchrun, and disturbed under `keepstep run`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from jobs import SCRIPTS, RunningJob

LAYOUTS = Path(__file__).resolve().parents[2] / "examples" / "layouts"
TORCHRUN = str(Path(sys.executable).parent / "torchrun")


def weights_of(directory: Path, world: int) -> str:
    """One hash over the weights that all ranks left."""
    parts = [(directory / f"rank-{rank}").read_text() for rank in range(world)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def by_torchrun(directory: Path, layout: str, *arguments: str, world: int) -> str:
    """The weights of an undisturbed, unprotected run."""
    return all_by_torchrun(directory, [layout], *arguments, world=world)[layout]


def all_by_torchrun(directory: Path, layouts: list[str], *arguments: str, world: int) -> dict[str, str]:
    """The same for several layouts, one after the other in the same processes."""
    scripts = [str(LAYOUTS / f"{layout}.py") for layout in layouts]
    command = [TORCHRUN, "--standalone", f"--nproc-per-node={world}", str(SCRIPTS / "one_after_another.py")]
    command += [str(directory), *scripts, "--", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "unprotected" in done.stderr
    return {layout: weights_of(directory / layout, world) for layout in layouts}


class LayoutJob(RunningJob):
    """A layout under `keepstep run`, with the options of dying.py in front of the script."""

    def __init__(self, directory: Path, layout: str, *arguments: str, options: list[str], world: int, standby: int):
        self.weights = directory.parent / f"{directory.name}-weights"
        self.weights.mkdir(parents=True)
        self.world = world
        marker = str(directory.parent / f"{directory.name}-marker")
        more = [*options, "--marker", marker, "--weights", str(self.weights)]
        script = [*more, str(LAYOUTS / f"{layout}.py"), *arguments]
        super().__init__(directory, *script, script="dying.py", world=world, standby=standby)

    def end(self) -> str:
        """The weights, after a good end."""
        assert self.finish(limit_s=400.0) == 0, self.text()
        return weights_of(self.weights, self.world)

    def steps_recomputed(self) -> list[int]:
        return [incident["steps_recomputed"] for incident in self.report()["incidents"]]

    def records(self, kind: str) -> list[dict]:
        """Facts or orders of that kind in the journal so far, with `source` or `target`."""
        journal = self.directory / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
        return [{**one, **(one.get("fact") or one.get("order") or {})} for one in found]
