"""What torch's process groups write when a collective does not end: releases 1.7 to 2.13, NCCL, Gloo and stores.

The words changed often; each line here is one of them, the newest last. `[Rank N]` in these lines counts inside the
process group, `[rankN]:` in front of the line counts in the world.
"""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["WATCHDOG_PATTERNS", "group_of"]

_PG = re.compile(
    r"\[PG (?:ID )?(?P<pg>\w+)(?: PG GUID (?P<guid>[\w:./-]+?)(?:\((?P<description>[^)]*)\))?"
    r"| \((?P<named>[^)]*)\))? Rank (?P<group_rank>\d+)\]"
)
_BARE = re.compile(r"\[Rank (?P<group_rank>\d+)\]")
_WORK = re.compile(r"([A-Za-z]+(?:\(ms\))?)\s*=\s*(\[[^\]]*\]|[^,)\s]+)")
_NAMES = {
    "SeqNum": "sequence",
    "OpType": "op",
    "NumelIn": "numel_in",
    "NumelOut": "numel_out",
    "TensorShape": "shape",
    "Timeout(ms)": "timeout_ms",
}


def group_of(text: str) -> dict[str, str]:
    """`group`, `description` and `group_rank` as a line's bracket gives them; the default group is called `0`."""
    match = _PG.search(text)
    if match is None:
        bare = _BARE.search(text)
        return {"group_rank": bare["group_rank"]} if bare else {}
    pg, description = match["pg"], match["description"] or match["named"]
    everywhere = pg == "0" or match["named"] is not None or not pg.isdigit()  # torch 2.4 writes the name of the group
    found = {"group": match["guid"] or (pg if everywhere else f"local {pg}"), "group_rank": match["group_rank"]}
    if description:
        found["description"] = description
    return found


def _work(text: str, fields: dict[str, str]) -> dict[str, str]:
    """Fields of `WorkNCCL(SeqNum=.., ...)`; what a version does not print is left out, and so is a value cut off."""
    inner = fields.pop("work", "")
    whole = len(inner) if not text.endswith(inner) else len(inner) - 1
    named = {
        _NAMES[found[1]]: found[2]
        for found in _WORK.finditer(inner)
        if found[1] in _NAMES and found[2] != "..." and found.end() <= whole
    }
    return fields | named | group_of(text)


def _status(text: str, fields: dict[str, str]) -> dict[str, str]:
    return fields | group_of(text)


_RANKS = r"[\[ ]*(?P<ranks>\d+(?:\s*,\s*\d+)*)\]?"
_CODES = "RemoteError|SystemError|InternalError|UnhandledCudaError|InvalidUsage|InvalidArgument"

