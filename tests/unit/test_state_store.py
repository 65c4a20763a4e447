"""The state store: one contract for all engines, a model-based test, damage, and two processes that race."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepstep.errors import AppendConflict, KeepstepError, StaleEpoch, StoreError, TornRecord, UsageError
from keepstep.store.state_file import FileStateStore
from keepstep.store.state_sqlite import SqliteStateStore
from keepstep.store.state_store import MAX_ENTRY_BYTES, Entry, Lease, MemoryStateStore, StateStore

STREAM = "job/gpt/journal"
RACER = """
import sys
from keepstep.errors import AppendConflict
from keepstep.store.state_file import FileStateStore
from keepstep.store.state_sqlite import SqliteStateStore
kind, path, name = sys.argv[1:]
store = FileStateStore(path) if kind == "file" else SqliteStateStore(path)
print("ready", flush=True)
sys.stdin.readline()
done = conflicts = 0
while done < 40:
    index = len(store.read("job/race/", 0))
    try:
        store.append("job/race/", index, data=f"{name}{done}".encode(), epoch=0)
        done += 1
    except AppendConflict:
        conflicts += 1
print(conflicts)
"""

Opener = Callable[[], StateStore]


@pytest.fixture(params=["memory", "file", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again, as several users would."""
    opened: list[StateStore] = []
    memory = MemoryStateStore()

    def again() -> StateStore:
        stores = {
            "memory": lambda: memory,
            "file": lambda: FileStateStore(tmp_path / "state"),
            "sqlite": lambda: SqliteStateStore(tmp_path / "state.sqlite"),
        }
        opened.append(stores[request.param]())
        return opened[-1]

    yield again
    for store in opened:
        store.close()
        store.close()


def test_entries_come_back_in_order_to_every_user(opener: Opener) -> None:
    first, second = opener(), opener()
    assert first.read(STREAM) == []
    first.append(STREAM, 0, data=b"a", epoch=0)
    second.append(STREAM, 1, data=b"", epoch=0)
    first.append(STREAM, 2, data=b"c" * 100_000, epoch=0)
    first.append("cluster/", 0, data=b"other", epoch=0)
    expected = [Entry(0, 0, b"a"), Entry(1, 0, b""), Entry(2, 0, b"c" * 100_000)]
    for store in (first, second, opener()):
        assert store.read(STREAM) == expected
        assert store.read(STREAM, 2) == expected[2:]
        assert store.read(STREAM, 3) == store.read(STREAM, 2**80) == []
        assert store.read("cluster/") == [Entry(0, 0, b"other")]


def test_of_two_writers_of_one_index_the_second_fails(opener: Opener) -> None:
    first, second = opener(), opener()
    first.append(STREAM, 0, data=b"mine", epoch=0)
    for wrong in (0, 2, -1):
        with pytest.raises(AppendConflict, match="read again"):
            second.append(STREAM, wrong, data=b"yours", epoch=0)
    assert second.read(STREAM) == [Entry(0, 0, b"mine")]
    second.append(STREAM, 1, data=b"yours", epoch=0)


def test_a_lease_is_renewed_by_its_holder_and_granted_anew_after_it_expired(opener: Opener) -> None:
    store, other = opener(), opener()
    assert store.lead("a", 100.0, ttl_s=10.0) == Lease("a", 1, 110.0)
    assert other.lead("b", 105.0, ttl_s=10.0) == Lease("a", 1, 110.0)
    assert store.lead("a", 105.0, ttl_s=10.0) == Lease("a", 1, 115.0)
    assert store.lead("a", 104.0, ttl_s=1.0) == Lease("a", 1, 115.0)
    assert other.lead("b", 115.0, ttl_s=10.0) == Lease("b", 2, 125.0)
    assert store.lead("a", 116.0, ttl_s=10.0) == Lease("b", 2, 125.0)
    assert opener().lead("b", 200.0, ttl_s=1.0) == Lease("b", 3, 201.0)


