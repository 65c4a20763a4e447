"""One member of the path benchmark: a fabric of keepstep's own links, told what to do by lines of JSON.

Arguments: rank, address. It prints where it is reached, takes the roster, and then answers one line for each order.
"""

import array
import json
import sys
import threading
import time

from keepstep.records.messages import Address
from keepstep.records.path_messages import Way
from keepstep.service.clock import SystemClock
from keepstep.service.path_counters import carried_by_ways
from keepstep.service.path_probing import hops_of_ways
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place
from keepstep.training.paths import PathPlan
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status


class Member:
    """Reduces with its groups, takes plans, probes."""

    def __init__(self, rank: int, doors: Doors, roster: dict[int, Address]) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        directory = RosterDirectory(roster)
        place = Place(rank, len(roster), 1)
        self.fabric = Fabric(doors, place, secret=b"b" * 32, directory=directory, protected=True)

    def say(self, answer: dict) -> None:
        with self.lock:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    def reduce(self, order: dict) -> None:
        """Steps of `times` reductions in all groups of this rank at once; the members agree after each."""
        groups = [(name, tuple(ranks)) for name, ranks in order["groups"] if self.rank in ranks]
        data = {name: array.array("f", bytes(order["nbytes"])) for name, _ in groups}
        took: list[list] = []
        for _ in range(order["times"]):
            threads = []
            for name, ranks in groups:
                call = (name, ranks, data[name], took)
                threads.append(threading.Thread(target=self.one, args=call))
                threads[-1].start()
            for thread in threads:
                thread.join()
            if not self.fabric.agreement():
                break
            self.fabric.turn()
        self.say({"do": "reduce", "took": took})

    def one(self, name: str, ranks: tuple[int, ...], values: array.array, took: list[list]) -> None:
        channel = self.fabric.channel(name, Lane.COLLECTIVE, ranks=ranks)
        buffer = (values.buffer_info()[0], 4 * len(values))
        call = Call(Op.ALL_REDUCE, Element.FLOAT32, Reduction.SUM, inputs=[buffer], outputs=[buffer])
        begin = time.time()
        ticket = channel.submit(call)
        status = channel.plane.wait(ticket, 120)
        channel.plane.release(ticket)
        took.append([name, begin, time.time() - begin, status is Status.DONE])

    def paths(self, order: dict) -> None:
        plan = PathPlan(
            order["number"],
            {int(peer): tuple(ports) for peer, ports in order["dial"].items()},
            {int(peer): tuple(ports) for peer, ports in order["accept"].items()},
        )
        self.fabric.prepare_paths(plan, ready=lambda why: self.say({"do": "paths", "why": why}))

    def hops(self, order: dict) -> None:
        ways = [Way(*way) for way in order["ways"]]
        found = hops_of_ways(ways, order["ttls"], clock=SystemClock())
        self.say({"do": "hops", "number": order["number"], "hops": found})

    def counts(self, order: dict) -> None:
        carried = carried_by_ways([Way(*way) for way in order["ways"]])
        self.say({"do": "counts", "number": order["number"], "carried": [[c.nbytes, c.busy_us] for c in carried]})


def main() -> None:
    rank, address = int(sys.argv[1]), sys.argv[2]
    doors = Doors(f"m{rank}", f"h{rank}", host=address)
    where = doors.address
    print(json.dumps([where.member, where.node, where.local, where.host, where.port]), flush=True)
    roster = {number: Address(*fields) for number, fields in enumerate(json.loads(sys.stdin.readline()))}
    member = Member(rank, doors, roster)
    for line in sys.stdin:
        order = json.loads(line)
        actions = {"reduce": member.reduce, "paths": member.paths, "hops": member.hops, "counts": member.counts}
        action = actions[order["do"]]
        threading.Thread(target=action, args=(order,), daemon=True).start()
    member.fabric.close()


if __name__ == "__main__":
    main()
