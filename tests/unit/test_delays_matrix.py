"""What slow cells of a delay matrix have in common, and what cannot be told apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.diagnosis.matrix import Cells, explain
from keepstep.records.finding import Suspect


def explained(populated, slow, nodes=None, *, small=()):
    """The sets of suspects, where the cells `slow` of `populated` are slow; cells in `small` move few bytes."""
    pairs = sorted(populated)
    cells = Cells(
        np.array([source for source, _ in pairs]),
        np.array([destination for _, destination in pairs]),
        np.array([1000.0 if pair in slow else 0.0 for pair in pairs]),
        np.array([10.0 if pair in small else 1e6 for pair in pairs]),
    )
    return [suspects for suspects, _ in explain(cells, nodes or {})]


RING = {(rank, (rank + 1) % 8) for rank in range(8)}
MESH = {(a, b) for a in range(4) for b in range(4) if a != b}


def test_nothing_slow_is_nothing():
    assert explained(MESH, set()) == []


def test_in_a_single_ring_source_destination_and_link_are_one_set():
    assert explained(RING, {(3, 4)}) == [(Suspect(link=(3, 4)), Suspect(source=3), Suspect(destination=4))]


def test_two_rings_tell_the_link_alone():
    other = {(rank, (rank + 3) % 8) for rank in range(8)}
    assert explained(RING | other, {(3, 4)}) == [(Suspect(link=(3, 4)),)]


def test_only_other_senders_leave_source_and_link():
    assert explained({(0, 1), (2, 1)}, {(0, 1)}) == [(Suspect(link=(0, 1)), Suspect(source=0))]


def test_a_source_is_all_its_cells():
    assert explained(MESH, {(2, 0), (2, 1), (2, 3)}) == [(Suspect(source=2),)]


def test_a_destination_is_all_cells_to_it():
    assert explained(MESH, {(0, 2), (1, 2), (3, 2)}) == [(Suspect(destination=2),)]


def test_a_rank_is_both():
    slow = {pair for pair in MESH if 2 in pair}
    assert explained(MESH, slow) == [(Suspect(rank=2),)]


def test_a_cell_with_few_bytes_clears_nobody():
    assert explained(MESH, {(2, 0), (2, 1)}, small={(2, 3)}) == [(Suspect(source=2),)]


def test_a_node_among_three_is_named_and_two_nodes_are_a_set():
    nodes = {rank: f"n{rank // 2}" for rank in range(6)}
    mesh = {(a, b) for a in range(6) for b in range(6) if a != b}
    slow = {(a, b) for a, b in mesh if nodes[a] == "n1" != nodes[b]}
    assert explained(mesh, slow, nodes) == [(Suspect(node="n1"),)]
    two = {rank: f"n{rank // 2}" for rank in range(4)}
    slow = {(a, b) for a, b in MESH if two[a] == "n0" != two[b]}
    assert explained(MESH, slow, two) == [(Suspect(node="n0"), Suspect(node="n1"))]


def test_two_links_are_two_findings():
    assert explained(MESH, {(0, 1), (2, 3)}) == [(Suspect(link=(0, 1)),), (Suspect(link=(2, 3)),)]


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), max_size=20))
def test_every_slow_cell_is_explained_once(slow):
    mesh = sorted({(a, b) for a in range(8) for b in range(8) if a != b})
    cells = Cells(
        np.array([a for a, _ in mesh]),
        np.array([b for _, b in mesh]),
        np.array([5.0 if pair in slow else 0.0 for pair in mesh]),
        np.full(len(mesh), 1e6),
    )
    told = [cell for _, mine in explain(cells, {rank: f"n{rank // 4}" for rank in range(8)}) for cell in mine]
    assert sorted(told) == sorted(set(told))
    assert {mesh[cell] for cell in told} == slow


@pytest.mark.parametrize("count", [1, 3])
def test_a_rank_far_away_changes_nothing(count):
    far = {(100 + number, 200 + number) for number in range(count)}
    assert explained(MESH | far, {(2, 0), (2, 1), (2, 3)}) == [(Suspect(source=2),)]
