"""Opening shared memory: which groups of a mesh can have it, and the connections between their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.comm.rendezvous import this_host
from engine.comm.shm.links import Listener
from engine.comm.shm.transport import SharedMemoryTransport


def own_address(listener: Listener) -> str:
    """Return what the other ranks must know: where this process listens, and on which machine that can be reached."""
    return f"{listener.address}@{this_host()}"


def open_groups(
    groups: Mapping[str, Sequence[int]],
    rank: int,
    listener: Listener,
    addresses: Sequence[str],
    *,
    limit: float,
    staging: int,
) -> dict[str, SharedMemoryTransport]:
    """Connect this process with the others of every group that can reach each other, and return these groups'
    transports. Every rank calls it.

    groups: global ranks by name; every rank has the same names in the same order. addresses: every global rank's, empty
    for one without shared memory. limit: seconds for a connection and for any later call. staging: bytes for each.
    """
    chosen = {name: ranks for name, ranks in groups.items() if len(ranks) > 1 and _together(ranks, addresses)}
    wanted = []
    numbers = {name: number for number, name in enumerate(groups)}
    for name, ranks in chosen.items():
        peers = {j: addresses[each].partition("@")[0] for j, each in enumerate(ranks) if each != rank}
        wanted.append((numbers[name], list(ranks).index(rank), peers))
    made = listener.connect(wanted, limit)
    return {
        name: SharedMemoryTransport(name, list(ranks).index(rank), ranks, sockets, limit, staging)
        for (name, ranks), sockets in zip(chosen.items(), made, strict=True)
    }


def _together(ranks: Sequence[int], addresses: Sequence[str]) -> bool:
    machines = {addresses[rank].partition("@")[2] for rank in ranks}
    return len(machines) == 1 and "" not in machines
