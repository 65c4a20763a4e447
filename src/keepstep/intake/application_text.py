"""Lines of the program and of its libraries: progress, phases, errors, memory, shapes that differ."""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["APPLICATION_PATTERNS"]

_EXCEPTION = (
    r"(?:^|[\s:\]>|])(?P<type>(?:[A-Za-z_]\w*\.)*(?-i:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout)))"
    r"(?:: (?P<message>.*)|\s*$)"
)
_OPTIONAL = re.compile(r"NCCL INFO|\bPlugin\b|libnccl-net|Could not load dynamic library|TF-TRT|\bdlerror\b")
"""Libraries that are looked for and used only if they are there."""
_TRIED_AGAIN = re.compile(r"\b(?:retry(?:ing)?|retries|ignor\w+|suppress\w+)\b", re.IGNORECASE)
"""Words before an error that tell what is done about it."""
_UNITS = {"s": 1, "m": 60, "h": 3600}
_CLOCK = re.compile(r"^(?:(\d+):)?(\d+):(\d\d)$")


def _seconds(text: str) -> float | None:
    clock = _CLOCK.match(text)
    if clock:
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return hours * 3600.0 + minutes * 60 + seconds
    pieces = re.findall(r"(\d+(?:\.\d+)?)\s*([smh])", text)
    return sum(float(value) * _UNITS[unit] for value, unit in pieces) if pieces else None


