"""Call logs of NCCL over several nodes and communicators: devices of nodes are no ranks, and pointers no names."""

from __future__ import annotations

from diagnosed_text import found_in

from keepstep.records.finding import Suspect


def prefix(rank: int) -> str:
    return f"n{rank // 2}:10{rank}:20{rank} [{rank % 2}] NCCL INFO "


def begun(rank: int, comm: str, *, name: str, place: int, size: int) -> str:
    return "".join(
        f"{prefix(rank)}comm {comm} rank {place} nranks {size} cudaDev 0 busId 1b000 commId {name} - Init {state}\n"
        for state in ("START", "COMPLETE")
    )


def call(rank: int, number: int, op: str = "AllReduce", *, numel: int = 64, comm: str = "0x5a", size: int = 4) -> str:
    return (
        f"{prefix(rank)}{op}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {numel} datatype 7 op 0 root 0 "
        f"comm {comm} [nranks={size}] stream 0x5\n"
    )


WORLD = "".join(begun(rank, "0x5a", name="0xabc", place=rank, size=4) for rank in range(4))
ODD = "".join(
    call(rank, number, numel=128 if (rank, number) == (2, 3) else 64) for number in (2, 3) for rank in range(4)
)


def test_the_lines_of_the_start_say_which_rank_a_device_of_a_node_is(tmp_path):
    (finding,) = found_in(WORLD + ODD, tmp_path)
    assert (finding.kind, finding.suspects) == ("collective_mismatch", ((Suspect(rank=2),),))
    assert finding.victims == (0, 1, 3)


def test_without_them_the_process_is_named(tmp_path):
    (finding,) = found_in(ODD, tmp_path)
    assert (finding.kind, finding.suspects) == ("collective_mismatch", ((Suspect(node="n1", pid=102),),))


def test_who_is_behind_is_looked_for_among_all_processes_of_a_node(tmp_path):
    text = "".join(call(rank, number) for number in range(400) for rank in range(3) if number < 300 or rank != 1)
    (finding,) = found_in(text, tmp_path)
    assert (finding.kind, finding.suspects) == ("noncommunication_hang", ((Suspect(node="n0", pid=101),),))


def test_numbers_of_different_communicators_are_not_compared(tmp_path):
    """Two pairs, each with calls of its own, and the world."""
    pairs = "".join(
        begun(rank, "0x6b", name=f"0xd{rank // 2}", place=rank % 2, size=2)
        + call(rank, 3, "AllGather" if rank < 2 else "ReduceScatter", comm="0x6b", size=2)
        for rank in range(4)
    )
    world = "".join(call(rank, 3) for rank in range(4))
    assert [finding.kind for finding in found_in(WORLD + world + pairs, tmp_path)] == ["undetermined"]
    unlinked = "".join(line for line in (world + pairs).splitlines(True) if "opCount" in line)
    assert [finding.kind for finding in found_in(unlinked, tmp_path)] == ["undetermined"]


def test_the_ends_of_a_transfer_call_different_things(tmp_path):
    text = WORLD + "".join(call(rank, 3, "Recv" if rank % 2 else "Send") for rank in range(4))
    assert [finding.kind for finding in found_in(text, tmp_path)] == ["undetermined"]
