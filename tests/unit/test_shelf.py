"""The bookkeeping of copies: whole versions only, at most two, and never without the newest one (property tests)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.training.host_memory import Block, copy_bytes
from keepstep.training.manifest import Entry, Manifest
from keepstep.training.shelf import KeptState, Shelf

SIZE = 8


def kept(version: int, *, rank: int = 0, generation: int = 0, block: Block | None = None) -> KeptState:
    """A copy whose bytes say which version it is."""
    block = block or Block(SIZE)
    block.view[:] = bytes([version % 256]) * SIZE
    manifest = Manifest((Entry("a", "uint8", (SIZE,), SIZE),), b"", "key")
    return KeptState(rank, version, generation, manifest, "", b"", block)


class Model:
    """What must be there after the same calls, told in the plainest way."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def put(self, version: int) -> None:
        if not self.versions or version >= self.versions[-1]:
            self.versions = [one for one in self.versions if one != version][-1:] + [version]

    def room(self) -> None:
        self.versions = self.versions[-1:] if len(self.versions) > 1 else self.versions


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.integers(0, 9)),
        st.tuples(st.just("broken"), st.integers(0, 9)),
        st.tuples(st.just("back"), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(STEPS)
@settings(deadline=None)
def test_the_newest_whole_version_survives_whatever_happens(steps):
    shelf, model = Shelf(), Model()
    for what, version in steps:
        if what == "back":
            shelf.drop_newer(version)
            model.versions = [one for one in model.versions if one <= version]
            continue
        newest = shelf.versions(0)[-1:]
        block = shelf.room(0, SIZE)
        model.room()
        block.view[:] = b"\xff" * SIZE  # a copy that breaks off leaves rubbish in its own block only
        assert shelf.versions(0)[-1:] == newest
        if what == "copy":
            assert shelf.put(kept(version, block=block)) == (not newest or version >= newest[0])
            model.put(version)
        else:
            shelf.give_back(0, block)
        assert shelf.versions(0) == tuple(model.versions)
        assert len(shelf.versions(0)) <= 2 and shelf.nbytes <= 3 * SIZE
        for one in shelf.versions(0):
            assert bytes(shelf.get(0, one).views()[0]) == bytes([one]) * SIZE


def test_ranks_do_not_take_each_others_room() -> None:
    shelf = Shelf()
    for version in (1, 2, 3):
        for rank in (4, 5):
            shelf.put(kept(version, rank=rank, block=shelf.room(rank, SIZE), generation=rank))
    assert shelf.versions(4) == shelf.versions(5) == (2, 3)
    assert {(one.rank, one.version) for one in shelf.all()} == {(4, 2), (4, 3), (5, 2), (5, 3)}
    shelf.drop_older_generations(5)
    assert shelf.versions(4) == () and shelf.versions(5) == (2, 3)
    shelf.clear()
    assert shelf.nbytes == 0 and shelf.get(5, 3) is None


def test_a_state_of_another_size_gets_its_own_block() -> None:
    shelf = Shelf()
    for version in (1, 2):
        shelf.put(kept(version))
    assert shelf.room(0, 100).nbytes == 100


def test_bytes_are_copied_as_they_are() -> None:
    target, source = Block(5), Block(5)
    source.view[:] = b"hello"
    copy_bytes(target.view, source.view)
    assert bytes(target.view) == b"hello"
    copy_bytes(Block(0).view, Block(0).view)
