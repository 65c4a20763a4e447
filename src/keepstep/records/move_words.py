"""A planned move in words, one line."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.records.moves import MOVE_MARKS, MoveRecord

__all__ = ["move_lines", "move_words", "pause_words", "whence_words"]


def move_words(record: MoveRecord) -> str:
    """What moved from where to where, or why not; with the parts of the pause."""
    head = f"move {record.number} is {record.outcome}: {whence_words(record)}"
    if record.outcome == "not made":
        return f"{head}: {record.why}"
    took = "" if record.first_step_s is None else f", {record.first_step_s:.1f} s after the request"
    why = f" ({record.why})" if record.why else ""
    pause = pause_words(record.pause)
    return "; ".join([f"{head}{took}{why}", *_stayed(record), *([pause] if pause else [])])


def move_lines(record: MoveRecord) -> list[str]:
    """A move for the report: what it was, a time line in milliseconds from the request, what the pause was."""
    why = f": {record.why}" if record.why else ""
    whence = "; ".join([whence_words(record), *_stayed(record)])
    lines = [f"move {record.number}: {record.outcome}, {whence}{why}"]
    times = [(name, getattr(record, f"{name}_s")) for name in MOVE_MARKS]
    reached = [(name, at) for name, at in times if at is not None]
    if reached:
        lines.append(f"  {'phase':<18}{'ms':>10}{'+ms':>10}")
    before = 0.0
    for name, at in reached:
        lines.append(f"  {name:<18}{at * 1e3:>10.1f}{(at - before) * 1e3:>10.1f}")
        before = at
    refused = f", votes refused {record.refused}" if record.refused else ""
    pause = pause_words(record.pause)
    return [*lines, f"  copied beside training {record.bytes_moved} bytes{refused}", *([f"  {pause}"] if pause else [])]


def whence_words(record: MoveRecord) -> str:
    """Each rank that moved, or was to if none did, with its old and its new process."""
    rows = zip(record.ranks, record.leavers, record.origins, record.joiners, record.nodes, strict=False)
    return ", ".join(
        f"rank {rank} from {leaver} on {origin} to {joiner or 'a standby'} on {node}"
        for rank, leaver, origin, joiner, node in rows
        if not record.moved or rank in record.moved
    )


def _stayed(record: MoveRecord) -> list[str]:
    """The ranks that did not move, where others did."""
    stayed = [str(rank) for rank in record.ranks if record.moved and rank not in record.moved]
    return [f"rank {', '.join(stayed)} did not move"] if stayed else []


def pause_words(pause: Mapping[str, float]) -> str:
    """`pause 3.1 ms: last update 1.2, check 1.9; 4096 bytes copied in it`; empty where nothing was counted."""
    parts = {name.removesuffix("_s").replace("_", " "): at for name, at in pause.items() if name.endswith("_s")}
    if not parts:
        return ""
    listed = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items())
    copied = f"; {int(pause['bytes'])} bytes copied in it" if pause.get("bytes") else ""
    return f"pause {sum(parts.values()) * 1e3:.1f} ms: {listed}{copied}"
