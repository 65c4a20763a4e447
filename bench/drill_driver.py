"""Jobs under drills: starts them, injects faults one after the other, and reads what the journal says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.errors import UsageError
from keepstep.records.drills import DrillRequest
from keepstep.service.control_socket import ask_drill

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "bench" / "jobs" / "nested.py"
COMMAND = (sys.executable, "-m", "keepstep.cli")
START_S, END_S, POLL_S = 120.0, 30.0, 0.05


class Failed(RuntimeError):
    """A job did not do what the measurement needs."""


@dataclass
class Journal:
    """The records of a running job so far; `records` grows with every `read`."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _at: int = 0

    def read(self) -> list[dict[str, Any]]:
        """What came since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        fresh = [json.loads(line) for line in whole.splitlines()]
        self.records += fresh
        return fresh

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All records of one kind."""
        return [record for record in self.records if record["record"] == kind]


class Job:
    """A job of `world` ranks on one node, or on as many as `nodes` says, each with an agent of its own."""

    def __init__(
        self,
        folder: Path,
        plan: str,
        *,
        world: int = 8,
        nodes: int = 1,
        words: Sequence[str] = (),
        script: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.directory = folder / "run"
        self.modes = folder / "modes"
        self._steps = folder / "steps"
        self._read, self._newest = 0, -1
        self._begins: list[float] = []
        self.output = folder / "console.txt"
        self.journal = Journal(self.directory / "journal.jsonl")
        self.world = world
        job = [str(JOB), "--plan", plan, "--log", str(self.modes), "--step-log", str(self._steps), *script]
        self._agents: list[subprocess.Popen[bytes]] = []
        if nodes == 1:
            self._process = self._start(
                "run", "--nproc-per-node", str(world), "--run", str(self.directory), *words, *job
            )
        else:
            self._cluster(folder, nodes, [*words, *job])

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as file:
            return subprocess.Popen(
                [*COMMAND, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _cluster(self, folder: Path, nodes: int, job: list[str]) -> None:
        token = str(folder / "token")
        shape = ["--nnodes", str(nodes), "--nproc-per-node", str(self.world // nodes), "--port", "0"]
        self._process = self._start("controller", *shape, "--token-file", token, "--run", str(self.directory), *job)
        self.until(lambda: " agents at " in self.text(), "the controller")
        address = self.text().split(" agents at ")[1].split(",")[0]
        for number in range(nodes):
            words = ("--controller", address, "--node", f"n{number}", "--token-file", token)
            self._agents.append(self._start("agent", *words, "--run", str(folder / f"n{number}")))

    def text(self) -> str:
        """What the job printed so far."""
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[], object], what: str, *, limit_s: float = START_S) -> bool:
        """Wait for something, reading the journal. Raises Failed if the job ends or the time is over."""
        end = time.monotonic() + limit_s
        while not condition():
            self.journal.read()
            if self._process.poll() is not None and not condition():
                raise Failed(f"the job ended before {what}\n{self.text()[-2000:]}")
            if time.monotonic() > end:
                raise Failed(f"never came: {what}\n{self.text()[-2000:]}")
            time.sleep(POLL_S)
        return True

    def wait(self, condition: Callable[[], object], limit_s: float) -> bool:
        """As `until`, but the time may be over and the job ended: whether it came."""
        end = time.monotonic() + limit_s
        while True:
            self.journal.read()
            if condition():
                return True
            if time.monotonic() > end or self._process.poll() is not None:
                self.journal.read()
                return bool(condition())
            time.sleep(POLL_S)

    @property
    def step(self) -> int:
        """The newest step that rank 0 began; -1: none."""
        self.begins()
        return self._newest

    def begins(self) -> list[float]:
        """When rank 0 began every step so far (a step done again: twice); wall clock."""
        if self._steps.exists():
            with self._steps.open() as file:
                file.seek(self._read)
                text = file.read()
            lines = text[: text.rfind("\n") + 1].splitlines()
            self._read += sum(len(line) + 1 for line in lines)
            self._begins += [float(line.split()[1]) for line in lines]
            self._newest = int(lines[-1].split()[0]) if lines else self._newest
        return self._begins

    def drill(self, request: DrillRequest) -> None:
        """Ask for a drill, again while the rank has no holder."""
        end = time.monotonic() + START_S
        while True:
            try:
                ask_drill(self.directory, request)
                return
            except UsageError as error:
                if "at the moment" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(POLL_S)

    def alive(self) -> bool:
        """Whether the job still runs."""
        return self._process.poll() is None

    def finish(self, limit_s: float) -> int | None:
        """Wait for the job's own end: its exit code; None when the time is over."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the job as a person would, by force if it takes too long."""
        for process in (self._process, *self._agents):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGINT)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.journal.read()
