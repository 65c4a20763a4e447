"""The file in which a person declares what a job sends: its layout, the collectives of a step. See docs/traffic.md."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.bounded_yaml import parse_yaml
from keepstep.intake.hostlist import checked_names, every_host
from keepstep.records.demand import JobLayout

__all__ = ["read_job"]

_KEY = "keepstep_job"
_SHORT = {"bytes": "nbytes", "start": "start_s", "end": "end_s", "op": "operation"}


def read_job(text: str, *, where: str = "") -> JobLayout:
    """The layout in `text`. Raises RecordError with the place of the first mistake."""
    body = parse_yaml(text, where=where)
    if not isinstance(body, dict) or body.pop(_KEY, None) != 1:
        raise RecordError(f"not a job file: it does not say `{_KEY}: 1`", where=where, remedy="see docs/traffic.md")
    hosts = body.get("hosts")
    if isinstance(hosts, str):
        body["hosts"] = every_host(hosts)
    elif isinstance(hosts, list):
        body["hosts"] = [name for one in hosts for name in every_host(str(one))]
    if isinstance(body.get("collectives"), list):
        _check_bytes(body["collectives"], where)
        body["collectives"] = [_long(one) for one in body["collectives"]]
    try:
        layout = msgspec.convert(body, JobLayout, strict=False)
    except msgspec.ValidationError as error:
        raise RecordError(f"not a job: {error}", where=where, remedy="see docs/traffic.md") from error
    checked_names((layout.job, *layout.hosts), where=where)
    return layout


def _check_bytes(collectives: list[Any], where: str) -> None:
    """Raises RecordError for a collective that does not say how much it sends."""
    for number, one in enumerate(collectives, 1):
        if isinstance(one, dict) and not {"bytes", "nbytes"} & one.keys():
            raise RecordError(
                f"not a job: collective {number} has no `bytes`", where=where, remedy="see docs/traffic.md"
            )


def _long(collective: Any) -> Any:
    """The short words of the file as fields of the record; numbers written as text (1e9) as numbers."""
    if not isinstance(collective, dict):
        return collective
    return {_SHORT.get(str(key), str(key)): _number(value) for key, value in collective.items()}


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
