"""Opening shared memory: which ranks of a mesh have it together, and the connections between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.comm.rendezvous import this_host
from engine.comm.shm.links import Listener
from engine.comm.shm.transport import SharedMemoryTransport


def own_address(listener: Listener) -> str:
    """Return what the other ranks must know: where this process listens, and on which machine that can be reached."""
    return f"{listener.address}@{this_host()}"


def hosts_with_memory(hosts: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Return for every global rank a name that is equal for those which share memory. hosts: the names of their hosts,
    which may be invented; addresses: see `own_address`.
    """
    return [f"{host} on {address.partition('@')[2]}" for host, address in zip(hosts, addresses, strict=True)]


def open_groups(
    groups: Mapping[str, Sequence[int]],
    rank: int,
    listener: Listener,
    addresses: Sequence[str],
    *,
    limit: float,
    staging: int,
) -> dict[str, SharedMemoryTransport]:
    """Connect this process with the others of every group, and return the transports of those that are more than one.

    groups: global ranks that share memory, by name; every rank has the same names in the same order. limit: seconds for
    a connection and for any later call. staging: bytes for each group.
    """
    chosen = {name: list(ranks) for name, ranks in groups.items() if len(ranks) > 1}
    wanted = []
    for number, name in enumerate(groups):
        if name in chosen:
            ranks = chosen[name]
            peers = {j: addresses[each].partition("@")[0] for j, each in enumerate(ranks) if each != rank}
            wanted.append((number, ranks.index(rank), peers))
    made = listener.connect(wanted, limit)
    return {
        name: SharedMemoryTransport(name, ranks.index(rank), ranks, sockets, limit, staging)
        for (name, ranks), sockets in zip(chosen.items(), made, strict=True)
    }
