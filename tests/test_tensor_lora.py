"""Low-rank adapters on parallel linear layers against plain PyTorch in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import Part
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear, lora
from tests.test_tensor_linear import ADAMW, DOUBLE, TIGHT, TO_1E10, attend, here, wave
from tests.test_tensor_overlap import record
from tests.world import World, refusals

Mesh = engine.Mesh


class PlainLoRA(nn.Module):
    """y = x W^T + b + alpha / rank * x A^T B^T, with W and b frozen."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, base.in_features, dtype=DOUBLE), math.sqrt(5)))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


class Net(nn.Module):
    """Attention of 4 query heads over 1 key head, all of whose layers are adapted."""

    def __init__(self, comm: engine.Communicator | None, dim: int | None) -> None:
        super().__init__()
        self.sizes: tuple[int, ...] = (8, 2, 2)
        self.inner: nn.Module
        if comm is None:
            self.qkv: nn.Module = PlainLoRA(nn.Linear(8, 12, dtype=DOUBLE), 3, 6.0)
            self.out: nn.Module = PlainLoRA(nn.Linear(8, 8, dtype=DOUBLE), 2, 1.0)
        else:
            parts = [Part(8, heads=4), Part(2, heads=1), Part(2, heads=1)]
            column = ColumnParallelLinear(8, 12, comm, parts=parts, dtype=DOUBLE, sequence_dim=dim)
            self.sizes = column.part_sizes
            self.qkv = lora(column, 3, 6.0)
            self.out = lora(RowParallelLinear(8, 8, comm, dtype=DOUBLE, sequence_dim=dim), 2, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(*self.qkv(x).split(self.sizes, -1)))


def filled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with B no longer zero, so that A has a gradient."""
    return {name: wave(40, *value.shape) if name.endswith(".b") else value for name, value in state.items()}


def adapt(mesh: Mesh, dim: int | None, stage: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Net(mesh.tensor, dim)
    drawn = engine.full_state_dict(model, mesh)
    engine.load_full_state_dict(model, mesh, filled(drawn))
    x = here(wave(1, 2, 4, 8), mesh, dim)
    y = model(x)
    y.square().sum().backward()
    first = {"y": y.detach(), "x": x.grad}
    model.zero_grad()
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, **ADAMW)
    gradients: dict[str, Tensor] = {}
    norms = []
    for number in range(3):
        model(here(wave(number, 2, 4, 8), mesh, dim)).square().sum().backward()
        norms.append(optimizer.finish_gradients().item())
        gradients = gradients or optimizer.full_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {
        **first,
        "drawn": drawn,
        "norms": norms,
        "gradients": gradients,
        "end": engine.full_state_dict(model, mesh),
        "frozen": all(p.grad is None for name, p in model.named_parameters() if "base" in name),
    }


@pytest.mark.parametrize(
    ("n", "dim", "stage"), [(1, None, 2), (2, None, 2), (2, 1, 0), (4, None, 1), (4, 1, 2)], ids=str
)
def test_adapters_train_as_in_one_process_and_nothing_else_does(
    world: World, n: int, dim: int | None, stage: int
) -> None:
    torch.manual_seed(5)
    model = Net(None, None)
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(filled(drawn))
    x = wave(1, 2, 4, 8).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    gradients: dict[str, Tensor] = {}
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        model(wave(number, 2, 4, 8)).square().sum().backward()
        trained = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        norms.append(torch.cat([g.flatten() for g in trained.values()]).norm().item())
        gradients = gradients or trained
        optimizer.step()
    for rank, got in enumerate(world.run(Layout(tensor=n), adapt, dim, stage)):
        assert got["frozen"]
        assert got["norms"] == pytest.approx(norms, rel=1e-10)
        assert set(got["gradients"]) == {"qkv.a", "qkv.b", "out.a", "out.b"} == set(gradients)
        for name, full in (("y", y.detach()), ("x", x.grad)):
            torch.testing.assert_close(got[name], full if dim is None else full.chunk(n, dim)[rank], **TIGHT)
        for name, value in drawn.items():
            assert torch.equal(got["drawn"][name], value), f"{name} is drawn as in one process"
        for name, value in gradients.items():
            torch.testing.assert_close(got["gradients"][name], value, **TO_1E10, msg=name)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got["end"][name], value, **TO_1E10, msg=name)


def merge(mesh: Mesh) -> Any:
    torch.manual_seed(5)
    model, events = Net(mesh.tensor, None), []
    engine.load_full_state_dict(model, mesh, filled(engine.full_state_dict(model, mesh)))
    record(mesh.tensor, events)
    x = here(wave(1, 2, 4, 8), mesh, None)
    before = model(x)
    before.sum().backward()
    sent = list(events)
    model.qkv, model.out = model.qkv.merge(), model.out.merge()
    return before.detach(), model(x).detach(), sent, [type(model.qkv).__name__, model.qkv.weight.requires_grad]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_merged_adapters_give_the_same_output_and_adapters_send_nothing_of_their_own(world: World, n: int) -> None:
    for before, after, sent, kind in world.run(Layout(tensor=n), merge):
        torch.testing.assert_close(after, before, **TIGHT)
        assert [each.removeprefix("start ") for each in sent if "wait" not in each] == ["all_reduce"] * (2 * (n > 1))
        assert kind == ["ColumnParallelLinear", False]


def test_wrong_arguments_are_refused_and_a_layer_says_what_it_is() -> None:
    comm = engine.plan_mesh(Layout(tensor=2), 0).tensor
    layer = RowParallelLinear(4, 6, comm)
    assert refusals([lambda: lora(nn.Linear(2, 2), 1, 1.0), lambda: lora(layer, 0, 1.0)]) == [  # type: ignore[arg-type]
        "lora takes a ColumnParallelLinear or RowParallelLinear, not a Linear",
        "lora: rank=0: the adapter has at least 1 column",
    ]
    assert repr(lora(layer, 2, 3.0)).splitlines() == [
        "LoRALinear(",
        "  rank=2, scale=1.5",
        "  (base): RowParallelLinear(in_features=4 / 2, out_features=6, bias=True)",
        ")",
    ]
    filled_a = lora(layer, 2, 1.0, init=lambda full: full.copy_(torch.arange(8.0).view(2, 4))).a
    assert filled_a.tolist() == [[0.0, 1.0], [4.0, 5.0]]
