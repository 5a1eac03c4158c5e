"""Plans of collectives, checked with no process: who ends with whose contribution, no deadlock, bytes by formula."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.comm.algorithms import PLANS, plan_for
from engine.comm.algorithms.plan import Hosts, Plan, Transfer, block, elements_sent, round_of
from engine.comm.algorithms.run import Running

CASES = [(operation, algorithm) for operation, makers in PLANS.items() for algorithm in makers]
ROOTED = ("broadcast", "reduce")


def play(plans: list[Plan], vectors: list[np.ndarray]) -> None:  # noqa: C901 (one machine, read top down)
    """Run all ranks' plans over their vectors, (count, n) contributions by element. A send ends only once its receive
    is posted; all transfers of a round are posted together. Raises AssertionError for a deadlock or a mismatch.
    """
    size = len(plans)
    at = [-1] * size
    open_transfers = [0] * size
    arrived: list[list[tuple[Transfer, np.ndarray | None]]] = [[] for _ in range(size)]
    sends: dict[tuple[int, int], deque[Transfer]] = {}
    receives: dict[tuple[int, int], deque[tuple[Transfer, int]]] = {}

    def finish_round(rank: int) -> None:
        each = plans[rank][at[rank]]
        for transfer, data in arrived[rank]:
            target = vectors[rank][transfer.start : transfer.stop]
            target[:] = target + data if each.reduce else data

    def next_round(rank: int) -> None:
        at[rank] += 1
        arrived[rank] = []
        if at[rank] == len(plans[rank]):
            return
        each = plans[rank][at[rank]]
        crossing = [(s, r) for s in each.sends for r in each.receives if s.start < r.stop and r.start < s.stop]
        assert each.swaps == bool(crossing)
        assert each.reduce or not crossing, "a slice is sent and overwritten in one round"
        for transfer in each.sends:
            sends.setdefault((rank, transfer.peer), deque()).append(transfer)
        for transfer in each.receives:
            arrived[rank].append((transfer, None))
            receives.setdefault((transfer.peer, rank), deque()).append((transfer, len(arrived[rank]) - 1))
        open_transfers[rank] = len(each.sends) + len(each.receives)

    for rank in range(size):
        next_round(rank)
    progress = True
    while progress:
        progress = False
        for (source, target), queue in sends.items():
            waiting = receives.get((source, target), deque())
            while queue and waiting:
                sent, (received, place) = queue.popleft(), waiting.popleft()
                assert (sent.start, sent.stop) == (received.start, received.stop), (source, target, sent, received)
                arrived[target][place] = (received, vectors[source][sent.start : sent.stop].copy())
                open_transfers[source] -= 1
                open_transfers[target] -= 1
                progress = True
        for rank in range(size):
            while at[rank] < len(plans[rank]) and open_transfers[rank] == 0:
                finish_round(rank)
                next_round(rank)
                progress = True
    assert [len(plan) for plan in plans] == at, "deadlock"
    assert not any(sends.values()), "a message was never received"
    assert not any(receives.values()), "a message never came"


def check(operation: str, algorithm: str, size: int, count: int, root: int, hosts: Hosts) -> None:
    """Every rank ends with what the operation promises, each contribution exactly once."""
    plans = [plan_for(operation, algorithm, rank, size, count, root, hosts) for rank in range(size)]
    identity = np.eye(size, dtype=int)
    vectors = [np.tile(identity[rank], (count, 1)) for rank in range(size)]
    blocks = [slice(*block(count, size, rank)) for rank in range(size)]
    if operation == "all_gather":
        for rank, vector in enumerate(vectors):
            kept = vector[blocks[rank]].copy()
            vector[:] = 99
            vector[blocks[rank]] = kept
    play(plans, vectors)
    for rank, vector in enumerate(vectors):
        if operation == "all_reduce":
            assert (vector == 1).all()
        elif operation == "reduce_scatter":
            assert (vector[blocks[rank]] == 1).all()
        elif operation == "all_gather":
            assert all((vector[blocks[owner]] == identity[owner]).all() for owner in range(size))
        elif operation == "broadcast":
            assert (vector == identity[root]).all()
        elif rank == root:
            assert (vector == 1).all()


def spread(size: int, number: int) -> Hosts:
    """Ranks over hosts in turn, so that neighbours are apart and hosts unequal."""
    hosts = [tuple(range(first, size, number)) for first in range(min(number, size))]
    return tuple(hosts)


@pytest.mark.parametrize(("operation", "algorithm"), CASES)
@pytest.mark.parametrize("size", range(1, 10))
def test_every_contribution_arrives_exactly_once(operation: str, algorithm: str, size: int) -> None:
    for count in (0, 1, size - 1, size, 3 * size + 1, 24):
        if operation in ("reduce_scatter", "all_gather") and count % size:
            continue
        for root in range(size) if operation in ROOTED else (0,):
            for hosts in (1, 2, 3, size) if algorithm == "hierarchical" else (1,):
                check(operation, algorithm, size, count, root, spread(size, hosts))


@given(data=st.data())
@settings(max_examples=200)
def test_any_hosts_and_any_count(data: st.DataObject) -> None:
    operation, algorithm = data.draw(st.sampled_from(CASES))
    size = data.draw(st.integers(1, 12))
    of_rank = [data.draw(st.integers(0, 3)) for _ in range(size)]
    hosts = tuple(tuple(r for r in range(size) if of_rank[r] == host) for host in sorted(set(of_rank)))
    count = data.draw(st.integers(0, 5)) * size + (0 if operation in ("reduce_scatter", "all_gather") else 1)
    check(operation, algorithm, size, count, data.draw(st.integers(0, size - 1)), hosts)


@pytest.mark.parametrize(
    ("operation", "algorithm", "expected"),
    [  # bytes that each of 4 ranks sends of a vector of 16 bytes, from the docstrings' formulas
        ("all_reduce", "pairwise", [24, 24, 24, 24]),
        ("all_reduce", "ring", [24, 24, 24, 24]),
        ("all_reduce", "doubling", [32, 32, 32, 32]),
        ("all_reduce", "halving_doubling", [24, 24, 24, 24]),
        ("all_reduce", "hierarchical", [24, 24, 24, 24]),  # 2 (m - 1) / m S + 2 (H - 1) / H S / m, m = H = 2
        ("reduce_scatter", "pairwise", [12, 12, 12, 12]),
        ("reduce_scatter", "ring", [12, 12, 12, 12]),
        ("reduce_scatter", "hierarchical", [12, 12, 12, 12]),  # (m - 1) H / n S + (H - 1) / n S
        ("all_gather", "pairwise", [12, 12, 12, 12]),
        ("all_gather", "ring", [12, 12, 12, 12]),
        ("all_gather", "hierarchical", [12, 12, 12, 12]),
        ("broadcast", "pairwise", [48, 0, 0, 0]),
        ("broadcast", "tree", [32, 16, 0, 0]),
        ("broadcast", "scatter_all_gather", [24, 8, 8, 8]),
        ("reduce", "tree", [0, 16, 16, 16]),
    ],
)
def test_bytes_of_four_ranks_are_these(operation: str, algorithm: str, expected: list[int]) -> None:
    plans = [plan_for(operation, algorithm, rank, 4, 16, 0, ((0, 1), (2, 3))) for rank in range(4)]
    assert [elements_sent(plan) for plan in plans] == expected


def formula(operation: str, algorithm: str, place: int, n: int, number: int) -> Fraction:
    """What one rank sends, in vectors, by the docstrings. place: from the root; number: of equal hosts."""
    inside, paired = Fraction(n, number), 1 << (n.bit_length() - 1)
    if (operation, algorithm) == ("broadcast", "pairwise"):
        return Fraction(0 if place else n - 1)
    if algorithm in ("pairwise", "ring"):
        return (1 + (operation == "all_reduce")) * Fraction(n - 1, n)
    if algorithm in ("doubling", "halving_doubling"):
        helper, helped = place >= paired, place < n - paired
        core = paired.bit_length() - 1 if algorithm == "doubling" else 2 * Fraction(paired - 1, paired)
        return Fraction(1) if helper else core + helped
    if algorithm == "hierarchical" and operation == "all_reduce":
        return 2 * (inside - 1) / inside + 2 * Fraction(number - 1, number) / inside
    if algorithm == "hierarchical":
        return (inside - 1) * number / n + Fraction(number - 1, n)
    if algorithm == "scatter_all_gather":
        return Fraction(n - 2, n) if place else 2 * Fraction(n - 1, n)
    if operation == "reduce":
        return Fraction(place != 0)
    return Fraction(sum(place < 2**j < n - place for j in range(4)))  # who got it before round j sends in it


@pytest.mark.parametrize(("operation", "algorithm"), CASES)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8])
def test_bytes_equal_the_formula(operation: str, algorithm: str, n: int) -> None:
    count = 840  # every block of every n is whole
    for number in [h for h in (1, 2, 4, n) if n % h == 0] if algorithm == "hierarchical" else [1]:
        hosts = spread(n, number)
        for root in range(n) if operation in ROOTED else (0,):
            sent = [elements_sent(plan_for(operation, algorithm, r, n, count, root, hosts)) for r in range(n)]
            assert sent == [count * formula(operation, algorithm, (r - root) % n, n, number) for r in range(n)]


def test_hierarchical_crosses_hosts_with_a_part_only() -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    for rank in range(8):
        plan = plan_for("all_reduce", "hierarchical", rank, 8, 64, 0, hosts)
        other = hosts[1 - rank // 4]
        across = sum(t.stop - t.start for each in plan for t in each.sends if t.peer in other)
        assert across == 2 * 64 // 2 // 4  # 2 (H - 1) / H S / m; a flat ring sends 2 * 7 / 8 S over the slowest link


def test_halving_doubling_beside_a_power_of_two_costs_the_extra_ranks_the_vector() -> None:
    sent = [elements_sent(plan_for("all_reduce", "halving_doubling", rank, 5, 16, 0, ())) for rank in range(5)]
    assert sent == [24 + 16, 24, 24, 24, 16]


class Sender:
    """In a messenger's place: a message leaves when its send is waited for, as a large one may, and 10 arrives."""

    moves_alone = True

    def tag(self) -> int:
        return 1

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.full((count,), 10.0, dtype=like.dtype)

    def give(self, buffer: torch.Tensor) -> None:
        del buffer

    def start(self, sends: list[Any], receives: list[Any], tag: int) -> list[str]:
        del receives, tag
        self.outgoing = sends[0][0]
        return ["send", "receive"]

    def wait(self, works: list[str]) -> None:
        if "send" in works:
            self.left = self.outgoing.clone()


def test_what_is_swapped_leaves_before_it_is_reduced_into() -> None:
    vector, messenger = torch.arange(4.0), Sender()
    plan = plan_for("all_reduce", "doubling", 0, 2, 4, 0, ())
    Running(cast(Any, messenger), plan, lambda start, stop: vector[start:stop], "sum", vector).wait()
    assert messenger.left.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert vector.tolist() == [10.0, 11.0, 12.0, 13.0]


def test_the_checker_sees_deadlocks_and_wrong_slices() -> None:
    first = (round_of([(1, (0, 1))], [], reduce=False), round_of([], [(1, (1, 2))], reduce=False))
    second = (round_of([(0, (1, 2))], [], reduce=False), round_of([], [(0, (0, 1))], reduce=False))
    with pytest.raises(AssertionError, match="deadlock"):
        play([first, second], [np.zeros((2, 2), int) for _ in range(2)])
    lost = (round_of([(1, (0, 2))], [], reduce=False),)
    wrong = (round_of([], [(0, (0, 1))], reduce=False),)
    with pytest.raises(AssertionError):
        play([lost, wrong], [np.zeros((2, 2), int) for _ in range(2)])