WATCHDOG_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "process_done",
        "not been destroyed|destroy_process_group() was not called",
        expression=r"process group has NOT been destroyed before"
        r"|destroy_process_group\(\) was not called before program exit",
    ),
    pattern(
        "watchdog_timeout",
        "before timing out",
        expression=r"Work(?P<library>[A-Z]\w*)\((?P<work>.*?)\)?\s+ran for (?P<ran_ms>\d+) milliseconds",
        refine=_work,
    ),
    pattern(
        "watchdog_timeout",
        "collective operation timeout",
        expression=r"Watchdog caught collective operation timeout:?\s*(?:Work\w*\()?(?P<work>.*)",
        refine=_work,
    ),
    pattern(
        "watchdog_timeout",
        "timeout at nccl work|timeout at collective",
        expression=r"Timeout at (?:NCCL work|collective): ?(?P<sequence>\d+)",
        refine=_status,
    ),
    pattern(
        "group_status",
        "last completed",
        expression=r"last enqueued (?:\w+ )?work: ?(?P<queued>-?\d+)"
        r"(?:, ?last started (?:\w+ )?work: ?(?P<started>-?\d+))?, ?last completed (?:\w+ )?work: "
        r"?(?P<finished>-?\d+)",
        refine=_status,
    ),
    pattern(
        "dump_signal",
        "dump signal",
        expression=r"dump signal due to a collective timeout from\s+(?:rank (?P<origin>\d+)"
        r"|(?P<own>this local rank))|"
        r"Observed flight recorder dump signal",
        refine=_status,
    ),
    pattern(
        "watchdog_stuck",
        "watchdog got stuck|watchdog thread got stuck|heartbeat of watchdog",
        expression=r"watchdog (?:thread )?got stuck for (?P<seconds>\d+)",
        refine=_status,
    ),
    pattern("desync_never", "lagging ranks", expression=rf"ranks {_RANKS}\s*are the lagging ranks"),
    pattern(
        "desync_waiting",
        "joined but d",
        expression=rf"\[{_RANKS}\s*joined but (?:didn't|do not) finish collective (?:seq: |#)(?P<sequence>\d+)",
    ),
    pattern(
        "desync_behind",
        "join collective",
        expression=rf"\[{_RANKS}\s*finished collective (?:seq: |#)(?P<sequence>\d+), but didn'?t join",
    ),
    pattern(
        "mismatch_report", "mismatch between collectives", expression=r"Detected mismatch between collectives on ranks"
    ),
    pattern(
        "barrier_missing",
        "failed to pass monitoredbarrier",
        expression=rf"Ranks? {_RANKS}\s*failed to pass monitoredBarrier",
    ),
    pattern(
        "barrier_reached",
        "successfully reached monitoredbarrier",
        expression=r"Rank (?P<rank>\d+) successfully reached monitoredBarrier",
    ),
    pattern(
        "store_timeout",
        "store based barrier|store-based barrier|clients joined|clients have joined|worker_count",
        expression=r"(?:on rank:? ?(?P<rank>\d+).*?)?world_size=(?P<world>\d+), (?:num_workers_joined"
        r"|worker_count)=(?P<joined>\d+)|"
        r"(?P<joined_2>\d+)/(?P<world_2>\d+) clients (?:have )?joined",
        refine=lambda _, fields: {key.removesuffix("_2"): value for key, value in fields.items()},
    ),
    pattern(
        "store_unreachable",
        "client socket|rendezvous|connect to",
        expression=r"(?:client socket has (?:timed out|failed)|failed to connect"
        r"|timed out).{0,80}?connect(?:ing)? to "
        r"[\[(]*(?P<host>[\w.:-]+?)\]?(?:, |:)(?P<port>\d+)|Rendezvous(?:Timeout|Connection|Closed)Error",
    ),
    pattern(
        "store_wait",
        "wait timeout after|socket timeout",
        expression=r"wait timeout after (?P<ms>\d+) ?ms(?:, keys: (?P<keys>\S+))?|Socket Timeout",
    ),
    pattern(
        "gloo_timeout",
        "timed out waiting",
        expression=r"Timed out waiting (?P<ms>\d+)ms for (?P<what>recv|send) operation",
    ),
    pattern(
        "peer_closed",
        "closed by peer|reset by peer|remote process exited|connection closed by|broken pipe|socket closed",
        expression=r"(?P<gloo>gloo)?.{0,80}?(?:Connection (?:closed|reset) by (?:remote )?peer"
        r"|remote process exited or there was a network error|"
        r"Connection closed by (?:localRank|remote)|\[Errno 32\] Broken pipe|Broken pipe"
        r"|Socket closed)(?:[: ]*\[?(?P<peer>\d+\.\d+\.\d+\.\d+))?",
    ),
    pattern(
        "nccl_error",
        "nccl",
        expression=rf"\bnccl(?P<code>{_CODES})\b|NCCL error.{{0,60}}?(?P<words>unhandled (?:system|cuda) error"
        r"|internal error|invalid usage)",
    ),
    pattern(
        "teardown",
        "taking the entire process down|terminate called|process group watchdog thread terminated",
        expression=r".+",
    ),
)
