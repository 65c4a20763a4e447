"""What the job's controller and its analysis process say to each other: MessagePack behind a length of four bytes."""

from __future__ import annotations

import struct

import msgspec

from keepstep.diagnosis.arrival import Arrival
from keepstep.errors import RecordError
from keepstep.records.events import Finding
from keepstep.records.plain_samples import PlainReport
from keepstep.records.summary import WatchReport

__all__ = ["LENGTH", "MAX_FRAME_BYTES", "Begin", "Look", "Seen", "Standing", "decode_frame", "framed"]

MAX_FRAME_BYTES = 256 * 1024 * 1024
LENGTH = struct.Struct("<I")


class Standing(msgspec.Struct, frozen=True):
    """A live finding: `key` names it through its life, `status` is new, updated or ended.

    `hard` says that a member may be replaced for it once a check on its node confirms it.
    """

    key: str
    status: str
    finding: Finding
    began_step: int | None = None
    hard: bool = False


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first frame: the job, the baseline of `earlier` (a run; empty: none), and the findings that are open.

    `hang_s` is how long a job that records nothing may stand still before that is told, and a measure of when a hang
    may be acted on.
    """

    job: str
    world: int
    hang_s: float = 5.0
    earlier: str = ""
    baseline: bytes = b""
    open: tuple[Standing, ...] = ()


class Look(msgspec.Struct, frozen=True, tag=True):
    """What came in since the last look, at wall-clock time `now`. `arrivals` is given while the job starts; `retired`
    are ranks that have ended or are being replaced.
    """

    now: float
    reports: tuple[WatchReport, ...] = ()
    plain: tuple[PlainReport, ...] = ()
    retired: tuple[int, ...] = ()
    arrivals: tuple[Arrival, ...] = ()


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The answer to every frame: what changed, and the job's own baseline where it has one."""

    changes: tuple[Standing, ...] = ()
    baseline: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Begin | Look | Seen] = msgspec.msgpack.Decoder(Begin | Look | Seen)


def framed(message: Begin | Look | Seen) -> bytes:
    """`message` as it goes over the pipe. Raises RecordError if it is too long."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise RecordError(f"a frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return LENGTH.pack(len(data)) + data


def decode_frame(data: bytes) -> Begin | Look | Seen:
    """The message in the bytes behind a length. Raises RecordError for nonsense."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"not a frame of the analysis: {error}") from error
