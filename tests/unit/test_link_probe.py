"""The transfers of a probe: every pair is measured, and a slow link gets no large transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from keepstep.records.messages import Address
from keepstep.records.watch_messages import LinkProbed, ProbeLinks
from keepstep.training import link_probe
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place
from keepstep.training.link_probe import LinkProbe, turns_of

PAIRS = ((0, 2), (0, 1), (1, 2), (2, 0), (2, 1), (1, 0))


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    doors = [Doors(f"m{rank}", "a") for rank in range(3)]
    roster: dict[int, Address] = {rank: one.address for rank, one in enumerate(doors)}
    made = [
        Fabric(one, Place(rank, 3, 1), secret=b"k" * 32, directory=RosterDirectory(roster), protected=True)
        for rank, one in enumerate(doors)
    ]
    yield made
    for one in made:
        one.close()


def probed(fabrics: list[Fabric], pairs: tuple[tuple[int, int], ...], *, slow: tuple[int, int] | None = None):
    """What the senders report, and the sizes that went over the `slow` link: it delays all that is no echo."""
    found: list[LinkProbed] = []
    sizes: list[int] = []
    complete = threading.Event()

    def report(one: LinkProbed) -> None:
        found.append(one)
        if len(found) == len(pairs):
            complete.set()

    class Slow(LinkProbe):
        def _move(self, channel, op, *, peer, tag, until, buffer) -> bool:
            if slow == (self._fabric.rank, peer) and op is link_probe.Op.SEND:
                sizes.append(len(buffer))
                threading.Event().wait(0.3 * (len(buffer) > 1))
            return super()._move(channel, op, peer=peer, tag=tag, until=until, buffer=buffer)

    for fabric in fabrics:
        Slow(fabric, clock=time.monotonic, report=report).take(ProbeLinks(1, 1, pairs, 1 << 20))
    assert complete.wait(60)
    return {(one.source, one.destination): one for one in found}, sizes


def test_every_pair_is_measured_up_to_the_full_size(fabrics: list[Fabric]) -> None:
    found, sizes = probed(fabrics, PAIRS, slow=None)
    assert set(found) == set(PAIRS)
    assert all(one.bytes_per_s > 0 and not one.why for one in found.values())


def test_a_slow_link_shows_in_small_transfers_and_holds_no_other_up(fabrics: list[Fabric]) -> None:
    found, sizes = probed(fabrics, PAIRS, slow=(0, 2))
    assert max(sizes) == 1024
    assert not any(one.why for one in found.values())
    assert min(found, key=lambda pair: found[pair].bytes_per_s) == (0, 2)


def test_pairs_that_share_a_rank_take_turns() -> None:
    assert turns_of(PAIRS) == [1, 2, 3, 4, 5, 6]
    assert turns_of([(0, 1), (2, 3), (1, 2)]) == [1, 1, 2]
