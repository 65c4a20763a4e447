"""What an event of a log can mean for a fault: hard evidence, a cause of its own, or only a symptom that others see."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from keepstep.records.evidence import LogEvent
from keepstep.records.finding import FindingKind, Layer

__all__ = ["FaultLine", "Strength", "field_says"]

Strength = Literal["hard", "cause", "symptom"]


class FaultLine(msgspec.Struct, frozen=True):
    """What an event of one kind means. `says` is for people; `then` is what would make it certain or what to do."""

    event: str
    strength: Strength
    kind: FindingKind
    layer: Layer
    confidence: float
    says: str
    then: str
    when: Callable[[LogEvent], bool] | None = None


def field_says(name: str, form: str) -> Callable[[LogEvent], bool]:
    """A condition: the field `name` of an event has something that the expression `form` finds, in any case."""
    expression = re.compile(form, re.IGNORECASE)
    return lambda event: expression.search(event.fields.get(name, "")) is not None
