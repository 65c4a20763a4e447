"""Drills in real jobs: each is injected, named by a finding while the job runs, and taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_answers import answer_of, right, verdict_of
from drill_driver import Job
from launching import keepstep, one_line

from keepstep.records.drills import DrillRequest

OBSERVE = ("--on-hang", "observe")
FOUND_S = 30.0

LASTING = [
    DrillRequest("slow-compute", 1, factor=2.0),
    DrillRequest("slow-data", 2, factor=2.0),
    DrillRequest("throttle-link", source=3, destination=1, factor=2.0),
    DrillRequest("stop-data", 0),
    DrillRequest("cut-link", source=0, destination=2),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Four ranks, tensor 2 x pipeline 2, that go on until they are stopped."""
    running = Job(tmp_path_factory.mktemp("drills"), "healthy:1000000", world=4, words=OBSERVE)
    running.until(lambda: running.step > 60, "sixty steps")
    yield running
    running.stop()


def found(job: Job, request: DrillRequest, since: int) -> bool:
    answer = answer_of(request)
    records = [record for record in job.journal.records[since:] if record["record"] in ("Finding", "Incident")]
    return any(right(verdict_of(record), answer) for record in records)


def drilled(job: Job, request: DrillRequest) -> list[dict]:
    return [record for record in job.journal.of("DrillRecord") if record["fault"] == request.fault]


@pytest.mark.parametrize("request_", LASTING, ids=lambda request: request.fault)
def test_a_drill_is_named_and_ends(job, request_):
    since = len(job.journal.records)
    job.drill(request_)
    assert job.wait(lambda: found(job, request_, since), FOUND_S), job.text()[-3000:]
    link = {"source": request_.source, "destination": request_.destination}
    job.drill(DrillRequest(request_.fault, request_.rank, stop=True, **link))
    assert job.wait(lambda: len(drilled(job, request_)) == 2, FOUND_S)
    began, ended = drilled(job, request_)
    assert ended.get("ended") and not began.get("ended") and began["wall"] < ended["wall"]
    step = job.step
    assert job.wait(lambda: job.step > step + 20, FOUND_S), "the job does not go on after the drill"


def test_faults_behind_a_loss_are_named(tmp_path):
    """The watch goes on in the new membership, for what is slow and for what stands still."""
    job = Job(tmp_path, "healthy:1000000", world=4, words=(*OBSERVE, "--standby", "1"))
    try:
        job.until(lambda: job.step > 40, "forty steps")
        job.drill(DrillRequest("kill", 3))
        assert job.wait(lambda: job.journal.of("Incident"), FOUND_S), job.text()[-3000:]
        before = job.step
        assert job.wait(lambda: job.step > before + 30, 2 * FOUND_S), "the job does not go on after the loss"
        for request in (LASTING[0], LASTING[-1]):
            since = len(job.journal.records)
            job.drill(request)
            assert job.wait(lambda r=request, s=since: found(job, r, s), FOUND_S), (request.fault, job.text()[-3000:])
            job.drill(
                DrillRequest(
                    request.fault, request.rank, stop=True, source=request.source, destination=request.destination
                )
            )
    finally:
        job.stop()


def test_a_drill_for_some_steps_ends_by_itself(job):
    before = len(job.journal.of("DrillRecord"))
    at = job.step + 15
    job.drill(DrillRequest("slow-compute", 3, at, steps=5, factor=1.2))
    assert job.wait(lambda: len(job.journal.of("DrillRecord")) == before + 2, FOUND_S)
    began, ended = job.journal.of("DrillRecord")[before:]
    assert (began["step"], ended["step"]) == (at, at + 5)
    assert (began["factor"], began["requested_step"]) == (1.2, at)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("slow-compute",), "needs --rank"),
        (("slow-compute", "--rank", 1, "--factor", 0.9), "factor 0.9"),
        (("cut-link", "--from", 1, "--to", 1), "two different ranks"),
        (("throttle-link", "--from", 1, "--to", 0), "--rate or --factor"),
        (("throttle-node", "--node", "nowhere", "--factor", 2), "nowhere"),
        (("mismatch", "--rank", 1, "--how", "mood"), "mood"),
        (("kill", "--rank", 1, "--stop"), "over at once"),
        (("never-start", "--rank", 1), "keepstep run --drill"),
        (("slow-compute", "--rank", 1, "--factor", "nan"), "factor"),
    ],
)
def test_nonsense_is_one_line_and_changes_nothing(job, words, says, tmp_path):
    before = len(job.journal.of("DrillRecord"))
    assert says in one_line(keepstep("drill", *words, "--run", job.directory, cwd=tmp_path))
    assert len(job.journal.of("DrillRecord")) == before


