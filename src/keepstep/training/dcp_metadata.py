"""The `.metadata` of a checkpoint, by which `torch.distributed.checkpoint` finds every item: made of what all ranks
noted beside their data, by whichever rank is the last one ready, without any collective. keepstep reads nothing of it
but the hash at its end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from keepstep.training.dcp_items import ItemPlace
from keepstep.training.dcp_names import Part, Value

__all__ = ["METADATA", "Contents", "has_whole_metadata", "write_metadata"]

METADATA = ".metadata"
_MARK = b"\nkeepstep sha256 "
_Content = tuple[str, tuple[int, ...], str]  # dtype, shape, digest


class Contents(msgspec.Struct, frozen=True):
    """What the data file of one rank holds: for every entry its type, shape, part and place, and where values are."""

    file: str
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    parts: list[Part]
    places: list[ItemPlace]
    values: list[Value]
    value_places: list[ItemPlace]


def write_metadata(place: Path, contents: Iterable[Contents], *, rank: int) -> None:
    """Write `.metadata` into `place`; several ranks may do so at once. Raises OSError.

    Where two ranks have tensors of the same name and another size or content, which plain DCP cannot tell apart (stages
    that name their layers alike, experts), the later one's own part stands for itself, with the file's name in front.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata

    building = _Building()
    for one in contents:
        building.add(one)
    own = place / f".metadata-{rank}"
    own.mkdir(exist_ok=True)
    try:
        metadata = Metadata(building.state, planner_data=building.paths)
        FileSystemWriter(own, sync_files=True).finish(metadata, [building.results])
        _add_hash(own / METADATA)
        (own / METADATA).replace(place / METADATA)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def has_whole_metadata(place: Path) -> bool:
    """Whether `.metadata` in `place` is there and ends with its own hash. Raises OSError."""
    try:
        data = (place / METADATA).read_bytes()
    except FileNotFoundError:
        return False
    body, mark, digest = data.rpartition(_MARK)
    return bool(mark) and digest == hashlib.sha256(body).hexdigest().encode()


def _add_hash(path: Path) -> None:
    """Put the hash of a file behind its end, where whoever unpickles it stops before."""
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
        file.write(_MARK + digest.encode())
        file.flush()
        os.fsync(file.fileno())


class _Building:
    """The metadata so far."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.results: list[object] = []
        self._known: dict[tuple[str, tuple[int, ...]], _Content] = {}

    def add(self, one: Contents) -> None:
        """The items of one rank."""
        for dtype, shape, part, place in zip(one.dtypes, one.shapes, one.parts, one.places, strict=True):
            self._tensor(part, dtype, shape=shape, place=place, file=one.file)
        for value, place in zip(one.values, one.value_places, strict=True):
            self._value(value, place, file=one.file)

    def _tensor(self, part: Part, dtype: str, *, shape: tuple[int, ...], place: ItemPlace, file: str) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        if 0 in shape and 0 not in part.size:
            return
        content = (dtype, shape, place.digest)
        if not self._fits(part, content):
            part = Part(f"{file.removesuffix('.distcp')}/{part.name}", shape, (0,) * len(shape))
        name, found = part.name, self.state.get(part.name)
        if found is None:
            found = TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(part.size), [])
            self.state[name] = found
            self.paths.setdefault(name, tuple(name.split(".", 1)) if "." in name else (name,))
        if (name, part.offsets) in self._known:
            return
        self._known[name, part.offsets] = content
        assert isinstance(found, TensorStorageMetadata)
        found.chunks.append(ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(shape)))
        self._item(name, place, offsets=part.offsets, file=file)

    def _fits(self, part: Part, content: _Content) -> bool:
        """Whether the tensor that has this name so far can be the one that `part` is of."""
        found = self.state.get(part.name)
        return found is None or (
            getattr(found, "size", None) == torch.Size(part.size)
            and self._known.get((part.name, part.offsets), content) == content
        )

    def _value(self, value: Value, place: ItemPlace, *, file: str) -> None:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        if value.name not in self.state:
            self.state[value.name] = BytesStorageMetadata()
            self.paths[value.name] = value.path
            self._item(value.name, place, offsets=None, file=file)

    def _item(self, name: str, place: ItemPlace, *, offsets: tuple[int, ...] | None, file: str) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        index = MetadataIndex(name, None if offsets is None else torch.Size(offsets))
        self.results.append(WriteResult(index, place.length, _StorageInfo(file, place.offset, place.length)))
