"""What people are told by a run that ends while they wait for its answer, and by one that cannot do what they ask."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_job_shell import started

from keepstep.errors import KeepstepError, MoveNotMade, NoAnswer, UsageError
from keepstep.records.drills import DrillRequest
from keepstep.records.moves import MoveRequest
from keepstep.service.control_socket import ask_drill, ask_move, serve_control
from keepstep.service.run_directory import LEFT_FILE, REPORT_FILE, STATE_FOLDER, RunDirectory, RunFacts

REQUEST = MoveRequest((1,))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The directory of a run that goes on, and the name of its socket."""
    name = f"keepstep-test-{os.getpid()}-{tmp_path.name}"
    directory = RunDirectory(tmp_path / "run", reserve_bytes=0)
    directory.publish(RunFacts("j", "s.py", (), 1, 0, 1, "1", "3", "2", 0.0, 1, name))
    yield directory.path, name
    directory.close()


def answering(name: str, reply: bytes) -> threading.Thread:
    """A controller that takes one request and ends with `reply`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen()

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("reply", [b"", b'{"ok": tr'], ids=["nothing", "half"])
def test_a_controller_that_ends_before_it_answers_may_have_made_the_move(run: tuple[Path, str], reply: bytes) -> None:
    directory, name = run
    controller = answering(name, reply)
    with pytest.raises(NoAnswer, match="a move was asked for.*keepstep report") as caught:
        ask_move(directory, REQUEST)
    controller.join()
    assert caught.value.exit_code == 75


def test_a_run_that_cannot_be_asked_is_over(run: tuple[Path, str]) -> None:
    with pytest.raises(UsageError, match="run j is over"):
        ask_move(run[0], REQUEST)


@pytest.mark.parametrize("answer", [UsageError("no rank 1"), MoveNotMade("a joiner died")])
def test_an_answer_is_what_the_run_says(run: tuple[Path, str], answer: KeepstepError) -> None:
    directory, name = run

    def drill(request: DrillRequest) -> str:
        return f"{request.fault} now"

    async def probe(number: int) -> str:
        raise AssertionError

    async def move(request: MoveRequest) -> str:
        assert request == REQUEST
        raise answer

    async def served() -> str:
        server = await serve_control(name, drill=drill, probe=probe, move=move)
        async with server:
            with pytest.raises(type(answer), match=str(answer)):
                await asyncio.to_thread(ask_move, directory, REQUEST)
            return await asyncio.to_thread(ask_drill, directory, DrillRequest("kill", rank=0))

    assert asyncio.run(served()) == "kill now"


def test_a_move_may_name_every_rank_of_a_large_job(run: tuple[Path, str]) -> None:
    directory, name = run
    request = MoveRequest(tuple(range(16384)))

    def drill(request: DrillRequest) -> str:
        raise AssertionError

    async def probe(number: int) -> str:
        raise AssertionError

    async def move(request: MoveRequest) -> str:
        return ", ".join(f"rank {rank} from m{rank} on {name} to a standby on {name}" for rank in request.ranks)

    async def asked() -> str:
        async with await serve_control(name, drill=drill, probe=probe, move=move):
            return await asyncio.to_thread(ask_move, directory, request)

    assert asyncio.run(asked()).endswith(f"m16383 on {name} to a standby on {name}")
    with pytest.raises(UsageError, match="a move with a request of .* bytes, at most 131071 are taken"):
        ask_move(directory, MoveRequest(tuple(range(10**6, 10**6 + 16384))))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"fault":"kill","rank":0,"step":100000000000000000000}', "<= 9007199254740992"),
        (b'{"fault":"slow-compute","rank":0,"steps":10000000000000000000}', "<= 9007199254740992"),
        (b'{"fault":"kill","rank":100000000000000000000}', "no rank 100000000000000000000"),
        (b'{"ranks":[100000000000000000000]}', "have not called"),
        (b"[", "not a request"),
        (b"\xff", "not a request"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, line: bytes, says: str) -> None:
    async def answer() -> dict:
        shell, _, sent = started()
        before, unexpected = len(sent), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unexpected.append(context))

        async def probe(number: int) -> str:
            raise AssertionError

        name = f"keepstep-test-{os.getpid()}-{tmp_path.name}"
        async with await serve_control(name, drill=shell.drill, probe=probe, move=shell.move):
            reader, writer = await asyncio.open_unix_connection("\0" + name)
            writer.write(line + b"\n")
            reply = await reader.readline()
            writer.close()
        assert unexpected == [] and len(sent) == before
        return json.loads(reply)

    reply = asyncio.run(answer())
    assert not reply["ok"] and says in reply["say"]


def left(directory: Path) -> None:
    """What a controller leaves for the one that takes over."""
    (directory / STATE_FOLDER).mkdir()
    (directory / STATE_FOLDER / LEFT_FILE).write_text("{}")


def test_a_job_whose_controller_is_gone_can_be_taken_over_and_is_not_over(tmp_path: Path) -> None:
    """G-23: the members train on, so whoever asks is told how they get a controller again."""
    directory = RunDirectory(tmp_path / "run", reserve_bytes=0)
    directory.publish(RunFacts("j", "s.py", (), 1, 0, 1, "1", "3", "2", 0.0, 1, f"keepstep-test-{tmp_path.name}"))
    left(directory.path)
    with pytest.raises(NoAnswer, match="controller of run j takes over or ends.*try again"):
        ask_move(directory.path, REQUEST)
    directory.close()
    with pytest.raises(NoAnswer, match="controller of run j is gone.*keepstep resume.*try again") as caught:
        ask_move(directory.path, REQUEST)
    assert caught.value.exit_code == 75
    (directory.path / REPORT_FILE).write_text("{}")
    with pytest.raises(UsageError, match="run j is over"):
        ask_move(directory.path, REQUEST)
