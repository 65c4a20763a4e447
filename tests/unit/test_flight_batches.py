"""Flight Recorder dumps with batches: torch keeps only the entry that closes a batch up to date."""

from __future__ import annotations

import pytest
from dump_files import dump, entry, of_2_3, write
from reading_all import findings_of, suspects_of

WORLD = range(4)


def batch(number, ops, *, seq, state="completed", closing="nccl:coalesced", p2p=True):
    """The entries of one batch: the operations stay `scheduled`, the one that closes it has the state."""
    inside = [entry(number + at, seq=seq, op=op, p2p=p2p) for at, op in enumerate(ops)]
    end = entry(number + len(ops), seq=seq, op=closing, p2p=p2p, state=state) | {"input_sizes": [], "output_sizes": []}
    return [*inside, end]


def towards(rank, other):
    return [f"nccl:send {rank}->{other}", f"nccl:recv {rank}<-{other}"]


def pipeline(last="completed", steps=3):
    """Ranks 0 and 1, 2 and 3 exchange in batches, then all reduce; the newest all_reduce is in the state given."""
    dumps = {}
    for rank in WORLD:
        entries = []
        for step in range(1, steps + 1):
            entries += batch(10 * step, towards(rank, rank ^ 1), seq=step)
            entries.append(entry(10 * step + 5, seq=step, state="completed" if step < steps else last))
        dumps[rank] = dump(entries, WORLD)
    return dumps


def ranks_of(findings):
    return [[one.get("rank") for one in some] for finding in suspects_of(findings) for some in finding]


def test_batches_that_are_closed_are_finished(tmp_path):
    (finding,) = findings_of(write(tmp_path / "dumps", pipeline()))
    assert finding.kind == "healthy"


def test_the_names_of_torch_2_3(tmp_path):
    old = {rank: of_2_3(content["entries"]) for rank, content in pipeline().items()}
    for content in old.values():
        for number, item in enumerate(content["entries"]):
            item["seq_id"] = 2 * (number // 4) + (number % 4 == 3)
    (finding,) = findings_of(write(tmp_path / "dumps", old))
    assert finding.kind == "healthy"


def test_closed_batches_do_not_hide_a_hang(tmp_path):
    dumps = pipeline(last="scheduled")
    dumps[2]["entries"].pop()
    assert ranks_of(findings_of(write(tmp_path / "dumps", dumps))) == [[2]]


def chain(ends):
    """A chain of ranks that exchange with both neighbours in one batch; `ends` did not come to it."""
    dumps = {}
    for rank in WORLD:
        entries = [entry(1, seq=1, state="completed")]
        peers = [other for other in (rank - 1, rank + 1) if other in WORLD]
        if rank not in ends:
            ops = [op for other in peers for op in towards(rank, other)]
            entries += batch(10, ops, seq=1, state="scheduled")
        dumps[rank] = dump(entries, WORLD)
    return dumps


@pytest.mark.parametrize("absent", [0, 3])
def test_who_did_not_come_to_a_batch_is_the_only_origin(absent, tmp_path):
    findings = findings_of(write(tmp_path / "dumps", chain({absent})))
    assert ranks_of(findings) == [[absent]]
    assert findings[0].kind == "noncommunication_hang"
    assert findings[0].victims == tuple(rank for rank in WORLD if rank != absent)


def test_batches_to_which_all_came_are_one_set(tmp_path):
    (finding,) = findings_of(write(tmp_path / "dumps", chain(set())))
    assert (finding.kind, len(finding.suspects)) == ("communication_hang", 1)
    assert {one.link for one in finding.suspects[0] if one.link} == {
        (0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)
    }  # fmt: skip


@pytest.mark.parametrize("closing", ["nccl:ALLGATHER_coalesced", "nccl:REDUCE_SCATTER_coalesced", "nccl:coalesced"])
def test_collectives_in_a_batch(closing, tmp_path):
    dumps = {}
    for rank in WORLD:
        entries = [
            one
            for seq in range(1, 4)
            for one in batch(10 * seq, ["nccl:_broadcast_oop"] * 4, seq=seq, closing=closing, p2p=False)
        ]
        dumps[rank] = dump(entries, WORLD)
    (finding,) = findings_of(write(tmp_path / "dumps", dumps))
    assert finding.kind == "healthy"
    for rank in WORLD:
        if rank != 1:
            dumps[rank]["entries"] += batch(
                90, ["nccl:_broadcast_oop"] * 4, seq=4, closing=closing, p2p=False, state="scheduled"
            )
    assert ranks_of(findings_of(write(tmp_path / "dumps", dumps))) == [[1]]


def test_a_closing_entry_is_no_other_operation(tmp_path):
    """On rank 1 the ring has lost the operations of its oldest batch and kept the entry that closes it."""
    dumps = {
        rank: dump(batch(1, ["nccl:_broadcast_oop"] * 2, seq=1, p2p=False, closing="nccl:ALLGATHER_coalesced"), WORLD)
        for rank in WORLD
    }
    del dumps[1]["entries"][:2]
    (finding,) = findings_of(write(tmp_path / "dumps", dumps))
    assert finding.kind == "healthy"


def test_a_batch_that_nothing_closes_is_over_when_a_later_one_is(tmp_path):
    dumps = {}
    for rank in WORLD:
        batched = batch(1, [op.replace("nccl", "xccl") for op in towards(rank, rank ^ 1)], seq=1)[:2]
        later = f"xccl:send {rank}->{rank ^ 1}" if rank % 2 else f"xccl:recv {rank}<-{rank ^ 1}"
        dumps[rank] = dump([*batched, entry(9, seq=2, op=later, p2p=True, state="completed")], WORLD)
    (finding,) = findings_of(write(tmp_path / "dumps", dumps))
    assert finding.kind == "healthy"