@pytest.mark.parametrize(
    "how", ["op", pytest.param("shape", marks=pytest.mark.long), pytest.param("extra", marks=pytest.mark.long)]
)
def test_a_mismatch_ends_the_job_and_names_the_rank(tmp_path, how):
    running = Job(tmp_path, "healthy:1000000", world=2, words=OBSERVE)
    request = DrillRequest("mismatch", 1, how=how)
    try:
        running.until(lambda: running.step > 10, "ten steps")
        running.drill(request)
        assert running.finish(60.0) not in (None, 0), running.text()[-3000:]
    finally:
        running.stop()
    assert found(running, request, 0), running.text()[-3000:]
    assert "Traceback" not in running.text().split("keepstep: job")[0]


@pytest.mark.parametrize("fault", ["never-start", "wrong-version"])
def test_a_start_that_goes_wrong_is_named(tmp_path, fault):
    running = Job(tmp_path, "healthy:1000000", world=2, words=(*OBSERVE, "--drill", f"{fault}:1"))
    request = DrillRequest(fault, 1)
    try:
        assert running.wait(lambda: found(running, request, 0), 60.0), running.text()[-3000:]
        if fault == "wrong-version":
            assert running.finish(30.0) == 76
    finally:
        running.stop()
    assert [record["fault"] for record in running.journal.of("DrillRecord")] == [fault]


def test_a_nonsense_start_drill_starts_nothing(tmp_path):
    (tmp_path / "script.py").write_text("")
    for text, says in (("kill:0", "kill"), ("never-start:7", "no rank 7"), ("never-start", "names no rank")):
        done = keepstep("run", "--run", "run", "--drill", text, "script.py", cwd=tmp_path)
        assert says in one_line(done)
    assert not Path(tmp_path / "run").exists()


def test_a_flipped_bit_of_one_replica_is_named(tmp_path):
    running = Job(tmp_path, "healthy:1000000", world=2, words=OBSERVE, script=("--flat",))
    request = DrillRequest("flip-bit", 1)
    try:
        running.until(lambda: running.step > 20, "twenty steps")
        running.drill(request)
        assert running.wait(lambda: found(running, request, 0), FOUND_S), running.text()[-3000:]
        seen = len(running.journal.of("Finding"))
        running.drill(request)  # the same bit once more
        ends = lambda: any(r.get("status") == "ended" for r in running.journal.of("Finding")[seen:])  # noqa: E731
        assert running.wait(ends, FOUND_S)
    finally:
        running.stop()


@pytest.mark.long
def test_a_throttled_node_is_named(tmp_path):
    running = Job(tmp_path, "healthy:1000000", nodes=4, words=OBSERVE)
    request = DrillRequest("throttle-node", node="n2", factor=2.0)
    try:
        running.until(lambda: running.step > 60, "sixty steps")
        running.drill(request)
        assert running.wait(lambda: found(running, request, 0), FOUND_S), running.text()[-3000:]
    finally:
        running.stop()
    assert {4, 5} <= {record["rank"] for record in drilled(running, request)}  # others only if they send there


@pytest.mark.long
def test_two_faults_at_once_are_both_named(tmp_path):
    running = Job(tmp_path, "healthy:1000000", words=OBSERVE)
    requests = [DrillRequest("slow-compute", 1, factor=2.0), DrillRequest("slow-data", 6, factor=2.0)]
    try:
        running.until(lambda: running.step > 60, "sixty steps")
        since = len(running.journal.records)
        for request in requests:
            running.drill(request)
        assert running.wait(lambda: all(found(running, request, since) for request in requests), FOUND_S)
    finally:
        running.stop()
