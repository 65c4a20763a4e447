"""Faults of several nodes that have a domain in common: then that is the suspect, and no longer each node. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.control.domains import Domains, everywhere, joint

__all__ = ["common_domains"]

_LEAST_NODES = 2


def common_domains(affected: Iterable[str], nodes: Iterable[str], *, domains: Domains) -> tuple[str, ...]:
    """The smallest domains that hold all `affected` nodes: which cannot be told apart; empty if there is none.

    Among `nodes`, those of the job that had ranks. A domain of all of them explains nothing; neither does one of which
    less than half is affected, or a single node.
    """
    hit, all_nodes = set(affected), {*nodes, *affected}
    if len(hit) < _LEAST_NODES:
        return ()
    sizes = {
        name: len(domains.nodes_in(name, all_nodes)) for name in joint(domains, hit) - everywhere(domains, all_nodes)
    }
    least = min(sizes.values(), default=0)
    return tuple(sorted(name for name, size in sizes.items() if size == least and 2 * len(hit) >= size))
