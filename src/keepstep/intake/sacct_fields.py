"""What sacct can print: which columns are needed, which are useful, and the command that gives them all."""

from __future__ import annotations

from keepstep.errors import RecordError

__all__ = ["COMMAND", "FREE_TEXT", "USED", "delimiter_of", "known", "missing"]

COMMAND = (
    "sacct -a -D -P -S 2026-01-01 -o Cluster,JobIDRaw,JobID,JobName,User,Account,Partition,QOS,State,ExitCode,"
    "DerivedExitCode,Submit,Eligible,Start,End,ElapsedRaw,Suspended,TimelimitRaw,NNodes,NCPUS,AllocTRES,ReqTRES,"
    "NodeList,Reason,Priority,Restarts,FailedNode,Comment"
)
"""Gives every column that is used (before Slurm 23.11 leave Restarts and FailedNode out)."""

USED = frozenset(COMMAND.rsplit(" ", 1)[1].lower().split(",")) | {"elapsed", "timelimit", "alloccpus", "cputimeraw"}
"""Columns that are read, in lower case."""

_FREE = "jobname comment admincomment systemcomment workdir submitline extra stdout stderr stdin container wckey"
FREE_TEXT = frozenset(_FREE.split())
"""Columns whose text is the user's: line breaks and delimiters may stand in them."""

_EVERY = (
    "account admincomment alloccpus allocgres allocnodes alloctres associd avecpu avecpufreq avediskread "
    "avediskwrite avepages averss avevmsize blockid cluster comment constraints consumedenergy consumedenergyraw "
    "container cputime cputimeraw dbindex derivedexitcode elapsed elapsedraw eligible end exitcode extra "
    "failednode flags gid group jobid jobidraw jobname layout licenses maxdiskread maxdiskreadnode "
    "maxdiskreadtask maxdiskwrite maxdiskwritenode maxdiskwritetask maxpages maxpagesnode maxpagestask maxrss "
    "maxrssnode maxrsstask maxvmsize maxvmsizenode maxvmsizetask mcslabel mincpu mincpunode mincputask ncpus "
    "nnodes nodelist ntasks partition planned plannedcpu plannedcpuraw priority qos qosraw qosreq reason "
    "reqcpufreq reqcpufreqgov reqcpufreqmax reqcpufreqmin reqcpus reqgres reqmem reqnodes reqtres reservation "
    "reservationid reserved restarts resvcpu resvcpuraw segmentsize slurmid sluid start state stderr stdin stdout "
    "submit submitline suspended systemcomment systemcpu timelimit timelimitraw totalcpu tresusageinave "
    "tresusageinmax tresusageinmaxnode tresusageinmaxtask tresusageinmin tresusageinminnode tresusageinmintask "
    "tresusageintot tresusageoutave tresusageoutmax tresusageoutmaxnode tresusageoutmaxtask tresusageoutmin "
    "tresusageoutminnode tresusageoutmintask tresusageouttot uid user usercpu wckey wckeyid workdir"
)
_ALL = frozenset(_EVERY.split())
_NEEDED = (("jobid", "jobidraw"), ("state",), ("start",), ("end",))
_WANTED = (
    ("submit", "Submit", "waiting times and requeues"),
    ("alloctres", "AllocTRES", "GPUs"),
    ("nodelist", "NodeList", "nodes"),
    ("nnodes", "NNodes", "sizes in nodes"),
    ("exitcode", "ExitCode", "causes"),
    ("user", "User", "retries by the user"),
    ("jobname", "JobName", "retries by the user"),
    ("eligible", "Eligible", "queue waits"),
    ("elapsedraw", "ElapsedRaw", "a check of the times and the length of running jobs"),
)
_SPELLED = {"jobid": "JobID", "jobidraw": "JobIDRaw", "state": "State", "start": "Start", "end": "End"}
_LONGEST_DELIMITER = 8


def known(name: str) -> bool:
    """Whether `name` (any case) is a column of sacct."""
    return name.lower() in _ALL


def delimiter_of(header: str) -> str | None:
    """The delimiter of a header line of sacct; None if it is no such line.

    It is the text between the first column and the next that cuts the line into the most known columns. A header
    with a single column has the delimiter `|`.
    """
    if known(header):
        return "|"
    best: tuple[int, str] | None = None
    for begin in (length for length in range(1, min(len(header), 24)) if known(header[:length])):
        for length in range(1, _LONGEST_DELIMITER + 1):
            delimiter = header[begin : begin + length]
            names = header.removesuffix(delimiter).split(delimiter)
            fits = sum(known(name) for name in names)
            if fits >= 2 and 2 * fits > len(names) and (best is None or 2 * fits - len(names) > best[0]):
                best = (2 * fits - len(names), delimiter)
    return best[1] if best else None


def missing(columns: set[str], *, where: str) -> list[str]:
    """What the absence of useful columns costs, as notes for people. `columns` in lower case.

    Raises RecordError, with the command that gives them, if columns are absent without which nothing can be said.
    """
    absent = [" or ".join(_SPELLED[name] for name in names) for names in _NEEDED if not columns & set(names)]
    if absent:
        raise RecordError(f"columns missing: {', '.join(absent)}", where=where, remedy=f"export with: {COMMAND}")
    present = columns | ({"elapsedraw"} if "elapsed" in columns else set())
    lost = [f"{spelled} ({use})" for name, spelled, use in _WANTED if name not in present]
    return [f"columns missing: {', '.join(lost)}; they come with: {COMMAND}"] if lost else []
