"""Taking a node out of a job: the ranks go where standbys were to be, or the node stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.exclusion import without_node
from keepstep.control.roster import NodeSpec

sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6)


@given(sizes, st.data())
def test_every_rank_has_a_place_and_no_node_gets_more_than_it_has_room_for(sizes, data) -> None:
    nodes = tuple(NodeSpec(f"n{i}", slots, standbys) for i, (slots, standbys) in enumerate(sizes))
    world = sum(node.slots for node in nodes)
    gone = data.draw(st.sampled_from(nodes))
    left = without_node(nodes, gone.name, world=world)
    room = sum(node.slots + node.standbys for node in nodes if node is not gone)
    if room < world or len(nodes) == 1:
        assert left is None
        return
    assert left is not None and sum(node.slots for node in left) == world
    before = {node.name: node for node in nodes}
    for node in left:
        assert node.name != gone.name
        assert node.slots + node.standbys == before[node.name].slots + before[node.name].standbys
        assert node.slots >= before[node.name].slots


def test_a_job_on_one_node_keeps_it() -> None:
    assert without_node((NodeSpec("n0", 2, 8),), "n0", world=2) is None
