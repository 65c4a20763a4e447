"""Our reading of Flight Recorder dumps beside torch's own analyser: whom each names, and how long it takes.

The two published jobs have faults injected on purpose; the generated ones have one planted fault each. An answer is
exact if all ranks that must be named are, and no other than those that may be. Torch's analyser answers in words: the
ranks it calls missing or culprits are taken as named. Time is CPU time from the files to the answer, in one process,
in turn.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dump_jobs import DumpJob, jobs
from harness import Result, judge, options, ratios, report, rounds
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from keepstep.diagnosis.dump_verdict import diagnose_dumps
from keepstep.intake.flight_recorder import READER

MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")
CULPRIT = re.compile(r"Culprit rank (\d+)")


def ours(job: DumpJob) -> tuple[set[int], str]:
    """The ranks we suspect, and our answer in short."""
    evidence = [item for path in sorted(job.folder.iterdir()) for item in READER.read(path)]
    findings = diagnose_dumps(evidence)
    ranks = {one.rank for finding in findings for some in finding.suspects for one in some if one.rank is not None}
    words = [
        f"{finding.kind} {sorted({one.rank for some in finding.suspects for one in some})}" for finding in findings
    ]
    return ranks, ", ".join(words)


def torchs(job: DumpJob) -> tuple[set[int], str]:
    """The ranks that torch's analyser calls missing or culprits, and its answer in short."""
    logger = logging.getLogger("Flight Recorder")
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    kept, logger.handlers, logger.propagate = logger.handlers, [handler], False
    try:
        with contextlib.redirect_stdout(said):
            config = JobConfig().parse_args([str(job.folder), "--prefix", "_dump_", "--allow-incomplete-ranks"])
            details, version = read_dir(config)
            build_db(details, config, version)
        failure = ""
    except (AssertionError, ValueError, KeyError, IndexError, TypeError, SystemExit) as problem:
        failure = f"stops with {type(problem).__name__} {str(problem)[:60]}".strip()
    finally:
        logger.handlers = kept
    text = said.getvalue()
    ranks = {int(rank) for part in MISSING.findall(text) for rank in part.split(",") if rank.strip()}
    ranks |= {int(rank) for rank in CULPRIT.findall(text)}
    return ranks, failure or (f"names {sorted(ranks)}" if ranks else "names nobody")


def exact(job: DumpJob, named: set[int]) -> float:
    """1 if the answer is exact, else 0."""
    return float(job.must <= named <= job.may)


def timed(answer: Callable[[DumpJob], object], job: DumpJob) -> Callable[[], float]:
    """A case for `rounds`: milliseconds of CPU for one answer (both are one thread; a busy machine does not count)."""

    def run() -> float:
        began = time.process_time()
        answer(job)
        return (time.process_time() - began) * 1e3

    return run


def measure(job: DumpJob, count: int) -> tuple[list[Result], list[str]]:
    """Results of one job, and the two answers in words."""
    (named, words), (others, other_words) = ours(job), torchs(job)
    times = rounds({"ours": timed(ours, job), "torch": timed(torchs, job)}, count)
    origin = "published dumps" if job.real else "generated dumps"
    right = f"must name {sorted(job.must)}" + (f", may name {sorted(job.may)}" if job.must != job.may else "")
    words_of_job = [f"{job.name} ({origin}; {right})", f"  keepstep: {words}", f"  torch:    {other_words}"]
    results = [
        judge(f"{job.name}: exact, keepstep", [exact(job, named)], unit="0 or 1", at_least=1.0),
        judge(f"{job.name}: exact, torch", [exact(job, others)], unit="0 or 1"),
        judge(f"{job.name}: CPU time, keepstep", times["ours"], unit="ms"),
        judge(f"{job.name}: CPU time, torch", times["torch"], unit="ms"),
        judge(f"{job.name}: torch's time over ours", ratios(times["torch"], times["ours"]), unit="ratio"),
    ]
    return results, words_of_job


def main() -> int:
    """Reads all jobs both ways and prints the results; 1 if an answer of ours is not exact."""
    chosen = options(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    ranks, entries, count = (8, 60, 2) if chosen.quick else (16, 500, 5)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for job in jobs(Path(scratch), ranks, entries):
            found, words = measure(job, count)
            results += found
            sys.stderr.write("\n".join(words) + "\n")
    report("flight_recorder", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
