"""`sacct --json` of Slurm 22.05 to 24.11 and later, as attempts and steps."""

from __future__ import annotations

from typing import Any

from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.json_documents import Elements, flag_list, number, text
from keepstep.intake.sacct_values import STATES, group_of

__all__ = ["sacct_document"]

_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING"}
_FLAGS_BEFORE = ("RESIZING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
"""Flags that say more than the PENDING they come with."""


def sacct_document(found: Elements, *, cluster: str) -> Taken:
    """Attempts and steps of the jobs in a document; jobs that make no sense go aside.

    22.05 writes `SUCCESS` as exit code of failed jobs too: there the exit code is not known.
    """
    attempts: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    aside = list(found.aside)
    for index, job in found.items:
        try:
            row = _attempt(job, cluster)
            wrong = _wrong(row)
            below = [_step(step, row) for step in job.get("steps") or [] if isinstance(step, dict)]
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            wrong, below = f"not as Slurm writes it: {error}", []
        if wrong:
            aside.append(Aside(index, wrong, str(job)[:200]))
            continue
        attempts.append(row)
        steps += [step for step in below if step]
    return Taken(taken_rows("attempts", attempts), taken_rows("steps", steps), tuple(aside))


def _wrong(row: dict[str, Any]) -> str:
    """Why an attempt makes no sense; empty if it does."""
    if row["job_number"] is None:
        return "no job id"
    if not row["state"]:
        return "no state of Slurm"
    if row["start"] is not None and row["end"] is not None and row["end"] < row["start"]:
        return "the end is before the start"
    return ""


def _moment(value: Any) -> int | None:
    seconds = number(value)
    return seconds * _SECOND_US if seconds and 0 < seconds < 4_102_444_800 else None


def _state(value: Any) -> str:
    """The state in `current`: a text, or a list of one state and flags."""
    words = [word for word in flag_list(value) if word in STATES]
    for word in words[1:]:
        if words[0] == "PENDING" and word in _FLAGS_BEFORE:
            return word
    return words[0] if words else ""


def _exit(value: Any, state: str) -> tuple[int | None, int | None]:
    """(code, signal); none for a job that failed with an exit code that says success."""
    if not isinstance(value, dict):
        return None, None
    signal = value.get("signal") or {}
    code, sign = number(value.get("return_code")), number(signal.get("signal_id", signal.get("id")))
    if state == "FAILED" and not code and not sign:
        return None, None
    return code, sign if sign is not None or code is None else 0


def _gpus(tres: Any) -> int | None:
    """GPUs in a list of resources; None where the list is empty."""
    if not isinstance(tres, list) or not tres:
        return None
    whole = [
        number(item.get("count")) or 0 for item in tres if item.get("type") == "gres" and item.get("name") == "gpu"
    ]
    kinds = [number(item.get("count")) or 0 for item in tres if str(item.get("name") or "").startswith("gpu:")]
    return sum(whole) if whole else sum(kinds)


def _count(tres: Any, kind: str) -> int | None:
    found = [number(item.get("count")) for item in tres or [] if isinstance(item, dict) and item.get("type") == kind]
    return found[0] if found else None


def _identity(job: dict[str, Any]) -> dict[str, Any]:
    """Ids of a job, written as sacct's text writes them."""
    raw = number(job.get("job_id"))
    array, het = job.get("array") or {}, job.get("het") or {}
    array_job, het_job = number(array.get("job_id")) or None, number(het.get("job_id")) or None
    task, offset = number(array.get("task_id")), number(het.get("job_offset"))
    if array_job and task is not None:
        written = f"{array_job}_{task}"
    elif array_job and text(array.get("task")):
        written = f"{array_job}_[{text(array.get('task'))}]"
    elif het_job and offset is not None:
        written = f"{het_job}+{offset}"
    else:
        written = "" if raw is None else str(raw)
    return {
        "job_id": written,
        "job_number": raw,
        "array_job": array_job if task is not None else None,
        "array_task": task if array_job else None,
        "het_job": het_job if offset is not None else None,
        "het_offset": offset if het_job else None,
    }


def _attempt(job: dict[str, Any], cluster: str) -> dict[str, Any]:
    time, state = job.get("time") or {}, _state((job.get("state") or {}).get("current"))
    comment = job.get("comment") or {}
    said = text(comment.get("job") if isinstance(comment, dict) else comment)[:1000]
    tres = job.get("tres") or {}
    code, signal = _exit(job.get("exit_code"), state)
    derived_code, derived_signal = _exit(job.get("derived_exit_code"), state)
    start, end = _moment(time.get("start")), _moment(time.get("end"))
    elapsed = (number(time.get("elapsed")) or 0) * _SECOND_US
    running = state in _RUNNING
    limit = number(time.get("limit"))
    nodes = text(job.get("nodes"))
    return {
        **_identity(job),
        "cluster": text(job.get("cluster")) or cluster,
        **{name: text(job.get(name)) for name in ("name", "user", "account", "partition", "qos", "failed_node")},
        "group_key": group_of(said),
        "state": state,
        "cancelled_by": text(job.get("kill_request_user")) if state == "CANCELLED" else "",
        "exit_code": code,
        "exit_signal": signal,
        "derived_code": derived_code,
        "derived_signal": derived_signal,
        "submit": _moment(time.get("submission")),
        "eligible": _moment(time.get("eligible")),
        "start": start,
        "end": None if running else end,
        "last_seen": start + elapsed if start and (running or not end) else end,
        "suspended_us": (number(time.get("suspended")) or 0) * _SECOND_US,
        "timelimit_us": limit * _MINUTE_US if limit else None,
        "gpus": _gpus(tres.get("allocated")),
        "gpus_asked": _gpus(tres.get("requested")),
        "node_count": _count(tres.get("allocated"), "node") or number(job.get("allocation_nodes")),
        "cpus": _count(tres.get("allocated"), "cpu"),
        "nodes": "" if nodes in ("None assigned", "Unknown") else nodes,
        "restarts": number(job.get("restart_cnt")),
        "priority": number(job.get("priority")),
        "reason": text((job.get("state") or {}).get("reason")),
        "comment": said,
        "time_note": _note(time, None if running else end),
    }


def _note(time: dict[str, Any], end: int | None) -> str:
    """What is odd in the times of a job, in the words of the text of the same job; empty if nothing is."""
    start, submit, elapsed = _moment(time.get("start")), _moment(time.get("submission")), number(time.get("elapsed"))
    if start is not None and end is not None and elapsed is not None:
        span, counted = (end - start) // _SECOND_US, elapsed + (number(time.get("suspended")) or 0)
        if abs(span - counted) > 2:
            return f"end - start is {span} s, the scheduler counted {counted} s"
    return "submitted after the start" if start is not None and submit is not None and submit > start else ""


def _step(step: dict[str, Any], job: dict[str, Any]) -> dict[str, Any] | None:
    """A step of `job`; None where it has no name."""
    names = step.get("step") or {}
    identity = names.get("id")
    if isinstance(identity, dict):
        identity = number(identity.get("step_id")) if "step_id" in identity else number(identity)
    name = text(identity).rsplit(".", 1)[-1]
    if not name:
        return None
    time, state = step.get("time") or {}, _state(step.get("state"))
    code, signal = _exit(step.get("exit_code"), state)
    nodes = step.get("nodes") or {}
    return {
        "cluster": job["cluster"],
        "job_id": job["job_id"],
        "job_number": job["job_number"],
        "step": name,
        "name": text(names.get("name")),
        "state": state,
        "exit_code": code,
        "exit_signal": signal,
        "start": _moment(time.get("start")),
        "end": _moment(time.get("end")),
        "nodes": text(nodes.get("range")) if isinstance(nodes, dict) else "",
    }
