"""What a person writes around a log: which ranks did not do something, how many there are, what changes.

These are claims, not records: events of these patterns carry `claimed`, and diagnosis trusts them less.
"""

from __future__ import annotations

import re

from keepstep.intake.log_patterns import Pattern, pattern
from keepstep.intake.phase_text import phase_word

__all__ = ["NOTE_PATTERNS"]

_LIST = r"(?P<ranks>\d+(?:\s*(?:,|and|&|-|to)\s*(?:and\s*)?\d+)*)"
_COUNT = r"(?:\d{1,6}|one|two|three|four|five|six|seven|eight|nine|ten)"
_NAMES = re.compile(r"\b(?:(?:node|rank|host|gpu|worker)[ _-]?\d+)\b", re.IGNORECASE)
_CURED = r"(?:it works|works|no (?:more )?hang\w*|fixed|resolved|solved|goes away|disappears?|runs fine|trains fine)"
_COUNT_WORDS = {
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}


def _claimed(_: str, fields: dict[str, str]) -> dict[str, str]:
    return fields | {"claimed": "yes"}


def _captures(text: str, fields: dict[str, str]) -> dict[str, str] | None:
    """Several captures, each naming one that stood apart: at least three names in a row."""
    tail = text[text.lower().rfind(fields["where"].lower()) :]
    everything = _NAMES.findall(text)
    names = [name.lower().replace(" ", "") for name in _NAMES.findall(tail)]
    if len(names) < 3:
        names = [name.lower().replace(" ", "") for name in everything]
    return {"names": " ".join(names), "where": fields["where"], "claimed": "yes"} if len(names) >= 3 else None


def _scaling(_: str, fields: dict[str, str]) -> dict[str, str]:
    return fields | {"high": fields.get("high", fields["low"]), "phase": phase_word(fields["what"])}


def _world(_: str, fields: dict[str, str]) -> dict[str, str] | None:
    word = (fields.get("world") or fields["world_2"]).lower()
    number = _COUNT_WORDS.get(word, word)
    return {"world": number, "claimed": "yes"} if int(number) > 1 else None


NOTE_PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "note_lack",
        "rank",
        expression=(
            rf"\branks? {_LIST},? (?:\w+ )?(?:never|do(?:es)? ?n[o']t|did ?n[o']t|ha(?:ve|s) ?n[o']t"
            rf"|failed to|fails? to|not yet|still (?:has|have) not) (?P<what>[^.;\n]{{3,120}})"
        ),
        refine=_claimed,
    ),
    pattern(
        "note_stand",
        "rank",
        expression=(
            rf"\branks? {_LIST},? (?:is|are|was|were|remains?|stays?|sits?|stands?|keeps?|hangs?"
            r"|blocks?|waits?)?\s?(?:still |all |both )?(?:stuck|blocked|hanging|hung|waiting|standing"
            rf"|sitting|stands?|waits?)?\s?(?:in|at|on|inside|for) (?P<what>[^.;\n]{{3,120}})"
        ),
        refine=_claimed,
    ),
    pattern(
        "note_only",
        "only",
        expression=rf"(?P<what>[^.;\n]{{3,100}}?)\b(?:only|just) (?:on|by|in) ranks? {_LIST}\b"
        rf"|only ranks? (?P<ranks_2>\d+) (?P<what_2>[^.;\n]{{3,100}})",
        refine=lambda _, fields: {key.removesuffix("_2"): value for key, value in fields.items()} | {"claimed": "yes"},
    ),
    pattern(
        "note_hang",
        "hang|hung|stuck|freez|frozen|deadlock|stops",
        expression=r"\b(?:hangs?|hanging|hung|(?:gets?|got|is|are|stays?) stuck|freezes|frozen|dead-?lock(?:s|ed)?"
        r"|stops (?:after|at|responding|forever|without))\b",
        refine=_claimed,
    ),
    pattern(
        "note_bug",
        "known bug|known issue|fixed in|regression|upgrad|downgrad",
        expression=r"\bknown (?:bug|issue|defect)\b|\bfixed in (?:version |v)?\d+\.\d+|\bregression (?:in|since|from)\b"
        r"|\b(?:after|since) (?:the )?(?:up|down)grad\w+\b[^.\n]{0,60}",
        refine=_claimed,
    ),
    pattern(
        "note_cure",
        "nccl_|disabl|off",
        expression=rf"(?P<switched>(?:disabl\w+|(?:switch|turn)\w* off)[^.\n]{{0,30}}?\b(?:ACS|IOMMU|VT-d"
        r"|custom[- _]all[- _]?reduce|NVLS|SHARP|GPU ?Direct))\b[^\n]{0,60}?"
        rf"\b{_CURED}"
        r"|\b(?:with|after|when|setting|if I set|export(?:ing)?)\b[^.\n]{0,30}?(?P<setting>(?:NCCL"
        r"|TORCH|GLOO|CUDA)_\w+)(?:\s?=\s?\w+)?"
        rf"[^\n]{{0,60}}?\b{_CURED}",
        refine=_claimed,
    ),
    pattern(
        "note_same",
        "same",
        expression=rf"\branks? {_LIST}\b[^\n]{{0,20}}?\bsame\b[^\n]{{0,40}}?\b(?:as|like) rank (?P<like>\d+)",
        refine=_claimed,
    ),
    pattern(
        "note_rotates",
        "slow|straggl|late",
        expression=(
            r"(?:slowest|slow|straggl\w+|late\w*) (?:rank|worker|process|gpu"
            r"|one)[^.\n]{0,40}?(?:rotat\w*|chang\w*|var(?:y|ies)|differ\w*|moves?|random\w*)"
            r"|(?:rotating|random|different|another) (?:straggler|slow(?:est)? rank"
            r"|rank (?:is )?slow)[^.\n]{0,30}"
        ),
        refine=_claimed,
    ),
    pattern(
        "note_captures",
        "captur|dump|snapshot|sample",
        expression=(
            r"(?:captures?|dumps?|snapshots?|samples?)[^\n]{0,400}?(?P<where>ahead|behind|late|missing|apart"
            r"|differ\w*|elsewhere)"
        ),
        refine=_captures,
    ),
    pattern(
        "note_scaling",
        "rank|process|worker|gpu",
        expression=r"(?P<what>[A-Za-z][\w /()-]{2,50}?),? (?P<number>\d+) (?:ranks?|process(?:es)?|workers?|GPUs?)"
        r"(?: (?:on|per|in|at) (?:the |a |one |each )?(?:node|host|machine|socket))?\W{1,4}(?P<low>\d+(?:\.\d+)?)"
        r"(?:\s*(?:-|to)\s*(?P<high>\d+(?:\.\d+)?))? ?(?P<unit>ms|us|s)\b",
        refine=_scaling,
    ),
    pattern(
        "note_world",
        "gpu|rank|process",
        expression=rf"\b(?P<world>{_COUNT})-(?:GPU|rank|process)\b"
        rf"|(?:^|\b(?:on|with|across|using|over|of) )(?P<world_2>{_COUNT}) (?:\w+ )?(?:GPUs|ranks|processes)\b"
        r"(?! per\b)",
        refine=_world,
    ),
)
