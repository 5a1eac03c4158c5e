"""Algorithms that treat all ranks of a group alike: pairwise, ring, recursive halving and doubling, binomial trees.

S: bytes of the whole vector, n: ranks. The bytes given are those that one rank sends. Methods: R. Thakur,
R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from engine.comm.algorithms.plan import Plan, block, round_of


def pairwise_reduce_scatter(rank: int, size: int, count: int) -> Plan:
    """Every rank sends each other its block at once: one round, (n - 1) / n S bytes. Only the own block is written."""
    others = [(rank + step) % size for step in range(1, size)]
    own = block(count, size, rank)
    sends = [(peer, block(count, size, peer)) for peer in others]
    return (round_of(sends, [(peer, own) for peer in reversed(others)], reduce=True),)


def pairwise_all_gather(rank: int, size: int, count: int) -> Plan:
    """Every rank sends its block to each other at once: one round, (n - 1) / n S bytes."""
    others = [(rank + step) % size for step in range(1, size)]
    own = block(count, size, rank)
    receives = [(peer, block(count, size, peer)) for peer in reversed(others)]
    return (round_of([(peer, own) for peer in others], receives, reduce=False),)


def pairwise_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Pairwise reduce-scatter, then all-gather: two rounds, 2 (n - 1) / n S bytes."""
    return pairwise_reduce_scatter(rank, size, count) + pairwise_all_gather(rank, size, count)


def ring_reduce_scatter(rank: int, size: int, count: int) -> Plan:
    """Partial sums go once around: n - 1 rounds, (n - 1) / n S bytes, each rank to the next."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def at(step: int) -> tuple[int, int]:
        return block(count, size, (rank - step) % size)

    steps = range(size - 1)
    return tuple(round_of([(after, at(k + 1))], [(before, at(k + 2))], reduce=True) for k in steps)


def ring_all_gather(rank: int, size: int, count: int) -> Plan:
    """Blocks go once around: n - 1 rounds, (n - 1) / n S bytes, each rank to the next."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def at(step: int) -> tuple[int, int]:
        return block(count, size, (rank - step) % size)

    return tuple(round_of([(after, at(k))], [(before, at(k + 1))], reduce=False) for k in range(size - 1))


def ring_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Ring reduce-scatter, then all-gather: 2 (n - 1) rounds, 2 (n - 1) / n S bytes."""
    return ring_reduce_scatter(rank, size, count) + ring_all_gather(rank, size, count)


def halving_doubling_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Recursive halving, then doubling: 2 log2(p) rounds, 2 (p - 1) / p S bytes, to partners at distances p/2 .. 1.

    p is the largest power of two up to n. Rank p + i only gives its vector to rank i and gets the result from it at the
    end: S bytes each way, two rounds more.
    """
    paired = _paired(size)
    halving, doubling = [], []
    low, high = 0, count
    distance = paired // 2 if rank < paired else 0
    while distance:
        partner, middle = rank ^ distance, low + (high - low) // 2
        lower, upper = (low, middle), (middle, high)
        kept, given = (upper, lower) if rank & distance else (lower, upper)
        halving.append(round_of([(partner, given)], [(partner, kept)], reduce=True))
        doubling.append(round_of([(partner, kept)], [(partner, given)], reduce=False))
        low, high = kept
        distance //= 2
    return _with_extra(rank, size, count, (*halving, *reversed(doubling)))


def doubling_all_reduce(rank: int, size: int, count: int) -> Plan:
    """Recursive doubling: partners at distances 1, 2, .. p/2 swap what they have: log2(p) rounds, log2(p) S bytes.

    p and the ranks beyond it: as in `halving_doubling_all_reduce`.
    """
    paired, whole = _paired(size), (0, count)
    distances = [1 << bit for bit in range(paired.bit_length() - 1)] if rank < paired else []
    core = tuple(round_of([(rank ^ d, whole)], [(rank ^ d, whole)], reduce=True) for d in distances)
    return _with_extra(rank, size, count, core)


def _paired(size: int) -> int:
    """Return the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def _with_extra(rank: int, size: int, count: int, core: Plan) -> Plan:
    """Return the plan of all ranks, given that of the first `_paired(size)`: each rank beyond gives its vector to one
    of them before, and gets the result from it after.
    """
    paired, whole = _paired(size), (0, count)
    if size == paired:
        return core
    if rank >= paired:
        partner = [(rank - paired, whole)]
        return (round_of(partner, [], reduce=True), round_of([], partner, reduce=False))
    helped = [(rank + paired, whole)] if rank < size - paired else []
    return (round_of([], helped, reduce=True), *core, round_of(helped, [], reduce=False))


def pairwise_broadcast(rank: int, size: int, count: int, root: int) -> Plan:
    """The root sends the vector to each other rank at once: one round, (n - 1) S bytes."""
    others, whole = [(root + step) % size for step in range(1, size)], (0, count)
    if rank == root:
        return (round_of([(peer, whole) for peer in others], [], reduce=False),)
    return (round_of([], [(root, whole)], reduce=False),)


def binomial_broadcast(rank: int, size: int, count: int, root: int) -> Plan:
    """Who has the vector hands it on, twice as many each round: ceil(log2 n) rounds; the root sends S bytes in each."""
    place, whole, plan = (rank - root) % size, (0, count), []
    distance = 1
    while distance < size:
        sends = [((rank + distance) % size, whole)] if place < distance and place + distance < size else []
        receives = [((rank - distance) % size, whole)] if distance <= place < 2 * distance else []
        plan.append(round_of(sends, receives, reduce=False))
        distance *= 2
    return tuple(plan)


def scatter_all_gather_broadcast(rank: int, size: int, count: int, root: int) -> Plan:
    """The root gives each rank a block, then all share theirs: two rounds, the root sends 2 (n - 1) / n S bytes, the
    others (n - 2) / n S.
    """
    own = block(count, size, rank)
    others = [(rank + step) % size for step in range(1, size)]
    if rank == root:
        return (
            round_of([(peer, block(count, size, peer)) for peer in others], [], reduce=False),
            round_of([(peer, own) for peer in others], [], reduce=False),
        )
    sends = [(peer, own) for peer in others if peer != root]
    receives = [(peer, block(count, size, peer)) for peer in reversed(others)]
    return (round_of([], [(root, own)], reduce=False), round_of(sends, receives, reduce=False))


def binomial_reduce(rank: int, size: int, count: int, root: int) -> Plan:
    """The binomial broadcast backwards: ceil(log2 n) rounds; every rank but the root sends S bytes, once."""
    place, whole, plan = (rank - root) % size, (0, count), []
    distance = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
    while distance:
        receives = [((rank + distance) % size, whole)] if place < distance and place + distance < size else []
        sends = [((rank - distance) % size, whole)] if distance <= place < 2 * distance else []
        plan.append(round_of(sends, receives, reduce=True))
        distance //= 2
    return tuple(plan)
