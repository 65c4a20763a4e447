"""Jobs whose findings are looked at: started as a person does, read back from the journal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 150.0


class Watched:
    """One `keepstep` command that runs a job in `directory`; what it prints is in a file."""

    def __init__(self, directory: Path, *words: object) -> None:
        self.directory = directory
        self.output = directory.parent / f"{directory.name}.txt"
        command = [sys.executable, "-m", "keepstep.cli", *map(str, words)]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=directory.parent
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def records(self, kind: str) -> list[dict]:
        """The records of one kind that the journal has so far."""
        path = self.directory / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record for record in found if record["record"] == kind]

    def findings(self, kind: str) -> list[dict]:
        return [record for record in self.records("Finding") if record["kind"] == kind]

    def until(self, condition, what: str, *, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, f"never came: {what}\n{self.text()}"
            time.sleep(0.1)

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.text()) is not None

    def finish(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.text()}") from None

    def stop(self) -> None:
        """End it as a person does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def running(directory: Path, script: str, *arguments: object, world: int = 3, options: tuple = ()) -> Iterator[Watched]:
    """`keepstep run` of a script of the tests."""
    words = ("run", "--nproc-per-node", world, "--run", directory, *options, SCRIPTS / script, *arguments)
    job = Watched(directory, *words)
    try:
        yield job
    finally:
        job.stop()


@contextlib.contextmanager
def cluster(directory: Path, *script: object, ranks: int, options: tuple = ()) -> Iterator[Watched]:
    """`keepstep controller` with two agents, a and b, on this machine, each with `ranks` ranks and a standby."""
    token = directory / "token"
    words = ("--nnodes", 2, "--nproc-per-node", ranks, "--standby", 1, "--port", 0, "--token-file", token)
    controller = Watched(directory / "run", "controller", *words, *options, "--run", directory / "run", *script)
    agents: list[Watched] = []
    try:
        controller.until(lambda: controller.said(r"127\.0\.0\.1:\d+"), "its address")
        address = re.search(r"127\.0\.0\.1:\d+", controller.text()).group()
        for node in ("a", "b"):
            where = ("--controller", address, "--node", node, "--run", directory / node, "--token-file", token)
            agents.append(Watched(directory / node, "agent", *where))
        yield controller
    finally:
        for process in (controller, *agents):
            process.stop()


def suspects(finding: dict) -> list[list[dict]]:
    return finding["suspects"]
