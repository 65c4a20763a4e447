"""The messages of a planned move come back from the wire as they went, and foreign bytes are refused."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.errors import RecordError
from keepstep.records.address import Address
from keepstep.records.messages import Abort, Message, decode_message, encode_message
from keepstep.records.move_messages import (
    AskAddress,
    CancelMove,
    CommitMove,
    MoveCommitted,
    MovePrepared,
    MoveRefused,
    MoveTaken,
    PrepareMove,
    ReleaseMember,
    TakeAddress,
)

_AT = Address("m7", "n1", "ks-m7", "10.0.0.1", 4000)
_MESSAGES: tuple[Message, ...] = (
    PrepareMove(1, 2, 5, "leave", {3: _AT}),
    PrepareMove(1, 2, 5, "join", {3: _AT}, roster={0: _AT, 3: _AT}, leaver=_AT),
    PrepareMove(1, 2, 5, "stay", {3: _AT}),
    CommitMove(1, 2),
    CancelMove(1, 2, "rank 3 was lost"),
    ReleaseMember(1, 2, "rank 3 has its new member"),
    TakeAddress(1, 3, _AT, 5),
    MovePrepared(2, peers=(0, 1), bytes_moved=7, why="no memory"),
    MoveCommitted(2, 5, 17),
    MoveRefused(2, 17, "rank 1 was not quiet"),
    MoveTaken(2, 17, {"last_update_s": 0.01, "bytes": 4096.0}),
    AskAddress(3),
    Abort(1, 6, (2,), renew=True),
)


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda m: type(m).__name__)
def test_comes_back_as_it_went(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_an_abort_that_says_nothing_of_links_keeps_them() -> None:
    """A message without the field is one of an earlier sender: links between stayers live on."""
    said = msgspec.msgpack.encode({"kind": "Abort", "epoch": 1, "generation": 6, "lost": [2]})
    assert decode_message(said) == Abort(1, 6, (2,), renew=False)


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "PrepareMove", "epoch": 1, "number": 2, "generation": 5, "part": "watch", "ranks": {}},
        {"kind": "PrepareMove", "epoch": 1, "number": 2, "generation": 5, "part": "stay", "ranks": {"three": None}},
        {"kind": "MoveTaken", "number": 2, "version": 17, "parts": {"check_s": "long"}},
        {"kind": "CommitMove", "epoch": 1},
    ],
)
def test_what_does_not_fit_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(RecordError, match="not a keepstep message"):
        decode_message(msgspec.msgpack.encode(said))
