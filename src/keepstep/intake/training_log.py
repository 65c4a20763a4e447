"""Progress of training runs that know nothing of keepstep: one JSON object a line; and Philly's job log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.json_documents import Elements, json_lines, number, text
from keepstep.intake.local_times import UNKNOWN, moment_of, moments

__all__ = ["read_philly", "read_training_log"]

_BATCH = 50_000
_WHAT = (
    "started",
    "step",
    "checkpoint",
    "validation_start",
    "validation_end",
    "compile_start",
    "compile_end",
    "data_start",
    "data_end",
    "restored",
    "ended",
)
_PHILLY = {"Pass": "COMPLETED", "Killed": "CANCELLED", "Failed": "FAILED"}


def read_training_log(stream: BinaryIO, *, cluster: str, where: str) -> Iterator[Taken]:
    """Progress from lines such as {"time": 1790000000.5, "job": "123", "what": "step", "step": 7, "step_s": 1.2}.

    `time` is seconds since 1970 or ISO with an offset; `job` is the scheduler's id (default: the name of the file);
    `what` is one of the words of the table `progress` (default: step); `tokens`, `attempt`, `members` may be there.
    """
    rows: list[dict[str, Any]] = []
    aside: list[Aside] = []
    for line, item in json_lines(stream):
        if isinstance(item, Aside):
            aside.append(item)
            continue
        when, what = moment_of(item.get("time") or item.get("timestamp")), text(item.get("what")) or "step"
        if when is None or what not in _WHAT:
            aside.append(Aside(line, "no time, or a word that progress does not have", str(item)[:200]))
            continue
        job = text(item.get("job") or item.get("job_id")) or where.split(".")[0]
        seconds = item.get("step_s")
        rows.append(
            {
                "cluster": cluster,
                "job": job,
                "scheduler_job": text(item.get("scheduler_job")) or job,
                "attempt": number(item.get("attempt")) or 0,
                "time": when,
                "what": what,
                "step": number(item.get("step")),
                "step_us": round(seconds * 1e6) if isinstance(seconds, int | float) else None,
                "tokens": number(item.get("tokens")),
                "members": number(item.get("members")),
            }
        )
        if len(rows) >= _BATCH:
            yield Taken(aside=tuple(aside), tables={"progress": taken_rows("progress", rows)})
            rows, aside = [], []
    yield Taken(aside=tuple(aside), tables={"progress": taken_rows("progress", rows)})


def read_philly(found: Elements, *, zone: str, cluster: str) -> Taken:
    """Attempts of Philly's `cluster_job_log` (Jeon et al., ATC 2019): every attempt of a job is a life of it.

    All attempts but the last of a job failed; the last one ended as the job did.
    """
    rows: list[dict[str, Any]] = []
    aside = list(found.aside)
    for index, job in found.items:
        try:
            lives = job["attempts"] or [{}]
            state, name = _PHILLY[text(job.get("status"))], text(job["jobid"])
            common = {
                "cluster": cluster or "philly",
                "job_id": name,
                "name": name,
                "user": text(job.get("user")),
                "partition": text(job.get("vc")),
            }
            submit = _local(job.get("submitted_time"), zone)
            for place, life in enumerate(lives):
                ended = state if place == len(lives) - 1 else "FAILED"
                rows.append(_life(life, zone) | common | {"state": ended, "submit": None if place else submit})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            aside.append(Aside(index, f"no job of Philly: {error}", str(job)[:200]))
    wrong = [row for row in rows if row.get("start") and row.get("end") and row["end"] < row["start"]]
    aside += [Aside(0, "the end is before the start", row["job_id"]) for row in wrong]
    return Taken(taken_rows("attempts", [row for row in rows if row not in wrong]), None, tuple(aside))


def _life(life: dict[str, Any], zone: str) -> dict[str, Any]:
    detail = [one for one in life.get("detail") or [] if isinstance(one, dict)]
    end = _local(life.get("end_time"), zone)
    return {
        "start": _local(life.get("start_time"), zone),
        "end": end,
        "last_seen": end,
        "gpus": sum(len(one.get("gpus") or []) for one in detail),
        "node_count": len(detail),
        "nodes": ",".join(text(one.get("ip")) for one in detail),
    }


def _local(value: Any, zone: str) -> int | None:
    word = text(value).replace(" ", "T", 1)
    found = int(moments(pa.chunked_array([pa.array([word], pa.string())]), zone).early[0])
    return None if found == UNKNOWN else found
