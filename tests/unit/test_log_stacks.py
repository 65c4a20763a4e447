"""Stacks of several processes: which of them holds the others up, in the forms of py-spy, faulthandler, gdb."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, named, ranks

COLLECTIVE = (
    "    all_reduce (torch/distributed/distributed_c10d.py:2501)\n    wrapper (torch/distributed/c10d_logger.py:79)\n"
    "    _reduce (train.py:88)\n    main (train.py:120)\n    <module> (train.py:140)\n"
)
LOADER = (
    "    wait (threading.py:331)\n    get (queue.py:180)\n    _try_get_data (torch/utils/data/dataloader.py:1243)\n"
    "    _get_data (torch/utils/data/dataloader.py:1397)\n    __next__ (torch/utils/data/dataloader.py:732)\n"
    "    main (train.py:101)\n    <module> (train.py:140)\n"
)
SAVING = (
    "    write_record (torch/serialization.py:802)\n    _save "
    "(torch/serialization.py:1100)\n    save (torch/serialization.py:944)\n"
    "    save_checkpoint (train.py:70)\n    main (train.py:131)\n    <module> (train.py:140)\n"
)
COMPILING = (
    "    poll (subprocess.py:1900)\n    compile (torch/_inductor/codecache.py:2100)\n    "
    "compile_fx (torch/_inductor/compile_fx.py:900)\n"
    "    forward (train.py:60)\n    main (train.py:110)\n    <module> (train.py:140)\n"
)
OWN = "    rebalance (app/balance.py:33)\n    main (train.py:118)\n    <module> (train.py:140)\n"
LOCKED = (
    "    acquire (filelock/_api.py:300)\n    build (app/extension.py:12)\n    main (train.py:20)\n"
    "    <module> (train.py:140)\n"
)


def spy(rank: int, stack: str, pid: int = 4000) -> str:
    return (
        f"--- rank {rank} ---\nProcess {pid + rank}: python train.py\nPython v3.11.4 "
        f'(/usr/bin/python3.11)\n\nThread {pid + rank} (idle): "MainThread"\n{stack}\n'
    )


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        (LOADER, "dataloader"),
        (SAVING, "storage"),
        (COMPILING, "software_library"),
        (OWN, "application"),
        (LOCKED, "storage"),
    ],
)
@pytest.mark.parametrize("odd", [0, 3, 6])
def test_the_one_that_does_something_else(stack, layer, odd, tmp_path):
    text = "".join(spy(rank, stack if rank == odd else COLLECTIVE) for rank in range(7))
    findings = found_in(text, tmp_path)
    assert [(finding.kind, finding.layer) for finding in findings] == [("noncommunication_hang", layer)]
    assert ranks(findings) == {odd}
    assert findings[0].victims == tuple(rank for rank in range(7) if rank != odd)


def test_one_file_for_each_rank(tmp_path):
    from keepstep.service.diagnosing import diagnose_paths

    for rank in range(4):
        stack = LOADER if rank == 2 else COLLECTIVE
        (tmp_path / f"pyspy_rank{rank}.txt").write_text(
            f'Process {900 + rank}: python t.py\n\nThread {900 + rank} (idle): "MainThread"\n{stack}'
        )
    findings = diagnose_paths([tmp_path]).findings
    assert [(finding.layer, ranks([finding])) for finding in findings] == [("dataloader", {2})]


def test_two_faults_are_two_findings(tmp_path):
    text = "".join(spy(rank, {1: LOADER, 4: SAVING}.get(rank, COLLECTIVE)) for rank in range(8))
    findings = found_in(text, tmp_path)
    assert {(finding.layer, *ranks([finding])) for finding in findings} == {("dataloader", 1), ("storage", 4)}


def test_lines_with_the_number_of_the_task_in_front(tmp_path):
    """srun --label: the lines of all tasks come mixed."""
    blocks = {
        rank: (f'Thread {70 + rank} (active): "MainThread"\n' + (LOADER if rank == 1 else COLLECTIVE)).splitlines()
        for rank in range(3)
    }
    longest = max(map(len, blocks.values()))
    lines = [
        f"{rank}: {lines[index]}" for index in range(longest) for rank, lines in blocks.items() if index < len(lines)
    ]
    findings = found_in("\n".join(lines) + "\n", tmp_path)
    assert [(finding.layer, ranks([finding])) for finding in findings] == [("dataloader", {1})]


def test_faulthandler(tmp_path):
    def one(rank: int, frames: list[tuple[str, int, str]]) -> str:
        lines = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
        return f"rank {rank} pid 55{rank}:\nCurrent thread 0x00007f1 (most recent call first):\n{lines}\n"

    wait = [
        ("/x/torch/distributed/distributed_c10d.py", 4000, "barrier"),
        ("/app/train.py", 9, "main"),
        ("/app/train.py", 20, "<module>"),
    ]
    load = [
        ("/x/torch/utils/data/dataloader.py", 1243, "_try_get_data"),
        ("/app/train.py", 5, "main"),
        ("/app/train.py", 20, "<module>"),
    ]
    findings = found_in("".join(one(rank, load if rank == 3 else wait) for rank in range(4)), tmp_path)
    assert [(finding.layer, ranks([finding])) for finding in findings] == [("dataloader", {3})]


def test_traceback_order(tmp_path):
    """`traceback.print_stack` and sys._current_frames: outermost first."""

    def one(rank: int, inner: str) -> str:
        return (
            f'rank {rank}\nThread 0x7f{rank} (most recent call last): "MainThread"\n  File '
            '"/app/train.py", line 20, in <module>\n'
            f'    main()\n  File "/app/train.py", line 9, in main\n    step()\n{inner}\n'
        )

    wait = '  File "/x/torch/distributed/distributed_c10d.py", line 4000, in all_gather_into_tensor\n    work.wait()\n'
    save = '  File "/x/torch/serialization.py", line 800, in save\n    _save()\n'
    findings = found_in("".join(one(rank, save if rank == 0 else wait) for rank in range(4)), tmp_path)
    assert [(finding.layer, ranks([finding])) for finding in findings] == [("storage", {0})]


def test_processes_without_ranks_are_named_by_node_and_id(tmp_path):
    text = 'Node 7:\n\n2 in:\nThread 11 (active): "MainThread"\nThread 12 (active): "MainThread"\n' + COLLECTIVE
    text += (
        '\n1 in:\nThread 13 (idle): "MainThread"\n'
        + LOADER
        + '\n\nNode 8\n\n1 in:\nThread 14 (active): "MainThread"\n'
        + COLLECTIVE
    )
    assert named(found_in(text, tmp_path)) == [[{"node": "7", "pid": 13}]]


def test_all_in_one_collective_blames_nobody(tmp_path):
    findings = found_in("".join(spy(rank, COLLECTIVE) for rank in range(4)), tmp_path)
    assert [finding.kind for finding in findings] == ["undetermined"]
    assert findings[0].next_probe


def test_one_in_another_collective_than_all_others(tmp_path):
    barrier = (
        "    barrier (torch/distributed/distributed_c10d.py:4000)\n    log (train.py:55)\n    "
        "main (train.py:121)\n    <module> (train.py:140)\n"
    )
    findings = found_in("".join(spy(rank, barrier if rank == 2 else COLLECTIVE) for rank in range(6)), tmp_path)
    assert [(finding.kind, ranks([finding])) for finding in findings] == [("collective_mismatch", {2})]
    assert findings[0].confidence < 0.7


def test_all_at_one_place_in_the_loader_is_a_stall_of_all(tmp_path):
    findings = found_in("".join(spy(rank, LOADER) for rank in range(4)), tmp_path)
    assert [(finding.kind, finding.layer, finding.suspects) for finding in findings] == [
        ("noncommunication_hang", "dataloader", ())
    ]


def test_workers_of_the_loader_are_not_ranks(tmp_path):
    worker = (
        "    read (app/files.py:3)\n    fetch (torch/utils/data/_utils/fetch.py:54)\n    "
        "_worker_loop (torch/utils/data/_utils/worker.py:351)\n"
    )
    text = (
        "".join(spy(rank, COLLECTIVE) for rank in range(3))
        + f'Process 99: python t.py\nThread 99 (idle): "MainThread"\n{worker}'
    )
    assert [finding.kind for finding in found_in(text, tmp_path)] == ["undetermined"]


def test_of_several_captures_the_newest_counts(tmp_path):
    before = "".join(spy(rank, LOADER) for rank in range(4))
    after = "".join(spy(rank, OWN if rank == 2 else COLLECTIVE) for rank in range(4))
    assert ranks(found_in(before + after, tmp_path)) == {2}


TORCHRUN = (
    "    _invoke_run (torch/distributed/elastic/agent/server/api.py:877)\n"
    "    run (torch/distributed/elastic/agent/server/api.py:680)\n"
    "    wrapper (torch/distributed/elastic/metrics/api.py:124)\n"
    "    launch_agent (torch/distributed/launcher/api.py:255)\n"
    "    main (torch/distributed/run.py:879)\n    <module> (torchrun:8)\n"
)
SPAWN = (
    "    wait (multiprocessing/connection.py:931)\n    join (torch/multiprocessing/spawn.py:132)\n    start_processes "
    "(torch/multiprocessing/spawn.py:215)\n    main (train.py:200)\n    <module> (train.py:210)\n"
)
TRACKER = "    main (multiprocessing/resource_tracker.py:209)\n    <module> (<string>:1)\n"
SERVICE = "    accept (socket.py:293)\n    serve (wandb/sdk/service/server.py:90)\n    <module> (wandb:8)\n"


@pytest.mark.parametrize("stack", [TORCHRUN, SPAWN, TRACKER, SERVICE])
def test_processes_that_start_ranks_or_serve_them_are_not_suspected(stack, tmp_path):
    other = f'Process 99: python\nThread 99 (idle): "MainThread"\n{stack}\n'
    for odd in (None, 2):
        text = other + "".join(spy(rank, OWN if rank == odd else COLLECTIVE) for rank in range(4))
        assert ranks(found_in(text, tmp_path)) == ({2} if odd else set())


def test_a_rank_that_hangs_in_what_a_service_gave_it_is_one(tmp_path):
    inside = "    deliver (wandb/sdk/lib/mailbox.py:90)\n    log (train.py:44)\n    <module> (train.py:140)\n"
    assert ranks(found_in("".join(spy(r, inside if r == 1 else COLLECTIVE) for r in range(4)), tmp_path)) == {1}
