"""Placements: shapes and shards against plain slicing, and that a declaration survives what people do to modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import engine
from engine.errors import LayoutError, UsageError
from engine.placement import (
    REPLICATED,
    Part,
    Placement,
    StageModule,
    Tied,
    cut,
    divide,
    placements_of,
    replicated,
    ties_of,
)
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

MESH = engine.plan_mesh(engine.Layout(tensor=2), rank=1)


class Placed(nn.Module):
    """Declares its own placements, as a user's layer would."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.columns = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.inner = nn.Linear(3, 5)
        self.placements = {"rows": Placement(dim=0), "columns": Placement(dim=1)}


PLACED = {
    "rows": Placement(dim=0),
    "columns": Placement(dim=1),
    "scale": REPLICATED,
    "inner.weight": REPLICATED,
    "inner.bias": REPLICATED,
}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_shards_are_equal_and_join_to_the_whole(shape: list[int], size: int, data: Any) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    placement = Placement(dim=dim)
    shards = [placement.shard(full, rank, size) for rank in range(size)]
    expected = [*shape]
    expected[dim] = shape[dim] // size
    assert {tuple(shard.shape) for shard in shards} == {tuple(expected)}
    assert placement.shape(shape, size) == tuple(expected)
    assert placement.full_shape(expected, size) == tuple(shape)
    assert torch.equal(torch.cat(shards, dim), full)


FUSED = Placement(dim=0, parts=(Part(8, heads=4), Part(2, heads=2), Part(2, heads=2)))
"""Queries of 4 heads of 2 rows, keys and values of 2 heads of 1 row."""


