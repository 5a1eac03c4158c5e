"""Algorithms that cross between hosts as little as they can: inside each host, across hosts, inside again.

S: bytes of the whole vector, n: ranks, H: hosts, m: ranks of one host. Hosts may have unequal numbers of ranks. Method:
as NCCL's and Horovod's hierarchical all-reduce (A. Sergeev, M. Del Balso, arXiv:1802.05799), generalised.
"""

from __future__ import annotations

from engine.comm.algorithms.plan import Hosts, Plan, block, round_of

Span = tuple[int, int]


def _home(rank: int, hosts: Hosts) -> tuple[int, ...]:
    """Return the ranks of this rank's host."""
    return next(host for host in hosts if rank in host)


def hierarchical_all_reduce(rank: int, size: int, count: int, hosts: Hosts) -> Plan:
    """Reduce-scatter inside the host, all-reduce each part between its owners on all hosts, all-gather inside.

    Four rounds. The owners are the first ranks of every host, as many as the smallest host has. With equal hosts of m
    ranks one rank sends 2 (m - 1) / m S bytes inside its host and 2 (H - 1) / H S / m across.
    """
    del size  # the hosts say it
    home = _home(rank, hosts)
    owners = min(len(host) for host in hosts)
    place = home.index(rank)
    neighbours = [peer for peer in home if peer != rank]

    def part(index: int) -> Span:
        return block(count, owners, index)

    def piece(index: int) -> Span:
        """The part of an owner's part that the owner on host `index` sums."""
        start, stop = part(place)
        low, high = block(stop - start, len(hosts), index)
        return start + low, start + high

    owned = [(home[i], part(i)) for i in range(owners) if home[i] != rank]
    if place >= owners:
        idle = round_of([], [], reduce=False)
        return (round_of(owned, [], reduce=True), idle, idle, round_of([], owned, reduce=False))
    here = hosts.index(home)
    across = [(i, hosts[i][place]) for i in range(len(hosts)) if i != here]
    mine = [(peer, part(place)) for peer in neighbours]
    theirs = [(peer, piece(i)) for i, peer in across]
    own_piece = [(peer, piece(here)) for _, peer in across]
    return (
        round_of(owned, mine, reduce=True),
        round_of(theirs, own_piece, reduce=True),
        round_of(own_piece, theirs, reduce=False),
        round_of(mine, owned, reduce=False),
    )


def hierarchical_all_gather(rank: int, size: int, count: int, hosts: Hosts) -> Plan:
    """Each block goes once to every other host, then all that came to a host goes around inside it: two rounds.

    With equal hosts of m ranks one rank sends (H - 1) / n S bytes across and (m - 1) H / n S inside.
    """
    home = _home(rank, hosts)
    landed = _landings(size, hosts)

    def span(owner: int) -> Span:
        return block(count, size, owner)

    elsewhere = [host for host in hosts if host != home]
    sends = [(landed[host, rank], span(rank)) for host in elsewhere]
    receives = [(owner, span(owner)) for owner in range(size) if owner not in home and landed[home, owner] == rank]
    held = {peer: [owner for owner in range(size) if landed[home, owner] == peer] for peer in home}
    neighbours = [peer for peer in home if peer != rank]
    spread = [(peer, span(owner)) for peer in neighbours for owner in held[rank]]
    gathered = [(peer, span(owner)) for peer in neighbours for owner in held[peer]]
    return (round_of(sends, receives, reduce=False), round_of(spread, gathered, reduce=False))


def hierarchical_reduce_scatter(rank: int, size: int, count: int, hosts: Hosts) -> Plan:
    """The all-gather backwards: each host sums what it has for a block, then sends that once to the block's rank.

    With equal hosts of m ranks one rank sends (m - 1) H / n S bytes inside its host and (H - 1) / n S across.
    """
    home = _home(rank, hosts)
    landed = _landings(size, hosts)

    def span(owner: int) -> Span:
        return block(count, size, owner)

    held = {peer: [owner for owner in range(size) if landed[home, owner] == peer] for peer in home}
    neighbours = [peer for peer in home if peer != rank]
    inside = [(peer, span(owner)) for peer in neighbours for owner in held[peer]]
    mine = [(peer, span(owner)) for peer in neighbours for owner in held[rank]]
    sends = [(owner, span(owner)) for owner in held[rank] if owner not in home]
    receives = [(landed[host, rank], span(rank)) for host in hosts if host != home]
    return (round_of(inside, mine, reduce=True), round_of(sends, receives, reduce=True))


def _landings(size: int, hosts: Hosts) -> dict[tuple[tuple[int, ...], int], int]:
    """Return, for each (host, owner of a block), the rank of that host through which the block passes."""
    place = {rank: host.index(rank) for host in hosts for rank in host}
    return {
        (host, owner): owner if owner in host else host[place[owner] % len(host)]
        for host in hosts
        for owner in range(size)
    }