def _bar(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """`elapsed_s` and `left_s` in seconds, `title` the words in front of the bar."""
    title = re.split(r"\d{1,3}%", text, maxsplit=1)[0].strip(" :|")
    found = {"percent": fields["percent"], "title": title[-120:]}
    for name in ("elapsed", "left"):
        seconds = _seconds(fields.get(name, ""))
        if seconds is not None:
            found[f"{name}_s"] = f"{seconds:.0f}"
    return found


def _error(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """An exception, but not a line of source code, of a log about retries, or of the names of settings."""
    if (
        re.search(r"\b(?:except|raise|import|class|ignor\w+|suppress\w+|retry\w*|retrying)\b", text)
        or "=" in fields["type"]
        or _TRIED_AGAIN.search(text.partition(fields["type"])[0])
    ):
        return None
    return fields


APPLICATION_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "progress_bar",
        "%",
        expression=r"(?P<percent>\d{1,3})%\s*\|?[^"
        r"|\n]{0,60}\|\s*[\d.]+\w{0,3}/[\d.]+\w{0,3}\s*\[(?P<elapsed>[\d:]+)<(?P<left>[\d:]+|\?)"
        r"|(?P<percent_2>\d{1,3})\s?%.{0,40}(?:ETA|eta|remaining|left)\W+(?P<left_2>[\d:]+(?:\s?[hms]\w*)?)",
        refine=lambda text, fields: _bar(text, {key.removesuffix("_2"): value for key, value in fields.items()}),
    ),
    pattern(
        "step_progress",
        "iteration|step|epoch|iter",
        expression=r"\b(?:iteration|global[_ ]?step|train(?:ing)? step|step"
        r"|iter)\W{1,3}\s*(?P<step>\d+)\s*(?:/\s*(?P<total>\d+)|\W.{0,200}?(?:loss|lr|time|elapsed))",
    ),
    pattern(
        "training_ended",
        "stopped|complete|finished|done|reached|ended",
        expression=r"Trainer\.fit` stopped|`?max_(?:epochs|steps)\W.*reached|\b(?:training|fit(?:ting)?"
        r"|all epochs)\W{1,3}(?:is |has |was )?(?:complete|completed|finished|done|ended)\b"
        r"|\bfinished training\b|\bdone training\b|Training completed|train_runtime",
    ),
    pattern(
        "save_began",
        "saving|save_checkpoint|checkpoint",
        expression=r"\bsaving (?:the |latest |best |final )?(?:model|checkpoint|state|weights"
        r"|optimizer)[^\n]*|save_checkpoint\b.*(?:start|begin)|begin(?:ning)? (?:to )?sav\w+",
    ),
    pattern(
        "save_ended",
        "saved|save",
        expression=r"\b(?:successfully saved|saved (?:the )?(?:model|checkpoint|state)|checkpoint saved"
        r"|finished saving|saving (?:done|finished|complete\w*))",
    ),
    pattern(
        "evaluation_began",
        "eval|validat",
        expression=r"\b(?:running|start\w*|begin\w*) (?:the )?(?:eval\w*|validation)"
        r"|\*{3,} ?Running (?:Evaluation|Prediction)",
    ),
    pattern(
        "loader_worker",
        "dataloader worker|pin memory thread|data worker",
        expression=r"DataLoader worker \(pid(?:\(s\))? ?(?P<victim>\d+)[\d, ]*\) (?:is killed by signal: "
        r"(?P<signal>[A-Za-z ]+?)"
        r"|exited unexpectedly)(?=[.\s]|$)|RuntimeError in DataLoader worker"
        r"|Caught \w+ in (?:DataLoader worker|pin memory thread)",
    ),
    pattern(
        "shm_small",
        "shared memory|bus error",
        expression=r"insufficient shared memory|out of shared memory|unable to (?:open|allocate|mmap"
        r"|write) (?:\d+ bytes (?:from|in) )?.{0,20}shared memory|shared memory.{0,30}(?:exhausted"
        r"|too small|limit)|might be caused by insufficient shm",
    ),
    pattern(
        "gpu_memory",
        "out of memory|outofmemory",
        expression=r"CUDA out of memory|OutOfMemoryError|(?:CUDA|HIP) error: out of memory|HIP out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|Cuda failure (?:\d+ )?'out of memory'",
    ),
    pattern(
        "cuda_error",
        "cuda error|cudaerror|cuda_error|hip error|illegal memory access|device-side assert|launch failure"
        "|cuda failure",
        expression=r"(?:CUDA|HIP) error: (?P<what>[^\n.]{3,80})"
        r"|Cuda failure (?:\d+ )?'(?P<what_3>[^']+)'|cudaError(?P<name>(?!ECC"
        r"|MemoryAllocation)[A-Z]\w+)|(?P<what_2>illegal memory access"
        r"|device-side assert triggered|unspecified launch failure)",
        refine=lambda _, fields: (
            None
            if "out of memory" in (joined := " ".join(fields.values())).lower() or "ecc" in joined.lower()
            else {"what": joined}
        ),
    ),
    pattern(
        "model_differs",
        "same model across all ranks|not to match sizes|inconsistent",
        expression=r"(?:DDP )?expects same model across all ranks, but Rank (?P<first>\d+) has "
        r"(?P<first_count>\d+) params, while rank (?P<second>\d+) has inconsistent "
        r"(?P<second_count>\d+)"
        r"|\[(?P<second_2>\d+)\]: params\[(?P<index>\d+)\] in this process with sizes.*?not to match sizes",
        refine=lambda _, fields: {key.removesuffix("_2"): value for key, value in fields.items()},
    ),
    pattern(
        "reduction_unfinished",
        "finished reduction in the prior iteration",
        expression=r"Expected to have finished reduction in the prior iteration",
    ),
    pattern("exception", "error|exception|interrupt|exit|failure|timeout", expression=_EXCEPTION, refine=_error),
    pattern(
        "crashed",
        "segmentation fault|segfault|fatal python error|core dumped|bus error|double free"
        "|corrupted size|sigsegv|signal 11",
        expression=r"Segmentation fault|segfault at [^\n]*?(?: in (?P<library>[\w.+-]+))?"
        r"|Fatal Python error: (?P<what>\w[\w ]*)|Bus error|double free or corruption"
        r"|corrupted size|SIGSEGV",
    ),
    pattern(
        "not_a_number",
        "nan|inf",
        expression=r"\bloss(?: is|:|=)? ?(?:nan|inf)\b|NaN or Inf found|Loss (?:became|is) (?:NaN|inf)",
    ),
    pattern(
        "wrong_device",
        "invalid device ordinal|no cuda-capable|devices available|driver version is insufficient"
        "|library version mismatch|no cuda gpus|no nvidia driver|no hip gpus",
        expression=r"invalid device ordinal|no CUDA-capable device|CUDA driver version is insufficient"
        r"|Driver/library version mismatch|No (?:CUDA|HIP) GPUs are available|Found no NVIDIA driver",
    ),
    pattern(
        "wrong_address",
        "address already in use|eaddrinuse|name resolution|name or service not known|no route to host|getaddrinfo",
        expression=r"Address already in use|EADDRINUSE|Temporary failure in name resolution"
        r"|Name or service not known|No route to host|getaddrinfo[^\n]{0,40}failed",
    ),
    pattern("too_many_files", "too many open files|errno 24", expression=r"Too many open files|\[Errno 24\]"),
    pattern(
        "library_missing",
        "undefined symbol|cannot open shared object|symbol lookup error",
        expression=r"undefined symbol: \S+|cannot open shared object file|symbol lookup error",
        refine=lambda text, fields: None if _OPTIONAL.search(text) else fields,
    ),
    pattern(
        "lock_held",
        "gil",
        expression=r"(?:holding|waiting for|acquir\w+|blocked on|deadlock\w*)[^\n]{0,20}\bthe GIL\b"
        r"|\bGIL (?:deadlock|contention)",
    ),
    pattern(
        "compile_running",
        "compil",
        expression=r"(?:compiling and loading|JIT compil\w+|recompil\w+|torch\._dynamo hit config\.(?:cache"
        r"|recompile)_limit|Autotun\w+)[^\n]{0,60}",
    ),
    pattern(
        "topology_path",
        "acs|iommu",
        expression=r"\bACS\b[^\n]{0,40}(?:enabled|is on|redirect)|IOMMU[^\n]{0,30}(?:enabled|is on)",
    ),
    pattern(
        "fabric_manager",
        "system not yet initialized|fabric manager|fabricmanager",
        expression=(
            r"system not yet initialized|fabric ?manager[^\n]{0,40}(?:not running|inactive|failed"
            r"|not started|error)"
        ),
    ),
    pattern(
        "file_damaged",
        "pytorchstreamreader|headerdeserialization|incompletebuffer|central directory|unexpected eof",
        expression=r"PytorchStreamReader failed|InvalidHeaderDeserialization|MetadataIncompleteBuffer"
        r"|failed finding central directory|unexpected EOF, expected",
    ),
)
