"""Lines of training processes: nothing lost, nothing unbounded, nothing that blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.service.member_process import loss_in, mismatch_in
from keepstep.service.output import MAX_LINE_BYTES, Console, LogFile, split_lines


@given(st.lists(st.binary(max_size=40)), st.booleans())
def test_no_byte_is_lost_however_the_reads_fall(reads, final):
    lines, rest = [], b""
    for read in reads:
        new, rest = split_lines(rest + read)
        lines += new
    assert b"\n".join([*lines, rest]) == b"".join(reads)


def test_long_lines_come_in_pieces():
    lines, rest = split_lines(b"a" * (2 * MAX_LINE_BYTES + 5) + b"\n" + b"b" * (MAX_LINE_BYTES + 1))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5, MAX_LINE_BYTES]
    assert rest == b"b"


def test_an_unfinished_last_line_is_given_at_the_end():
    assert split_lines(b"one\ntwo", final=True) == ([b"one", b"two"], b"")


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (b"step 3 loss 2.5", 2.5),
        (b"loss=1e-3, lr 1", 1e-3),
        (b"train Loss: -0.25", -0.25),
        (b"the loss is none", None),
        (b"glossy 3", None),
        (b"", None),
    ],
)
def test_the_loss_in_a_line(line, loss):
    assert loss_in(line) == loss


def test_the_console_keeps_the_order():
    written: list[tuple[str, bool]] = []
    console = Console(lambda line, error: written.append((line, error)))
    for number in range(100):
        console.say(str(number), error=number % 2 == 1)
    console.close()
    assert written == [(str(number), number % 2 == 1) for number in range(100)]


def test_a_log_that_cannot_be_written_says_so_once(tmp_path):
    troubles: list[str] = []
    log = LogFile(tmp_path / "no such directory" / "m.log", on_trouble=troubles.append)
    log.write(b"a")
    log.write(b"b")
    log.close()
    assert len(troubles) == 1 and log.dropped == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"668 vs 4. Is there a distributed collective mismatch in your code?\n", "668 vs 4. Is there"),
        (b"RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running", "RuntimeError: Detected"),
        (b"no mismatch between collectives", ""),
    ],
)
def test_what_a_library_says_of_collectives_that_do_not_match(line, said):
    assert mismatch_in(line).startswith(said) and bool(mismatch_in(line)) == bool(said)
