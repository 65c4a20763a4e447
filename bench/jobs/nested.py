"""Eight ranks in nested groups (tensor 2 x pipeline 2 x data 2) whose compute is waiting: two cores run it honestly.

Every collective is a real one of keepstep's; tensors are small. `--plan` says what the steps are like, for example
`healthy:500,sequence:2000,gc:1000`; the modes are those of a healthy but uneven job:

healthy     all alike
sequence    lengths of sequences differ for every replica, step and micro-batch
last-stage  the last pipeline stage has half as much again to do
gc          every rank stops for a garbage collection every 40 steps, each at its own
rotating    another rank is slower by half every three steps
save        rank 0 writes files for `--pause` seconds between two steps, every 150 steps
validate    rank 0 validates for `--pause` seconds inside a step, every 150 steps
compile     the first step of the stretch takes `--pause` seconds, a little different on every rank
recompile   one rank compiles again for a third of `--pause`, every 150 steps
data-stall  the loaders of all ranks stop for a third of `--pause`, every 150 steps

Rank 0 writes what it is in to `--log`, one line of JSON for each stretch.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

MODES = (
    "healthy",
    "sequence",
    "last-stage",
    "gc",
    "rotating",
    "save",
    "validate",
    "compile",
    "recompile",
    "data-stall",
)
MICRO_BATCHES = 2
EVERY = 150


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank: tensor-parallel ranks are neighbours, replicas are farthest apart. `flat`: all are
    replicas of one model."""

    rank: int
    world: int
    flat: bool = False

    @property
    def tensor(self) -> int:
        return 0 if self.flat else self.rank % 2

    @property
    def stage(self) -> int:
        return 0 if self.flat else self.rank // 2 % 2

    @property
    def replica(self) -> int:
        return self.rank if self.flat else self.rank // 4


class Plan:
    """Which mode a step is in: stretches of steps, the last one without end."""

    def __init__(self, text: str) -> None:
        self.stretches: list[tuple[str, int]] = []
        first = 0
        for part in text.split(","):
            mode, _, count = part.partition(":")
            if mode not in MODES:
                sys.exit(f"no mode {mode!r}: one of {', '.join(MODES)}")
            self.stretches.append((mode, first))
            first += int(count or 1)
        self.total = first

    def at(self, step: int) -> tuple[str, int]:
        """The mode of `step` and the number of the step in its stretch."""
        mode, first = [stretch for stretch in self.stretches if stretch[1] <= step][-1]
        return mode, step - first


class Uneven:
    """What the modes do to one rank."""

    def __init__(self, place: Place, pause_s: float, seed: int) -> None:
        self.place, self.pause_s, self.seed = place, pause_s, seed

    def load(self, mode: str, step: int, micro: int) -> float:
        """How much there is to compute, 1 for the usual amount."""
        place = self.place
        if mode == "sequence":
            return random.Random(f"{self.seed}/{place.replica}/{step}/{micro}").uniform(0.5, 1.5)
        if mode == "last-stage":
            return 1.5 if place.stage == 1 else 1.0
        if mode == "rotating":
            return 1.5 if step // 3 % place.world == place.rank else 1.0
        return 1.0

    def stop_s(self, mode: str, number: int) -> float:
        """Seconds this rank stops inside a step."""
        at = number % EVERY
        if mode == "gc" and (number + 7 * self.place.rank) % 40 == 20:
            return 0.06
        if mode == "validate" and at == EVERY // 2 and self.place.rank == 0:
            return self.pause_s
        if mode == "compile" and number == 0:
            return self.pause_s * (1.0 + 0.05 * self.place.rank)
        if mode == "recompile" and at == EVERY // 2 and self.place.rank == number // EVERY % self.place.world:
            return self.pause_s / 3
        return 0.0

    def data_s(self, mode: str, number: int) -> float:
        """Seconds the loader takes."""
        return self.pause_s / 3 if mode == "data-stall" and number % EVERY == EVERY // 2 else 0.001

    def save_s(self, mode: str, number: int) -> float:
        """Seconds rank 0 writes files after the step."""
        return self.pause_s if mode == "save" and self.place.rank == 0 and number % EVERY == EVERY // 2 else 0.0


