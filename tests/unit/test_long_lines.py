"""Lines and tables about hundreds of ranks: nobody is lost, and no number is cut in two."""

from __future__ import annotations

import pytest
from diagnosed_text import found_in, ranks

from keepstep.diagnosis.log_case import rank_list
from keepstep.intake.log_text import READER


def pasted(slow, world=256):
    rows = "".join(f"{rank}, {700.4 if rank == slow else 512.1 + rank % 7 / 10}\n" for rank in range(world))
    return f"INFO measured by hand\nrank, compute_ms\n{rows}INFO done\n"


def in_one_line(slow, world=256):
    pairs = " ".join(f"rank{rank} {700.4 if rank == slow else 512.1 + rank % 7 / 10:.1f}" for rank in range(world))
    return f"INFO measured by hand\nbackward_ms: {pairs}\nINFO done\n"


@pytest.mark.parametrize("text", [pasted, in_one_line])
@pytest.mark.parametrize("slow", [3, 201, 255])
def test_one_of_256_ranks(text, slow, tmp_path):
    findings = found_in(text(slow), tmp_path)
    assert ranks(findings) == {slow}


@pytest.mark.parametrize("text", [pasted, in_one_line])
def test_none_of_256_ranks(text, tmp_path):
    assert not ranks(found_in(text(None), tmp_path))


@pytest.mark.parametrize("world", [300, 400, 500, 1000])
def test_a_line_that_is_too_long_names_nobody_by_half_a_number(world, tmp_path):
    assert not ranks(found_in(in_one_line(None, world), tmp_path))


def test_a_list_of_a_thousand_ranks_is_whole(tmp_path):
    path = tmp_path / "job.log"
    path.write_text(
        f"[rank0]:[E1101 10:00:00.1 ProcessGroupNCCL.cpp:632] ranks {list(range(1024))} are the lagging ranks\n"
    )
    (event,) = [item for item in READER.read(path) if getattr(item, "kind", "") == "desync_never"]
    assert rank_list(event.fields["ranks"]) == list(range(1024))
