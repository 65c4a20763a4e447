"""A node with more ways than its agent answers at once: they are asked about in pieces, and all of them count."""

from __future__ import annotations

import pytest
from test_conducting import BOTH_WAYS, World

from keepstep.records.path_messages import MAX_WAYS
from keepstep.traffic import conducting
from keepstep.traffic.path_actions import Action, AskCounts, AskHops, Tell


def test_ways_are_probed_in_pieces_and_waited_for() -> None:
    world = World([(0, b) for b in range(4, 71)], hosts=72)
    world.train()
    asks = [action for action in world.conductor.step(101.0) if isinstance(action, AskHops)]
    pieces = [len(ask.ways) for ask in asks if ask.node == "h0"]
    assert sum(pieces) == 67 * 128 and max(pieces) <= MAX_WAYS < sum(pieces)
    assert world.conductor.step(110.0) == []
    for ask in asks:
        world.conductor.hops(ask.number, [world.hop(way) for way in ask.ways])
    assert any(isinstance(action, Tell) and action.added == 67 for action in world.conductor.step(111.0))


def test_what_connections_carried_is_asked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "MAX_WAYS", 3)
    world = World(BOTH_WAYS)
    asked: list[AskCounts] = []

    def obey(action: Action) -> None:
        if isinstance(action, AskCounts):
            asked.append(action)
        World.obey(world, action)

    monkeypatch.setattr(world, "obey", obey)
    world.run(8)
    assert max(len(one.ways) for one in asked) == 3
    world.speed[3] = 1e7
    world.run(3)
    assert all(world.route(*pair) != 3 for pair in world.pairs)