class Groups:
    """The process groups of a rank, and its neighbours in the pipeline."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.tensor = self.pipe = None
        if place.flat:
            self.data = self._own([list(range(place.world))])
            return
        self.tensor = self._own([[r, r + 1] for r in range(0, place.world, 2)])
        self.data = self._own([[r, r + 4] for r in range(4)] if place.world == 8 else [])
        self.pipe = self._own([[r, r + 2] for r in range(place.world) if r % 4 < 2] if place.world >= 4 else [])

    def _own(self, all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
        """Makes all groups of one kind, as every rank must, and returns the own one."""
        made = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
        return next((group for ranks, group in made if self.place.rank in ranks), None)


class Loader:
    """Batches that take as long as they are told."""

    def __init__(self) -> None:
        self.delay_s = 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.delay_s)
            yield torch.ones(8)


class Trainer:
    """One rank's step: forward and backward through the pipeline with tensor-parallel sums, then the gradients."""

    def __init__(self, place: Place, args: argparse.Namespace) -> None:
        self.place = place
        self.groups = Groups(place)
        self.uneven = Uneven(place, args.pause, args.seed)
        self.compute_s = args.compute_ms / 1000
        self.real = args.real
        self.activation = torch.ones(args.activation)
        self.matrix = torch.rand(192, 192)
        torch.manual_seed(place.stage * 2 + place.tensor)
        self.weight = torch.nn.Parameter(torch.rand(args.weights))

    def compute(self, share: float) -> None:
        """Work for `share` of the usual time; with `--real` the processor works."""
        if not self.real:
            time.sleep(self.compute_s * share)
            return
        for _ in range(round(40 * share)):
            self.matrix = torch.tanh(self.matrix @ self.matrix)

    def step(self, mode: str, step: int, number: int) -> None:
        toil(self.uneven.stop_s(mode, number))
        for micro in range(MICRO_BATCHES):
            self.pass_through(0, self.uneven.load(mode, step, micro))
        for micro in range(MICRO_BATCHES):
            self.pass_through(1, 2 * self.uneven.load(mode, step, micro))
        self.weight.grad = torch.full_like(self.weight, 1e-3)
        if self.groups.data is not None:
            dist.all_reduce(self.weight.grad, group=self.groups.data)

    def pass_through(self, backward: int, share: float) -> None:
        """One micro-batch through this stage: forward comes from the stage before, backward from the one behind."""
        first = self.place.stage == backward
        other = self.place.rank + (2 if self.place.stage == 0 else -2)
        if self.groups.pipe is not None and not first:
            dist.recv(self.activation, src=other, group=self.groups.pipe)
        self.compute(share)
        if self.groups.tensor is not None:
            dist.all_reduce(self.activation, dist.ReduceOp.MAX, group=self.groups.tensor)
        if self.groups.pipe is not None and first:
            dist.send(self.activation, dst=other, group=self.groups.pipe)


def toil(seconds: float) -> None:
    """Be at work for so long, as a compiler or a writer of files is: in many places, with the processor."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        (sort_numbers if number % 2 else write_lines)(number)
        time.sleep(0.004)


def sort_numbers(seed: int) -> None:
    sorted(random.Random(seed).random() for _ in range(500))


def write_lines(count: int) -> None:
    json.dumps([{"line": count, "text": "x" * 40}] * 100)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a light job in nested groups")
    parser.add_argument("--plan", type=Plan, default=Plan("healthy:200"))
    parser.add_argument("--compute-ms", type=float, default=4.0, help="forward time of one micro-batch in one stage")
    parser.add_argument("--pause", type=float, default=3.0, help="the long pause of some modes, seconds")
    parser.add_argument("--activation", type=int, default=4096, help="floats between stages")
    parser.add_argument("--weights", type=int, default=4096, help="floats of gradient")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flat", action="store_true", help="replicas alone, without tensor and pipeline groups")
    parser.add_argument("--real", action="store_true", help="multiply matrices instead of waiting")
    parser.add_argument("--log", type=Path, help="rank 0 writes the stretches here")
    parser.add_argument("--step-log", type=Path, help="rank 0 writes number and time of every step it begins here")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    with keepstep.join() as job:
        place = Place(job.rank, job.world, args.flat)
        trainer = Trainer(place, args)
        loader = Loader()
        optimizer = torch.optim.SGD([trainer.weight], lr=0.01)
        model = torch.nn.ParameterList([trainer.weight])
        job.track(model=model, optimizer=optimizer, role=f"stage{place.stage}tensor{place.tensor}")
        batches = job.data(loader)
        steps = args.step_log.open("a", buffering=1) if args.step_log and place.rank == 0 else None
        for step in job.steps(total=args.plan.total):
            mode, number = args.plan.at(step.number)
            if args.log and place.rank == 0 and number == 0:
                with args.log.open("a") as file:
                    file.write(json.dumps({"mode": mode, "step": step.number, "wall": time.time()}) + "\n")
            if steps is not None:
                steps.write(f"{step.number} {time.time():.6f}\n")
            with step:
                loader.delay_s = trainer.uneven.data_s(mode, number)
                next(batches)
                trainer.step(mode, step.number, number)
                optimizer.step()
                optimizer.zero_grad()
            toil(trainer.uneven.save_s(mode, number))


if __name__ == "__main__":
    main()
