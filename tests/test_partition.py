"""Cutting layers into stages: the counts literally, and the balanced cut against trying every cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import engine
from engine.errors import LayoutError
from engine.pipeline.partition import by_cost, explicit, uniform
from tests.plain_gpt import Head

COSTS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def lengths(stages: tuple[range, ...]) -> list[int]:
    return [len(stage) for stage in stages]


def assert_covers(stages: tuple[range, ...], layers: int) -> None:
    assert [layer for stage in stages for layer in stage] == list(range(layers)), "ordered, disjoint, complete"
    assert min(lengths(stages)) >= 1


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(30, 4, [8, 8, 7, 7]), (7, 2, [4, 3]), (5, 4, [2, 1, 1, 1]), (4, 4, [1, 1, 1, 1]), (9, 1, [9])],
)
def test_no_layer_is_lost_in_an_uneven_split(layers: int, stages: int, expected: list[int]) -> None:
    assert lengths(uniform(layers, stages)) == expected
    assert_covers(uniform(layers, stages), layers)


@given(st.integers(1, 200), st.integers(1, 24))
def test_uniform_lengths_differ_by_at_most_one_longer_first(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(LayoutError):
            uniform(layers, stages)
        return
    cut = uniform(layers, stages)
    assert_covers(cut, layers)
    assert len(cut) == stages
    assert max(lengths(cut)) - min(lengths(cut)) <= 1
    assert lengths(cut) == sorted(lengths(cut), reverse=True)


def test_fewer_layers_than_stages_is_refused_with_both_numbers() -> None:
    text = "2 layers cannot fill 4 pipeline stages: use at most 2, or add layers"
    for cut in (lambda: uniform(2, 4), lambda: by_cost([3.0, 1.0], 4)):
        with pytest.raises(LayoutError) as caught:
            cut()
        assert str(caught.value) == text
        assert isinstance(caught.value, ValueError)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_explicit_counts_are_taken_as_they_are(counts: list[int]) -> None:
    cut = explicit(counts, sum(counts), len(counts))
    assert lengths(cut) == counts
    assert_covers(cut, sum(counts))


@pytest.mark.parametrize(
    ("counts", "layers", "stages", "text"),
    [
        ([11, 13], 48, 2, "balance=[11, 13] adds up to 24 layers, the model has 48"),
        ([24, 25], 48, 2, "balance=[24, 25] adds up to 49 layers, the model has 48"),
        ([24, 24], 48, 3, "balance=[24, 24] names 2 stages, the layout has 3"),
        ([48, 0], 48, 2, "balance=[48, 0]: every stage needs at least one layer"),
        ([50, -2], 48, 2, "balance=[50, -2]: every stage needs at least one layer"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_with_the_numbers(
    counts: list[int], layers: int, stages: int, text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        explicit(counts, layers, stages)
    assert str(caught.value) == text


def all_cuts(costs: list[int], stages: int) -> list[list[int]]:
    """The stage costs of every possible cut."""
    cuts = []
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = [0, *inner, len(costs)]
        cuts.append([sum(costs[low:high]) for low, high in itertools.pairwise(ends)])
    return cuts


@given(COSTS, st.integers(1, 8))
@example([0, 0, 0, 0], 3)
@example([9, 1, 1, 1, 1, 1], 3)
@example([1, 5, 2, 3], 3)  # [6, 2, 3] has smaller squares than [1, 5, 5], but a costlier stage
def test_the_costliest_stage_costs_least_and_then_the_squares_are_least(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    cut = by_cost(costs, stages)
    assert_covers(cut, len(costs))
    assert len(cut) == stages
    cost = [sum(costs[layer] for layer in stage) for stage in cut]
    best = min(max(other) for other in all_cuts(costs, stages))
    assert max(cost) == best
    squares = min(sum(c * c for c in other) for other in all_cuts(costs, stages) if max(other) == best)
    assert sum(c * c for c in cost) == squares


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=7), st.integers(1, 7))
def test_fractional_costs_are_balanced_too(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    cut = by_cost(costs, stages)
    assert_covers(cut, len(costs))
    best = min(
        max(sum(costs[low:high]) for low, high in itertools.pairwise([0, *inner, len(costs)]))
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(costs[layer] for layer in stage) for stage in cut) <= best * (1 + 1e-9)


def test_a_deep_model_is_cut_in_no_time() -> None:
    assert lengths(by_cost([1.0] * 128, 8)) == [16] * 8
    assert lengths(by_cost([64.0] + [1.0] * 128, 3)) == [1, 64, 64]


@pytest.mark.parametrize(("balance", "expected"), [("uniform", [2, 2]), ([1, 3], [1, 3]), ("compute", [3, 1])], ids=str)
def test_the_stages_of_a_model_hold_each_layer_once(balance: str | list[int], expected: list[int]) -> None:
    # Elements of parameters with two dims: 4, 8, 12 and 40, so the last layer is worth more than all others.
    specs = [engine.LayerSpec(Head, vocabulary, 4) for vocabulary in (1, 2, 3, 10)]
    layout = engine.Layout(pipeline=2)
    stages = [engine.PipelineModel(specs, engine.plan_mesh(layout, rank), balance=balance) for rank in range(2)]
    assert [len(stage.layers) for stage in stages] == expected
    assert [list(stage.layers) for stage in stages] == [list(range(expected[0])), list(range(expected[0], 4))]
    assert [name for stage in stages for name, _ in stage.named_children()] == ["0", "1", "2", "3"]
