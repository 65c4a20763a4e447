"""State on its way: from 1, 2 and 4 sources over loopback, what a swap costs stayers in memory, what mirrors cost.

Transfer: bytes per second of a joiner's `fetch` (requests, digests compared, every chunk hashed on arrival) against a
plain copy of the same bytes through one socket, in the same round. Peak: the most resident memory of the stayers after
a swap over the most before it, in a job whose state is large against the interpreter. Mirrors: the step of an FSDP2 job
with a mirror after each step against the same job without, both runs next to each other.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Result, judge, options, ratios, report, rounds

from keepstep.training.host_memory import Block
from keepstep.training.manifest import Entry, Image, Manifest
from keepstep.training.transfer import StateServer, fetch

ROOT = Path(__file__).parents[1]
SOURCES = (1, 2, 4)
ENTRY_BYTES = 4 * 1024 * 1024
SHARE, PEAK = 0.70, 1.02


def image_of(nbytes: int) -> Image:
    """A state of 4 MiB tensors, the same in every process; its pages are there."""
    count = nbytes // ENTRY_BYTES
    block = Block(count * ENTRY_BYTES)
    piece = bytes(range(251)) * (ENTRY_BYTES // 251 + 1)
    entries, views = [], []
    for number in range(count):
        view = block.view[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        view[:] = piece[number % 251 : number % 251 + ENTRY_BYTES]
        entries.append(Entry(f"e{number}", "uint8", (ENTRY_BYTES,), ENTRY_BYTES))
        views.append(view)
    return Image(Manifest(tuple(entries), b"", "key"), views, keep=block)


class Taker:
    """Whoever takes the state; its memory is there beforehand, as a joiner's is."""

    taking = False

    def __init__(self, nbytes: int) -> None:
        self._block = Block(nbytes)
        self._block.view[:] = bytes(nbytes)

    def adopt(self, manifest: Manifest) -> list[memoryview]:
        size = ENTRY_BYTES
        return [self._block.view[i * size : (i + 1) * size] for i in range(len(manifest.entries))]

    def adopted(self) -> None:
        """Nothing is left to do."""


def serve(nbytes: int, port: multiprocessing.Queue, *, plain: bool) -> None:
    """One source in a process of its own: the state server, or the same bytes as a plain stream."""
    image = image_of(nbytes)
    server = StateServer(lambda: image)
    assert image.digest
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.put(listener.getsockname()[1])
        while True:
            sock, _ = listener.accept()
            if not plain:
                server.handle(sock)
                continue
            with sock:
                for view in image.buffers:
                    sock.sendall(view)


def taken(ports: list[int], taker: Taker, nbytes: int) -> float:
    """Bytes per second from all these sources."""
    sources = {rank: socket.create_connection(("127.0.0.1", port)) for rank, port in enumerate(ports)}
    begin = time.perf_counter()
    got = fetch(sources, "", state=taker)
    took = time.perf_counter() - begin
    for sock in sources.values():
        sock.close()
    assert got.bytes_moved == nbytes and not got.lost and not got.diverged
    return nbytes / took


def streamed(port: int, taker: Taker, nbytes: int) -> float:
    """Bytes per second of the plain stream."""
    views = taker.adopt(image_manifest(nbytes))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        begin = time.perf_counter()
        for view in views:
            assert sock.recv_into(view, len(view), socket.MSG_WAITALL) == len(view)
        return nbytes / (time.perf_counter() - begin)


def image_manifest(nbytes: int) -> Manifest:
    entry = Entry("e", "uint8", (ENTRY_BYTES,), ENTRY_BYTES)
    return Manifest((entry,) * (nbytes // ENTRY_BYTES), b"", "")


def transfer(nbytes: int, count: int) -> list[Result]:
    """All numbers of sources against the plain stream, in the same rounds."""
    context = multiprocessing.get_context("fork")
    port: multiprocessing.Queue = context.Queue()
    processes = []
    ports = []
    for number in range(max(SOURCES) + 1):
        process = context.Process(
            target=serve, args=(nbytes, port), kwargs={"plain": number == max(SOURCES)}, daemon=True
        )
        process.start()
        processes.append(process)
        ports.append(port.get(timeout=120))
    try:
        taker = Taker(nbytes)
        cases = {f"{n}": (lambda n=n: taken(ports[:n], taker, nbytes)) for n in SOURCES}
        values = rounds({**cases, "plain": lambda: streamed(ports[-1], taker, nbytes)}, count)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    results = [judge("plain socket copy", [v / 1e6 for v in values["plain"]], unit="MB/s")]
    for n in SOURCES:
        results.append(judge(f"{n} sources", [v / 1e6 for v in values[f"{n}"]], unit="MB/s"))
        share = ratios(values[f"{n}"], values["plain"])
        results.append(judge(f"{n} sources, share of a plain copy", share, unit="", at_least=SHARE))
    return results


# ---------------------------------------------------------------- in real jobs


def job(folder: Path, *words: object, world: int, standby: int = 0) -> list[list[str]]:
    """Run bench/jobs/state_job.py to its end; the lines each rank left."""
    out = folder / "out"
    out.mkdir()
    launch = ["run", "--nproc-per-node", str(world), "--standby", str(standby), "--run", str(folder / "run")]
    script = [str(ROOT / "bench" / "jobs" / "state_job.py"), "--out", str(out), *map(str, words)]
    command = [sys.executable, "-m", "keepstep.cli", *launch, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [line.split() for file in sorted(out.glob("rank-*")) for line in file.read_text().splitlines()]


def peak_share(width: int) -> float:
    """The most resident memory of the stayers after a swap over the most before it."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        lines = job(Path(name), "--width", width, "--steps", 12, "--die", 6, world=3, standby=1)
    peaks = {
        word: {int(rank): int(value) for kind, rank, value in lines if kind == word} for word in ("before", "after")
    }
    return max(peaks["after"][rank] / peaks["before"][rank] for rank in peaks["before"] if rank != 1)


def step_s(width: int, steps: int, *, mirror: bool) -> float:
    """The median step of an FSDP2 job."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        words = ["--fsdp", "--width", width, "--steps", steps, *([] if mirror else ["--no-mirror"])]
        lines = job(Path(name), *words, world=2)
    times = sorted(float(value) for kind, _, value in lines if kind == "step")
    return times[len(times) // 2]


def main() -> None:
    """Measure and report."""
    parser = options(__doc__ or "")
    parser.add_argument("--only", choices=("transfer", "peak", "mirror"), default="")
    args = parser.parse_args()
    nbytes, count = (64 << 20, 3) if args.quick else (512 << 20, 7)
    width, steps, repeats = (1024, 12, 1) if args.quick else (2048, 40, 3)
    results: list[Result] = []
    if args.only in ("", "transfer"):
        results += transfer(nbytes, count)
    if args.only in ("", "peak"):
        shares = [peak_share(width) for _ in range(repeats)]
        results.append(judge("peak memory of stayers in a swap, over training", shares, unit="", at_most=PEAK))
    if args.only in ("", "mirror"):
        cases = {
            "with": lambda: step_s(width, steps, mirror=True),
            "without": lambda: step_s(width, steps, mirror=False),
        }
        values = rounds(cases, repeats)
        results.append(judge("FSDP2 step without mirrors", [v * 1e3 for v in values["without"]], unit="ms"))
        results.append(judge("FSDP2 step with mirrors", [v * 1e3 for v in values["with"]], unit="ms"))
        results.append(judge("step with mirrors over without", ratios(values["with"], values["without"]), unit=""))
    report("state_copy", results, args.format)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path[:0], os.environ.get("PYTHONPATH", "")])
    main()