@pytest.mark.parametrize(
    ("size", "rows"),
    [  # which rows of 12 each rank holds, by hand: its heads of every part
        (1, [[*range(12)]]),
        (2, [[0, 1, 2, 3, 8, 10], [4, 5, 6, 7, 9, 11]]),
        (4, [[0, 1, 8, 10], [2, 3, 8, 10], [4, 5, 9, 11], [6, 7, 9, 11]]),
    ],
)
def test_a_fused_shard_holds_its_heads_of_every_part(size: int, rows: list[list[int]]) -> None:
    full = torch.arange(24.0).view(12, 2)
    shards = [FUSED.shard(full, rank, size) for rank in range(size)]
    assert [[int(row[0]) // 2 for row in shard] for shard in shards] == rows
    assert {FUSED.shape((12, 2), size)} == {tuple(shard.shape) for shard in shards}
    assert FUSED.full_shape(shards[0].shape, size) == (12, 2)
    assert torch.equal(FUSED.join(shards), full)
    columns = Placement(dim=1, parts=FUSED.parts)
    assert torch.equal(columns.join([columns.shard(full.T, rank, size) for rank in range(size)]), full.T)


def test_copied_heads_are_counted_once_and_their_gradients_are_summands() -> None:
    counted = [FUSED.counted((4, 2), rank, 4) for rank in range(4)]
    assert counted == [((0, 4), (4, 6), (6, 8)), ((0, 4),), ((0, 4), (4, 6), (6, 8)), ((0, 4),)]
    gradient = torch.arange(8.0).view(4, 2)
    pieces = [(view.tolist(), index, count) for view, index, count in FUSED.partial(gradient, 3, 4)]
    assert pieces == [([[4.0, 5.0]], 1, 2), ([[6.0, 7.0]], 1, 2)]
    assert FUSED.partial(torch.zeros(6, 2), 1, 2) == []
    assert FUSED.is_copied(4)
    assert not FUSED.is_copied(2)


@pytest.mark.parametrize(("vocabulary", "size"), [(10, 4), (5, 4), (1, 3), (7, 2)])
def test_a_padded_part_gets_zeros_behind_its_last_element(vocabulary: int, size: int) -> None:
    placement, full = Placement(dim=0, parts=(Part(vocabulary, padded=True),)), torch.arange(1.0, vocabulary + 1)
    rows = -(-vocabulary // size)
    expected = torch.cat([full, torch.zeros(rows * size - vocabulary)]).view(size, rows)
    shards = [placement.shard(full, rank, size) for rank in range(size)]
    assert torch.equal(torch.stack(shards), expected)
    assert [placement.padding(rank, size) for rank in range(size)] == [int((each == 0).sum()) for each in expected]
    assert torch.equal(placement.join(shards), full)


def test_what_divides_into_one_part_is_placed_as_if_it_had_none() -> None:
    assert cut(0, [Part(8, padded=True)], 4) == cut(0, [Part(8, heads=4)], 4) == Placement(dim=0)
    assert cut(0, [Part(8, heads=2)], 4).is_copied(4)
    assert cut(0, [Part(7, padded=True)], 4) != Placement(dim=0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Part(6, heads=4), "Part(size=6, heads=4, padded=False): a part has at least 1 element, and its heads"),
        (lambda: Part(6, heads=3, padded=True), "whole heads are not padded"),
        (lambda: cut(0, [Part(12, heads=6)], 4), "6 heads do not divide over 4 ranks, nor 4 ranks over the heads"),
        (lambda: cut(0, [Part(4), Part(6)], 4), "a part of 6 elements: 6 does not divide by 4"),
        (lambda: Placement(parts=(Part(4),)), "only a dim that is cut has parts"),
        (lambda: FUSED.shape((11, 2), 2), "dim 0 of shape (11, 2) is not the 12 elements of its parts"),
        (
            lambda: Placement(dim=1, parts=(Part(2, heads=1),)).counted((3, 2), 0, 2),
            "need the parts to lie along dim 0",
        ),
    ],
)
def test_parts_that_cannot_be_cut_are_refused(call: Any, text: str) -> None:
    with pytest.raises((LayoutError, UsageError)) as caught:
        call()
    assert text in str(caught.value)


def test_a_shard_is_a_view_in_rank_order() -> None:
    full = torch.arange(12.0).view(4, 3)
    assert Placement(dim=0).shard(full, 1, 2).tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert Placement(dim=1).shard(full, 2, 3).tolist() == [[2.0], [5.0], [8.0], [11.0]]
    Placement(dim=1).shard(full, 2, 3)[0] = -1.0
    assert full[0].tolist() == [0.0, 1.0, -1.0]


def test_replicated_keeps_the_whole() -> None:
    full = torch.arange(5)
    assert REPLICATED.shard(full, 1, 2) is full
    assert REPLICATED.shape((5,), 2) == REPLICATED.full_shape((5,), 2) == (5,)


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError) as caught:
        Placement(dim=1).shard(torch.zeros(4, 10), 0, 4)
    assert str(caught.value) == (
        "dim 1 of shape (4, 10): 10 does not divide by 4: use a multiple of 4, or a size that divides 10"
    )
    assert divide(12, 4, "heads") == 3
    with pytest.raises(LayoutError, match=r"^heads: 12 does not divide by 0"):
        divide(12, 0, "heads")


@pytest.mark.parametrize("arguments", [{"gradient": "mean"}, {"dim": 0, "gradient": "sum"}])
def test_a_placement_that_means_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="gradient="):
        Placement(**arguments)


def test_declared_and_undeclared_parameters_are_found_at_any_depth() -> None:
    model = nn.Sequential(nn.LayerNorm(2), nn.ModuleDict({"a": Placed(), "b": nn.ModuleList([Placed()])}))
    assert placements_of(model) == {
        "0.weight": REPLICATED,
        "0.bias": REPLICATED,
        **{f"1.a.{name}": placement for name, placement in PLACED.items()},
        **{f"1.b.0.{name}": placement for name, placement in PLACED.items()},
    }