def test_a_deposed_leader_can_write_nothing(opener: Opener) -> None:
    old, new = opener(), opener()
    old.append(STREAM, 0, data=b"before", epoch=0)
    assert old.lead("a", 0.0, ttl_s=10.0).epoch == 1
    old.append(STREAM, 1, data=b"a", epoch=1)
    assert new.lead("b", 20.0, ttl_s=10.0).epoch == 2
    with pytest.raises(StaleEpoch, match="epoch 2 leads now"):
        old.append(STREAM, 2, data=b"a", epoch=1)
    with pytest.raises(StoreError, match="never granted"):
        new.append(STREAM, 2, data=b"b", epoch=3)
    new.append(STREAM, 2, data=b"b", epoch=2)
    assert [entry.epoch for entry in old.read(STREAM)] == [0, 1, 2]


@pytest.mark.parametrize(
    "stream", ["", "job", "cluster", "job//x", "job/a/b/c", "other/x", "job/../x", "job/a/x\n", "jöb/a/"]
)
def test_bad_streams_are_refused(opener: Opener, stream: str) -> None:
    store = opener()
    with pytest.raises(UsageError, match="not a stream"):
        store.append(stream, 0, data=b"", epoch=0)
    with pytest.raises(UsageError, match="not a stream"):
        store.read(stream)


def test_entries_and_leaders_are_bounded(opener: Opener) -> None:
    store = opener()
    with pytest.raises(StoreError, match="at most"):
        store.append(STREAM, 0, data=b"x" * (MAX_ENTRY_BYTES + 1), epoch=0)
    for holder, ttl_s in (("", 1.0), ("x" * 300, 1.0), ("a", 0.0), ("a", float("nan"))):
        with pytest.raises(UsageError):
            store.lead(holder, 0.0, ttl_s=ttl_s)


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_closed_store_and_a_bad_place_say_so(kind: str, tmp_path: Path) -> None:
    made = {"file": FileStateStore, "sqlite": SqliteStateStore}[kind]
    store = made(tmp_path / "state")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read(STREAM)
    (tmp_path / "plain").write_bytes(b"not a database, not a directory" * 100)
    for place in (tmp_path / "plain", tmp_path / "plain" / "below"):
        with pytest.raises(StoreError):
            made(place)


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_two_processes_race_and_every_entry_counts_once(kind: str, tmp_path: Path) -> None:
    place = str(tmp_path / "state")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, kind, place, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=120)
        assert racer.returncode == 0
    store: StateStore = FileStateStore(place) if kind == "file" else SqliteStateStore(place)
    entries = store.read("job/race/")
    store.close()
    assert [entry.index for entry in entries] == list(range(80))
    for name in ("a", "b"):
        mine = [entry.data.decode() for entry in entries if entry.data.startswith(name.encode())]
        assert mine == [f"{name}{number}" for number in range(40)]


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_many_may_open_a_new_store_at_once(kind: str, tmp_path: Path) -> None:
    made = {"file": FileStateStore, "sqlite": SqliteStateStore}[kind]
    for turn in range(20):
        gate = threading.Barrier(6)

        def open_one(place: Path = tmp_path / f"state{turn}", gate: threading.Barrier = gate) -> None:
            gate.wait()
            made(place).close()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(open_one) for _ in range(6)]:
                assert done.result() is None


def torn_store(tmp_path: Path) -> tuple[Path, list[Entry]]:
    store = FileStateStore(tmp_path)
    entries = [Entry(index, 0, bytes([65 + index]) * 40) for index in range(3)]
    for entry in entries:
        store.append(STREAM, entry.index, data=entry.data, epoch=0)
    store.close()
    return tmp_path / "job+gpt+journal.stream", entries


