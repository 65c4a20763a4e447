"""A planned move in words."""

from __future__ import annotations

import msgspec

from keepstep.records.move_words import move_lines, move_words
from keepstep.records.moves import MoveRecord

RECORD = MoveRecord(
    number=1,
    outcome="partly made",
    ranks=(1, 2),
    moved=(1,),
    leavers=("m1", "m2"),
    joiners=("m4", "m5"),
    origins=("a", "a"),
    nodes=("b", "c"),
    why="m5 was lost in its commit",
    pause={"check_s": 0.002},
)


def test_ranks_that_did_not_move_are_told_apart() -> None:
    moved = "rank 1 from m1 on a to m4 on b"
    assert move_words(RECORD) == (
        f"move 1 is partly made: {moved} (m5 was lost in its commit); rank 2 did not move; pause 2.0 ms: check 2.0"
    )
    assert move_lines(RECORD)[0] == f"move 1: partly made, {moved}; rank 2 did not move: m5 was lost in its commit"


def test_a_move_that_was_not_made_says_what_it_was_to_be() -> None:
    record = msgspec.structs.replace(RECORD, outcome="not made", moved=())
    assert move_words(record) == (
        "move 1 is not made: rank 1 from m1 on a to m4 on b, rank 2 from m2 on a to m5 on c: m5 was lost in its commit"
    )