def test_the_engines_layers_declare_how_they_are_cut() -> None:
    model = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(4, 6, MESH.tensor),
            "row": RowParallelLinear(4, 6, MESH.tensor),
            "bare": ColumnParallelLinear(4, 6, MESH.tensor, bias=False),
            "table": VocabParallelEmbedding(6, 4, MESH.tensor),
        }
    )
    assert placements_of(model) == {
        "column.weight": Placement(dim=0),
        "column.bias": Placement(dim=0),
        "row.weight": Placement(dim=1),
        "row.bias": REPLICATED,
        "bare.weight": Placement(dim=0),
        "table.weight": Placement(dim=0),
    }


def test_a_shared_parameter_or_module_is_placed_under_each_of_its_names() -> None:
    shared = Placed()
    model = nn.ModuleDict({"first": shared, "second": shared, "third": Placed()})
    model["third"].rows = shared.rows
    found = placements_of(model)
    assert set(found) == {f"{where}.{name}" for where in ("first", "second", "third") for name in PLACED}
    for where in ("first", "second", "third"):
        assert {name: found[f"{where}.{name}"] for name in PLACED} == PLACED
    assert set(found) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_a_declared_name_that_is_no_parameter_is_answered_with_the_nearest() -> None:
    model = nn.Sequential(Placed())
    model[0].placements["colums"] = Placement(dim=1)
    with pytest.raises(UsageError) as caught:
        placements_of(model)
    assert str(caught.value) == "Placed places 'colums', which is none of its parameters (did you mean 'columns'?)", (
        "a misspelt name must not pass silently"
    )


def test_a_declared_parameter_may_be_absent() -> None:
    model = Placed()
    model.register_parameter("rows", None)
    assert placements_of(model) == {name: placement for name, placement in PLACED.items() if name != "rows"}


@pytest.mark.parametrize(
    "treat",
    [
        copy.deepcopy,
        lambda module: copy.deepcopy(module).to("meta"),
        lambda module: copy.deepcopy(module).to("meta").to_empty(device="cpu"),
        lambda module: copy.deepcopy(module).double().requires_grad_(requires_grad=False),
    ],
    ids=["deepcopy", "to_meta", "to_empty", "double_frozen"],
)
def test_placements_survive(treat: Any) -> None:
    model = nn.Sequential(Placed(), replicated(nn.LayerNorm(3), gradient="sum"))
    expected = {f"0.{name}": placement for name, placement in PLACED.items()}
    expected |= {"1.weight": Placement(gradient="sum"), "1.bias": Placement(gradient="sum")}
    treated = treat(model)
    assert treated is not model
    assert placements_of(treated) == expected
    assert placements_of(model) == expected


def test_changing_a_copys_placements_leaves_the_original() -> None:
    model = Placed()
    other = copy.deepcopy(model)
    other.placements["scale"] = Placement(dim=0)
    assert placements_of(model) == PLACED


def test_replicated_marks_every_parameter_below_and_returns_the_module() -> None:
    block = nn.Sequential(nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.LayerNorm(3, bias=False))
    assert replicated(block, gradient="sum") is block
    partial = Placement(gradient="sum")
    assert placements_of(block) == dict.fromkeys(["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight"], partial)
    untouched = nn.Sequential(block, nn.LayerNorm(4))
    assert placements_of(untouched)["1.weight"] == REPLICATED
    replicated(block, gradient="equal")
    assert set(placements_of(block).values()) == {REPLICATED}


def test_replicated_refuses_a_misspelt_gradient() -> None:
    with pytest.raises(UsageError, match="'summ'"):
        replicated(nn.LayerNorm(2), gradient="summ")  # type: ignore[arg-type]


def test_only_a_stage_has_ties() -> None:
    tie = Tied("key", "0.weight", (0, 1), "3.weight")
    plain, stage = nn.Linear(2, 2), StageModule()
    assert ties_of(stage) == ()
    plain.ties = stage.ties = (tie,)  # type: ignore[assignment]
    assert ties_of(plain) == ()
    assert ties_of(stage) == (tie,)
