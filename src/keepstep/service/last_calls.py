"""The newest collectives in a recorder ring, group by group: what a member called before its job ended."""

from __future__ import annotations

from collections import defaultdict

from keepstep.errors import RecordError
from keepstep.records.operations import COLLECTIVES
from keepstep.records.ring import decode_ring
from keepstep.records.watch_messages import Called, CallMade
from keepstep.service.member_process import MemberProcess

__all__ = ["newest_calls"]

_TAIL_SLOTS = 1024
_MOST_A_GROUP = 16


def newest_calls(member: MemberProcess) -> Called | None:
    """What `member` called last in every group; None where its ring holds nothing."""
    with member.ring.held() as view:
        if view is None:
            return None
        try:
            ring = decode_ring(view, newest=_TAIL_SLOTS)
        except RecordError:
            return None
    groups: dict[int, list[CallMade]] = defaultdict(list)
    for slot in ring.operations:
        if slot.op in COLLECTIVES and slot.generation == ring.header.generation:
            name = ring.group_name(slot.group_hash)
            call = CallMade(slot.group_hash, name, slot.sequence, slot.op, slot.element, slot.count, slot.root)
            groups[slot.group_hash].append(call)
    calls = tuple(call for made in groups.values() for call in made[-_MOST_A_GROUP:])
    return Called(member.name, member.rank, ring.header.generation, calls) if calls else None
