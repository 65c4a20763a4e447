"""Whether a process really does nothing: looked at twice. Only this is hard enough to replace a member that lives.

Denied, and nobody replaced, where it moves, where it waits for others in a collective, where its stack cannot be known,
and where it stands at a lock of the script: a new member would come to stand there too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from keepstep.errors import RecordError
from keepstep.records.ring import SlotStatus, decode_ring
from keepstep.records.watch_messages import CheckHang, HangDenied, MemberHung
from keepstep.service.counters import process_counters
from keepstep.service.member_process import MemberProcess
from keepstep.service.stack_words import place_words, standing_of, stands_at_a_lock, waits_for_a_process, waits_for_work
from keepstep.service.stacks import StackFrame, take_stack

__all__ = ["Look", "check_hang", "compared"]

_BUSY_SHARE = 0.05
"""Processor time of a process that does nothing, as a share of the time between two looks."""
_TAIL_SLOTS = 512
_FIRST_POINT_TO_POINT = 10


class Look(msgspec.Struct, frozen=True):
    """One look at a process: its main thread's frames (innermost first), state, processor time, recorder position."""

    state: str
    frames: tuple[StackFrame, ...]
    how: str
    cpu_s: float
    head: int
    in_collective: bool


async def check_hang(member: MemberProcess, order: CheckHang, *, log: Path) -> MemberHung | HangDenied:
    """Look at `member` twice, `order.apart_s` seconds apart. Its private state and onset are for the caller to add."""
    first = await asyncio.to_thread(_look, member, log)
    await asyncio.sleep(order.apart_s)
    second = await asyncio.to_thread(_look, member, log)
    if why := compared(first, second, apart_s=order.apart_s, alone=member.protected):
        return HangDenied(member.name, member.rank, why)
    return MemberHung(member.name, member.rank, order.since, place_words(second.frames), order.apart_s)


def compared(first: Look, second: Look, *, apart_s: float, alone: bool) -> str:
    """Why two looks are no hard evidence of a hang; empty if they are.

    `alone` says that this one member would be replaced: where all start again, a lock may well be passed.
    """
    if second.state in ("", "X", "Z"):
        return "its process is gone"
    if first.head != second.head:
        return "it works: its recorder moved"
    if second.in_collective:
        return "it waits for others in a collective"
    if second.state in ("T", "D") and first.state == second.state:
        return ""
    if not second.frames:
        return f"its stack cannot be known ({second.how})"
    if first.frames != second.frames:
        return f"it works: its stack moved to {place_words(second.frames)}"
    if (used_s := second.cpu_s - first.cpu_s) > _BUSY_SHARE * apart_s:
        return f"it works at {place_words(second.frames)}: {used_s:.1f} s of processor time in {apart_s} s"
    if standing_of(second.frames).where == "collective" or waits_for_work(second.frames):
        return f"it waits for others in a collective, by its stack: {place_words(second.frames)}"
    if waits_for_a_process(second.frames):
        return f"it waits for a process that it started: {place_words(second.frames)}"
    if alone and stands_at_a_lock(second.frames):
        return f"it stands at a lock of the script, where a new member would stand too: {place_words(second.frames)}"
    return ""


def _look(member: MemberProcess, log: Path) -> Look:
    counters = process_counters(member.process.pid)
    head, busy = _recorder(member)
    stack = take_stack(member.process.pid, log)
    return Look(
        state=counters.state if counters else "",
        frames=stack.main,
        how=stack.how,
        cpu_s=counters.cpu_s if counters else 0.0,
        head=head,
        in_collective=busy,
    )


def _recorder(member: MemberProcess) -> tuple[int, bool]:
    """How far the recorder is, and whether a collective of the present generation is under way."""
    with member.ring.held() as view:
        if view is None:
            return -1, False
        try:
            ring = decode_ring(view, newest=_TAIL_SLOTS)
        except RecordError:
            return -1, False
    running = (SlotStatus.QUEUED, SlotStatus.RUNNING)
    return ring.header.head, any(
        slot.status in running and slot.op < _FIRST_POINT_TO_POINT and slot.generation == ring.header.generation
        for slot in ring.operations
    )
