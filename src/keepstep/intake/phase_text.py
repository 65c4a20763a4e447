"""What ranks print about the phase they are in, and times of phases a person tabulated by rank."""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern

__all__ = ["PHASE_PATTERNS", "phase_word"]

_PHASES: tuple[tuple[str, str], ...] = (
    ("clock", r"\bclocks?\b|clock_|mhz"),
    ("temperature", r"temperature|\btemp\b|temp_c"),
    (
        "load",
        r"tokens|seq(?:uence)?[ _]?len|samples_per|num_samples|batch[ _]size|experts?_load|tokens_per|micro_?batches",
    ),
    ("data", r"\[data\]|\bdata|batch|loader|\binput|iterator|next\(|fetch|dataset|prefetch|tokeni[sz]|shard"),
    (
        "communication",
        r"all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|collective|\bcomm|nccl|sync\b|all_?to_?all|p2p",
    ),
    ("checkpoint", r"checkpoint|ckpt|\bsav(?:e|ing)"),
    ("backward", r"backward|\bbwd"),
    ("forward", r"forward|\bfwd"),
    ("optimizer", r"optimi[sz]er|optim|zero_grad"),
    ("host", r"host|cpu|launch|\bprep|schedul"),
    ("compute", r"compute|kernel|gemm|matmul|attention|model|layer|gpu"),
    ("step", r"step|iter|total"),
)
_FORMS = tuple((name, re.compile(form, re.IGNORECASE)) for name, form in _PHASES)


def phase_word(text: str) -> str:
    """The phase a few words speak of, such as `data` for `input_wait_ms`; empty if none."""
    return next((name for name, form in _FORMS if form.search(text)), "")


_VALUE = r"\d{1,18}(?:\.\d{1,18})?"
_PAIR = re.compile(rf"rank ?#?(\d{{1,6}})(?!\d)\)?\s*[:=]?\s*({_VALUE})(?!\d*\s*(?:/|%))", re.IGNORECASE)
_TIME = re.compile(r"time|latency|duration|elapsed|wait|took|takes|\bms\b|\bsec(?:ond)?s?\b", re.IGNORECASE)
_NO_TIME = re.compile(
    r"(?<![a-z])(?:seed|port|pid|memory|mem|vram|byte|size|param(?:eter)?|count|loss(?:e)?|norm|lr|offset|index(?:e)?|id"
    r"|version|shard|file|sample|row|power|util(?:i[sz]ation)?|hash(?:e)?|checksum|accuracy)s?(?![a-z])",
    re.IGNORECASE,
)
_AMOUNT = re.compile(
    rf"rank ?#?\d{{1,6}}(?!\d)\)?\s*[:=]?\s*{_VALUE} ?(?:[kmgt]?i?b|bytes?|samples?|files?|rows?|params?)\b",
    re.IGNORECASE,
)
"""Numbers that are not of time: that they differ makes nobody slow."""
_NAMED = re.compile(
    (
        r"(?P<label>(?:experiment|run|case|config"
        r"|trial)\s+\w+)?[\s:,-]*(?P<name>[A-Za-z][\w /-]*?)(?:[_ ]?\(?(?P<unit>ms|us|s|sec"
        r"|seconds)\)?)?\s*[:=]\s*(?=[a-z ]*\(?rank)"
    ),
    re.IGNORECASE,
)


def _table(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """`values` as `rank:number ...`; `peers` is `median` where one of them stands for all the others."""
    pairs = _PAIR.findall(text)
    if len({rank for rank, _ in pairs}) < 2:
        return None
    named = _NAMED.search(text)
    name = (named["name"] if named else text.split("rank", 1)[0]).strip(" :=-|")
    found = {
        "values": " ".join(f"{rank}:{value}" for rank, value in pairs[:100_000]),
        "name": name[:80],
        "phase": phase_word(name),
    }
    in_time = _TIME.search(name) or (named and named["unit"] and not text[named.start("unit") - 1].isalpha())
    amounts = _NO_TIME.search(name) or _AMOUNT.search(text)
    if amounts and not in_time and found["phase"] not in ("load", "clock", "temperature"):
        return None
    if named and named["unit"]:
        found["unit"] = named["unit"]
    if named and named["label"]:
        found["label"] = " ".join(named["label"].split())
    if re.search(r"median|average|mean|typical|others", text[text.lower().find("rank") :], re.IGNORECASE):
        found["peers"] = "median"
    return found if found["phase"] else None


def _phase(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    phase = phase_word(fields["what"])
    return {"edge": fields["edge"].lower(), "phase": phase, "what": fields["what"].strip()} if phase else None


_NAMED_VALUE = re.compile(
    r"([A-Za-z][A-Za-z_ ]{1,30}?)[_ ]?(?:\(?(?:ms|s)\)?)?\s*[:=]?\s*(\d+(?:\.\d+)?) ?(ms|s|sec|us)\b"
)


def _values(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """`values` as `phase=number ...`, in the unit given, of one rank's line; lines of steps are left to tables."""
    found: dict[str, str] = {}
    for name, value, unit in _NAMED_VALUE.findall(fields["rest"]):
        phase = phase_word(name)
        if phase:
            found.setdefault(phase, f"{phase}={value}{unit}")
    return {"values": " ".join(found.values())} if found else None


PHASE_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "phase_table",
        "rank",
        expression=rf"rank ?#?\d{{1,6}}(?!\d)\)?\s*[:=]?\s*{_VALUE}[^\n]*rank ?#?\d{{1,6}}(?!\d)\)?\s*[:=]?\s*{_VALUE}",
        refine=_table,
    ),
    pattern(
        "rank_phase",
        "rank",
        expression=(
            r"rank[ =:_]{0,2}\d+\W{1,4}(?:\S+ ){0,3}?(?P<edge>before|after|enter(?:ing|ed)?"
            r"|start(?:ing|ed)?|begin(?:ning)?|waiting (?:for|in|on)|reached|left|leaving|finished"
            r"|done(?: with)?|loading|loaded|fetching|got)\s+(?P<what>[^\n]{2,60})"
        ),
        refine=_phase,
    ),
    pattern(
        "rank_values",
        "rank",
        expression=r"^\W*rank[ =:#]{0,2}\d{1,6}\b\W{0,3}(?P<rest>[^\n]*\d ?(?:ms|s|sec|us)\b[^\n]*)",
        refine=_values,
    ),
    pattern(
        "rank_count",
        "batches|steps|iterations",
        expression=(
            r"\b(?:after|processed|did|has|had|saw|completed|finished|total(?: of)?"
            r"|ran)\W{1,3}(?P<count>\d+)\s+(?P<what>(?:mini-?|micro-?)?batches|steps|iterations)\b"
        ),
    ),
)
