"""Bad input for every format that `keepstep diagnose` reads: never a traceback, never anybody blamed for the damage."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_inspector
import test_ras
from diagnosed_text import dump as told
from diagnosed_text import named, status, timeout
from dump_files import DATA, dump, entry, write
from test_diagnose_runs import ENDED, LOSS, STARTED, run_of
from test_log_of_one_node import init
from test_log_stacks import COLLECTIVE, OWN, spy

from keepstep.diagnosis.failure_report import failure_report
from keepstep.errors import KeepstepError
from keepstep.service.diagnosing import Diagnosis, as_json, diagnose_paths

ODD = 2
RANKS = range(4)


def flight(folder: Path, *, as_json: bool = False, first: int = 5, wrap: int = 0) -> None:
    dumps = {}
    for rank in RANKS:
        entries = [entry(seq, seq=seq, state="completed") for seq in range(first - 3, first)]
        entries += [] if rank == ODD else [entry(first + 9, seq=first)]
        for one in entries:
            one["collective_seq_id"] %= wrap or 1 << 64
        dumps[rank] = dump(entries, RANKS)
    write(folder, dumps, as_json=as_json, name="nccl_trace_rank_{}")


def watchdog(first: int = 105) -> str:
    waiting = "".join(timeout(rank, first) + status(rank, first + 2, first - 1) for rank in RANKS if rank != ODD)
    return waiting + told(ODD, first - 1, first - 1, 0)


def one_log(folder: Path) -> None:
    (folder / "job.log").write_text(watchdog())


def log_each(folder: Path) -> None:
    for rank in RANKS:
        lines = [line for line in watchdog().splitlines(True) if line.startswith(f"[rank{rank}]")]
        (folder / f"rank_{rank}.log").write_text("".join(lines))


def nccl_debug(folder: Path) -> None:
    text = "".join(init(rank, "START", nranks=4) for rank in RANKS)
    text += "".join(init(rank, "COMPLETE", nranks=4) for rank in RANKS if rank != ODD)
    (folder / "nccl.log").write_text(text + timeout(0, 1))


def ras_text(folder: Path) -> None:
    text = (DATA / "ras" / "ncclexample-sleep-straggler-rank7.txt").read_text()
    (folder / "ras.txt").write_text(text.replace("Rank 7 has", f"Rank {ODD} has"))


def ras_json(folder: Path) -> None:
    ranks = [test_ras.member(rank, 100 + rank, 3 if rank == ODD else 10) for rank in RANKS]
    (folder / "ras.json").write_text(json.dumps(test_ras.report(("0xw", ranks, [])), indent=2))


def inspector(folder: Path) -> None:
    test_inspector.write(folder, late=ODD)


def stacks(folder: Path) -> None:
    (folder / "stacks.txt").write_text("".join(spy(rank, OWN if rank == ODD else COLLECTIVE) for rank in RANKS))


def stacks_each(folder: Path) -> None:
    for rank in RANKS:
        text = spy(rank, OWN if rank == ODD else COLLECTIVE).split("\n", 1)[1]
        (folder / f"stack_rank{rank}.txt").write_text(text)


def rows() -> list[tuple[int, int, float]]:
    noise = np.random.default_rng(1).normal(1, 0.02, (len(RANKS), 60))
    return [
        (rank, step, 500 * float(noise[rank, step]) * (1.5 if rank == ODD else 1))
        for rank in RANKS
        for step in range(60)
    ]


NAMES = ("rank", "step", "step_time_ms")


def csv(folder: Path) -> None:
    lines = [",".join(NAMES), *(f"{rank},{step},{ms:.3f}" for rank, step, ms in rows())]
    (folder / "times.csv").write_text("\n".join(lines) + "\n")


def csv_each(folder: Path) -> None:
    for rank in RANKS:
        lines = [",".join(NAMES), *(f"{who},{step},{ms:.3f}" for who, step, ms in rows() if who == rank)]
        (folder / f"rank{rank}.csv").write_text("\n".join(lines) + "\n")


def json_rows(folder: Path) -> None:
    (folder / "times.json").write_text(json.dumps([dict(zip(NAMES, row, strict=True)) for row in rows()]))


def parquet(folder: Path) -> None:
    columns = zip(*rows(), strict=True)
    pq.write_table(pa.table(dict(zip(NAMES, map(list, columns), strict=True))), folder / "times.parquet")


def trace(folder: Path) -> None:
    shutil.copy(DATA / "straggler" / "trace-ST.parquet", folder / "trace.parquet")


def run_directory(folder: Path) -> None:
    run_of(folder / "run", STARTED, LOSS, ENDED)


@dataclass(frozen=True)
class Format:
    """How to write it; whose fault it shows; how a rank's part of it is named, if each rank has a file."""

    make: Callable[[Path], None]
    odd: int | None = ODD
    each: str = ""


