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
from engine.placement import REPLICATED, Placement, StageModule, Tied, divide, placements_of, replicated, ties_of
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
