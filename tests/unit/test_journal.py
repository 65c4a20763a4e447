"""The journal on disk and in memory: append, replay, torn tails, full disks, one writer."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import RecordError, StoreError
from keepstep.records.events import JobEnded, StepProgress
from keepstep.records.journal_line import encode_line
from keepstep.store.journal import JOURNAL_NAME, AnyJournal, Journal, MemoryJournal, TornTail, read_journal


@pytest.fixture(params=["disk", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    made: AnyJournal = Journal.open(tmp_path) if request.param == "disk" else MemoryJournal()
    yield made
    made.close()


def steps(number: int) -> list[StepProgress]:
    return [StepProgress(step=step, loss=step / 2) for step in range(number)]


def test_replay_gives_what_was_appended_in_order(journal: AnyJournal) -> None:
    assert list(journal.replay()) == []
    for event in steps(5):
        journal.append(event, durable=event.step == 3)
    assert list(journal.replay()) == steps(5)
    journal.append(JobEnded(exit_code=0))
    journal.sync()
    assert list(journal.replay()) == [*steps(5), JobEnded(exit_code=0)]


def test_a_replay_in_progress_ends_where_it_began(journal: AnyJournal) -> None:
    for event in steps(2):
        journal.append(event)
    replay = journal.replay()
    assert next(replay) == steps(1)[0]
    journal.append(JobEnded(exit_code=0))
    assert list(replay) == steps(2)[1:]


def test_a_closed_journal_takes_nothing(journal: AnyJournal) -> None:
    journal.close()
    journal.close()
    with pytest.raises(StoreError, match="closed"):
        journal.append(JobEnded(exit_code=0))


def test_an_unwritable_record_leaves_the_journal_as_it_was(journal: AnyJournal) -> None:
    journal.append(steps(1)[0])
    with pytest.raises(RecordError):
        journal.append(JobEnded(exit_code=0, false_alarm_s=float("nan")))
    journal.append(JobEnded(exit_code=0))
    assert list(journal.replay()) == [*steps(1), JobEnded(exit_code=0)]


@given(st.data())
def test_a_torn_tail_is_cut_off_told_and_written_over(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("torn")
    lines = [encode_line(event) for event in steps(3)]
    cut = data.draw(st.integers(0, len(lines[2]) - 1))
    (directory / JOURNAL_NAME).write_bytes(b"".join(lines[:2]) + lines[2][:cut])
    expected = TornTail(offset=len(lines[0] + lines[1]), nbytes=cut) if cut else None
    assert read_journal(directory) == (tuple(steps(2)), expected)
    journal = Journal.open(directory)
    assert journal.repaired_bytes == cut
    journal.append(JobEnded(exit_code=0))
    journal.close()
    assert read_journal(directory) == ((*steps(2), JobEnded(exit_code=0)), None)


def test_damage_before_the_end_is_refused_and_not_touched(tmp_path: Path) -> None:
    good = encode_line(JobEnded(exit_code=0))
    damaged = good + b"{nonsense\n" + good
    (tmp_path / JOURNAL_NAME).write_bytes(damaged)
    with pytest.raises(RecordError, match="line 2"):
        Journal.open(tmp_path)
    with pytest.raises(RecordError, match="line 2"):
        read_journal(tmp_path)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == damaged


def test_one_writer_at_a_time_and_readers_at_any_time(tmp_path: Path) -> None:
    first = Journal.open(tmp_path)
    first.append(steps(1)[0])
    with pytest.raises(StoreError, match="another process writes"):
        Journal.open(tmp_path)
    assert read_journal(tmp_path) == (tuple(steps(1)), None)
    first.close()
    second = Journal.open(tmp_path, create=False)
    assert list(second.replay()) == steps(1)
    second.close()


def test_a_missing_journal_and_a_bad_place_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="check the path"):
        read_journal(tmp_path)
    with pytest.raises(StoreError, match="check the path"):
        Journal.open(tmp_path, create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        Journal.open(tmp_path / "file")


def test_a_full_disk_loses_only_the_record_that_did_not_fit(tmp_path: Path) -> None:
    """A file size limit stands for the full disk: the kernel writes the part that fits."""
    journal = Journal.open(tmp_path)
    journal.append(steps(1)[0], durable=True)
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        with pytest.raises(StoreError, match="free space on that disk.*intact"):
            journal.append(JobEnded(exit_code=0), durable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before
    journal.append(JobEnded(exit_code=1))
    assert list(journal.replay()) == [*steps(1), JobEnded(exit_code=1)]
    journal.close()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    assert (tmp_path / JOURNAL_NAME).stat().st_mode & 0o077 == 0
