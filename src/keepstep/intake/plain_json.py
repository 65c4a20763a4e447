"""JSON of other tools: bounded, and as much of it as is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from keepstep.errors import RecordError

__all__ = ["is_json_line", "items_of_torn_list", "parsed_json", "several_json"]

_DAMAGE = (ValueError, RecursionError)


def parsed_json(content: bytes) -> Any:
    """The value of a JSON document in UTF-8 (damaged characters are replaced). Raises RecordError if it is none."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(content.decode("utf-8", "replace"))
    except _DAMAGE as problem:
        raise RecordError(f"not JSON: {str(problem)[:100]}") from None


def is_json_line(content: bytes) -> bool:
    """Whether the first line is a whole JSON object, as in logs of one object a line."""
    try:
        return isinstance(json.loads(content.lstrip().split(b"\n", 1)[0].decode("utf-8", "replace")), dict)
    except _DAMAGE:
        return False


def several_json(content: bytes) -> Iterator[Any]:
    """The JSON values that follow each other in `content` (one a line, or one after another); stops at damage.

    A line that is no JSON is skipped if the next one is JSON again.
    """
    text = content.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    at = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,;\ufeff":
            at += 1
        if at >= len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
            yield value
        except _DAMAGE:
            following = text.find("\n", at)
            if following < 0:
                return
            at = following + 1


def items_of_torn_list(content: bytes, key: str) -> list[Any]:
    """The whole items of the list under `key` in a JSON document that is cut off or damaged behind them."""
    text = content.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    at = text.find(f'"{key}"')
    at = text.find("[", at) + 1 if at >= 0 else 0
    items: list[Any] = []
    while at > 0:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except _DAMAGE:
            break
        items.append(value)
    return items
