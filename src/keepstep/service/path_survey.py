"""A catalogue of source ports from this host to a listening port: by the best method that is allowed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from keepstep.errors import EnvironmentProblem, KeepstepError, TransportError, UsageError
from keepstep.records.plan import Catalogue
from keepstep.service.clock import Clock
from keepstep.service.path_load import ports_by_load
from keepstep.service.path_probing import (
    MAX_PORTS,
    Target,
    Times,
    handshakes,
    hops_by_port,
    raw_allowed,
    taken_ports,
)
from keepstep.traffic.catalogue import catalogue_of

__all__ = ["Method", "SurveyRequest", "port_range", "survey"]

Method = Literal["auto", "ttl", "round_trip"]
_TIMED_PER_PATH = 3


class SurveyRequest(msgspec.Struct, frozen=True):
    """What to find out: the paths of `ports` to `target`, `ttl` hops away; `hop_names` translates their addresses."""

    target: Target
    ports: tuple[int, ...]
    ttl: int = 2
    method: Method = "auto"
    token: str = ""
    hop_names: Mapping[str, str] = {}


def port_range(text: str) -> tuple[int, ...]:
    """The ports of `FIRST-LAST`. Raises UsageError for nonsense, privileged or too many ports."""
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)):
        raise UsageError(f"ports {text!r}", remedy="give FIRST-LAST, such as 42000-42063")
    low, high = int(first), int(last or first)
    if not 1024 <= low <= high <= 65535 or high - low >= MAX_PORTS:
        raise UsageError(f"ports {text}", remedy=f"give at most {MAX_PORTS} ports between 1024 and 65535")
    return tuple(range(low, high + 1))


def survey(request: SurveyRequest, *, clock: Clock) -> Catalogue:
    """The catalogue, as of now. Raises TransportError where nobody listens, EnvironmentProblem where neither raw
    sockets nor a sink and its token are there, no switch tells where a packet died, or waiting cannot tell inside this
    host; UsageError for the method round_trip without a token."""
    by_ttl = request.method == "ttl" or (request.method == "auto" and raw_allowed())
    if by_ttl and not raw_allowed():
        raise EnvironmentProblem("raw sockets are not allowed", remedy="run with CAP_NET_RAW, or --method round_trip")
    if not by_ttl:
        _check_waiting(request)
    return _by_ttl(request, clock) if by_ttl else _by_load(request, clock)


def _check_waiting(request: SurveyRequest) -> None:
    """Whether paths can be told apart by waiting behind a load."""
    sink = "start `keepstep traffic sink` at the other end and give its --token-file"
    if not request.token and request.method == "round_trip":
        raise UsageError("no token for a sink is given", remedy=sink)
    if not request.token:
        what = "raw sockets are not allowed here, and no token for a sink is given"
        raise EnvironmentProblem(what, remedy=f"run with CAP_NET_RAW, or {sink}")
    if request.target.source == request.target.destination:
        what = "the target is this host: no path to it can be told from another by waiting"
        raise EnvironmentProblem(what, where=request.target.destination, remedy="give another host")


def _by_ttl(request: SurveyRequest, clock: Clock) -> Catalogue:
    target = request.target
    hops = hops_by_port(target, request.ports, ttl=request.ttl, clock=clock)
    paths = {port: (request.hop_names.get(hop, hop),) for port, hop in hops.items()}
    by_path: dict[tuple[str, ...], list[int]] = {}
    for port, path in paths.items():
        by_path.setdefault(path, []).append(port)
    unknown = [port for port in request.ports if port not in paths]
    timed = [port for ports in by_path.values() for port in ports[:_TIMED_PER_PATH]]
    times = handshakes(target, timed, clock=clock)
    asked = 0
    while asked < len(unknown):  # some of them, as far as they are not in use here
        some = handshakes(target, unknown[asked : asked + 2 * _TIMED_PER_PATH], clock=clock)
        times = Times(times.round_trip_s | some.round_trip_s, times.silent + some.silent, times.taken + some.taken)
        asked += 2 * _TIMED_PER_PATH
        if some.round_trip_s or some.silent:
            break
    if not times.round_trip_s:
        raise _nobody(target, times)
    if not by_path:
        raise EnvironmentProblem(
            f"no switch answers after {request.ttl} hops: the target is nearer, or switches there say nothing",
            where=f"{target.destination}:{target.port}",
            remedy="give another --ttl, or --method round_trip",
        )
    taken = taken_ports(target, unknown[asked:]).union(times.taken)
    found = catalogue_of(
        (target.source, f"{target.destination}:{target.port}"),
        paths,
        wall=clock.wall(),
        method="ttl",
        round_trip_s=times.round_trip_s,
        silent=frozenset(times.silent).union(unknown) - taken,
    )
    return msgspec.structs.replace(found, taken=tuple(sorted(taken)))


def _by_load(request: SurveyRequest, clock: Clock) -> Catalogue:
    target = request.target
    times = handshakes(target, request.ports, clock=clock)
    if not times.round_trip_s:
        raise _nobody(target, times)
    groups = ports_by_load(target, tuple(times.round_trip_s), token=request.token, clock=clock)
    paths = {port: (f"path{number}",) for number, group in enumerate(groups) for port in group}
    found = catalogue_of(
        (target.source, f"{target.destination}:{target.port}"),
        paths,
        wall=clock.wall(),
        method="round_trip",
        round_trip_s=times.round_trip_s,
        silent=frozenset(times.silent),
    )
    return msgspec.structs.replace(found, taken=times.taken)


def _nobody(target: Target, times: Times) -> KeepstepError:
    """No port got an answer: because the other end says nothing, or because none could ask."""
    if not times.silent:
        return EnvironmentProblem("all source ports are in use", remedy="give other --ports")
    where = f"{target.destination}:{target.port}"
    return TransportError("nobody answers there", where=where, remedy="give a host and port that listens")
