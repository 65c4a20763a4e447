"""Members of a job without a controller: a test says itself what each of them is told, and when, to the message."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.errors import PeerLost
from keepstep.records.messages import Address, Fact, Hello, Order, Welcome
from keepstep.service.ring_memory import RingMemory
from keepstep.store.wire_server import AgentWire, serve

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 90.0


class Process:
    """One training process: what it said, and its line."""

    def __init__(self, name: str, ring: RingMemory) -> None:
        self.name = name
        self.ring = ring
        self.popen: subprocess.Popen[bytes] | None = None
        self.wire: AgentWire | None = None
        self.said: list[Fact] = []
        self.address: Address | None = None

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid


class Stage:
    """Processes of one script and a thread that listens to them."""

    def __init__(self, directory: Path, *arguments: str, script: str = "toy.py", world: int = 4) -> None:
        self.world = world
        self.out = directory
        self.out.mkdir(parents=True, exist_ok=True)
        self.command = [str(SCRIPTS / script), *arguments, "--out", str(self.out)]
        self.processes: dict[str, Process] = {}
        self.roster: dict[int, Address] = {}
        self.secret = secrets.token_bytes(32)
        self.change = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = asyncio.run_coroutine_threadsafe(
            serve(f"keepstep-stage-{secrets.token_hex(8)}", self._talk), self.loop
        ).result(10)

    async def _talk(self, wire: AgentWire) -> None:
        process = next(one for one in self.processes.values() if one.popen is not None and one.pid == wire.pid)
        wire.post_descriptor(process.ring.descriptor)
        process.wire = wire
        while True:
            try:
                fact = await wire.receive()
            except PeerLost:
                return
            with self.change:
                if isinstance(fact, Hello):
                    process.address = fact.address
                process.said.append(fact)
                self.change.notify_all()

    def start(self, name: str, *, rank: int = -1, node: str = "a", local_rank: int = 0) -> Process:
        """Start a member (`rank`) or a standby."""
        process = self.processes[name] = Process(name, RingMemory(name, slots=4096))
        environment = os.environ | {
            "KEEPSTEP_AGENT": self.server.name,
            "KEEPSTEP_NODE": node,
            "KEEPSTEP_HOST": "127.0.0.1",
            "WORLD_SIZE": str(self.world),
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable]
        if rank < 0:
            words += ["-m", "keepstep.training.standby"]
        else:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        with (self.out / f"{name}.txt").open("wb") as file, self.change:
            process.popen = subprocess.Popen(
                words + self.command, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        return process

    def start_all(self, nodes: str = "aaaa") -> None:
        """All members of the job, welcomed into generation 1."""
        for rank in range(self.world):
            self.start(f"m{rank}", rank=rank, node=nodes[rank], local_rank=nodes[:rank].count(nodes[rank]))
        self.roster = {rank: self.hello(f"m{rank}") for rank in range(self.world)}
        for rank in range(self.world):
            self.tell(f"m{rank}", self.welcome(rank, generation=1))

    def welcome(self, rank: int, *, generation: int, joiner: bool = False, roster=None) -> Welcome:
        return Welcome(1, rank, self.world, 0, generation, 0, joiner, roster or self.roster, self.secret)

    def hello(self, name: str) -> Address:
        self.hear(name, Hello)
        address = self.processes[name].address
        assert address is not None
        return address

    def tell(self, name: str, order: Order) -> None:
        wire = self.processes[name].wire
        assert wire is not None
        self.loop.call_soon_threadsafe(wire.post, order)

    def hear(self, name: str, kind: type, *, which: Callable[[Fact], bool] = lambda fact: True, limit_s=LIMIT_S):
        """The first fact of `kind` that `name` says or has said."""
        process = self.processes[name]
        end = time.monotonic() + limit_s
        with self.change:
            while True:
                for fact in process.said:
                    if isinstance(fact, kind) and which(fact):
                        return fact
                assert time.monotonic() < end, f"{name} did not say {kind.__name__}: {self.talk(name)}"
                self.change.wait(0.2)

    def talk(self, name: str) -> str:
        said = [msgspec.to_builtins(fact) for fact in self.processes[name].said[-12:] if not isinstance(fact, Hello)]
        return f"{said}\n{(self.out / f'{name}.txt').read_text(errors='replace')[-3000:]}"

    def finish(self, *names: str, limit_s: float = LIMIT_S) -> None:
        """Wait for the end of these processes: code 0."""
        for name in names:
            popen = self.processes[name].popen
            assert popen is not None
            assert popen.wait(limit_s) == 0, self.talk(name)

    def close(self) -> None:
        for process in self.processes.values():
            if process.popen is not None and process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)

    def logs(self) -> dict[int, list[str]]:
        """What each rank logged of kept steps, without pids."""
        return {
            int(path.stem.split("-")[1]): [line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()]
            for path in sorted(self.out.glob("rank-*.log"))
        }
