"""Plans of collectives, checked with no process: who ends with whose contribution, no deadlock, bytes by formula."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.comm.algorithms import PLANS, plan_for
from engine.comm.algorithms.plan import Hosts, Plan, Transfer, block, elements_sent, round_of, with_early
from engine.comm.algorithms.run import Running

CASES = [(operation, algorithm) for operation, makers in PLANS.items() for algorithm in makers]
ROOTED = ("broadcast", "reduce")


def play(plans: list[Plan], vectors: list[np.ndarray], *, early: bool, order: int) -> None:  # noqa: C901 (one machine, top down)
    """Run all ranks' plans over their vectors, (count, n) contributions by element. A send ends only once its receive
    is posted; all transfers of a round are posted together, with `early` the next round's early receives too, and what
    is not reduced lands as it arrives. order: of messages between different ranks. Raises AssertionError for a
    deadlock or a mismatch.
    """
    size = len(plans)
    at = [-1] * size
    waits = [[len(each.sends) + len(each.receives) for each in plan] for plan in plans]  # transfers under way, by round
    arrived: list[list[tuple[Transfer, np.ndarray]]] = [[] for _ in range(size)]
    sends: dict[tuple[int, int], deque[tuple[Transfer, int]]] = {}
    receives: dict[tuple[int, int], deque[tuple[Transfer, int]]] = {}
    choose = random.Random(order)

    def finish_round(rank: int) -> None:
        for transfer, data in arrived[rank]:
            vectors[rank][transfer.start : transfer.stop] += data
        arrived[rank] = []

    def post_receives(rank: int, number: int) -> None:
        for transfer in plans[rank][number].receives:
            receives.setdefault((transfer.peer, rank), deque()).append((transfer, number))

    def next_round(rank: int) -> None:
        at[rank] += 1
        number = at[rank]
        if number == len(plans[rank]):
            return
        each = plans[rank][number]
        crossing = [(s, r) for s in each.sends for r in each.receives if s.start < r.stop and r.start < s.stop]
        assert each.swaps == bool(crossing)
        assert each.reduce or not crossing, "a slice is sent and overwritten in one round"
        for transfer in each.sends:
            sends.setdefault((rank, transfer.peer), deque()).append((transfer, number))
        if not (early and each.early):
            post_receives(rank, number)
        if early and number + 1 < len(plans[rank]) and plans[rank][number + 1].early:
            post_receives(rank, number + 1)

    def match(source: int, target: int) -> None:
        (sent, send_round), (received, number) = sends[source, target].popleft(), receives[source, target].popleft()
        assert (sent.start, sent.stop) == (received.start, received.stop), (source, target, sent, received)
        data = vectors[source][sent.start : sent.stop].copy()
        if plans[target][number].reduce:
            arrived[target].append((received, data))
        else:
            vectors[target][received.start : received.stop] = data
        waits[source][send_round] -= 1
        waits[target][number] -= 1

    for rank in range(size):
        next_round(rank)
    while True:
        ready = [pair for pair, queue in sends.items() if queue and receives.get(pair)]
        through = [rank for rank in range(size) if at[rank] < len(plans[rank]) and waits[rank][at[rank]] == 0]
        if not ready and not through:
            break
        if choose.randrange(len(ready) + len(through)) < len(ready):
            match(*choose.choice(ready))
        else:
            rank = choose.choice(through)
            finish_round(rank)
            next_round(rank)
    assert [len(plan) for plan in plans] == at, "deadlock"
    assert not any(sends.values()), "a message was never received"
    assert not any(receives.values()), "a message never came"


def check(operation: str, algorithm: str, size: int, count: int, root: int, hosts: Hosts) -> None:
    """Every rank ends with what the operation promises, each contribution exactly once, in any order of messages."""
    for early in (False, True):
        for order in range(2):
            check_once(operation, algorithm, size, count, root, hosts, early, order)


def check_once(
    operation: str, algorithm: str, size: int, count: int, root: int, hosts: Hosts, early: bool, order: int
) -> None:
    plans = [plan_for(operation, algorithm, rank, size, count, root, hosts) for rank in range(size)]
    identity = np.eye(size, dtype=int)
    vectors = [np.tile(identity[rank], (count, 1)) for rank in range(size)]
    blocks = [slice(*block(count, size, rank)) for rank in range(size)]
    if operation == "all_gather":
        for rank, vector in enumerate(vectors):
            kept = vector[blocks[rank]].copy()
            vector[:] = 99
            vector[blocks[rank]] = kept
    play(plans, vectors, early=early, order=order)
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
        play([first, second], [np.zeros((2, 2), int) for _ in range(2)], early=False, order=0)
    lost = (round_of([(1, (0, 2))], [], reduce=False),)
    wrong = (round_of([], [(0, (0, 1))], reduce=False),)
    with pytest.raises(AssertionError):
        play([lost, wrong], [np.zeros((2, 2), int) for _ in range(2)], early=False, order=0)


def test_receives_are_early_only_where_their_memory_is_free() -> None:
    for operation, algorithm in (("all_reduce", "pairwise"), ("all_reduce", "ring"), ("all_gather", "hierarchical")):
        plan = plan_for(operation, algorithm, 0, 4, 8, 0, ((0, 1), (2, 3)))
        assert [each.early for each in plan] == [number > 0 and not each.reduce for number, each in enumerate(plan)]
    handed_on = [round_of([(1, (0, 1))], [], reduce=False), round_of([], [(2, (0, 1))], reduce=False)]
    assert not with_early(handed_on)[1].early  # rank 2 may send before rank 1 has received
    taken_twice = [round_of([], [(1, (0, 1))], reduce=False), round_of([], [(1, (0, 1))], reduce=False)]
    assert not with_early(taken_twice)[1].early
    swapped = [round_of([(1, (0, 1))], [], reduce=False), round_of([], [(1, (0, 1))], reduce=False)]
    assert with_early(swapped)[1].early


def test_the_checker_sees_what_comes_too_early() -> None:
    def once(order: int) -> np.ndarray:
        plans = [
            (round_of([(1, (0, 1))], [], reduce=False), replace(round_of([], [(2, (0, 1))], reduce=False), early=True)),
            (round_of([], [(0, (0, 1))], reduce=False),),
            (round_of([(0, (0, 1))], [], reduce=False),),
        ]
        vectors = [np.full((1, 1), rank) for rank in range(3)]
        play(plans, vectors, early=True, order=order)
        return vectors[1]

    assert {int(once(order)[0, 0]) for order in range(20)} == {0, 2}
