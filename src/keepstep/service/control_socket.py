"""The socket a run listens on for people's requests (drills, probes, moves), and its client. One JSON line each way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.errors import EnvironmentProblem, KeepstepError, MoveNotMade, NoAnswer, UsageError
from keepstep.records.drills import DrillRequest
from keepstep.records.moves import MoveRequest
from keepstep.service.run_directory import is_closed, is_left, is_running, not_allowed, read_run

__all__ = [
    "DrillTaker",
    "MoveTaker",
    "ProbeRequest",
    "ProbeTaker",
    "ask_drill",
    "ask_move",
    "ask_probe",
    "serve_control",
]

_MAX_LINE_BYTES = 1 << 17
"""A request that names 16,384 ranks one by one takes 96 KiB."""
_MAX_REPLY_BYTES = 1 << 23
_CLIENT_S = 5.0
_PROBE_S = 150.0
_MOVE_S = 3600.0
_CREDENTIALS = struct.Struct("3i")


class DrillTaker(Protocol):
    """Whoever carries drills out."""

    def __call__(self, request: DrillRequest) -> str:
        """Inject a fault; returns what will happen. Raises UsageError for nonsense."""


class ProbeTaker(Protocol):
    """Whoever carries probes out."""

    async def __call__(self, number: int) -> str:
        """Probe finding `number`; returns what is left of its suspects. Raises UsageError for nonsense."""


class MoveTaker(Protocol):
    """Whoever moves ranks."""

    async def __call__(self, request: MoveRequest) -> str:
        """Move ranks; returns what will happen or how it went. Raises UsageError for nonsense, MoveNotMade."""


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run the probe of finding `probe`."""

    probe: int


async def serve_control(name: str, *, drill: DrillTaker, probe: ProbeTaker, move: MoveTaker) -> asyncio.Server:
    """Answer requests on the abstract socket `name`; those that take them say what will happen, or raise."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            if _same_user(writer.get_extra_info("socket")):
                line = await asyncio.wait_for(reader.readline(), _CLIENT_S)
                reply = await _reply(line, drill=drill, probe=probe, move=move)
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_unix_server(answer, path="\0" + name, limit=_MAX_LINE_BYTES)
    except OSError as error:
        raise EnvironmentProblem(f"cannot listen for drills: {error.strerror}", where=name) from error


def ask_drill(directory: Path, request: DrillRequest) -> str:
    """Have the run in `directory` inject a fault; returns what it answers.

    Raises UsageError if it is over, NoAnswer where it has no controller or gets no answer.
    """
    return _ask(directory, msgspec.json.encode(request), what="a drill", limit_s=_CLIENT_S)


def ask_probe(directory: Path, number: int) -> str:
    """Have the run in `directory` probe finding `number`; returns what is left.

    Raises UsageError if it is over, NoAnswer where it has no controller or gets no answer.
    """
    return _ask(directory, msgspec.json.encode(ProbeRequest(number)), what="a probe", limit_s=_PROBE_S)


def ask_move(directory: Path, request: MoveRequest) -> str:
    """Have the run in `directory` move ranks; returns what will happen or, with `wait`, how it went.

    Raises UsageError if it makes no sense or the run is over, MoveNotMade if the move was given up, NoAnswer.
    """
    limit_s = _MOVE_S if request.wait else _CLIENT_S
    return _ask(directory, msgspec.json.encode(request), what="a move", limit_s=limit_s)


def _ask(directory: Path, request: bytes, *, what: str, limit_s: float) -> str:
    facts = read_run(directory)
    if not facts.control:
        raise UsageError("this is the directory of an agent", where=str(directory), remedy="give the controller's")
    if not is_running(directory):
        raise _unheard(directory, facts.job, what=what)
    if len(request) >= _MAX_LINE_BYTES:
        raise UsageError(
            f"{what} with a request of {len(request)} bytes, at most {_MAX_LINE_BYTES - 1} are taken",
            remedy="name fewer ranks at once, or a node",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit_s)
        try:
            connection.connect("\0" + facts.control)
            connection.sendall(request + b"\n")
        except OSError as error:
            raise _unheard(directory, facts.job, what=what) from error
        try:
            with connection.makefile("rb") as file:
                reply = json.loads(file.readline(_MAX_REPLY_BYTES))
        except (OSError, ValueError) as error:
            why = f"{what} was asked for, and the controller ended or did not answer"
            raise NoAnswer(why, where=str(directory), remedy="what came of it is in `keepstep report`") from error
    if not reply.get("ok"):
        kind = MoveNotMade if reply.get("code") == MoveNotMade.exit_code else UsageError
        raise kind(str(reply.get("say", "refused")), where=str(directory))
    return str(reply.get("say", ""))


def _unheard(directory: Path, job: str, *, what: str) -> KeepstepError:
    """Why nobody takes a request: the run is over, has no controller at the moment, or is another user's."""
    where = str(directory)
    if is_closed(directory):
        return not_allowed(directory)
    if not is_left(directory):
        return UsageError(
            f"run {job} is over", where=where, remedy=f"{what} needs a running job; see `keepstep report`"
        )
    if is_running(directory):
        return NoAnswer(f"the controller of run {job} takes over or ends", where=where, remedy="try again in a moment")
    return NoAnswer(
        f"the controller of run {job} is gone, and nobody has taken over from it",
        where=where,
        remedy="start `keepstep resume` with this directory while the agents wait, then try again",
    )


async def _reply(line: bytes, *, drill: DrillTaker, probe: ProbeTaker, move: MoveTaker) -> dict[str, Any]:
    try:
        request = _request(line)
        if isinstance(request, DrillRequest):
            say = drill(request)
        else:
            say = await (probe(request.probe) if isinstance(request, ProbeRequest) else move(request))
        return {"ok": True, "say": say}
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return {"ok": False, "say": f"not a request: {error}", "code": UsageError.exit_code}
    except KeepstepError as error:
        return {"ok": False, "say": str(error), "code": error.exit_code}


def _request(line: bytes) -> DrillRequest | ProbeRequest | MoveRequest:
    """Raises msgspec's errors for anything that is none of them."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.json.decode(line, type=ProbeRequest)
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.json.decode(line, type=MoveRequest)
    return msgspec.json.decode(line, type=DrillRequest)


def _same_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] in (os.getuid(), 0))