FORMATS = {
    "flight recorder, pickle": Format(flight, each="nccl_trace_rank_{}"),
    "flight recorder, json": Format(lambda folder: flight(folder, as_json=True), each="nccl_trace_rank_{}.json"),
    "watchdog": Format(one_log),
    "watchdog, one file a rank": Format(log_each, each="rank_{}.log"),
    "nccl debug": Format(nccl_debug),
    "ras text": Format(ras_text),
    "ras json": Format(ras_json),
    "inspector": Format(inspector, each="h-pid{}.log"),
    "py-spy": Format(stacks),
    "py-spy, one file a rank": Format(stacks_each, each="stack_rank{}.txt"),
    "csv": Format(csv),
    "csv, one file a rank": Format(csv_each, each="rank{}.csv"),
    "json": Format(json_rows),
    "parquet": Format(parquet),
    "bytedance": Format(trace, odd=None),
    "run directory": Format(run_directory),
}
TEXT = [name for name in FORMATS if name not in ("flight recorder, pickle", "parquet", "bytedance", "run directory")]
EACH = [name for name, one in FORMATS.items() if one.each]


def blamed(answer: Diagnosis, *, sure: float = 0.0) -> set[int]:
    """Ranks that are suspected of something else than silence, more than `sure`; a report can be written of all."""
    assert failure_report(answer.findings, answer.unread)
    loud = [one for one in answer.findings if one.kind != "reporter_silent" and one.confidence > sure]
    return {value for group in named(loud) for suspect in group for key, value in suspect.items() if key == "rank"}


def wrote(name: str, folder: Path) -> Path:
    FORMATS[name].make(folder)
    return folder


def answer_of(name: str) -> set[int]:
    return set() if FORMATS[name].odd is None else {FORMATS[name].odd}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_shows_its_fault(name, tmp_path):
    assert blamed(diagnose_paths([wrote(name, tmp_path)])) == answer_of(name)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("it-was-executed",)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_none_of_it_is_named_beside_it(name, tmp_path, monkeypatch):
    """A dump that is no dump, a pickle that would run something, noise, an empty file."""
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "given").mkdir()
    wrote(name, folder)
    (folder / "_dump_1").write_bytes(b"\x80\x04this is no pickle")
    (folder / "_dump_3").write_bytes(pickle.dumps({"entries": [Evil()]}))
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 64)
    (folder / "empty.csv").write_bytes(b"")
    (folder / "void").mkdir()
    answer = diagnose_paths([folder])
    assert blamed(answer) == answer_of(name)
    unread = {os.path.basename(item.path) for item in answer.unread}
    assert {"_dump_1", "_dump_3", "weights.bin", "empty.csv"} <= unread
    assert not (tmp_path / "it-was-executed").exists()


@pytest.mark.parametrize("name", EACH)
def test_a_rank_that_is_missing_is_not_blamed_for_it(name, tmp_path):
    folder = wrote(name, tmp_path)
    (folder / FORMATS[name].each.format(1)).unlink()
    assert blamed(diagnose_paths([folder])) <= answer_of(name)


@pytest.mark.parametrize("name", EACH)
def test_a_file_that_is_there_twice(name, tmp_path):
    folder = wrote(name, tmp_path)
    path = folder / FORMATS[name].each.format(1)
    shutil.copy(path, path.with_name(f"copy_of_{path.name}"))
    assert blamed(diagnose_paths([folder])) <= answer_of(name)


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].each and name != "run directory"])
def test_a_file_of_all_ranks_that_is_there_twice(name, tmp_path):
    folder = wrote(name, tmp_path)
    for path in list(folder.iterdir()):
        shutil.copy(path, path.with_name(f"copy_of_{path.name}"))
    assert blamed(diagnose_paths([folder])) <= answer_of(name)


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.33, 0.71, 0.93])
@pytest.mark.parametrize("name", FORMATS)
def test_files_that_are_cut_off(name, share, tmp_path):
    """What a whole file would have said may be missing; that somebody came last can only be supposed then."""
    folder = wrote(name, tmp_path)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    cut(paths[0] if not FORMATS[name].each else folder / FORMATS[name].each.format(1), share)
    try:
        assert blamed(diagnose_paths([folder]), sure=0.6) <= answer_of(name)
    except KeepstepError as error:
        assert error.what


@pytest.mark.parametrize("name", TEXT)
def test_bytes_that_are_no_text(name, tmp_path):
    folder = wrote(name, tmp_path)
    for path in folder.iterdir():
        content = path.read_bytes()
        lines = content.split(b"\n")
        path.write_bytes(b"\n".join([*lines[:-1], b"# caf\xe9 \xff\xfe\x80 \xc3(", lines[-1]]))
    try:
        assert blamed(diagnose_paths([folder])) <= answer_of(name)
    except KeepstepError as error:
        assert error.what


LINES = ["watchdog", "watchdog, one file a rank", "nccl debug", "ras text", "py-spy", "py-spy, one file a rank"]


