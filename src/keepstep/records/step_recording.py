"""The recording of a role kind's first steps: what its collectives gave. A file with a key, bounded when read.

Layout: 8 bytes of magic, then one MessagePack map. Only numbers are kept; payloads of plain bytes (which may be
pickled objects) never are, so that nothing read from a file can reach an unpickler.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from keepstep.errors import RecordError, UsageError

__all__ = [
    "HEAD_BYTES",
    "MAX_CALLS",
    "MAX_RECORDING_BYTES",
    "RecordedCall",
    "Recording",
    "RecordingKey",
    "check_key",
    "decode_recording",
    "encode_recording",
]

MAX_RECORDING_BYTES = 8 * 1024 * 1024
"""Most bytes of one recording file."""

MAX_CALLS = 20_000
"""Most collectives of one recording."""

HEAD_BYTES = 64 * 1024
"""What is kept of one output at most, from its beginning."""

_MAGIC = b"KSTEP\x00\x01\n"
_MOST_OUTPUTS = 4096

_Name = Annotated[str, Meta(max_length=256)]
_Outputs = Annotated[tuple[int, ...], Meta(max_length=_MOST_OUTPUTS)]
_Heads = Annotated[tuple[bytes, ...], Meta(max_length=_MOST_OUTPUTS)]


class RecordingKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a recording is of; another job, script, world, layout (`kind`) or version is another key."""

    job: _Name
    script: _Name
    world: Annotated[int, Meta(ge=1)]
    kind: _Name
    keepstep: _Name
    torch: _Name
    python: _Name


class RecordedCall(msgspec.Struct, frozen=True, array_like=True):
    """One call: its group by name, the numbers of operation and element type, the peer or root, the tag.

    `sizes` are the bytes of its outputs, `heads` what was kept of each from its beginning (empty: nothing).
    """

    group: _Name
    op: Annotated[int, Meta(ge=1, le=255)]
    element: Annotated[int, Meta(ge=0, le=255)]
    peer: int
    tag: int
    sizes: _Outputs
    heads: _Heads


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All calls of the set-up and the first steps of `rank`, in the order they were made."""

    key: RecordingKey
    rank: Annotated[int, Meta(ge=0)]
    calls: Annotated[tuple[RecordedCall, ...], Meta(max_length=MAX_CALLS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Recording)


def encode_recording(recording: Recording) -> bytes:
    """The bytes of a file. Raises RecordError if they are more than MAX_RECORDING_BYTES."""
    data = _MAGIC + _encoder.encode(recording)
    if len(data) > MAX_RECORDING_BYTES:
        raise RecordError(f"the recording has {len(data)} bytes, at most {MAX_RECORDING_BYTES} are kept")
    return data


def decode_recording(data: bytes, *, where: str = "") -> Recording:
    """The recording in `data`, read at `where`. Raises RecordError for anything else, too much, or another version."""
    if len(data) > MAX_RECORDING_BYTES:
        raise RecordError(f"recording larger than {MAX_RECORDING_BYTES} bytes refused", where=where)
    if data[: len(_MAGIC)] != _MAGIC:
        raise RecordError("not a recording of this version", where=where)
    try:
        recording = _decoder.decode(data[len(_MAGIC) :])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"damaged recording: {error}", where=where) from error
    for call in recording.calls:
        if len(call.heads) != len(call.sizes) or any(
            len(head) > min(size, HEAD_BYTES) for head, size in zip(call.heads, call.sizes, strict=True)
        ):
            raise RecordError("damaged recording: heads do not fit their outputs", where=where)
    return recording


def check_key(found: RecordingKey, wanted: RecordingKey, *, where: str = "") -> None:
    """Raises UsageError naming the first field in which `found` is another recording than `wanted`."""
    for field in RecordingKey.__struct_fields__:
        have, want = getattr(found, field), getattr(wanted, field)
        if have != want:
            raise UsageError(
                f"the recording is of another {field} ({have}, not {want}): it is not used",
                where=where,
                remedy="each job records its own first steps; do not copy recordings between run directories",
            )
