"""Gloo's time / ours: all_reduce over shared memory and TCP, and whole training steps. Above 1: ours is faster.

Both backends run in the same processes, one right after the other in every round, so that both see the same machine.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Result, judge, options, ratios, report, rounds

KIB, MIB = 1024, 1024 * 1024
LEAST = {"tcp": 1.0, "shared": 2.0}
STEP_LEAST = 1.3
NAMES = {4 * KIB: "4 KiB", MIB: "1 MiB", 25 * MIB: "25 MiB", 100 * MIB: "100 MiB"}


@dataclass(frozen=True)
class Plan:
    """What one world of `ranks` processes measures: all_reduce of `sizes` bytes, and training steps or not."""

    ranks: int
    sizes: tuple[int, ...]
    count: int
    steps: bool


def plans(quick: bool) -> list[Plan]:
    """The worlds to run, one after the other."""
    if quick:
        small = (4 * KIB, MIB)
        return [
            Plan(2, (*small, 25 * MIB), 4, False),
            Plan(4, (*small, 25 * MIB), 4, True),
            Plan(8, small, 2, False),
        ]
    every = tuple(NAMES)
    return [Plan(2, every, 9, False), Plan(4, every, 9, True), Plan(8, every, 5, False)]


def repeats(nbytes: int) -> int:
    """Collectives per measurement: enough to last well over a millisecond."""
    return max(1, min(100, 8 * MIB // nbytes))


def timed(work: Callable[[], object], times: int, barrier: Callable[[], object]) -> float:
    """Seconds that `times` calls take on this rank, all ranks having started together."""
    barrier()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    barrier()
    return time.perf_counter() - begin


def all_reduce_cases(groups: dict[str, Any], nbytes: int) -> dict[str, Callable[[], float]]:
    """One case per group."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(nbytes // 4)

    def case(group: Any) -> Callable[[], float]:
        def work() -> None:
            dist.all_reduce(tensor, group=group)

        work()
        return lambda: timed(work, repeats(nbytes), lambda: dist.barrier(groups["gloo"]))

    return {name: case(group) for name, group in groups.items()}


def network() -> Any:
    """About 4 million parameters in several layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers)


def step_of(module: Any) -> Callable[[], None]:
    """A training step of `module`."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    batch = torch.randn(8, 1024)

    def step() -> None:
        module(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wrapped(kind: str, group: Any) -> Any:
    """The network under DDP or FSDP2 on `group`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module = network()
    if kind == "DDP":
        return DistributedDataParallel(module, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def step_cases(kind: str, groups: dict[str, Any]) -> dict[str, Callable[[], float]]:
    """One case per group: three steps."""
    import torch.distributed as dist

    def case(group: Any) -> Callable[[], float]:
        step = step_of(wrapped(kind, group))
        for _ in range(2):
            step()
        return lambda: timed(step, 3, lambda: dist.barrier(groups["gloo"]))

    return {name: case(group) for name, group in groups.items()}


def results_of(name: str, values: dict[str, list[float]], least: dict[str, float | None]) -> Iterator[Result]:
    """Ratios of Gloo's time to that of each other case."""
    for transport, limit in least.items():
        over = ratios(values["gloo"], values[transport])
        yield judge(f"{name}, {transport}", over, unit="x", at_least=limit)


def connect(rank: int, ranks: int, path: str) -> dict[str, Any]:
    """The same ranks as a Gloo group, and as keepstep groups over shared memory and over TCP."""
    import torch
    import torch.distributed as dist

    from keepstep.training import process_group

    torch.set_num_threads(1)
    process_group.register()
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    everybody = list(range(ranks))
    groups: dict[str, Any] = {"gloo": dist.group.WORLD}
    for name, node in (("shared", "one"), ("tcp", f"node{rank}")):
        groups[name] = dist.new_group(everybody, backend="keepstep", pg_options=process_group.Options(node=node))
    return groups


def measure(rank: int, plan: Plan, path: str, answer: Any) -> None:
    """One process of one world; rank 0 sends the results."""
    import torch.distributed as dist

    groups = connect(rank, plan.ranks, path)
    results: list[Result] = []
    for nbytes in plan.sizes:
        values = rounds(all_reduce_cases(groups, nbytes), plan.count)
        results += results_of(f"all_reduce {NAMES[nbytes]}, {plan.ranks} ranks", values, dict(LEAST))
    if plan.steps:
        for kind in ("DDP", "FSDP2"):
            values = rounds(step_cases(kind, groups), 3 * plan.count)
            limits: dict[str, float | None] = {"shared": STEP_LEAST, "tcp": None}
            results += results_of(f"{kind} step, {plan.ranks} ranks", values, limits)
    if rank == 0:
        answer.send(results)
    dist.barrier()
    dist.destroy_process_group()


def run(plan: Plan) -> list[Result]:
    """All results of one world. Raises RuntimeError if one of its processes fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "store")
        processes = [
            context.Process(target=measure, args=(rank, plan, path, sender), daemon=True) for rank in range(plan.ranks)
        ]
        for process in processes:
            process.start()
        sender.close()
        results: list[Result] | None = None
        try:
            results = receiver.recv()
        except EOFError:
            results = None
        for process in processes:
            process.join(30)
    if results is None:
        raise RuntimeError(f"a process of {plan.ranks} ranks failed; see its traceback above")
    return results


def main() -> int:
    """Runs all worlds and prints the results; 1 if a target was missed."""
    chosen = options(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    results = [result for plan in plans(chosen.quick) for result in run(plan)]
    report("transport", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