@pytest.mark.parametrize("cut", range(1, 72, 7))
def test_a_torn_last_entry_is_left_out_and_written_over(tmp_path: Path, cut: int) -> None:
    path, entries = torn_store(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    store = FileStateStore(tmp_path)
    assert store.read(STREAM) == entries[:2]
    store.append(STREAM, 2, data=b"new", epoch=0)
    assert store.read(STREAM) == [*entries[:2], Entry(2, 0, b"new")]
    store.close()


def test_a_tail_of_zeros_is_torn_too(tmp_path: Path) -> None:
    path, entries = torn_store(tmp_path)
    path.write_bytes(path.read_bytes()[: 2 * 72] + b"\0" * 72)
    store = FileStateStore(tmp_path)
    assert store.read(STREAM) == entries[:2]
    store.close()


@pytest.mark.parametrize("place", [0, 5, 20, 31, 50, 72 + 3, 72 + 60, 2 * 72 + 9])
def test_damage_is_refused_and_not_touched(tmp_path: Path, place: int) -> None:
    path, _entries = torn_store(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 0xFF
    path.write_bytes(damaged)
    store = FileStateStore(tmp_path)
    with pytest.raises(TornRecord, match="damaged"):
        store.read(STREAM)
    with pytest.raises(TornRecord, match="damaged"):
        store.append(STREAM, 3, data=b"", epoch=0)
    assert path.read_bytes() == damaged
    store.close()
    (tmp_path / "lease.json").write_text("{")
    with pytest.raises(TornRecord, match="lease is damaged"):
        FileStateStore(tmp_path).lead("a", 0.0, ttl_s=1.0)


class EnginesAgree(RuleBasedStateMachine):
    """Whatever two users of each engine do, all engines answer as the one in memory."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        place = Path(self.directory.name)
        memory = MemoryStateStore()
        self.users: list[list[StateStore]] = [
            [memory, FileStateStore(place / "files"), SqliteStateStore(place / "state.sqlite")] for _ in range(2)
        ]
        self.epochs = [0]
        self.now = 0.0

    def answers(self, user: int, ask: Callable[[StateStore], object]) -> None:
        said: list[object] = []
        for store in self.users[user]:
            try:
                said.append(ask(store))
            except KeepstepError as error:
                said.append((type(error), str(error)))
        assert said[0] == said[1] == said[2]
        if isinstance(said[0], Lease):
            self.epochs.append(said[0].epoch)

    @rule(
        user=st.integers(0, 1),
        stream=st.sampled_from(["cluster/", "job/a/", "job/a/x", "bad"]),
        index=st.integers(-1, 6),
        epoch=st.integers(0, 4),
        data=st.binary(max_size=20),
    )
    def append(self, user: int, stream: str, index: int, epoch: int, data: bytes) -> None:
        self.answers(user, lambda store: store.append(stream, index, data=data, epoch=epoch))

    @rule(user=st.integers(0, 1), stream=st.sampled_from(["cluster/", "job/a/"]), data=st.binary(max_size=20))
    def append_next(self, user: int, stream: str, data: bytes) -> None:
        epoch = self.epochs[-1]
        self.answers(user, lambda store: store.append(stream, len(store.read(stream)), data=data, epoch=epoch))

    @rule(user=st.integers(0, 1), stream=st.sampled_from(["cluster/", "job/a/", "job/a/x"]), first=st.integers(-2, 5))
    def read(self, user: int, stream: str, first: int) -> None:
        self.answers(user, lambda store: store.read(stream, first))

    @rule(user=st.integers(0, 1), holder=st.sampled_from("abc"), wait=st.sampled_from([0.0, 1.0, 5.0]))
    def lead(self, user: int, holder: str, wait: float) -> None:
        self.now += wait
        self.answers(user, lambda store: store.lead(holder, self.now, ttl_s=3.0))

    @invariant()
    def epochs_only_grow(self) -> None:
        if hasattr(self, "epochs"):
            assert self.epochs == sorted(self.epochs)

    def teardown(self) -> None:
        if hasattr(self, "users"):
            for stores in self.users:
                for store in stores:
                    store.close()
            self.directory.cleanup()


EnginesAgree.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_engines_agree = EnginesAgree.TestCase
