"""Which version all come to with mirrors: the newest that every stayer and every joiner can have (property test)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.job_state import Change, MirrorSearch
from keepstep.control.mirror_sources import choose_mirrors
from keepstep.control.roster import Member, Status
from keepstep.records.mirror_messages import HeldMirror, Mirrors
from keepstep.training.mirror_plan import in_need

NOW = 9


def stayer(rank: int, replica: str = "") -> Member:
    return Member(
        f"m{rank}", rank, "n0", Status.SETTLED, version=NOW, digest="d", replica=replica or f"part{rank}", answered=1
    )


def joiner(rank: int, replica: str = "") -> Member:
    return Member(f"m{rank + 10}", rank, "n0", Status.READY, joiner=True, replica=replica or f"part{rank}")


def change(answers: dict[str, Mirrors], private: dict[int, dict[int, bytes]] | None = None) -> Change:
    return Change(1, 0.0, (), version=NOW, search=MirrorSearch(answers=answers), private=private or {})


VERSIONS = st.sets(st.integers(NOW - 4, NOW + 1), max_size=3)


@given(own=st.lists(VERSIONS, min_size=2, max_size=2), held=st.lists(VERSIONS, min_size=2, max_size=2))
def test_the_newest_common_version_is_found(own, held):
    """Ranks 0 and 1 stay, 2 and 3 join; rank 0 holds 2, rank 1 holds 3."""
    stayers, joiners = [stayer(0), stayer(1)], [joiner(2), joiner(3)]
    answers = {
        f"m{rank}": Mirrors(
            1,
            tuple(sorted(own[rank])),
            tuple(HeldMirror(2 + rank, version, "d", f"part{2 + rank}") for version in sorted(held[rank])),
        )
        for rank in (0, 1)
    }
    common = (own[0] | {NOW}) & (own[1] | {NOW}) & held[0] & held[1] & set(range(NOW + 1))
    found = choose_mirrors(stayers, joiners, change=change(answers))
    if not common:
        assert found is None
    else:
        assert found is not None and found[0] == max(common)
        assert {rank: (holder, held.version) for rank, (holder, held) in found[1].items()} == {
            2: (0, found[0]),
            3: (1, found[0]),
        }


def test_a_rank_with_a_live_replica_needs_no_mirror() -> None:
    stayers, joiners = [stayer(0, "all"), stayer(1)], [joiner(2, "all"), joiner(3)]
    held = (HeldMirror(3, 8, "d", "part3"),)
    answers = {"m0": Mirrors(1, (8, 9)), "m1": Mirrors(1, (8, 9), held)}
    found = choose_mirrors(stayers, joiners, change=change(answers, {2: {8: b"own"}}))
    assert found is not None and found[0] == 8 and set(found[1]) == {3}
    assert choose_mirrors(stayers, joiners, change=change(answers)) is None, "nobody knows what only rank 2 knew"


def test_other_layouts_and_refused_ones_do_not_count() -> None:
    answers = {"m0": Mirrors(1, (8,), (HeldMirror(2, 8, "d", "other"), HeldMirror(2, 9, "d", "part2")))}
    one = change(answers)
    assert choose_mirrors([stayer(0)], [joiner(2)], change=one) is not None
    search = MirrorSearch(answers=answers, refused=frozenset({(0, 2, 9)}))
    refused = Change(1, 0.0, (), version=NOW, search=search)
    assert choose_mirrors([stayer(0)], [joiner(2)], change=refused) is None


def test_who_is_in_need_of_a_mirror() -> None:
    assert in_need({0: ("a", "n"), 1: ("b", "n")}) == {0, 1}
    assert in_need({0: ("a", "n"), 1: ("a", "n"), 2: ("b", "n")}) == {2}
    assert in_need({0: ("a", "n"), 1: ("a", "m")}) == set()
    assert in_need({0: ("a", "n"), 1: ("a", "n"), 2: ("b", "m"), 3: ("b", "n")}) == {0, 1}
