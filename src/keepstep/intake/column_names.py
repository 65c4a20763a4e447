"""What the columns of a table of step times mean, as people name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Columns", "is_member_name", "meaning_of", "phase_of", "rank_in", "unit_of"]

_MEMBER: tuple[str, ...] = (
    "rank",
    "global_rank",
    "rank_id",
    "world_rank",
    "worker",
    "worker_id",
    "worker_rank",
    "process",
    "process_id",
)
_MEMBER += ("proc", "proc_id", "member", "task", "task_id", "trainer", "trainer_id", "replica", "gpu", "gpu_id")
_HOST: tuple[str, ...] = ("host", "hostname", "host_name", "node", "node_id", "node_name", "machine")
_MEMBER += ("gpu_rank", "device", "device_id", *_HOST)
_STEP: tuple[str, ...] = (
    "step",
    "global_step",
    "step_id",
    "step_num",
    "train_step",
    "iteration",
    "iter",
    "it",
    "iter_id",
    "batch",
)
_STEP += ("batch_id", "batch_idx", "minibatch", "mini_batch", "iteration_id", "sample", "index")
_WHOLE = re.compile(
    r"(step|iter|iteration|batch|mini_?batch|total|elapsed|wall|train|e2e)_?(time|duration|latency|elapsed|seconds|secs?|s"
    r"|ms|us|cost)"
)
_PLAIN = ("time", "duration", "seconds", "elapsed", "latency", "dur", "secs", "sec", "ms", "value", "total", "t")
_PHASE_COLUMN = ("phase", "kind", "op", "operation", "name", "event", "section", "span", "metric", "optype", "part")
_AXES = {
    "dp": ("dp", "dp_rank", "data_parallel_rank", "dp_id", "data_parallel"),
    "tp": ("tp", "tp_rank", "tensor_parallel_rank", "tp_id", "mp_rank"),
    "stage": ("stage", "pp", "pp_rank", "pp_stage", "pipeline_stage", "pipeline_rank", "pp_id", "stage_id"),
    "ep": ("ep", "ep_rank", "expert_parallel_rank"),
}
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("data", re.compile(r"data|loader|load_batch|batch_generator|fetch|input|h2d|read|prefetch")),
    ("checkpoint", re.compile(r"checkpoint|ckpt|save")),
    (
        "communication",
        re.compile(r"comm|reduce|gather|all_?to_?all|broadcast|nccl|collective|sync|barrier|wait|send|recv"),
    ),
    ("forward", re.compile(r"forward|fwd|\bfw\b|\bfp\b")),
    ("backward", re.compile(r"backward|bwd|\bbw\b|\bbp\b|grad")),
    ("optimizer", re.compile(r"optim|\bopt\b|update")),
    ("validation", re.compile(r"valid|eval")),
    ("gc", re.compile(r"\bgc\b|garbage")),
    ("compute", re.compile(r"compute|kernel|model|gpu_time|gemm|matmul")),
)
_UNITS = (
    (re.compile(r"(?:^|_)(?:ns|nanos(?:econds?)?)$"), 1e-9),
    (re.compile(r"(?:^|_)(?:us|usecs?|micros(?:econds?)?)$"), 1e-6),
    (re.compile(r"(?:^|_)(?:ms|msecs?|millis(?:econds?)?)$"), 1e-3),
    (re.compile(r"(?:^|_)(?:s|secs?|seconds?)$"), 1.0),
    (re.compile(r"(?:^|_)(?:min|minutes?)$"), 60.0),
)
_MOMENT = re.compile(
    r"(?:(?P<of>.+)_)?(?:(?P<start>start|started|begin|began)|(?P<end>(?<!_to_)(?:end|ended|finish|finished|stop|stopped))"
    r"|(?P<stamp>ts|timestamp))(?:_(?:time|ts|timestamp|at))?(?P<unit>_(?:ns|us|ms|s|secs?|seconds?))?"
)
"""Names of moments, such as `compute_start` and `compute_end_ms`; what lies between the two is the time of `of`."""
_MOMENT_OF_WHOLE = ("step", "iter", "iteration", "batch", "total", "train", "train_step", "training_step")
_MOMENT_OF_ROW = ("", "time", "t", "ts")
_FILE_OF_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|trainer)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_WIDE_MEMBER = re.compile(
    r"(?:(?:rank|worker|gpu|node|host|proc|device|r|w)_?)?(\d{1,6})(?:_(?:ms|us|ns|s|time|time_ms))?"
)


@dataclass(slots=True)
class Columns:
    """Which column is which; names are those of the table."""

    member: str | None = None
    host: str | None = None
    """Where the member runs, where that is not the member itself."""
    step: str | None = None
    whole: str | None = None
    """Duration of the step, or the value where `phase` says what it is of."""
    phase: str | None = None
    """Column that names the phase of each row."""
    phases: dict[str, str] = field(default_factory=dict)
    """Columns with the duration of one phase each, to the phase."""
    axes: dict[str, str] = field(default_factory=dict)
    """Role coordinate to its column."""
    ends: dict[str, str] = field(default_factory=dict)
    """Columns of the moment in which a time starts (`whole`, or one of `phases`), to the column in which it ends."""
    alone: list[str] = field(default_factory=list)
    """Columns of a moment of a phase, without the one at its other end: no times."""
    members: dict[str, int] = field(default_factory=dict)
    """Columns that are members themselves (one column a rank), to the number of the rank."""

    @property
    def useful(self) -> bool:
        """Whether times of several members over steps can be read from the table."""
        return bool((self.member and (self.whole or self.phases)) or len(self.members) > 1)

    @property
    def of_one_member(self) -> bool:
        """Whether the rows are steps with times that say what they are of, and only whose they are is missing."""
        steps = self.step is not None and _plain(self.step) in _STEP
        times = bool(self.phases) or (self.whole is not None and _WHOLE.match(_plain(self.whole)) is not None)
        return steps and times and not self.useful


def rank_in(path: Path) -> int | None:
    """The rank that the name of a file, or of its folder, gives: `rank3.csv`, `rank=3/part-0.parquet`; None if none."""
    found = _FILE_OF_RANK.search(path.name) or _FILE_OF_RANK.search(path.parent.name)
    return int(found[1]) if found else None


def meaning_of(names: Iterable[str], text_columns: Iterable[str] = ()) -> Columns:
    """The meaning of the columns. `text_columns` are those whose values are words."""
    plain = {name: _plain(name) for name in names}
    words = set(text_columns)
    found = Columns()
    found.member = _first(plain, _MEMBER)
    found.host = _first({name: text for name, text in plain.items() if name != found.member}, _HOST)
    found.step = _first(plain, _STEP)
    for axis, spellings in _AXES.items():
        column = _first(plain, spellings)
        if column is not None and column not in words:
            found.axes[axis] = column
    taken = (found.member, found.host, found.step, *found.axes.values())
    rest = {name: text for name, text in plain.items() if name not in taken}
    found.phase = next(
        (name for name, text in rest.items() if name in words and text in (*_PHASE_COLUMN, "stage")), None
    )
    numbers = {name: text for name, text in rest.items() if name not in words and text}
    spans = _spans(found, numbers)
    numbers = {name: text for name, text in numbers.items() if not _MOMENT.fullmatch(text)}
    found.whole = next(
        (name for name, text in numbers.items() if _WHOLE.match(text) and not phase_of(_inner(name))), None
    )
    found.whole = found.whole or next((name for name, of in spans.items() if of in _MOMENT_OF_WHOLE), None)
    for name, text in numbers.items():
        if name != found.whole and (_looks_like_time(text) or _bare_phase(text)):
            phase = phase_of(_inner(name)) or phase_of(text)
            if phase is not None and phase not in found.phases.values():
                found.phases[name] = phase
    for name, of in spans.items():
        phase = phase_of(of)
        if name != found.whole and phase is not None and phase not in found.phases.values():
            found.phases[name] = phase
    if found.whole is None and (found.phase is not None or not found.phases):
        found.whole = next((name for name, text in numbers.items() if _stem(text) in _PLAIN), None)
        found.whole = found.whole or next((name for name, of in spans.items() if of in _MOMENT_OF_ROW), None)
    times = {found.whole, *found.phases}
    found.ends = {name: end for name, end in found.ends.items() if name in times}
    if found.step is None:
        found.step = next(
            (name for name, text in plain.items() if text in ("time", "timestamp", "ts") and name != found.whole), None
        )
    if not found.useful:
        _as_members(found, plain)
    return found


def phase_of(name: str) -> str | None:
    """The phase that a name speaks of, None if it speaks of none."""
    text = _plain(name).replace("_", " ")
    joined = text.replace(" ", "_")
    return next((phase for phase, pattern in _PHASES if pattern.search(text) or pattern.search(joined)), None)


def unit_of(name: str) -> float | None:
    """Seconds in one unit of the column, None if its name does not say."""
    text = _plain(name)
    return next((factor for pattern, factor in _UNITS if pattern.search(text)), None)


def is_member_name(name: str) -> bool:
    """Whether a column of this name says who is meant."""
    return _plain(name) in _MEMBER


def _plain(name: str) -> str:
    """Lower case, words joined by underscores, camel case split."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")


