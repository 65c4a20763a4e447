"""Several ranks share one GPU: collectives of all types, DDP, a rank killed and replaced, and the speed of the path.

NOT RUN ON A GPU YET: this is the check for the day one is at hand. Without CUDA it says so in one line and ends.
`--device cpu` runs the same with CPU tensors, which checks this script and not the path of CUDA tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Result, judge, options, report

HERE = Path(__file__).resolve().parent
RANKS = 3
MIB = 1024 * 1024
LIMIT_S = 600
END_S = 60


class CheckFailed(Exception):
    """A check that did not come to its end; what its processes said is above."""


def types() -> list[Any]:
    """Types of elements that every kind of collective is tried with."""
    import torch

    return [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def cases(rank: int, dtype: Any, device: Any) -> Iterator[tuple[str, Any]]:
    """Every collective once, as its name and what it gave."""
    import torch
    import torch.distributed as dist

    own = (torch.arange(1000) % 5 + rank).to(dtype).to(device)
    for name in ("SUM", "MIN", "MAX", "PRODUCT"):
        tensor = own.clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        yield f"all_reduce {name}", tensor
    if dtype == torch.float32:
        large = own.repeat(5_000)
        dist.all_reduce(large)
        yield "all_reduce in pieces", large
    sent = own.clone()
    dist.broadcast(sent, 1)
    yield "broadcast", sent
    reduced = own.clone()
    dist.reduce(reduced, 0)
    yield "reduce", reduced if rank == 0 else own
    every = torch.empty(RANKS * 1000, dtype=dtype, device=device)
    dist.all_gather_into_tensor(every, own)
    yield "all_gather", every
    part = torch.empty(1000, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(part, every)
    yield "reduce_scatter", part
    swapped = torch.empty(RANKS * 1000, dtype=dtype, device=device)
    dist.all_to_all_single(swapped, every)
    yield "all_to_all", swapped
    gathered = [torch.empty_like(own) for _ in range(RANKS)] if rank == 2 else None
    dist.gather(own, gathered, dst=2)
    yield "gather", torch.cat(gathered) if gathered else own
    got = torch.empty_like(own)
    dist.scatter(got, list(every.split(1000)) if rank == 0 else None, src=0)
    yield "scatter", got
    box = torch.empty_like(own)
    works = [dist.isend(own, (rank + 1) % RANKS), dist.irecv(box, (rank - 1) % RANKS)]
    for work in works:
        work.wait()
    yield "send and receive", box


def differences(rank: int, device: Any) -> list[str]:
    """Collectives that gave another result on the device than on the CPU."""
    import torch

    wrong = []
    for dtype in types():
        there, here = cases(rank, dtype, device), cases(rank, dtype, torch.device("cpu"))
        for (name, one), (_, other) in zip(there, here, strict=True):
            if not torch.equal(one.cpu(), other):
                wrong.append(f"{name} of {dtype} on rank {rank}")
    return wrong


def speed(device: Any, nbytes: int, times: int) -> list[float]:
    """MiB/s of all_reduce, from behind the device."""
    import torch
    import torch.distributed as dist

    tensor, found = torch.ones(nbytes // 4, device=device), []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        float(tensor[0])
        found.append(nbytes / MIB / (time.perf_counter() - begin))
    return found


def member(rank: int, kind: str, path: str, *, quick: bool, answer: Any) -> None:
    """One process: joins the group, compares, measures."""
    import torch
    import torch.distributed as dist

    from keepstep.training import process_group

    torch.set_num_threads(1)
    process_group.register()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
    bound = None if kind == "cpu" else device
    store = dist.FileStore(path, RANKS)
    dist.init_process_group("keepstep", store=store, rank=rank, world_size=RANKS, device_id=bound)
    wrong = differences(rank, device)
    sizes = (MIB, 25 * MIB) if quick else (MIB, 25 * MIB, 100 * MIB)
    speeds = {nbytes // MIB: speed(device, nbytes, 3 if quick else 10) for nbytes in sizes}
    answer.send((wrong, speeds))
    dist.barrier()
    dist.destroy_process_group()


def answered(receiver: Any) -> Any:
    """What a rank sent; None if it is gone, or took too long."""
    try:
        return receiver.recv() if receiver.poll(LIMIT_S) else None
    except EOFError:
        return None


def together(kind: str, *, quick: bool) -> list[Result]:
    """What the ranks found. Raises CheckFailed if one of them failed."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(
                target=member,
                args=(rank, kind, str(Path(scratch) / "store")),
                kwargs={"quick": quick, "answer": pipes[rank][1]},
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that the end of a rank is seen
        found = [answered(receiver) for receiver, _ in pipes]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    if None in found:
        raise CheckFailed("collectives: a rank failed, or took too long")
    wrong = [text for texts, _ in found for text in texts]
    for text in wrong:
        sys.stderr.write(f"differs from the CPU: {text}\n")
    results = [judge("collectives that differ from the CPU", [float(len(wrong))], unit="", at_most=0)]
    speeds = found[0][1]
    return results + [judge(f"all_reduce {size} MiB, {RANKS} ranks", speeds[size], unit="MiB/s") for size in speeds]


def weights(kind: str, folder: Path, *, kill: bool) -> set[str]:
    """Hashes of the final weights of all ranks of a job, with a rank killed and replaced or not."""
    launch = [str(Path(sys.executable).parent / "keepstep"), "run", "--nproc-per-node", str(RANKS), "--standby", "1"]
    script = [str(HERE / "gpu_job.py"), "--device", kind, *(["--kill", str(folder / "killed")] if kill else [])]
    command = [*launch, "--run", str(folder / f"run-{kill}"), *script]
    surroundings = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    with (folder / f"said-{kill}").open("w+", errors="replace") as said:
        job = subprocess.Popen(command, env=surroundings, stdout=said, stderr=subprocess.STDOUT)
        code = ended(job)
        said.seek(0)
        text = said.read()
    lines = [line.split()[-1] for line in text.splitlines() if "] weights " in line]
    if code != 0 or len(lines) != RANKS or kill != (folder / "killed").exists():
        sys.stderr.write(text)
        how = f"did not end within {LIMIT_S} s" if code is None else f"ended with {code}"
        raise CheckFailed(f"the job {how}, with weights of {len(lines)} of {RANKS} ranks{' and a kill' * kill}")
    return set(lines)


def ended(job: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None where it took too long and was stopped."""
    try:
        return job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        job.terminate()
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    return None


def replaced(kind: str) -> Result:
    """How many different weights there are after a run with a loss and one without: one, if all is well."""
    with tempfile.TemporaryDirectory() as scratch:
        found = weights(kind, Path(scratch), kill=False) | weights(kind, Path(scratch), kill=True)
    return judge("different final weights, with and without a killed rank", [float(len(found))], unit="", at_most=1)


def main() -> int:
    """Runs all checks; 1 if one failed, 0 also where there is no GPU."""
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("skipped: no CUDA device here; nothing was checked\n")
        return 0
    try:
        results = [*together(chosen.device, quick=chosen.quick), replaced(chosen.device)]
    except CheckFailed as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    report(f"one {chosen.device} device, {RANKS} ranks", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
