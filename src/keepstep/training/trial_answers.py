"""What a trial's collectives give back: what members that had their trial before really sent, else something plausible.

Reductions are answered as if all members had given the same; a broadcast, scatter or receive gives the bytes which the
other side sent in its own trial, if they are few, else those that another rank sent at the same line.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from keepstep.records.operations import element_name
from keepstep.training.local_answers import answer_locally
from keepstep.training.plane import Call, Op, Reduction

__all__ = ["Answers", "Sent"]

_MOST_BYTES = 65536
_MOST_IN_ALL = 16 * 1024 * 1024
_MOST_IN_FILE = 64 * 1024 * 1024

_Span = tuple[int, int]


class Sent(msgspec.Struct, frozen=True):
    """Bytes of one call: `exact` names the call for one receiver, `alike` what another rank would call the same."""

    exact: str
    alike: str
    data: bytes


class Answers:
    """Reads what earlier trials left in `directory` and keeps what this one sends.

    `starve` is called with the rank whose trial has to come first.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = directory / f"rank-{rank}.sent"
        self._rank = rank
        self._exact: dict[str, bytes] = {}
        self._alike: dict[str, bytes] = {}
        self._kept: list[Sent] = []
        self._bytes = 0
        self.starve: Callable[[int], None] = lambda peer: None
        self._times: Counter[str] = Counter()
        for path in sorted(directory.glob("rank-*.sent")):
            if path.stat().st_size <= _MOST_IN_FILE:
                for one in msgspec.msgpack.decode(path.read_bytes(), type=list[Sent]):
                    self._exact.setdefault(one.exact, one.data)
                    self._alike.setdefault(one.alike, one.data)

    def write(self) -> None:
        """Leave what this trial sent to later ones."""
        part = self._file.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(self._kept))
        part.replace(self._file)

    def fill(self, call: Call, own: int, *, ranks: tuple[int, ...], where: str, needed: bool) -> None:
        """Fill the outputs of `call` for group rank `own` of the group of global `ranks`; `where` names its line.

        `needed`: nothing but what the other side sends will do (an object): `starve` is called if that is not known.
        """
        if call.op in (Op.SEND, Op.RECV):
            self._transfer(call, own, ranks=ranks, needed=needed)
        elif call.op is Op.BROADCAST:
            name = self._numbered(f"broadcast {call.root} {hash(ranks)}")
            if call.root == own:
                self._keep(name, call.inputs, alike=where)
            elif not self._put(name, call.outputs, alike=where) and needed:
                self.starve(ranks[call.root])
        elif call.op is Op.SCATTER:
            self._scatter(call, own, ranks=ranks, where=where, needed=needed)
        else:
            answer_locally(call, own)
            _as_if_by_all(call, len(ranks))

    def _transfer(self, call: Call, own: int, *, ranks: tuple[int, ...], needed: bool) -> None:
        """A send is kept, a receive answered: by the same transfer, or by the one between the same places of a group of
        the same size."""
        pair = (own, call.peer) if call.op is Op.SEND else (call.peer, own)
        who = [ranks[place] if 0 <= place < len(ranks) else -1 for place in pair]
        name = self._numbered(f"send {who} {call.tag}")
        alike = self._numbered(f"send {pair} of {len(ranks)} {call.tag}")
        if call.op is Op.SEND:
            self._keep(name, call.inputs, alike=alike)
        elif not self._put(name, call.outputs, alike=alike):
            for address, nbytes in call.outputs:
                ctypes.memset(address, 0, nbytes)
            if needed:
                self.starve(who[0])

    def _scatter(self, call: Call, own: int, *, ranks: tuple[int, ...], where: str, needed: bool) -> None:
        name = self._numbered(f"scatter {call.root} {hash(ranks)}")
        answer_locally(call, own)
        if call.root != own:
            if not self._put(f"{name} {own}", call.outputs, alike=where) and needed:
                self.starve(ranks[call.root])
            return
        for place, span in enumerate(call.inputs):
            self._keep(f"{name} {place}", [span], alike=where)

    def _numbered(self, name: str) -> str:
        self._times[name] += 1
        return f"{name} {self._times[name]}"

    def _keep(self, exact: str, spans: Iterable[_Span], *, alike: str) -> None:
        spans = list(spans)
        size = sum(nbytes for _, nbytes in spans)
        if size <= _MOST_BYTES and self._bytes + size <= _MOST_IN_ALL:
            self._bytes += size
            data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in spans)
            self._kept.append(Sent(exact, f"{alike} {size}", data))

    def _put(self, exact: str, spans: Iterable[_Span], *, alike: str) -> bool:
        """Whether there was something of the right size to put there."""
        spans = list(spans)
        size = sum(nbytes for _, nbytes in spans)
        data = self._exact.get(exact)
        if data is None or len(data) != size:
            data = self._alike.get(f"{alike} {size}")
        if data is None:
            return False
        at = 0
        for address, nbytes in spans:
            ctypes.memmove(address, data[at : at + nbytes], nbytes)
            at += nbytes
        return True


def _as_if_by_all(call: Call, count: int) -> None:
    """A reduction over `count` equal inputs."""
    if call.op not in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        return
    if call.reduction not in (Reduction.SUM, Reduction.PRODUCT):
        return
    dtype = getattr(torch, element_name(int(call.element)))
    if dtype is torch.bool:
        return
    for address, nbytes in call.outputs:
        if nbytes:
            values = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=dtype)
            if call.reduction is Reduction.SUM:
                values.mul_(count)
            else:
                values.pow_(count)
