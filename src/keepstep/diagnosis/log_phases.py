"""What a rank that did not come was doing instead, as far as logs tell: loading, saving, evaluating."""

from __future__ import annotations

import re

import msgspec

from keepstep.diagnosis.log_case import LogCase, is_claim, quotation, rank_list
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Layer

__all__ = ["Activity", "activity_of", "bar_activity", "claimed_activity", "unfinished_bars"]

_DATA_TITLE = re.compile(
    (
        r"data|shuffl|token|index|map\b|filter|split|process|build|cach|pars|scan|read|line|sample"
        r"|corpus|pack|preprocess|init|convert|examples?"
    ),
    re.IGNORECASE,
)
_STORAGE_TITLE = re.compile(
    r"checkpoint|shard|weights|download|upload|copy|sav(?:e|ing)|load(?:ing)? (?:model|state|pipeline)", re.IGNORECASE
)
_WORK_TITLE = re.compile(r"epoch|\bsteps?\b|iter\b|iteration|loss|^\W*train(?:ing)?\W*$", re.IGNORECASE)
_EVALUATION_TITLE = re.compile(r"eval|valid|test(?:ing)?\b|generat(?:e|ing)|predict|infer", re.IGNORECASE)
_DATA_WORDS = re.compile(r"data|batch|loader|input|iterator|next\(|fetch|sampl|token|shard|read", re.IGNORECASE)
_STORAGE_WORDS = re.compile(
    r"checkpoint|ckpt|sav(?:e|ing)|writ(?:e|ing)|nfs|lustre|gpfs|disk|file ?system|storage|download", re.IGNORECASE
)
_NEAR = 0.8


class Activity(msgspec.Struct, frozen=True):
    """What somebody was doing: its layer, in words, the line that says so, and how sure that is."""

    layer: Layer
    does: str
    event: LogEvent
    confidence: float


def activity_of(case: LogCase, rank: int) -> Activity | None:
    """What one rank did last, by its own lines; None if they do not tell."""
    own = [event for event in case.events if event.rank == rank and not is_claim(event)]
    for event in reversed(own):
        found = _activity(event)
        if found is not None:
            return found
    return None


def _activity(event: LogEvent) -> Activity | None:
    if event.kind == "loader_worker":
        return Activity("dataloader", "a worker of its data loader died", event, 0.85)
    if event.kind == "rank_phase" and event.fields["edge"] not in (
        "after",
        "finished",
        "done",
        "loaded",
        "got",
        "left",
    ):
        phase = event.fields["phase"]
        if phase == "data":
            return Activity("dataloader", "had begun to load data", event, 0.75)
        if phase == "checkpoint":
            return Activity("storage", "had begun to save or load a checkpoint", event, 0.65)
    if event.kind == "progress_bar":
        return bar_activity(event)
    if event.kind == "save_began":
        return Activity("storage", "had begun to save", event, 0.6)
    if event.kind == "evaluation_began":
        return Activity("application", "had begun an evaluation", event, 0.55)
    if event.kind in ("storage_error", "storage_server", "task_blocked", "kernel_wait"):
        return Activity("storage", "met trouble with a file system", event, 0.75)
    return None


def bar_activity(event: LogEvent) -> Activity | None:
    """What the owner of a progress bar that is not at its end does; None for a bar of training itself."""
    percent, title = int(event.fields.get("percent", "100")), event.fields.get("title", "")
    if percent >= 100 or _WORK_TITLE.search(title):
        return None
    left = event.fields.get("left_s")
    more = f" and expects {int(left) // 60} min more" if left else ""
    says = f"a progress bar stands at {percent} %{more}"
    if _EVALUATION_TITLE.search(title) and not _DATA_TITLE.search(title):
        return Activity("application", f"evaluates: {says}", event, 0.55)
    if _STORAGE_TITLE.search(title):
        return Activity("storage", f"loads or saves files: {says}", event, 0.65)
    if _DATA_TITLE.search(title):
        return Activity("dataloader", f"prepares data: {says}", event, 0.75)
    return None


def unfinished_bars(case: LogCase) -> list[Activity]:
    """Bars of preparation that had not ended, the surest first.

    A bar that has run for as long as the time-out is the work that others waited for.
    """
    timeouts = [int(event.fields["ran_ms"]) / 1000 for event in case.of("watchdog_timeout") if "ran_ms" in event.fields]
    found = []
    for event in case.of("progress_bar", claims=False):
        activity = bar_activity(event)
        if activity is None:
            continue
        elapsed = float(event.fields.get("elapsed_s", "0"))
        near = any(elapsed >= _NEAR * ran for ran in timeouts)
        found.append(
            msgspec.structs.replace(activity, confidence=min(0.9, activity.confidence + (0.1 if near else -0.15)))
        )
    for event in case.of("save_began", "evaluation_began", claims=False):
        later = case.of("save_ended", "step_progress", "training_ended", claims=False)
        done = any(item.path == event.path and item.line > event.line for item in later)
        if not done and timeouts and (activity := _activity(event)) is not None:
            found.append(msgspec.structs.replace(activity, does=activity.does.replace("had begun", "has begun")))
    return sorted(found, key=lambda activity: -activity.confidence)


def claimed_activity(case: LogCase) -> list[tuple[list[int], Activity]]:
    """Ranks of which a person says that they did not do, or stand in, something with data or storage."""
    found = []
    for event in case.of("note_lack", "note_stand", "note_only"):
        what = event.fields["what"]
        layer: Layer | None = None
        if _DATA_WORDS.search(what):
            layer = "dataloader"
        elif _STORAGE_WORDS.search(what):
            layer = "storage"
        if layer is not None:
            does = f"according to a note: {quotation(event)}"
            found.append((rank_list(event.fields["ranks"]), Activity(layer, does, event, 0.6)))
    return found
