"""What it takes to replace 1 and 4 members of 32 to 1,024, against making all connections anew, and against Gloo.

Members have no torch; 32 share a process, each with sockets and threads of its own, all over TCP on this machine. A
normal step is an all_reduce of 4 KiB over all members and the agreement. A swap is a planned move: links to the joiners
are prepared beside the steps. Its pause is the time from the agreement of the last member to the new generation of the
last member, and what the first step with the joiners takes more than a normal one. A full re-initialisation (`install`
with all links renewed, watch links, one step) minus a normal step is what the swap is compared with.

Messages are TCP segments with data, connections are new sockets, processor seconds are those of all members; those of a
swap are prepare, commit and first step without two normal steps. "Above a step" is their ratio to one normal step of
the same size.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import Result, judge, options, report
from light_members import host

from keepstep.training.turning import Move

SIZES, QUICK_SIZES = (32, 64, 128, 256, 512, 1024), (32, 64)
MOVED = (1, 4)
GLOO_SIZES, QUICK_GLOO_SIZES = (8, 16, 32, 64), (8,)
MEMBERS_A_HOST, STEPS = 32, 5
MOST_GROWTH, LEAST_SPEED, MOST_SOCKETS = 2.0, 20.0, 64
ANSWER_S, GLOO_S = 300.0, 60.0


class Failed(RuntimeError):
    """A world did not do what the measurement needs."""


class Counts(NamedTuple):
    """Over all members: messages, sockets made, processor seconds; and wall seconds."""

    messages: float
    sockets: float
    cpu_s: float
    wall_s: float

    def minus(self, other: Counts, times: int) -> Counts:
        """What is left without `times` of `other`."""
        return Counts(*(max(one - times * two, 0.0) for one, two in zip(self, other, strict=True)))


class Swap(NamedTuple):
    """One planned move: to prepare it, the step that made it, the first step with the joiners; and `boundary_s`, from
    the last agreement to the last new generation."""

    prepared: Counts
    made: Counts
    first: Counts
    boundary_s: float

    def pause_s(self, normal: Counts) -> float:
        """What training lost to it."""
        return self.boundary_s + max(self.first.wall_s - normal.wall_s, 0.0)

    def above(self, normal: Counts) -> Counts:
        """All of it without its two steps."""
        parts = zip(self.prepared, self.made, self.first, strict=True)
        return Counts(*(sum(part) for part in parts)).minus(normal, 2)


class World:
    """Hosts with `size` members; leaving the block ends them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._moves = 0
        self.generation = 1

    def __enter__(self) -> World:
        hosts = max(1, self.size // MEMBERS_A_HOST)
        for number in range(hosts):
            ours, theirs = self._context.Pipe()
            arguments = {"world": self.size, "pipe": theirs}
            process = self._context.Process(target=host, args=(number, hosts), kwargs=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        roster: dict[int, Any] = {}
        for answer in self._answers():
            roster.update(answer[0])
        self.order("begin", roster)
        self.order("steps", 1)
        self.order("watch")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def order(self, method: str, *arguments: Any) -> list[Any]:
        """Has all hosts do something at once; what each answered, with its cost. Raises Failed."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_S):
                raise Failed(f"no answer within {ANSWER_S:.0f} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise Failed(answer)
            found.append(answer)
        return found

    def counted(self, method: str, *arguments: Any) -> tuple[Counts, list[Any]]:
        """What an order cost, and what the hosts answered."""
        before, _ = self.sockets()
        begin = time.perf_counter()
        answers = self.order(method, *arguments)
        wall_s = time.perf_counter() - begin
        after, _ = self.sockets()
        messages = sum(count - before.get(inode, 0) for inode, count in after.items())
        cpu_s = sum(cost.cpu_s for _, cost in answers)
        return Counts(messages, len(after.keys() - before.keys()), cpu_s, wall_s), [result for result, _ in answers]

    def sockets(self) -> tuple[dict[int, int], int]:
        """Messages by connection, and the most sockets of a member."""
        answers = [answer[0] for answer in self.order("counts")]
        return {k: v for counts, _ in answers for k, v in counts.items()}, max(most for _, most in answers)

    def swap(self, moved: int) -> Swap:
        """One planned move of `moved` members."""
        self._moves += 1
        self.generation += 1
        ranks = [(1 + self._moves + number * self.size // moved) % self.size for number in range(moved)]
        joiners: dict[int, Any] = {}
        for answer in self.order("join", ranks, self.generation):
            joiners.update(answer[0])
        move = Move(self._moves, self.generation, joiners)
        prepared, _ = self.counted("prepare", move)
        made, stamps = self.counted("commit", move)
        first, _ = self.counted("steps", 1)
        self.order("steps", 1)
        self.order("clean")
        boundary_s = max(installed for _, installed in stamps) - max(agreed for agreed, _ in stamps)
        return Swap(prepared, made, first, boundary_s)

    def renewed(self) -> Counts:
        """A full re-initialisation with one step."""
        self.generation += 1
        self.order("poison")
        return self.counted("renew", self.generation)[0]


class Figures(NamedTuple):
    """What one size gave: seconds by members moved and of the re-initialisation, ratios to a step, sockets."""

    pause_s: dict[int, list[float]]
    boundary_s: dict[int, list[float]]
    renew_s: list[float]
    ratios: dict[str, list[float]]
    sockets: int


def measure(size: int, rounds: int) -> Figures:
    """One world: steps, swaps and re-initialisations in turn."""
    pauses: dict[int, list[float]] = {moved: [] for moved in MOVED}
    boundaries: dict[int, list[float]] = {moved: [] for moved in MOVED}
    renewals: list[float] = []
    ratios: dict[str, list[float]] = {"messages": [], "sockets made": [], "processor seconds": []}
    with World(size) as world:
        for _ in range(rounds):
            steps = [world.counted("steps", 1)[0] for _ in range(STEPS)]
            normal = Counts(*(statistics.median(column) for column in zip(*steps, strict=True)))
            swaps = {moved: world.swap(moved) for moved in MOVED}
            for moved, swap in swaps.items():
                pauses[moved].append(swap.pause_s(normal))
                boundaries[moved].append(swap.boundary_s)
            above = swaps[1].above(normal)
            ratios["messages"].append(above.messages / normal.messages)
            ratios["processor seconds"].append(above.cpu_s / normal.cpu_s)
            ratios["sockets made"].append(above.sockets / size)
            renewals.append(world.renewed().minus(normal, 1).wall_s)
        _, sockets = world.sockets()
    return Figures(pauses, boundaries, renewals, ratios, sockets)


def of_size(size: int, found: Figures) -> Iterator[Result]:
    """The lines of one size."""
    for moved, seconds in found.pause_s.items():
        yield judge(f"{size} members, {moved} replaced: pause", [1000 * one for one in seconds], unit="ms")
    for moved, seconds in found.boundary_s.items():
        yield judge(f"{size} members, {moved} replaced: boundary", [1000 * one for one in seconds], unit="ms")
    yield judge(f"{size} members: all made anew", [1000 * one for one in found.renew_s], unit="ms")
    least = LEAST_SPEED if size == SIZES[-1] else None
    for moved, seconds in found.pause_s.items():
        over = [b / a for a, b in zip(seconds, found.renew_s, strict=True)]
        yield judge(f"{size} members, {moved} replaced: anew / swap", over, unit="x", at_least=least)
    for name, values in found.ratios.items():
        unit = "a member" if name == "sockets made" else "steps"
        yield judge(f"{size} members, 1 replaced: {name} above a step", values, unit=unit)
    yield judge(f"{size} members: most sockets of one", [float(found.sockets)], unit="", at_most=MOST_SOCKETS)


def growth(first: Figures, last: Figures, *, sizes: tuple[int, int]) -> Iterator[Result]:
    """How much dearer a swap is, in steps of its own size, from the smallest world to the largest."""
    for name, values in last.ratios.items():
        below = max(statistics.median(first.ratios[name]), 1e-9)
        ratio = [value / below for value in values]
        what = f"{sizes[0]} to {sizes[1]} members: growth of {name}"
        yield judge(what, ratio, unit="x", at_most=MOST_GROWTH)


def gloo_rank(rank: int, size: int, *, folder: str, answer: Any) -> None:
    """Destroys and makes a Gloo group three times; rank 0 tells how long each took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    times = []
    for number in range(4):
        begin = time.perf_counter()
        store = dist.FileStore(str(Path(folder) / str(number)), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.all_reduce(torch.ones(1024))
        times.append(time.perf_counter() - begin)
        dist.destroy_process_group()
    if rank == 0:
        answer.send(times[1:])


def gloo(size: int) -> list[float] | None:
    """Seconds of making a Gloo group of `size` processes anew; None where that took more than a minute."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"folder": folder, "answer": sender}
        processes = [
            context.Process(target=gloo_rank, args=(rank, size), kwargs=arguments, daemon=True) for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = receiver.recv() if receiver.poll(GLOO_S) else None
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return found


def main() -> int:
    """Runs all sizes and prints the results; 1 if a target was missed or a size failed."""
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="members of each world")
    parser.add_argument("--without-gloo", action="store_true")
    chosen = parser.parse_args()
    sizes = tuple(chosen.sizes or (QUICK_SIZES if chosen.quick else SIZES))
    found: dict[int, Figures] = {}
    results: list[Result] = []
    failed = False
    for size in sizes:
        try:
            found[size] = measure(size, 1 if chosen.quick else 3)
            results += of_size(size, found[size])
        except Failed as error:
            failed = True
            sys.stderr.write(f"{size} members: {error}\n")
    done = tuple(found)
    if len(done) > 1:
        results += growth(found[done[0]], found[done[-1]], sizes=(done[0], done[-1]))
    for size in () if chosen.without_gloo else QUICK_GLOO_SIZES if chosen.quick else GLOO_SIZES:
        times = gloo(size)
        if times is None:
            sys.stderr.write(f"Gloo with {size} processes: not made anew within {GLOO_S:.0f} s\n")
            break
        results.append(judge(f"Gloo, {size} processes: made anew", [1000 * one for one in times], unit="ms"))
    report("swap_scale", results, chosen.format)
    return 0 if not failed and all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
