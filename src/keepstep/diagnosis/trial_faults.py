"""What single trials tell: errors, hangs, data that runs out, sizes and ranks that are written into the script."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from keepstep.diagnosis.hang_words import listed
from keepstep.records.trial import Trace, TrialFinding, place_of

__all__ = ["fault_findings", "world_findings"]

_DIVIDES = re.compile(
    r"divisib|\bdivid|evenly|multiple of|division|\bmodulo\b|shared equally|uneven|does not divide", re.IGNORECASE
)
_DIVISION_IN_CODE = re.compile(r"%|//")
_RUNS_OUT = re.compile(r"gives no batches|fewer batches")

_Said = tuple[str, str, str, str, str]
"""Kind, place, what, remedy, evidence."""


def fault_findings(traces: Sequence[Trace]) -> list[TrialFinding]:
    """One finding for each different thing, with all the ranks that show it."""
    by_what: dict[_Said, list[int]] = defaultdict(list)
    for trace in traces:
        for said in (*_ended(trace), *_cut(trace), *_joined(trace), *_data(trace)):
            by_what[said].append(trace.rank)
    found = [
        TrialFinding(
            kind=kind,
            ranks=tuple(sorted(ranks)),
            sites=(place,) if place else (),
            what=f"{listed(ranks)}: {what}",
            remedy=remedy,
            evidence=(evidence,) if evidence else (),
        )
        for (kind, place, what, remedy, evidence), ranks in by_what.items()
    ]
    return [*found, *_uneven(traces)]


def _ended(trace: Trace) -> Iterable[_Said]:
    end = trace.ended
    if end is None or end.how not in ("error", "exit") or trace.guessed:
        return  # what follows from a guess is nobody's fault
    place = place_of(trace, end.site)
    if end.how == "exit":
        yield (
            "script_error",
            place,
            f"the script ends itself with exit code {end.text}",
            "see what it prints; `keepstep preflight` shows the last lines",
            "",
        )
        return
    text = " ".join(end.text.split())
    said = f"{end.error}: {text}" if text else f"{end.error} in `{end.line}`"
    if end.error == "StopIteration" or _RUNS_OUT.search(text):
        kind, remedy = "too_few_batches", "make the data set larger, the batch smaller, or drop no incomplete batch"
        said = f"the loader has no batch left ({said})"
    elif end.error == "UnsupportedState":
        kind, remedy = "cannot_be_carried", "keep it out of job.track(), or give it state_dict and load_state_dict"
    elif _DIVIDES.search(text) or end.error == "ZeroDivisionError" or _by_division(end.error, end.line):
        kind, remedy = "does_not_divide", "choose sizes that are multiples of the sizes of their groups"
    else:
        kind, remedy = "script_error", "correct the line; the same error would end the job at this size"
    yield kind, place, said, remedy, f"`{end.line}`" if end.line else ""


def _by_division(error: str, line: str) -> bool:
    """A bare assert, or a check, on a rest of a division."""
    return error == "AssertionError" and bool(_DIVISION_IN_CODE.search(line))


def _cut(trace: Trace) -> Iterable[_Said]:
    inner = trace.stack[0] if trace.stack else ""
    stack = " < ".join(trace.stack[:6])
    if trace.cut == "hang":
        yield (
            "hang",
            inner,
            f"does not come to its end in {trace.cut_text}" + (f", stands at {inner}" if inner else ""),
            "see the stack: what does it wait for? A larger --timeout if it is only slow",
            stack,
        )
    elif trace.cut == "memory":
        yield (
            "memory",
            inner,
            f"was ended because it took {trace.cut_text}",
            "give a rank less to hold, or more memory to the machine that tries it out (--memory)",
            stack,
        )
    elif trace.cut:
        yield (
            "process_died",
            inner,
            f"its process was ended by {trace.cut_text}",
            "run it under `python -X faulthandler`; see the last lines of its output",
            stack,
        )


def _joined(trace: Trace) -> Iterable[_Said]:
    for joined in trace.joined[:1]:
        place = place_of(trace, joined.site)
        if joined.rank >= 0 and joined.rank != trace.rank:
            yield (
                "rank_fixed",
                place,
                f"joins as rank {joined.rank}",
                "leave rank and world_size to the environment, or take RANK and WORLD_SIZE from it",
                "",
            )
        if joined.how == "join":
            for read in trace.reads:
                if read.default:
                    yield (
                        "rank_before_join",
                        place_of(trace, read.site),
                        f"{read.name} is read before join(), with a default",
                        "read it after keepstep.join(): a standby has no rank yet and would go on with the default",
                        "",
                    )


def _data(trace: Trace) -> Iterable[_Said]:
    wanted = max((asked.total for asked in trace.asked), default=0)
    for data in trace.data:
        if data.kind == "once" and 0 <= data.batches < wanted:
            yield (
                "too_few_batches",
                place_of(trace, data.site),
                f"{data.batches} batches for {wanted} steps, and an iterator cannot begin again",
                "give job.data() the loader itself, which begins a new epoch, or more data",
                "",
            )
        if data.kind == "loop" and data.batches == 0:
            yield (
                "too_few_batches",
                place_of(trace, data.site),
                "the loader has no batch at this size",
                "make the data set larger, the batch smaller, or drop no incomplete batch",
                "",
            )


def _uneven(traces: Sequence[Trace]) -> Iterable[TrialFinding]:
    """Loaders that a script iterates by itself, with different numbers of batches."""
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for data in trace.data:
            if data.kind == "loop" and data.batches > 0:
                counts[place_of(trace, data.site)][data.batches].append(trace.rank)
    for place, by_count in counts.items():
        if len(by_count) < 2:
            continue
        words = "; ".join(f"{listed(ranks)}: {count} batches" for count, ranks in sorted(by_count.items())[:4])
        fewest = min(by_count)
        yield TrialFinding(
            kind="uneven_batches",
            ranks=tuple(sorted(by_count[fewest])),
            sites=(place,),
            what=f"the ranks have different numbers of batches, those with fewer leave the others waiting: {words}",
            remedy="use DistributedSampler, or drop the rest so that all ranks have the same number",
        )


def world_findings(traces: Sequence[Trace], world: int) -> list[TrialFinding]:
    """Scripts that fix the size of the job themselves."""
    fixed: dict[tuple[int, str], list[int]] = defaultdict(list)
    for trace in traces:
        for joined in trace.joined[:1]:
            if joined.world > 0 and joined.world != world:
                fixed[joined.world, place_of(trace, joined.site)].append(trace.rank)
    return [
        TrialFinding(
            kind="world_fixed",
            ranks=tuple(sorted(ranks)),
            sites=(place,),
            what=f"{listed(ranks)}: the script joins a world of {size} in a job of {world}",
            remedy="leave world_size to the environment, or take WORLD_SIZE from it",
        )
        for (size, place), ranks in fixed.items()
    ]
