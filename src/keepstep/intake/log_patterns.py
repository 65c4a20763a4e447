"""What a recogniser of log lines is: words to look for first, then an expression whose named groups become fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

__all__ = ["Pattern", "PatternIndex", "events_of", "pattern"]

_Refine = Callable[[str, dict[str, str]], dict[str, str] | None]
"""Looks at line and fields and gives better fields, or None: it was not that after all."""


_START = 3
_LOOK_BACK = 80
_NO = re.compile(r"\b(?:no|without(?: any)?|zero|never(?: any)?|free of)\s+(?:[\w-]+\s+){0,2}$", re.IGNORECASE)
_ZERO = re.compile(r"(?P<before>[^\W\d]*)\W*(?<![\w.:])0\s+(?:[\w-]+\s+){0,2}$")
_NUMBERED = re.compile(
    r"(?:gpus?|cuda|device|dev|card|(?:local_)?ranks?|node|host|worker|index|slot|socket|port|link|hca|channel|line|step"
    r"|epoch|id|code)$",
    re.IGNORECASE,
)
"""Words before a 0 that is a name and no count."""
_NAMES_OF_COUNTERS = re.compile(r"\w*(?:\s+(?:count\w*|total|detected|found|seen|volatile|aggregate|errors?))*", re.I)
_NOTHING = re.compile(
    r"\s*(?:\([^)\n]{0,30}\)\s*)?[:=|]\s*(?:0+(?![\w.:])|(?:no|none|false)\s*(?=$|[,;)|]))", re.IGNORECASE
)


_ENDS_WITH_NOTHING = re.compile(r"[:=]\s*(?:0+|no|none|false)\s*$", re.IGNORECASE)


class Pattern(msgspec.Struct, frozen=True):
    """A kind of event, the lower-case `words` one of which is in every such line, and its expression."""

    kind: str
    words: tuple[str, ...]
    expression: re.Pattern[str]
    refine: _Refine | None = None
    counted: bool = False
    """Whether lines also count such events, so that one may say that there was none."""

    def fields_in(self, text: str) -> dict[str, str] | None:
        """The fields of the event in `text`; None if there is none."""
        matches = (match for match in self.expression.finditer(text) if not (self.counted and _is_none(text, match)))
        match = next(matches, None)
        if match is None:
            return None
        fields = {key: value.strip() for key, value in match.groupdict().items() if value is not None}
        return fields if self.refine is None else self.refine(text, fields)


def _is_none(text: str, match: re.Match[str]) -> bool:
    """Whether the line says of what was found that there is none of it: `0 errors`, `no error`, `errors: 0`."""
    before = text[max(0, match.start() - _LOOK_BACK) : match.start()]
    if _NO.search(before):
        return True
    name = _NAMES_OF_COUNTERS.match(text, match.end())
    end = match.end() if name is None else name.end()
    if _NOTHING.match(text, end) or _ENDS_WITH_NOTHING.search(match.group()):
        return True
    zero = _ZERO.search(before)
    many = re.search(r"s\b", text[match.start() : end]) is not None
    return zero is not None and many and _NUMBERED.match(zero["before"]) is None


class PatternIndex:
    """Many patterns, found by their words, and these by how they begin: most words of a line begin none of them."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        """Of patterns of one kind the first that fits a line counts."""
        self._by_start: dict[str, list[tuple[str, int, Pattern]]] = {}
        for number, one in enumerate(patterns):
            for word in one.words:
                self._by_start.setdefault(word[:_START], []).append((word, number, one))
        self._starts = frozenset(start for start in self._by_start if len(start) == _START)
        self._short = tuple(start for start in self._by_start if len(start) < _START)

    def fitting(self, text: str) -> tuple[Pattern, ...]:
        """The patterns whose expression is in a line, whatever its numbers then say."""
        low = text.lower()
        begun = self._starts.intersection([low[at : at + _START] for at in range(len(low) - _START + 1)])
        candidates = {
            number: one
            for start in (*begun, *self._short)
            for word, number, one in self._by_start[start]
            if word in low
        }
        return tuple(candidates[number] for number in sorted(candidates) if candidates[number].expression.search(text))


def events_of(patterns: Iterable[Pattern], text: str) -> list[tuple[str, dict[str, str]]]:
    """(kind, fields) of every event that these patterns find in a line, each kind once."""
    found: dict[str, dict[str, str]] = {}
    for one in patterns:
        if one.kind not in found and (fields := one.fields_in(text)) is not None:
            found[one.kind] = fields
    return list(found.items())


def pattern(kind: str, words: str, *, expression: str, refine: _Refine | None = None, counted: bool = False) -> Pattern:
    """A pattern; `words` are separated by `|`. Case does not matter in the expression."""
    return Pattern(kind, tuple(words.lower().split("|")), re.compile(expression, re.IGNORECASE), refine, counted)