@pytest.mark.parametrize("name", LINES)
def test_colours_and_windows_line_ends(name, tmp_path):
    folder = wrote(name, tmp_path)
    for path in folder.iterdir():
        lines = path.read_text().splitlines()
        path.write_text("".join(f"\x1b[1;31m{line}\x1b[0m\r\n" if line else "\r\n" for line in lines), newline="")
    assert blamed(diagnose_paths([folder])) == answer_of(name)


@pytest.mark.parametrize("name", LINES)
def test_lines_of_another_program_in_between(name, tmp_path):
    folder = wrote(name, tmp_path)
    for path in folder.iterdir():
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line}\nepoch 3 batch {n} loss 2.13\n" for n, line in enumerate(lines)))
    assert blamed(diagnose_paths([folder])) <= answer_of(name)


@pytest.mark.parametrize("name", ["csv", "csv, one file a rank", "json", "inspector"])
def test_lines_of_another_program_in_tables(name, tmp_path):
    folder = wrote(name, tmp_path)
    for path in folder.iterdir():
        lines = path.read_text().splitlines(True)
        path.write_text("".join([*lines[:3], "\x1b[33mwarning: \x1b[0mslow disk\n", *lines[3:]]))
    try:
        assert blamed(diagnose_paths([folder])) <= answer_of(name)
    except KeepstepError as error:
        assert error.what


def shifted(text: str) -> str:
    """The times of each rank's lines by as many times five minutes as its number."""

    def later(line: str) -> str:
        rank = re.match(r"\[rank(\d)\]", line)
        minutes = 5 * int(rank[1]) if rank else 0
        return re.sub(r"(?<=1101 )10:00", f"10:{minutes:02}", line)

    return "".join(map(later, text.splitlines(True)))


def moved(text: str, key: str, change: Callable[[int], int]) -> str:
    """The text of JSON with other numbers under a key."""
    return re.sub(rf'("{key}": )(\d+)', lambda found: f"{found[1]}{change(int(found[2]))}", text)


def shift_numbers(folder: Path, key: str, factor: int) -> None:
    for path in folder.iterdir():
        ahead = int(re.findall(r"\d+", path.name)[-1]) * 300 * factor
        path.write_text(moved(path.read_text(), key, ahead.__add__))


CLOCKS = {
    "flight recorder, json": lambda folder: shift_numbers(folder, "time_created_ns", 10**9),
    "inspector": lambda folder: shift_numbers(folder, "dump_timestamp_us", 10**6),
    "watchdog": lambda folder: (folder / "job.log").write_text(shifted((folder / "job.log").read_text())),
    "watchdog, one file a rank": lambda folder: [p.write_text(shifted(p.read_text())) for p in folder.iterdir()],
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_that_disagree_by_minutes(name, tmp_path):
    folder = wrote(name, tmp_path)
    CLOCKS[name](folder)
    assert blamed(diagnose_paths([folder])) == answer_of(name)


def test_the_clock_of_a_run_that_was_set_back(tmp_path):
    late, early = (msgspec.structs.replace(one, wall=wall) for one, wall in ((LOSS, 900.0), (ENDED, 100.0)))
    run_of(tmp_path / "run", msgspec.structs.replace(STARTED, wall=1000.0), late, early)
    assert blamed(diagnose_paths([tmp_path])) == {ODD}


WRAPPED = {
    "flight recorder, pickle": lambda folder: flight(folder, first=1 << 32, wrap=1 << 32),
    "flight recorder, json": lambda folder: flight(folder, first=(1 << 32) + 1, wrap=1 << 32, as_json=True),
    "ras json": lambda folder: (folder / "ras.json").write_text(
        json.dumps(
            test_ras.report(("0xw", [test_ras.member(r, 100 + r, (1 << 32) - 3 if r == ODD else 4) for r in RANKS], []))
        )
    ),
    "inspector": lambda folder: [
        path.write_text(moved(path.read_text(), "coll_sn", lambda number: (number + (1 << 32) - 20) % (1 << 32)))
        for path in test_inspector.write(folder, late=ODD).iterdir()
    ],
}


@pytest.mark.parametrize("name", WRAPPED)
def test_counters_that_wrapped_at_32_bits(name, tmp_path):
    WRAPPED[name](tmp_path)
    assert blamed(diagnose_paths([tmp_path])) == {ODD}


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_no_job_has(name, tmp_path):
    """Every run of digits in the last quarter of a file becomes one of 25 digits."""
    folder = wrote(name, tmp_path)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        start = len(content) * 3 // 4
        path.write_bytes(content[:start] + re.sub(rb"\d+", b"9" * 25, content[start:]))
    try:
        assert failure_report(diagnose_paths([folder]).findings)
    except KeepstepError as error:
        assert error.what


def test_names_that_are_no_text(tmp_path):
    for name in (b"rank0\xff.log", b"weights\xfe.bin"):
        (tmp_path / os.fsdecode(name)).write_bytes(bytes(range(256)) * 9)
    (tmp_path / os.fsdecode(b"job\xff.log")).write_text(watchdog())
    answer = diagnose_paths([tmp_path])
    assert "job?.log" in as_json(answer) and "weights?.bin" in failure_report(answer.findings, answer.unread)
