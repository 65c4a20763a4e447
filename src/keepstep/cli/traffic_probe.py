"""Commands that look at real paths: `keepstep traffic probe` and the sink it may need at the other end."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from keepstep.cli.options import Printed, TextOrJson

__all__ = ["ProbeMethod", "probe", "sink"]

_TokenFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Secret shared with the sink, mode 0600.")]


class ProbeMethod(StrEnum):
    """How paths are told apart."""

    auto = "auto"
    ttl = "ttl"
    round_trip = "round_trip"


def probe(
    target: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A listening TCP port at the other end.")],
    ports: Annotated[str, typer.Option(help="Source ports to try, FIRST-LAST.")] = "42000-42063",
    ttl: Annotated[int, typer.Option(min=1, max=32, help="Hops to the switches that tell paths apart.")] = 2,
    method: Annotated[
        ProbeMethod, typer.Option(help="ttl needs CAP_NET_RAW, round_trip a sink; auto: what is allowed.")
    ] = ProbeMethod.auto,
    token_file: _TokenFile = None,
    into: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the catalogue there as JSON, too.")] = None,
    format: Printed = TextOrJson.text,
) -> int:
    """Learn which source port takes which path to another host, and what is slow or bad; exit code 1 if anything is."""
    import msgspec

    from keepstep.errors import UsageError
    from keepstep.service.clock import SystemClock
    from keepstep.service.path_probing import resolved
    from keepstep.service.path_survey import SurveyRequest, port_range, survey
    from keepstep.service.path_text import catalogue_text
    from keepstep.service.token import read_token
    from keepstep.service.traffic_files import write_text

    host, colon, port = target.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UsageError(f"target {target!r}", remedy="give HOST:PORT of something that listens")
    request = SurveyRequest(
        resolved(host, int(port)),
        port_range(ports),
        ttl=ttl,
        method=method.value,
        token=read_token(token_file) if token_file else "",
    )
    found = survey(request, clock=SystemClock())
    document = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    if into is not None:
        write_text(into, document + "\n")
    print(document if format is TextOrJson.json else catalogue_text(found))
    return int(any(one.state != "good" for one in found.ports))


def sink(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of this host.")] = "127.0.0.1:29470",
    token_file: _TokenFile = None,
    seconds: Annotated[float, typer.Option(min=1, max=86400, help="Ends by itself after so long.")] = 600.0,
) -> int:
    """Swallow the load of `probe --method round_trip` from another host that knows the token."""
    import threading

    from keepstep.errors import UsageError
    from keepstep.service.path_load import LoadSink
    from keepstep.service.token import make_token

    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 65536):
        raise UsageError(f"address {listen!r}", remedy="give HOST:PORT")
    if token_file is None:
        raise UsageError("no token file is given", remedy="give --token-file FILE; it is made if it is not there")
    listener = LoadSink((host, int(port)), token=make_token(token_file))
    print(f"keepstep: sink at {host}:{listener.port} for {seconds:g} s; give {token_file} to `keepstep traffic probe`")
    threading.Event().wait(seconds)
    listener.close()
    return 0
