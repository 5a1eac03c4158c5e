"""Full state dicts: equal on every layout, independent copies, exact reload, and all-or-nothing on a wrong state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import EngineError
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt
from tests.world import World

SIZES = {"layers": 3, "hidden": 8, "heads": 4, "sequence": 5, "vocabulary": 16}


def build(mesh: engine.Mesh, tied: bool = True) -> engine.PipelineModel:
    return engine.PipelineModel(gpt_layers(GPTConfig(**SIZES, tied=tied), mesh.tensor), mesh)


def take(mesh: engine.Mesh, tied: bool) -> Any:
    model = build(mesh, tied)
    full = engine.full_state_dict(model, mesh)
    only = engine.full_state_dict(model, mesh, rank=mesh.layout.world_size - 1)
    kept = {name: value.clone() for name, value in full.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    independent = all(torch.equal(full[name], kept[name]) for name in full)
    return kept, len(only), independent


@pytest.mark.parametrize("tied", [False, True])
def test_the_state_is_the_same_on_every_layout_and_loads_into_plain_pytorch(world: World, tied: bool) -> None:
    reference = world.run(Layout(), take, tied)[0][0]
    plain_gpt(**SIZES, tied=tied).load_state_dict(reference, strict=True)
    for layout in (Layout(pipeline=2, tensor=2), Layout(data=2, tensor=4), Layout(pipeline=4), Layout(data=3)):
        for rank, (state, only, independent) in enumerate(world.run(layout, take, tied)):
            assert list(state) == list(reference)
            assert all(torch.equal(state[name], reference[name]) for name in reference)
            assert only == (len(reference) if rank == layout.world_size - 1 else 0)
            assert independent


def reload(mesh: engine.Mesh, state: dict[str, Tensor]) -> Any:
    model = build(mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0, stage=1)
    engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)
    step = engine.TrainStep(model, optimizer, next_token_loss(mesh.tensor), mesh)
    ids = torch.arange(20).view(4, 5) % SIZES["vocabulary"]
    before = step.evaluate(ids, ids).loss.item()
    step(ids, ids)  # with lr 0 nothing may come back from before the load
    return engine.full_state_dict(model, mesh), before


def test_a_state_from_plain_pytorch_loads_on_every_layout_and_survives_a_step(world: World) -> None:
    torch.manual_seed(8)
    plain = plain_gpt(**SIZES, tied=True)
    state = plain.state_dict()
    ids = torch.arange(20).view(4, 5) % SIZES["vocabulary"]
    expected = nn.functional.cross_entropy(plain(ids).flatten(0, 1), ids.flatten()).item()
    without_alias = {name: value for name, value in state.items() if name != "7.project.weight"}
    for layout, given in ((Layout(pipeline=2, tensor=2), state), (Layout(data=2, pipeline=3), without_alias)):
        for loaded, loss in world.run(layout, reload, dict(given)):
            assert all(torch.equal(loaded[name], state[name]) for name in state)
            assert loss == pytest.approx(expected, rel=1e-5)


def refuse(mesh: engine.Mesh) -> Any:
    model = build(mesh)
    state = engine.full_state_dict(model, mesh)
    other = nn.Linear(2, 2)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    wrong: list[dict[str, Tensor]] = [
        {name: value for name, value in state.items() if name != "2.up.weight"},
        {**state, "2.up.wieght": torch.zeros(1)},
        {**state, "0.position.weight": torch.zeros(5, 9)},
        {**state, "7.project.weight": torch.zeros_like(state["7.project.weight"])},
        {},
        {**state, "2.up.weight": [1.0]},  # type: ignore[dict-item]
        None,  # type: ignore[list-item]
    ]
    texts = [error_of(engine.load_full_state_dict, model, mesh, each) for each in wrong]
    texts.append(error_of(engine.load_full_state_dict, model, state, mesh))
    texts.append(error_of(engine.load_full_state_dict, mesh, model, state))
    texts.append(error_of(engine.full_state_dict, mesh, model))
    texts.append(error_of(engine.load_full_state_dict, model, mesh, state, optimizer=torch.optim.SGD([nn.Parameter()])))
    texts.append(error_of(engine.load_full_state_dict, other, mesh, state, optimizer=optimizer))
    optimizer.finish_gradients()
    texts.append(error_of(engine.load_full_state_dict, model, mesh, state, optimizer=optimizer))
    texts.append(error_of(engine.full_state_dict, model, mesh, rank=99))
    after = engine.full_state_dict(model, mesh)
    return texts, all(torch.equal(after[name], state[name]) for name in state)


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except EngineError as error:
        return str(error)
    return "no error"


def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(world: World) -> None:
    expected = [
        "nothing was loaded: missing: 2.up.weight",
        "unexpected: 2.up.wieght",
        "wrong shape: 0.position.weight is (5, 9), the model has (5, 8)",
        "torn ties: 7.project.weight differs from 0.token.weight, to which it is tied",
        "missing: 0.token.weight, 0.position.weight,",
        "no tensors: 2.up.weight is a list",
        "it is a NoneType, and a dict of tensors by name is wanted, on every rank",
        "mesh is a dict: the order is load_full_state_dict(model, mesh, state, optimizer=optimizer)",
        "model is a Mesh: the order is load_full_state_dict(model, mesh, state",
        "model is a Mesh: the order is full_state_dict(model, mesh)",
        "optimizer= is a SGD: give the model's ZeroOptimizer",
        "built over another model",
        "between finish_gradients() and step()",
        "rank=99 is outside the mesh",
    ]
    for texts, unchanged in world.run(Layout(pipeline=2, tensor=2), refuse):
        for text, part in zip(texts, expected, strict=True):
            assert part in text
        assert unchanged


def one_bad(mesh: engine.Mesh) -> Any:
    model = build(mesh)
    state = engine.full_state_dict(model, mesh)
    given = {} if mesh.rank == 1 else {name: torch.zeros_like(value) for name, value in state.items()}
    text = error_of(engine.load_full_state_dict, model, mesh, given)
    after = engine.full_state_dict(model, mesh)
    unchanged = all(torch.equal(after[name], state[name]) for name in state)
    engine.load_full_state_dict(model, mesh, {name: value + mesh.data.rank for name, value in state.items()})
    return text, unchanged, all(torch.equal(engine.full_state_dict(model, mesh)[name], state[name]) for name in state)


def test_one_rank_with_a_wrong_state_stops_all_and_data_rank_zeros_values_count(world: World) -> None:
    for rank, (text, unchanged, first) in enumerate(world.run(Layout(data=2), one_bad)):
        assert ("missing: 0.token.weight" if rank == 1 else "another rank was given does not fit the model") in text
        assert unchanged
        assert first


def load_nan(mesh: engine.Mesh) -> bool:
    model = build(mesh)
    state = {name: torch.full_like(value, float("nan")) for name, value in engine.full_state_dict(model, mesh).items()}
    engine.load_full_state_dict(model, mesh, state)
    return all(value.isnan().all() for value in engine.full_state_dict(model, mesh).values())


def test_a_diverged_state_with_ties_loads(world: World) -> None:
    assert world.run(Layout(pipeline=2), load_nan) == [True, True]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def buffers(mesh: engine.Mesh) -> Any:
    model = engine.PipelineModel([engine.LayerSpec(Counter), engine.LayerSpec(Counter)], mesh, balance="uniform")
    return engine.full_state_dict(model, mesh)


def test_persistent_buffers_are_part_of_the_state_and_others_are_not(world: World) -> None:
    state = world.run(Layout(pipeline=2), buffers)[1]
    assert list(state) == ["0.weight", "0.seen", "1.weight", "1.seen"]
    assert state["1.seen"].item() == 3
