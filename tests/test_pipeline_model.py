"""PipelineModel: weights and names do not depend on the layout; ties; balance; what is refused. Mostly on plans."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel, plan_mesh
from engine.errors import LayoutError, UsageError
from engine.placement import replicated
from tests.world import World


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight


def specs(layers: int = 5) -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 4, 4, bias=bool(i % 2)) for i in range(layers)]


def stages_of(layout: Layout, model_specs: list[LayerSpec], **options: Any) -> list[PipelineModel]:
    ranks = [rank for rank in range(layout.world_size) if rank % (layout.data * layout.tensor) == 0]
    return [PipelineModel(model_specs, plan_mesh(layout, rank, seed=3), **options) for rank in ranks]


def test_weights_and_names_are_those_of_one_sequential_on_every_layout() -> None:
    whole = PipelineModel(specs(), plan_mesh(Layout(), 0, seed=3)).state_dict()
    assert set(whole) == set(nn.Sequential(*(spec.build() for spec in specs())).state_dict())
    for stages in (2, 3, 5):
        parts: dict[str, Tensor] = {}
        for part in stages_of(Layout(pipeline=stages, data=2), specs(), balance="uniform"):
            parts.update(part.state_dict())
        assert list(parts) == list(whole)
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_building_leaves_the_callers_generator_alone_and_layers_differ() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = PipelineModel(specs(), plan_mesh(Layout(pipeline=2), 0))
    assert torch.equal(torch.rand(3), expected)
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert not torch.equal(weights[0], weights[1])


def test_forward_runs_the_stages_layers_and_the_first_takes_all_arguments() -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
            return a + b

    model = PipelineModel([LayerSpec(Add), LayerSpec(nn.Identity)], plan_mesh(Layout(), 0))
    assert torch.equal(model(torch.tensor(1.0), b=torch.tensor(2.0)), torch.tensor(3.0))


def tied_specs() -> list[LayerSpec]:
    first = LayerSpec(nn.Embedding, 6, 4, tied={"table": "weight"})
    return [first, *specs(2), LayerSpec(nn.Linear, 4, 6, bias=False, tied={"table": "weight"})]


def test_a_tie_on_one_stage_is_one_parameter_over_two_is_a_copy_with_the_first_value() -> None:
    whole = PipelineModel(tied_specs(), plan_mesh(Layout(), 0, seed=3))
    assert whole.get_parameter("0.weight") is whole.get_parameter("3.weight")
    assert whole.ties == ()
    assert [name for name, _ in whole.named_parameters()] == ["0.weight", "1.weight", "2.weight", "2.bias"]
    first, last = stages_of(Layout(pipeline=2), tied_specs(), balance="uniform")
    assert torch.equal(last.get_parameter("3.weight"), whole.get_parameter("0.weight"))
    assert [(t.key, t.canonical, t.stages, t.name) for t in first.ties] == [("table", "0.weight", (0, 1), "0.weight")]
    assert [(t.key, t.canonical, t.stages, t.name) for t in last.ties] == [("table", "0.weight", (0, 1), "3.weight")]


def test_a_tie_may_name_a_nested_parameter() -> None:
    tied = [LayerSpec(Scale, 4, tied={"s": "inner.weight"}) for _ in range(3)]
    model = PipelineModel(tied, plan_mesh(Layout(), 0))
    assert len(list(model.parameters())) == 1
    x = torch.ones(1, 4)
    model(x).sum().backward()
    assert model.get_parameter("0.inner.weight").grad is not None


SHARED = nn.Linear(4, 4)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SHARED


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([LayerSpec(nn.Linear, 4, 4, tied={"k": "weigth"}), LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"})],
         "Linear has no parameter 'weigth' (did you mean 'weight'?)"),
        ([LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"}), LayerSpec(nn.Linear, 4, 4)], "is on layer 0 (Linear) only"),
        ([LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"}), LayerSpec(nn.Linear, 4, 5, tied={"k": "weight"})],
         "Linear's weight is torch.float32 (5, 4), the first layer's is torch.float32 (4, 4)"),
        ([nn.Linear(4, 4)], "takes LayerSpecs, got Linear"),
        ([LayerSpec(nn.Sequential, nn.Linear(4, 4)), LayerSpec(nn.Tanh), LayerSpec(lambda: SHARED), LayerSpec(Head)],
         "2.weight and 3.inner.weight are one parameter, and on two ranks would be two: build it in each layer, and "
         "tie them: LayerSpec(..., tied={'shared': 'inner.weight'})"),
    ],
)  # fmt: skip
def test_wrong_specs_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        PipelineModel(wrong, plan_mesh(Layout(), 0))
    assert text in str(caught.value)


def layers_of(models: list[PipelineModel]) -> list[list[int]]:
    return [list(model.layers) for model in models]


def test_compute_balance_counts_matrices_but_no_tables_and_a_tied_head() -> None:
    vocabulary = 64
    model_specs = [
        LayerSpec(nn.Embedding, vocabulary, 8, tied={"e": "weight"}),  # a table: no work
        *[LayerSpec(nn.Linear, 8, 8) for _ in range(8)],  # 64 each
        LayerSpec(nn.Linear, 8, vocabulary, bias=False, tied={"e": "weight"}),  # 512, as much as the eight
    ]
    assert layers_of(stages_of(Layout(pipeline=2), model_specs)) == [[*range(9)], [9]]
    assert layers_of(stages_of(Layout(pipeline=2), model_specs, balance="uniform")) == [[*range(5)], [*range(5, 10)]]
    assert layers_of(stages_of(Layout(pipeline=2), model_specs, balance=[3, 7])) == [[0, 1, 2], [*range(3, 10)]]


class NoMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2) * torch.ones(1).item())


def test_a_layer_that_cannot_be_counted_needs_its_cost() -> None:
    with pytest.raises(UsageError, match=r"layer 1 \(NoMeta\) cannot be: .*LayerSpec\(cost=...\)"):
        PipelineModel([LayerSpec(nn.Linear, 4, 4), LayerSpec(NoMeta)], plan_mesh(Layout(pipeline=2), 0))
    costly = [LayerSpec(NoMeta, cost=1.0), LayerSpec(NoMeta, cost=1.0), LayerSpec(NoMeta, cost=2.0)]
    assert layers_of(stages_of(Layout(pipeline=2), costly)) == [[0, 1], [2]]


def test_layers_that_do_not_fill_the_stages_and_unknown_balances_are_refused() -> None:
    mesh = plan_mesh(Layout(pipeline=4), 0)
    with pytest.raises(LayoutError, match="2 layers cannot fill 4 pipeline stages"):
        PipelineModel(specs(2), mesh)
    with pytest.raises(UsageError, match=r"balance='unform' \(did you mean 'uniform'\?\)"):
        PipelineModel(specs(5), mesh, balance="unform")
    with pytest.raises(LayoutError, match=r"adds up to 8 layers, the model has 5"):
        PipelineModel(specs(5), mesh, balance=[2, 2, 2, 2])


def copy_and_use(mesh: engine.Mesh) -> Any:
    tied = [LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"}), LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"})]
    model = PipelineModel(tied, mesh, balance="uniform")
    average = copy.deepcopy(model)
    before = engine.full_state_dict(average, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = engine.full_state_dict(average, mesh)
    return average.mesh is mesh, all(torch.equal(before[n], after[n]) for n in before), average.ties == model.ties


def test_a_deep_copy_has_weights_of_its_own_on_the_same_mesh(world: World) -> None:
    assert world.run(Layout(pipeline=2), copy_and_use) == [(True, True, True)] * 2


def test_ties_that_would_be_summed_wrongly_are_refused() -> None:
    two = [LayerSpec(nn.Linear, 4, 4, tied={"a": "weight", "b": "weight"}), *tied_specs()]
    with pytest.raises(UsageError, match="ties one parameter under several keys"):
        PipelineModel(two, plan_mesh(Layout(pipeline=3), 0))
    mesh = plan_mesh(Layout(tensor=2), 0)
    apart = [
        LayerSpec(nn.LayerNorm, 4, tied={"n": "weight"}),
        LayerSpec(lambda: replicated(nn.LayerNorm(4), gradient="sum"), tied={"n": "weight"}),
    ]
    with pytest.raises(UsageError, match="places it as Placement"):
        PipelineModel(apart, mesh)
