"""A preflight comes to its end when its time is up, whatever ranks still wait for each other's objects."""

from __future__ import annotations

from pathlib import Path

from keepstep.records.trial import TrialEnded, encode_record
from keepstep.service.preflighting import PreflightRequest, _Preflight

_MOST_LOOKS = 10_000


class Hands:
    """A clock that is moved by hand, and looked at so many times at most."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = 0

    def wall(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        self.looks += 1
        assert self.looks < _MOST_LOOKS, "it does not come to its end"
        return self.now_s


class Starving:
    """Runs trials of which each takes four seconds and needs an object of the next rank first."""

    def __init__(self, clock: Hands) -> None:
        self.said: list[bytes] = []
        self._clock = clock

    def wait_until_ready(self) -> None:
        """It is."""

    def start(self, rank: int, plan_file: Path) -> None:
        end = TrialEnded("starved", "", str(rank + 1), "", -1, 0, 100, 200, 50)
        (plan_file.parent / f"rank-{rank}.trace").write_bytes(encode_record(end))
        self.said += [b"started %d 0" % rank, b"ended %d 0" % rank]

    def lines(self) -> list[bytes]:
        self._clock.now_s += 4.0
        said, self.said = self.said, []
        return said


def test_ranks_that_wait_for_objects_when_time_is_up_are_told(tmp_path):
    clock, said = Hands(), []
    request = PreflightRequest(script="job.py", world=4, memory_bytes=1 << 30, whole_s=6.0)
    report = _Preflight(request, tmp_path, clock=clock, say=said.append).run(Starving(clock))
    assert [one.rank for one in report.ranks] == [0, 1]
    assert said == ["rank 0: needs an object of rank 1 first", "rank 1: needs an object of rank 2 first"]
    assert report.not_looked_at[0] == "ranks 2, 3: no trial, the bound of trials or of time was reached"
    assert report.findings == []
