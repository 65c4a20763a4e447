"""A host falls off the network and comes back: its rank was given away meanwhile, and what comes back is fenced.

Shows G-2 and G-8 across real network namespaces: the host's processes live all the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fabric_lab import Fabric, FabricPlan

ROOT = Path(__file__).parents[2]
KEEPSTEP = [sys.executable, "-m", "keepstep.cli"]
SCRIPT = ["examples/layouts/ddp.py", "--pace", "0.2"]
STEPS = 400


class SpreadJob:
    """A controller, and an agent with one rank and perhaps a standby on each of four hosts."""

    def __init__(self, fabric: Fabric, scratch: Path) -> None:
        self.fabric, self.run, self.steps = fabric, scratch / "run", scratch / "steps"
        settings = scratch / "settings.toml"
        settings.write_text("silence_s = 2.0\n")
        script = [str(ROOT / SCRIPT[0]), *SCRIPT[1:], "--steps", str(STEPS), "--step-log", str(self.steps)]
        listen = ["--host", fabric.management, "--port", "29400", "--run", str(self.run), "--settings", str(settings)]
        self.said = scratch / "said"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.said.open("w") as said:
            command = [*KEEPSTEP, "controller", "--nnodes", "4", "--standby", "1", *listen, *script]
            self.controller = fabric.start(
                fabric.manage, command, stdout=said, stderr=subprocess.STDOUT, env=self.environment
            )
        until((self.run / "token").exists)
        self.agents = [self._agent(number, scratch, settings) for number in range(4)]

    def _agent(self, number: int, scratch: Path, settings: Path) -> subprocess.Popen:
        host = self.fabric.hosts[number]
        reach = ["--controller", f"{self.fabric.management}:29400", "--token-file", str(self.run / "token")]
        where = ["--node", f"h{number}", "--address", host.address, "--run", str(scratch / f"agent{number}")]
        command = [*KEEPSTEP, "agent", *reach, *where, "--settings", str(settings)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return self.fabric.start(host.namespace, command, env=self.environment, **quiet)

    def begun(self, rank: int) -> list[tuple[int, int]]:
        """Step and pid of all begins of a rank."""
        lines = self.steps.read_text().split("\n")[:-1] if self.steps.exists() else []
        return [(int(step), int(pid)) for _, step, who, pid in (line.split() for line in lines) if int(who) == rank]

    def journal(self, kind: str) -> list[dict]:
        lines = (self.run / "journal.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record.get("record") == kind]


def until(reached, *, what: str = "", limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.exhaustive
@pytest.mark.long
def test_what_comes_back_from_a_partition_is_fenced(fabrics, tmp_path: Path) -> None:
    fabric = fabrics(FabricPlan(hosts=4, spines=2))
    job = SpreadJob(fabric, tmp_path)
    victim = 1
    until(lambda: len(job.begun(victim)) >= 5, what="the job does not start")
    fabric.cut_host(victim)
    last, pid = job.begun(victim)[-1]
    until(lambda: len({who for _, who in job.begun(victim)}) > 1, what=job.said.read_text())
    taken = len(job.begun(victim))
    assert Path(f"/proc/{pid}").exists(), "the lost rank's process lives on behind the cut"
    until(lambda: len(job.begun(victim)) > taken + 5, what=job.said.read_text())
    fabric.mend_host(victim)
    until(lambda: not Path(f"/proc/{pid}").exists(), what=job.said.read_text(), limit_s=60.0)
    assert max(step for step, who in job.begun(victim) if who == pid) <= last + 1, "it made no step of its own"
    assert job.controller.wait(timeout=400) == 0, job.said.read_text()
    report = json.loads((job.run / "report.json").read_text())
    assert len(report["incidents"]) == 1, job.said.read_text()
    assert report["weights_sha256"] == undisturbed(tmp_path)


def undisturbed(scratch: Path) -> str:
    launch = [*KEEPSTEP, "run", "--nproc-per-node", "4", "--run", str(scratch / "even")]
    subprocess.run([*launch, str(ROOT / SCRIPT[0]), "--steps", str(STEPS)], check=True, capture_output=True)
    return json.loads((scratch / "even" / "report.json").read_text())["weights_sha256"]
