"""Looks at members that know nothing of keepstep: once a second their stack, state and processor time."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.records.plain_samples import PlainReport, PlainSample
from keepstep.service.clock import Clock
from keepstep.service.counters import host_counters, host_sample, main_thread_turns
from keepstep.service.member_process import MemberProcess
from keepstep.service.stack_words import (
    digest_of,
    own_line,
    place_words,
    standing_of,
    stands_at_a_lock,
    waits_for_work,
)
from keepstep.service.stacks import Stack, ThreadStack, spy_stack

__all__ = ["PlainEyes", "plain_place"]

_EVERY_S = 1.0
_YOUNG_S = 5.0
"""A script that joins does so in its first seconds, as a rule; it is left alone until then."""
_MOST_TEXT = 200


class PlainEyes:
    """The looks of one agent. Runs in the observer's thread."""

    def __init__(self, node: str, *, clock: Clock) -> None:
        """Nothing was seen yet."""
        self._node = node
        self._clock = clock
        self._looked = float("-inf")
        self._first: dict[str, float] = {}

    def look(self, members: Sequence[MemberProcess]) -> PlainReport | None:
        """The report of this second, if one is due and there is somebody to look at."""
        now = self._clock.monotonic()
        self._first = {member.name: self._first.get(member.name, now) for member in members}
        due = [member for member in members if now - self._first[member.name] >= _YOUNG_S]
        if not due or now - self._looked < _EVERY_S:
            return None
        self._looked = now
        moved = sum(i.bytes_received + i.bytes_sent for i in host_counters().interfaces.values())
        samples = tuple(_sample(member) for member in due)
        return PlainReport(node=self._node, wall=self._clock.wall(), samples=samples, network_bytes=moved)


def plain_place(stack: Stack) -> str:
    """Where the main thread stands; one that sleeps in a backward pass waits there for the others' gradients."""
    where = standing_of(stack.main).where
    if waits_for_work(stack.main):
        return "collective"
    if stands_at_a_lock(stack.main):
        return "lock"
    main = _main_thread(stack)
    if where in ("program", "unknown") and main is not None and main.frames and not main.active:
        return "collective" if "torch/autograd/" in main.frames[0].file else where
    return where


def _main_thread(stack: Stack) -> ThreadStack | None:
    return next((thread for thread in stack.threads if thread.name == "MainThread"), None)


def _sample(member: MemberProcess) -> PlainSample:
    stack = spy_stack(member.process.pid)
    host = host_sample(member.process.pid)
    return PlainSample(
        rank=member.rank,
        member=member.name,
        state=host.state,
        cpu_us=host.cpu_us,
        run_delay_us=host.run_delay_us,
        place=plain_place(stack),
        stack=digest_of(stack.main),
        where=own_line(stack.main)[:_MOST_TEXT],
        at=place_words(stack.main)[:_MOST_TEXT],
        turns=main_thread_turns(member.process.pid),
    )
