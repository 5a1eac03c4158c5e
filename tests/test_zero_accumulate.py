"""Gradients of several microbatches in both ways of adding them up: values, traffic, memory, odd arrivals."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.zero import ZeroOptimizer
from engine.zero.order import StartOrder
from tests.world import World, refusals

MODES = [(0, "full"), (1, "full"), (2, "full"), (2, "shard")]


# ---- the order, without processes ----------------------------------------------------------------------------------

memberships = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
    lambda sizes: [list(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes))]
)


@given(memberships, st.data())
def test_every_rank_starts_the_same_buckets_in_the_same_order_whatever_arrives(
    buckets: list[list[int]], data: st.DataObject
) -> None:
    turns = list(range(len(buckets)))[::-1]
    known = [index for members in buckets for index in members]
    order = StartOrder(buckets)
    for _ in range(3):
        for _ in range(2):
            arrivals = data.draw(st.lists(st.sampled_from(known), max_size=12)) if known else []
            order.begin(turns)
            started, seen = [], set()
            for index in arrivals:
                seen.add(index)
                started += order.arrive(index)
            assert started + order.end() == turns
        order.next_step()


def test_a_bucket_starts_with_its_last_gradient_once_those_before_it_have() -> None:
    order = StartOrder([[0, 1], [2], [3, 4]])
    for _ in range(2):
        order.begin([2, 1, 0])
        # 2 is complete, but the bucket before it is not.
        assert [order.arrive(index) for index in (2, 4, 3, 0, 1)] == [[], [], [2, 1], [], [0]]
        assert order.end() == []
    order.next_step()


def test_a_parameter_with_two_arrivals_or_none_is_waited_for_as_the_step_before_had_it() -> None:
    order = StartOrder([[0], [1, 2]])
    order.begin([1, 0])
    assert [order.arrive(index) for index in (1, 1, 0)] == [[], [], []]  # 2 never comes, 1 comes twice
    assert order.end() == [1, 0]
    order.next_step()
    order.begin([1, 0])
    assert [order.arrive(index) for index in (1, 1, 0)] == [[], [1], [0]]
    assert order.end() == []


def test_nothing_starts_early_where_it_may_not_nor_after_a_failure() -> None:
    order = StartOrder([[0], [1]], early=False)
    order.begin([1, 0])
    assert order.arrive(1) == order.arrive(0) == []
    assert order.end() == [1, 0]
    order.begin([1, 0])
    order.drop()
    assert order.end() == []
    assert order.arrive(1) == []


# ---- values --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.norm = nn.LayerNorm(width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).tanh())


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def train_grid(mesh: engine.Mesh, cases: list[tuple[int, str, int, str, int]]) -> list[Any]:
    found = []
    for stage, accumulate, microbatches, schedule, chunks in cases:
        tie = {"tied": {"both": "linear.weight"}}
        specs = [LayerSpec(Layer, **(tie if i in (0, 3) else {})) for i in range(4)]
        model = engine.PipelineModel(specs, mesh, balance="uniform", chunks=chunks)
        start = engine.full_state_dict(model, mesh)
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, mesh, stage=stage, accumulate=accumulate, bucket_mib=2e-4, lr=1e-2
        )
        step = engine.TrainStep(
            model, optimizer, squared, mesh, microbatches=microbatches, schedule=schedule, clip_grad_norm=2.0
        )
        norms = []
        for number in range(2):
            inputs, targets = (x.tensor_split(mesh.data.size)[mesh.data.rank] for x in batch(number, 16))
            norms.append(step(inputs, targets).grad_norm.item())
        found.append((start, norms, engine.full_state_dict(model, mesh)))
    return found


def train_plain(start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    model[3].linear.weight = model[0].linear.weight
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for number in range(2):
        inputs, targets = batch(number, 16)
        optimizer.zero_grad()
        (squared(model(inputs), targets)[0] / 16).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 2.0).item())
        optimizer.step()
    return norms, dict(model.state_dict())


GRID = [
    (Layout(data=2), ("1f1b",), 1),
    (Layout(data=4), ("gpipe",), 1),
    (Layout(data=2, pipeline=2), ("1f1b", "zero_bubble"), 1),
    (Layout(data=2, pipeline=2), ("interleaved",), 2),
    (Layout(data=2, pipeline=2, tensor=2), ("1f1b",), 1),
]


@pytest.mark.parametrize(("layout", "schedules", "chunks"), GRID, ids=lambda x: str(x))
def test_both_ways_equal_plain_training_in_every_stage_layout_and_schedule(
    world: World, layout: Layout, schedules: tuple[str, ...], chunks: int
) -> None:
    cases = [(*mode, count, name, chunks) for mode, count, name in itertools.product(MODES, (1, 4), schedules)]
    if layout.pipeline > 1:
        cases = [case for case in cases if case[2] == 4]
    for each in world.run(layout, train_grid, cases):
        for start, norms, weights in each:
            wanted_norms, wanted = train_plain(start)
            assert norms == pytest.approx(wanted_norms, rel=1e-10)
            for name, value in wanted.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-13)


def scalar_sums(mesh: engine.Mesh, accumulate: str) -> Any:
    """Gradients 1, 2, 3, 4 in four backwards; on the second rank three times as much."""
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, accumulate=accumulate, lr=1.0)
    calls: list[str] = []
    for name in ("reduce_scatter", "all_reduce"):
        real = getattr(mesh.data, name)

        def spy(x: Tensor, *args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            if x.is_floating_point() and x.dim():
                calls.append(name)
            return real(x, *args, **kwargs)

        setattr(mesh.data, name, spy)
    sums = []
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(4):
            with optimizer.microbatch(last=number == 3):
                (model.weight.sum() * (number + 1.0) * (1 + 2 * mesh.rank)).backward()
        optimizer.finish_gradients(4 * mesh.data.size)
        sums.append(optimizer.full_gradients()["weight"].tolist())
        optimizer.step()
    return sums, calls


@pytest.mark.parametrize(("accumulate", "count"), [("full", 1), ("shard", 4)])
def test_nothing_is_lost_between_microbatches_and_full_reduces_once(world: World, accumulate: str, count: int) -> None:
    for sums, calls in world.run(Layout(data=2), scalar_sums, accumulate):
        assert sums == [[[5.0, 5.0, 5.0]]] * 2  # the mean of 1..4 is 2.5, the mean of ranks with 1 and 3 times it 5
        assert calls == ["reduce_scatter"] * count * 2


# ---- odd arrivals --------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Which parameters a backward reaches, how often and in which order is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(5)])


# For each microbatch and data rank: backwards one after another, each over parameters with factors.
PROGRAMS: dict[str, list[list[list[dict[int, float]]]]] = {
    "used on one rank": [[[{0: 1, 1: 2, 2: 3, 3: 4, 4: 5}], [{0: 1, 4: 1}]]] * 2,
    "used in one microbatch": [[[{0: 1}], [{0: 2}]], [[{1: 1, 3: 5}], [{3: 1}]], [[{}], [{2: 7}]]],
    "twice in a microbatch": [[[{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {4: 8, 2: 4}], [{0: 1, 2: 3}, {2: 5}]]] * 2,
    "another order": [[[{4: 1}, {0: 1}, {2: 1}], [{0: 3}, {2: 2}, {4: 9}]]],
}


def run_programs(mesh: engine.Mesh, stage: int, accumulate: str, told: bool) -> dict[str, Any]:
    found = {}
    for name, program in PROGRAMS.items():
        model = Branches()
        optimizer = ZeroOptimizer(
            model, torch.optim.SGD, mesh, stage=stage, accumulate=accumulate, bucket_mib=48 / 2**20, lr=1.0
        )
        for _ in range(3):  # what arrived in one step decides when buckets start in the next
            optimizer.zero_grad()
            for number, ranks in enumerate(program):
                with optimizer.microbatch(last=number == len(program) - 1 and told):
                    for factors in ranks[mesh.rank]:
                        if factors:
                            sum(model.parts[i].sum() * f for i, f in factors.items()).backward()  # type: ignore[union-attr]
            optimizer.finish_gradients()
            optimizer.step()
        found[name] = [-part[0].item() / 3 for part in model.parts]
    return found


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("told", [True, False], ids=["last", "not told"])
def test_no_gradient_is_lost_or_doubled_whatever_arrives_where(world: World, mode: tuple[int, str], told: bool) -> None:
    for found in world.run(Layout(data=2), run_programs, *mode, told):
        for name, program in PROGRAMS.items():
            wanted = [0.0] * 5
            for ranks in program:
                for backwards in ranks:
                    for index, factor in (pair for factors in backwards for pair in factors.items()):
                        wanted[index] += factor
            assert found[name] == wanted, name


def untold(mesh: engine.Mesh) -> list[float]:
    """No `microbatch` at all, and a gradient by hand."""
    model = Branches()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, accumulate="shard", lr=1.0)
    for _ in range(2):
        for _ in range(3):
            (model.parts[0].sum() * (mesh.rank + 1)).backward()
        model.parts[1].grad = torch.full((3,), 5.0, dtype=torch.float64)
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [-part[0].item() for part in model.parts]


def test_backwards_that_nobody_announced_are_reduced_at_the_end(world: World) -> None:
    assert world.run(Layout(data=2), untold) == [[18.0, 20.0, 0.0, 0.0, 0.0]] * 2


def not_moved(mesh: engine.Mesh, cases: list[tuple[int, str]]) -> list[Any]:
    """Gradients that have a graph of their own, and some made by hand before and inside a microbatch."""
    found = []
    for stage, accumulate in cases:
        model = Branches()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, accumulate=accumulate, lr=1.0)
        by_hand = torch.full((3,), 5.0, dtype=torch.float64)
        model.parts[1].grad = by_hand.clone()
        for number in range(2):
            with optimizer.microbatch(last=number == 1):
                (model.parts[0] * (mesh.rank + 1) + model.parts[0].square()).sum().backward(create_graph=True)
                if number:
                    model.parts[2].grad = by_hand.clone()
        optimizer.finish_gradients()
        found.append([gradient[0].item() for gradient in optimizer.full_gradients().values()])
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("transport", ["torch", None])
def test_gradients_that_no_hook_can_move_are_reduced_with_the_others(world: World, transport: str | None) -> None:
    for found in world.run(Layout(data=2), not_moved, MODES, **({"transport": transport} if transport else {})):
        assert found == [[6.0, 10.0, 10.0, 0.0, 0.0]] * len(MODES)


class Product(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(2, 3, dtype=dtype))


def products(mesh: engine.Mesh, cases: list[tuple[int, str, torch.dtype]]) -> list[Any]:
    """A gradient handed over as factors, before and after what autograd makes, and one by hand."""
    found = []
    for stage, accumulate, dtype in cases:
        model = Product(dtype)
        optimizer = ZeroOptimizer(
            model, torch.optim.SGD, mesh, stage=stage, accumulate=accumulate, bucket_mib=1e-9, lr=1.0
        )
        sinks = optimizer.gradient_sinks()
        left = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=dtype)
        right = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0]], dtype=dtype) * (mesh.rank + 1)
        for _ in range(3):
            optimizer.zero_grad()
            for number in range(2):
                with optimizer.microbatch(last=number == 1):
                    sinks[id(model.second)].add(left, right)
                    (model.first.sum() + model.second.sum()).backward()
                    sinks[id(model.first)].add(left, right)
                    sinks[id(model.first)].add(left, right)
            if number:
                model.second.grad = None if model.second.grad is None else model.second.grad.clone()
            optimizer.finish_gradients()
            optimizer.step()
        found.append([[(-p.float() / 3).tolist() for p in (model.first, model.second)]])
    return found


@pytest.mark.parametrize("transport", ["torch", None])
def test_gradients_that_are_handed_over_as_factors_arrive_as_autograds_do(world: World, transport: str | None) -> None:
    # left^T right is [[1, 0, 1], [4, 1, 2]], on the second rank twice that: over ranks and microbatches 6 times.
    once = torch.tensor([[1.0, 0.0, 1.0], [4.0, 1.0, 2.0]])
    wanted = [[(12 * once + 4).tolist(), (6 * once + 4).tolist()]]
    cases = [(*mode, dtype) for mode in MODES for dtype in (torch.float64, torch.bfloat16)]
    for found in world.run(Layout(data=2), products, cases, **({"transport": transport} if transport else {})):
        for case, values in zip(cases, found, strict=True):
            assert values == wanted, case


# ---- memory --------------------------------------------------------------------------------------------------------


def held(mesh: engine.Mesh, accumulate: str) -> Any:
    """The bytes of gradients at the end of a microbatch, where they lie from step to step, and buffers borrowed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = ZeroOptimizer(
        model, torch.optim.SGD, mesh, accumulate=accumulate, bucket_mib=64 * 64 * 4 / 2**20, lr=1e-3
    )
    places = []
    for _ in range(4):
        optimizer.zero_grad()
        for number in range(2):
            with optimizer.microbatch(last=number == 1):
                model(torch.ones(2, 64)).square().sum().backward()
        left = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
        optimizer.finish_gradients(2.0)
        pool = optimizer._buckets[0]._pool
        places.append({buffer.data_ptr() for free in pool._free.values() for buffer in free})
        optimizer.step()
    kept = sum(bucket._gradients.numel() for bucket in optimizer._buckets)
    return left, kept, places, mesh.data.overlaps


