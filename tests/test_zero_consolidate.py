"""The full optimizer state by name: equal to plain PyTorch's, which goes on from it with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import engine
from engine import LayerSpec, Layout
from engine.zero import ZeroOptimizer
from tests.test_zero_matrices import SHAPES, UNUSED, Layer, Polar, gradient, grouped
from tests.world import World, refusals

BEFORE, AFTER = 3, 2  # steps before and after the state is taken


def sharded_steps(mesh: engine.Mesh, model: nn.Module, optimizer: ZeroOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if (name, step) in UNUSED:
                continue
            placement = SHAPES[name.split(".")[1]][1]
            own = placement.shard(gradient(name, step, mesh.data.rank), mesh.tensor.rank, mesh.tensor.size).clone()
            for piece, _, count in placement.partial(own, mesh.tensor.rank, mesh.tensor.size):
                piece.mul_(count / mesh.tensor.size)
            parameter.grad = own
        optimizer.finish_gradients(mesh.data.size)
        optimizer.step()


def train(mesh: engine.Mesh, stage: int, bucket_mib: float) -> Any:
    model = engine.PipelineModel([LayerSpec(Layer, mesh.tensor) for _ in range(2)], mesh, balance="uniform")
    start = engine.full_state_dict(model, mesh)
    groups = grouped(model, Polar, lambda n, p: (n, p))
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, mesh, groups=groups, stage=stage, bucket_mib=bucket_mib, lr=0.01, amsgrad=True
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sharded_steps(mesh, model, optimizer, range(BEFORE))
    scheduler.step()
    between, state = engine.full_state_dict(model, mesh), optimizer.consolidate()
    only = optimizer.consolidate(rank=mesh.layout.world_size - 1)
    sharded_steps(mesh, model, optimizer, range(BEFORE, BEFORE + AFTER))
    return start, between, state, bool(only), engine.full_state_dict(model, mesh)


def plain(start: dict[str, Tensor]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Sequential(*(Layer() for _ in range(2)))
    model.load_state_dict(start)
    rest, *matrices = grouped(model, Polar, lambda _, p: p)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([rest], lr=0.01, amsgrad=True, foreach=False)]
    for group in matrices:
        options = {key: value for key, value in group.items() if key not in ("params", "optimizer", "shard")}
        optimizers.append(Polar(group["params"], **options))
    return model, optimizers


def plain_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, data: int) -> None:
    for step in steps:
        for name, p in model.named_parameters():
            mean = torch.stack([gradient(name, step, rank) for rank in range(data)]).mean(0)
            p.grad = None if (name, step) in UNUSED else mean
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("layout", "stage", "bucket_mib"),
    [
        (Layout(data=2), 0, 25),
        (Layout(data=3), 1, 1e-6),
        (Layout(data=2), 2, 25),
        (Layout(data=2, tensor=2), 2, 25),
        (Layout(tensor=2), 0, 1e-6),
        (Layout(pipeline=2, data=2), 2, 25),
    ],
    ids=str,
)
def test_the_full_state_is_plain_torchs_which_goes_on_from_it(
    world: World, layout: Layout, stage: int, bucket_mib: float
) -> None:
    results = world.run(layout, train, stage, bucket_mib)
    start, between, _, _, after = results[0]
    model, optimizers = plain(start)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    plain_steps(model, optimizers, range(BEFORE), layout.data)
    for scheduler in schedulers:
        scheduler.step()
    wanted = get_optimizer_state_dict(model, optimizers)
    for rank, (_, _, state, only, _) in enumerate(results):
        assert only == (rank == layout.world_size - 1)
        assert state["state"].keys() == wanted["state"].keys()
        for name, values in wanted["state"].items():
            assert state["state"][name].keys() == values.keys()
            for key, value in values.items():
                torch.testing.assert_close(
                    state["state"][name][key], value, rtol=1e-10, atol=1e-11, msg=f"{name} {key}"
                )
        assert state["param_groups"] == wanted["param_groups"]
    model, optimizers = plain(between)
    set_optimizer_state_dict(model, optimizers, results[-1][2])
    plain_steps(model, optimizers, range(BEFORE, BEFORE + AFTER), layout.data)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=1e-10, atol=1e-11)


class Twins(nn.Module):
    """Two parameters of one shape, that only their names tell apart."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))


def twins(mesh: engine.Mesh, names: tuple[str, str], placed: list[int] | str) -> Any:
    model = engine.PipelineModel([LayerSpec(Twins, *names) for _ in range(2)], mesh, balance=placed)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, mesh, lr=0.1, betas=(0.0, 0.9))
    before = optimizer.consolidate()["state"]
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full((3,), float(name[0]) * 10 + (1.0 if name.endswith("a") else 2.0))
    optimizer.finish_gradients(mesh.data.size)
    optimizer.step()
    state = optimizer.consolidate()["state"]
    return before, {name: values["exp_avg"].tolist() for name, values in state.items()}


def test_state_is_kept_by_name_in_whatever_order_and_split_parameters_come(world: World) -> None:
    wanted = {"0.a": [1.0] * 3, "0.b": [2.0] * 3, "1.a": [11.0] * 3, "1.b": [12.0] * 3}
    for layout, names in ((Layout(data=2), ("a", "b")), (Layout(pipeline=2), ("b", "a")), (Layout(), ("b", "a"))):
        for before, found in world.run(layout, twins, names, "uniform"):
            assert before == {}
            assert found == wanted


class Pooled(torch.optim.Optimizer):
    """Keeps two numbers for whatever run of elements it gets."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"range": torch.stack([p.min(), p.max()]), "seen": 1, "none": None}


def tied_and_refused(mesh: engine.Mesh) -> Any:
    tie = {"tied": {"table": "weight"}}
    specs = [LayerSpec(nn.Linear, 3, 3, bias=False, **tie) for _ in range(2)]
    found = []
    for shard in ("flat", "tensor"):
        model = engine.PipelineModel(specs, mesh, balance="uniform")
        groups = [{"params": list(model.named_parameters()), "shard": shard}]
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, groups=groups, lr=0.1)
        pooled = ZeroOptimizer(engine.PipelineModel(specs, mesh, balance="uniform"), Pooled, mesh)
        for layer in model.layers:
            (model.get_parameter(f"{layer}.weight") * (2.0 + layer)).sum().backward()
        for each in (optimizer, pooled):
            each.finish_gradients(mesh.data.size)
            each.step()
        state = optimizer.consolidate()
        values = state["state"]["0.weight"]
        found.append((list(state["state"]), values["exp_avg"].tolist(), values["step"].item(), state["param_groups"]))
    refused = refusals([pooled.consolidate, lambda: optimizer.consolidate(rank=mesh.layout.world_size)])
    return found, refused


def test_a_tied_parameter_has_its_state_once_and_state_without_a_place_is_refused(world: World) -> None:
    for found, refused in world.run(Layout(data=2, pipeline=2), tied_and_refused):
        for names, average, step, groups in found:
            assert (names, step) == (["0.weight"], 1.0)
            assert average == [pytest.approx([0.5] * 3, rel=1e-6)] * 3  # a tenth of 2 + 3
            assert [group["params"] for group in groups] == [["0.weight"]]
        assert "the state 'range' that Pooled keeps has shape (2,) for" in refused[0]
        assert "an update that is not elementwise needs 'shard': 'tensor' in its group" in refused[0]
        assert "rank=4 is outside the mesh" in refused[1]
