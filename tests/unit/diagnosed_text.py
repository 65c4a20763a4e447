"""For tests of log diagnosis: a text as a file, diagnosed as the command would."""

from __future__ import annotations

from pathlib import Path

from keepstep.service.diagnosing import diagnose_paths


def found_in(text: str, folder: Path, name: str = "job.log"):
    """The findings of one file with this text."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return diagnose_paths([path]).findings


def named(findings) -> list[list[dict]]:
    """Suspects as plain values, all findings together."""
    return [
        [
            {key: getattr(suspect, key) for key in suspect.__struct_fields__ if getattr(suspect, key) is not None}
            for suspect in group
        ]
        for finding in findings
        for group in finding.suspects
    ]


def ranks(findings) -> set[int]:
    """Every rank among the suspects."""
    return {suspect["rank"] for group in named(findings) for suspect in group if "rank" in suspect}


WATCHDOG = "Watchdog caught collective operation timeout: "


def timeout(rank: int, sequence: int, op: str = "ALLREDUCE", numel: int = 4096, ms: int = 600000) -> str:
    """The line of a watchdog of 2025 whose collective did not end."""
    return (
        f"[rank{rank}]:[E1101 10:00:0{rank % 10}.123456789 ProcessGroupNCCL.cpp:632] [Rank "
        f"{rank}] {WATCHDOG}WorkNCCL(SeqNum={sequence}, "
        f"OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)={ms}) ran for {ms + 57} "
        "milliseconds before timing out.\n"
    )


def status(rank: int, queued: int, finished: int) -> str:
    """The line with the numbers of a group, 2025."""
    return (
        f"[rank{rank}]:[E1101 10:00:00.1 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID "
        f"0(default_pg) Rank {rank}]  failure detected "
        f"by watchdog at work sequence id: {finished + 1} PG status: last enqueued work: "
        f"{queued}, last completed work: {finished}\n"
    )


def dump(rank: int, queued: int, finished: int, origin: int) -> str:
    """What a rank says that was told of another one's time-out."""
    return (
        f"[rank{rank}]:[E1101 10:00:01.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID "
        f"0(default_pg) Rank {rank}] Received a dump "
        f"signal due to a collective timeout from  rank {origin} and we will try our best to dump "
        "the debug info. Last enqueued NCCL "
        f"work: {queued}, last completed NCCL work: {finished}.This is most likely caused by "
        "incorrect usages of collectives\n"
    )
