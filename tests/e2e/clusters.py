"""A controller and agents on this machine that stand for several nodes, running the toy job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
COMMAND = (sys.executable, "-m", "keepstep.cli")


class Cluster:
    """One job over agents; `nodes` gives each one's words. Use it in a `with` block: nothing is left behind."""

    def __init__(
        self, folder: Path, *, nnodes: int, words: tuple[object, ...] = (), script: tuple[object, ...]
    ) -> None:
        self.folder = folder
        self.directory = folder / "run"
        self.output = folder / "console.txt"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.controller = self._start(
            "controller",
            "--nnodes",
            nnodes,
            "--port",
            0,
            "--run",
            self.directory,
            "--token-file",
            folder / "token",
            *words,
            *script,
        )
        self.until(lambda: "agents at" in self.text(), "the controller")
        found = re.search(r"agents at (127\.0\.0\.1:\d+)", self.text())
        assert found is not None
        self.address = found[1]

    def _start(self, *words: object) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as file:
            return subprocess.Popen(
                [*COMMAND, *map(str, words)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )

    def agent(self, node: str, *words: object) -> None:
        """Start the agent of `node` (again: in a directory of its own)."""
        run = self.folder / f"{node}-{len(self.agents)}"
        self.agents[run.name] = self._start(
            "agent",
            "--controller",
            self.address,
            "--node",
            node,
            "--run",
            run,
            "--token-file",
            self.folder / "token",
            *words,
        )

    def agent_of(self, node: str) -> subprocess.Popen[bytes]:
        return next(process for name, process in self.agents.items() if name.startswith(f"{node}-"))

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def records(self, kind: str) -> list[dict]:
        """The records of that kind in the journal so far."""
        path = self.directory / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record for record in whole if record["record"] == kind]

    def until(self, condition: Callable[[], object], what: str, *, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"never came: {what}\n{self.text()[-4000:]}"
            assert self.controller.poll() is None or condition(), f"ended before {what}\n{self.text()[-4000:]}"
            time.sleep(0.02)

    def keepstep(self, *words: object) -> str:
        done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def finish(self, *, limit_s: float = 180.0) -> int:
        """The controller's exit code, and its report in `self.report`."""
        try:
            code = self.controller.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.text()[-6000:]}") from None
        self.report = json.loads((self.directory / "report.json").read_text())
        return code

    def interrupt(self) -> int:
        """End the job as a person would."""
        os.kill(self.controller.pid, signal.SIGINT)
        return self.finish()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in (self.controller, *self.agents.values()):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGINT)
        for process in (self.controller, *self.agents.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def toy(out: Path, *words: object) -> tuple[object, ...]:
    """The toy job with its logs in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return (SCRIPTS / "toy.py", "--out", out, *words)
