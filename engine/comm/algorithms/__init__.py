"""Collectives made of point-to-point messages: pure plans, and one executor that runs them.

`PLANS[operation][algorithm]` makes the plan of one rank. `native`, the backend's own call, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.comm.algorithms import flat, hierarchical
from engine.comm.algorithms.plan import Hosts, Plan, with_early

Maker = Callable[[int, int, int, int, Hosts], Plan]


def _alike(make: Callable[[int, int, int], Plan]) -> Maker:
    return lambda rank, size, count, _root, _hosts: make(rank, size, count)


def _rooted(make: Callable[[int, int, int, int], Plan]) -> Maker:
    return lambda rank, size, count, root, _hosts: make(rank, size, count, root)


def _hosted(make: Callable[[int, int, int, Hosts], Plan]) -> Maker:
    return lambda rank, size, count, _root, hosts: make(rank, size, count, hosts)


PLANS: dict[str, dict[str, Maker]] = {
    "all_reduce": {
        "pairwise": _alike(flat.pairwise_all_reduce),
        "ring": _alike(flat.ring_all_reduce),
        "doubling": _alike(flat.doubling_all_reduce),
        "halving_doubling": _alike(flat.halving_doubling_all_reduce),
        "hierarchical": _hosted(hierarchical.hierarchical_all_reduce),
    },
    "reduce_scatter": {
        "pairwise": _alike(flat.pairwise_reduce_scatter),
        "ring": _alike(flat.ring_reduce_scatter),
        "hierarchical": _hosted(hierarchical.hierarchical_reduce_scatter),
    },
    "all_gather": {
        "pairwise": _alike(flat.pairwise_all_gather),
        "ring": _alike(flat.ring_all_gather),
        "hierarchical": _hosted(hierarchical.hierarchical_all_gather),
    },
    "broadcast": {
        "pairwise": _rooted(flat.pairwise_broadcast),
        "tree": _rooted(flat.binomial_broadcast),
        "scatter_all_gather": _rooted(flat.scatter_all_gather_broadcast),
    },
    "reduce": {"tree": _rooted(flat.binomial_reduce)},
}


def plan_for(operation: str, algorithm: str, rank: int, size: int, count: int, root: int, hosts: Hosts) -> Plan:
    """Return the plan of one rank, without rounds in which it is idle."""
    plan = PLANS[operation][algorithm](rank, size, count, root, hosts)
    return with_early([each for each in plan if each.sends or each.receives])
