"""What the recorder costs: training steps with it on and off in turns of 50 inside one process, and one record alone.

Two figures, as shares of a training step: the A/B difference (with the upper end of its 95 % confidence interval), and
the cost of one record (processor time of a two-rank all_reduce with and without it) times the records of a step.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Result, judge, options, report

from keepstep.records.ring import SpanKind

RANKS = 2
TURN = 50
AT_MOST_AB = 0.01
AT_MOST_RECORDS = 0.0027


def upper_bound(differences: list[float]) -> float:
    """Upper end of the two-sided 95 % interval of the median (order statistics: no assumption about the noise).

    Source: Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2, normal approximation of the binomial.
    """
    count = len(differences)
    return sorted(differences)[min(count - 1, math.ceil(count / 2 + 1.96 * math.sqrt(count) / 2))]


def training(fabric: Any) -> Callable[[], None]:
    """A DDP step of a few milliseconds, with several buckets and the spans of a step guard: short, so that records
    weigh much.

    A turn of longer steps lasts long enough for the machine to change its pace within a pair of turns.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.07)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    batch = torch.randn(32, 128)

    def step() -> None:
        whole = fabric.span_begin(SpanKind.STEP)
        fabric.span_end(fabric.span_begin(SpanKind.DATA))
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fabric.span_end(whole)

    return step


def turn(work: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of `clock` per call."""
    begin = clock()
    for _ in range(times):
        work()
    return (clock() - begin) / times


def in_turns(
    fabric: Any,
    work: Callable[[], object],
    *,
    times: int,
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Seconds per call with the recorder on and off, pair by pair; the order changes from pair to pair."""
    on: list[float] = []
    off: list[float] = []
    for number in range(pairs):
        for recording in (True, False) if number % 2 else (False, True):
            fabric.recording = recording
            (on if recording else off).append(turn(work, times, clock))
    fabric.recording = True
    return on, off


def middle(values: list[float]) -> list[float]:
    """`values` without the lowest and highest tenth: turns that the machine disturbed."""
    cut = len(values) // 10
    return sorted(values)[cut : len(values) - cut] if cut else values


def measure(rank: int, quick: bool, path: str, answer: Any) -> None:
    """One of the two processes; rank 0 sends the results."""
    import torch
    import torch.distributed as dist

    from keepstep.training import process_group
    from keepstep.training.recorder import Recorder

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # a rank that moves between cores is noise
    process_group.register()
    dist.init_process_group("keepstep", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    fabric = dist.group.WORLD.fabric
    recorder = Recorder.private_memory()
    fabric.record_into(recorder.address, recorder.size)
    step, small = training(fabric), torch.zeros(1)
    turn(step, TURN)
    on, off = in_turns(fabric, step, times=TURN, pairs=80 if quick else 1600)
    head = recorder.slots_written()
    turn(step, TURN)
    slots = (recorder.slots_written() - head) / TURN
    single_on, single_off = in_turns(
        fabric, lambda: dist.all_reduce(small), times=200, pairs=50 if quick else 300, clock=time.process_time
    )
    if rank == 0:
        answer.send(judged(on, off, slots=slots, alone=(single_on, single_off)))
    dist.barrier()
    dist.destroy_process_group()


def judged(on: list[float], off: list[float], *, slots: float, alone: tuple[list[float], list[float]]) -> list[Result]:
    """The two shares and what they are made of. `slots` per step; an all_reduce of two ranks writes two slots."""
    base = statistics.median(off)
    shares = [(a - b) / base for a, b in zip(on, off, strict=True)]
    per_record = middle([a - b for a, b in zip(*alone, strict=True)])
    cost = max(statistics.fmean(per_record), 0.0)
    records = slots / 2
    share = cost * records / base
    bound, spread = upper_bound(shares), (min(shares), max(shares))
    return [
        judge("step without recorder", [b * 1e3 for b in off], unit="ms"),
        Result("A/B cost, 95 % upper bound", bound, "share", AT_MOST_AB, bound <= AT_MOST_AB, spread),
        judge("one record", [value * 1e9 for value in per_record], unit="ns"),
        Result("records per step", records, "", None, True, (records, records)),
        Result("records x cost", share, "share", AT_MOST_RECORDS, share <= AT_MOST_RECORDS, (share, share)),
    ]


def main() -> int:
    """Runs both processes and prints the results; 1 if a target was missed."""
    chosen = options(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (chosen.quick, str(Path(scratch) / "store"), sender)
        processes = [context.Process(target=measure, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        sender.close()
        try:
            results = receiver.recv()
        except EOFError:
            sys.exit("a process failed; see its traceback above")
        for process in processes:
            process.join(30)
    report("recording", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