def test_shard_keeps_a_shard_and_three_buckets_and_takes_no_memory_after_a_step(world: World) -> None:
    whole = 8 * 64 * 64
    for left, kept, places, _ in world.run(Layout(data=4), held, "shard"):
        assert (left, kept) == (0, whole // 4)
        assert len(places[1]) == 3
        assert places[1] == places[2] == places[3]
    for left, kept, places, overlaps in world.run(Layout(data=4), held, "full"):
        assert (left, kept) == (0 if overlaps else whole, whole)
        assert places == [set()] * 4


class Failing(nn.Module):
    """Four weights; in a backward, the error of the rank comes before the gradient of weight `at` is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(4)])

    def forward(self, x: Tensor, at: int | None) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = (x @ weight).tanh()
            if number == at:
                x.register_hook(_fail)
        return x.square().sum()


def _fail(_gradient: Tensor) -> None:
    raise ArithmeticError


# Where the first backward fails, by data rank; None: it does not.
FAILURES: list[tuple[int | None, int | None]] = [(3, 0), (1, 2), (None, 2)]


def interrupted(mesh: engine.Mesh, cases: list[tuple[int, str, bool]]) -> list[dict[str, Tensor]]:
    """Three steps; after the failure in the second one `zero_grad` is called, or the next microbatch follows."""
    found = []
    for stage, accumulate, drops in cases:
        for failure in FAILURES:
            model = Failing()
            options: Any = {"stage": stage, "accumulate": accumulate, "bucket_mib": 1e-9, "lr": 0.1}
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, **options)
            for step in range(3):
                optimizer.zero_grad()
                for half in range(2):
                    fails = (step, half) == (1, 0)
                    at = failure[mesh.rank] if fails else None
                    loss = model(small_rows(step, half, mesh.rank), at)
                    error = nullcontext() if at is None else pytest.raises(ArithmeticError)
                    with error, optimizer.microbatch(last=half == 1 or (drops and fails)):
                        loss.backward()
                    if drops and fails:
                        optimizer.zero_grad()
                optimizer.finish_gradients(2.0)
                optimizer.step()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def small_rows(step: int, half: int, rank: int) -> Tensor:
    return torch.randn(
        2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + 10 * half + rank)
    )


def interrupted_plainly(drops: bool, failure: tuple[int | None, int | None]) -> dict[str, Tensor]:
    model = Failing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for half in range(2):
            for rank in range(2):
                at = failure[rank] if (step, half) == (1, 0) else None
                loss = model(small_rows(step, half, rank), at) / 2
                with nullcontext() if at is None else pytest.raises(ArithmeticError):
                    loss.backward()
            if drops and (step, half) == (1, 0):
                optimizer.zero_grad()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("transport", ["torch", None])
def test_ranks_whose_backward_failed_at_different_points_go_on_together(world: World, transport: str | None) -> None:
    cases = [(stage, accumulate, drops) for stage, accumulate in MODES for drops in (True, False)]
    options = {} if transport is None else {"transport": transport}
    wanted = {drops: [interrupted_plainly(drops, failure) for failure in FAILURES] for drops in (True, False)}
    runs = [(case, failure, plain) for case in cases for failure, plain in zip(FAILURES, wanted[case[2]], strict=True)]
    for results in world.run(Layout(data=2), interrupted, cases, **options):
        for (case, failure, plain), weights in zip(runs, results, strict=True):
            for name, value in plain.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14, msg=f"{case} {failure} {name}")


def refused(mesh: engine.Mesh) -> list[str]:
    def make(**options: Any) -> Any:
        return lambda: ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, mesh, lr=0.1, **options)

    return refusals(
        [
            make(stage=0, accumulate="shard"),
            make(stage=1, accumulate="shard"),
            make(accumulate="both"),
            make(accumulate="full" if mesh.rank else "shard"),
            make(broadcast_buffers=1),
        ]
    )


def test_ways_that_do_not_exist_or_differ_are_refused_on_every_rank(world: World) -> None:
    for zero, one, both, apart, buffers in world.run(Layout(data=2), refused):
        assert "stage=0 keeps all of them: take stage=2, or accumulate='full'" in zero
        assert "stage=1 keeps all of them" in one
        assert "accumulate='both': choose 'full' (one reduction in a step) or 'shard'" in both
        assert "ZeroOptimizer's options differs over axis 'world'" in apart
        assert buffers == "broadcast_buffers=1: give True or False"