def _inner(name: str) -> str:
    """The last part of the name of a value in an object, as in `timers.forward`; empty for a name of one part."""
    return name.rpartition(".")[2] if "." in name else ""


def _first(plain: dict[str, str], spellings: tuple[str, ...]) -> str | None:
    """The column whose name comes first in `spellings`."""
    for spelling in spellings:
        for name, text in plain.items():
            if text == spelling:
                return name
    return None


def _spans(found: Columns, numbers: dict[str, str]) -> dict[str, str]:
    """Columns of moments in which a time starts, to what it is of; their ends, and those alone, go to `found`."""
    moments = {name: match for name, text in numbers.items() if (match := _MOMENT.fullmatch(text)) is not None}
    ends = {(match["of"], match["unit"]): name for name, match in moments.items() if match["end"]}
    spans = {}
    for name, match in moments.items():
        if match["start"] and (match["of"], match["unit"]) in ends:
            found.ends[name] = ends.pop((match["of"], match["unit"]))
            spans[name] = match["of"] or ""
    paired = {*found.ends, *found.ends.values()}
    found.alone = [
        name
        for name, match in moments.items()
        if name not in paired and (match["of"] in _MOMENT_OF_WHOLE or phase_of(match["of"] or ""))
    ]
    return spans


def _stem(text: str) -> str:
    """The name without its unit."""
    for pattern, _ in _UNITS:
        shorter = pattern.sub("", text)
        if shorter and shorter != text:
            return shorter
    return text


def _looks_like_time(text: str) -> bool:
    return unit_of(text) is not None or bool(re.search(r"time|duration|latency|elapsed|dur$", text))


def _bare_phase(text: str) -> bool:
    return phase_of(text) is not None and not re.search(r"bytes|size|count|loss|norm|lr|rate|util|mem|tokens|id$", text)


def _as_members(found: Columns, plain: dict[str, str]) -> None:
    """Take the table for one with a column a rank, if most of its columns are named like ranks."""
    ranks = {name: _WIDE_MEMBER.fullmatch(text) for name, text in plain.items() if name != found.step}
    members = {name: int(match[1]) for name, match in ranks.items() if match is not None}
    if len(members) > 1 and len(members) >= len(plain) - 2 and len(set(members.values())) == len(members):
        found.members = members
