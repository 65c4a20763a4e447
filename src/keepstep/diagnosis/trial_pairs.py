"""Sends and receives of ranks under trial: each needs its other side, of the same size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from keepstep.diagnosis.trial_calls import call_words
from keepstep.records.trial import CallKept, Trace, TrialFinding, place_of

__all__ = ["ANY", "Streams", "pair_findings", "streams_of"]

ANY = -1
_SEND, _RECV = 10, 11
_Pair = tuple[CallKept | None, CallKept | None]

Streams = dict[tuple[int, int, int], list[CallKept]]
"""Calls in order, by (source, destination, tag)."""


def streams_of(traces: Sequence[Trace]) -> tuple[Streams, Streams]:
    """All sends and all receives."""
    sends: Streams = defaultdict(list)
    receives: Streams = defaultdict(list)
    for trace in traces:
        for event in trace.events:
            if isinstance(event, CallKept) and event.op == _SEND:
                sends[trace.rank, event.peer, event.tag].append(event)
            elif isinstance(event, CallKept) and event.op == _RECV:
                receives[event.peer, trace.rank, event.tag].append(event)
    return sends, receives


def pair_findings(traces: Sequence[Trace]) -> list[TrialFinding]:
    """Transfers between two ranks under trial that cannot take place; one a pair and direction.

    Whoever receives from anybody is left out.
    """
    by_rank = {trace.rank: trace for trace in traces}
    sends, receives = streams_of(traces)
    open_ears = {destination for source, destination, _ in receives if source == ANY}
    found: dict[tuple[int, int], TrialFinding] = {}
    for stream in sorted(sends.keys() | receives.keys()):
        source, destination, _ = stream
        there = source in by_rank and destination in by_rank
        if not there or destination in open_ears or (source, destination) in found:
            continue
        one = _compare(stream, sends.get(stream, []), receives=receives.get(stream, []), traces=by_rank)
        if one is not None:
            found[source, destination] = one
    return _one_a_place(list(found.values()))


def _one_a_place(found: list[TrialFinding]) -> list[TrialFinding]:
    first: dict[tuple[str, tuple[str, ...]], TrialFinding] = {}
    for one in found:
        first.setdefault((one.kind, one.sites), one)
    return list(first.values())


def _compare(
    stream: tuple[int, int, int], sends: list[CallKept], *, receives: list[CallKept], traces: Mapping[int, Trace]
) -> TrialFinding | None:
    source, destination, tag = stream
    for index, (send, receive) in enumerate(zip(sends, receives, strict=False)):
        told = any(earlier.value and earlier.step == send.step for earlier in sends[:index])
        loose = send.free or receive.free or told
        if (send.sent != receive.got and not loose) or send.element != receive.element:
            return _finding("transfer_differs", stream, pair=(send, receive), traces=traces)
    if len(sends) > len(receives) and traces[destination].whole:
        return _finding("send_without_receive", stream, pair=(sends[len(receives)], None), traces=traces)
    if len(receives) > len(sends) and traces[source].whole:
        return _finding("receive_without_send", stream, pair=(None, receives[len(sends)]), traces=traces)
    return None


def _finding(kind: str, stream: tuple[int, int, int], *, pair: _Pair, traces: Mapping[int, Trace]) -> TrialFinding:
    source, destination, tag = stream
    words, places = [], []
    for rank, call, verb in ((source, pair[0], "sends"), (destination, pair[1], "receives")):
        if call is not None:
            places.append(place_of(traces[rank], call.site) or "an unknown line")
            size = call_words(call if verb == "sends" else replace(call, sent=call.got)).split(" of ", 1)[-1]
            other = f"to rank {destination}" if verb == "sends" else f"from rank {source}"
            words.append(f"rank {rank} {verb} {size} {other} at {places[-1]}")
    if pair[0] is None:
        words.append(f"rank {source} does not send it")
    if pair[1] is None:
        words.append(f"rank {destination} does not receive it")
    marked = f" (tag {tag})" if tag else ""
    return TrialFinding(
        kind=kind,
        ranks=(source, destination),
        sites=tuple(dict.fromkeys(places)),
        what=", ".join(words) + marked,
        remedy="give each send one receive of the same size, type and tag on the other side, in the same order",
    )
