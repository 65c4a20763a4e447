"""YAML from people, read within bounds: no aliases (they can multiply without end), no deep nesting, no odd tags."""

from __future__ import annotations

from typing import Any

import yaml

from keepstep.errors import RecordError

__all__ = ["parse_yaml"]

_MOST_EVENTS = 6_000_000
_DEEPEST = 24
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, *, where: str = "") -> Any:
    """The plain values in `text`. Raises RecordError for what is no YAML or beyond the bounds, with the line."""
    depth = 0
    try:
        for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
            if isinstance(event, yaml.AliasEvent):
                raise RecordError(
                    "YAML aliases (*name) are not read", where=f"{where} line {event.start_mark.line + 1}"
                )
            depth += isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent))
            depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
            if depth > _DEEPEST or number > _MOST_EVENTS:
                raise RecordError("too deeply nested or too long", where=where)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - the safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where} line {mark.line + 1}" if mark is not None else where
        raise RecordError(f"not YAML: {getattr(error, 'problem', None) or error}", where=place.strip()) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not YAML: {error}", where=where) from error
