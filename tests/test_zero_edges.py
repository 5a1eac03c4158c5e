"""Parameters that are unused, frozen later or used twice, and buffers that forward writes: as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.zero import ZeroOptimizer
from tests.world import World

WAYS = [(0, "full"), (1, "full"), (2, "full"), (2, "shard")]
DTYPE = torch.float64


class Branches(nn.Module):
    """`used` says which of four weights a forward multiplies with; the first one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3, n, dtype=DTYPE)) for n in (3, 5, 1, 7)])

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        y = x @ self.weights[0]
        y = y.tanh() @ self.weights[0]
        return y.sum() + sum((y @ self.weights[n]).square().sum() for n in used if n)


ALL = [0, 1, 2, 3]
# The weights used in each step, by data rank: all; without one; one on a rank only; without two; all again.
STEPS = [(ALL, ALL), ([0, 1], [0, 1, 3]), ([0, 2], [0]), ([0], [0]), (ALL, [1, 2, 3]), (ALL, ALL), (ALL, ALL)]
FROZEN = {4: [1], 5: [0, 1, 3], 6: [0]}
"""The weights that are frozen from a step on; the others are trained again, from the state that they had."""
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.3}),
]


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(10 * step + rank))


def groups(model: nn.Module, named: bool) -> list[dict[str, Any]]:
    pairs = list(model.named_parameters())
    pick = (lambda pair: pair) if named else (lambda pair: pair[1])
    return [{"params": [pick(p) for p in pairs[:3]]}, {"params": [pick(p) for p in pairs[3:]], "weight_decay": 0.0}]


def freeze(model: Branches, step: int) -> None:
    for number, weight in enumerate(model.weights):
        weight.requires_grad_(number not in FROZEN.get(step, []))


def train(mesh: engine.Mesh, cases: list[tuple[int, str, int, float]]) -> list[dict[str, Tensor]]:
    found = []
    for stage, accumulate, number, bucket_mib in cases:
        model, (kind, options) = Branches(), OPTIMIZERS[number]
        optimizer = ZeroOptimizer(
            model,
            kind,
            mesh,
            groups=groups(model, named=True),
            stage=stage,
            accumulate=accumulate,
            bucket_mib=bucket_mib,
            **options,
        )
        for step, used in enumerate(STEPS):
            freeze(model, step)
            with optimizer.microbatch(last=True):
                model(rows(step, mesh.rank), used[mesh.rank]).backward()
            optimizer.finish_gradients(mesh.data.size)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def train_plain(number: int) -> dict[str, Tensor]:
    model, (kind, options) = Branches(), OPTIMIZERS[number]
    optimizer = kind(groups(model, named=False), **options)
    for step, used in enumerate(STEPS):
        freeze(model, step)
        optimizer.zero_grad()
        (sum(model(rows(step, rank), used[rank]) for rank in range(2)) / 2).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("transport", ["torch", None])
def test_what_got_no_gradient_anywhere_is_left_as_it_is_and_its_state_too(world: World, transport: str | None) -> None:
    # One bucket whose runs of elements are cut where usage differs, or one for each parameter.
    cases = [(*way, number, size) for way in WAYS for number in range(3) for size in (25, 1e-9)]
    options = {} if transport is None else {"transport": transport}
    wanted = [train_plain(number) for number in range(3)]
    for each in world.run(Layout(data=2), train, cases, **options):
        for case, weights in zip(cases, each, strict=True):
            for name, value in wanted[case[2]].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-13, msg=f"{case} {name}")


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=DTYPE))
        self.other = nn.Parameter(torch.ones(3, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def raw(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output * target).sum(), 1


def on_stages(mesh: engine.Mesh) -> dict[str, Tensor]:
    """A tied parameter that only the second stage uses: every copy is stepped; and one that none uses."""
    specs = [LayerSpec(Sometimes, tied={"both": "other"}), LayerSpec(Second, tied={"both": "other"})]
    model = engine.PipelineModel(specs, mesh, balance="uniform")
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.1, weight_decay=0.5)
    step = engine.TrainStep(model, optimizer, raw, mesh, microbatches=2)
    for _ in range(2):
        step(torch.ones(2, 4, dtype=DTYPE), torch.ones(2, 4, dtype=DTYPE))
    return engine.full_state_dict(model, mesh)


class Second(Sometimes):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.other.sum()


def test_a_tie_that_one_stage_uses_is_stepped_on_all_and_an_unused_parameter_on_none(world: World) -> None:
    plain = nn.Sequential(Sometimes(), Second())
    plain[1].other = plain[0].other
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(4, dtype=DTYPE)).sum().backward()
        optimizer.step()
    for weights in world.run(Layout(data=2, pipeline=2), on_stages):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=0)
        assert weights["1.weight"].tolist() == [1.0] * 4


# ---- buffers -------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=DTYPE)
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.full((x.shape[0],), x.sum().item())  # another tensor in each step: the rank's own
        return self.norm(x)


def buffers(mesh: engine.Mesh, broadcast: bool) -> Any:
    model = Statistics()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, broadcast_buffers=broadcast, lr=0.1)
    step = engine.TrainStep(model, optimizer, raw, mesh, microbatches=2)
    sent = []
    real = mesh.data.broadcast

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(x.numel())
        return real(x, *args, **kwargs)

    mesh.data.broadcast = spy  # type: ignore[method-assign]
    for number in range(3):
        step(statistics_rows(number, mesh.data.rank), torch.ones(6, 4, dtype=DTYPE))
    return {name: value.clone() for name, value in model.named_buffers()}, sent


def statistics_rows(step: int, rank: int) -> Tensor:
    return rank + torch.randn(6, 4, dtype=DTYPE, generator=torch.Generator().manual_seed(7 * step + rank))


@pytest.mark.parametrize("broadcast", [True, False])
def test_statistics_are_the_first_ranks_as_ddp_has_them_unless_told(world: World, broadcast: bool) -> None:
    found = world.run(Layout(data=2), buffers, broadcast)
    for rank, (values, sent) in enumerate(found):
        norm = nn.BatchNorm1d(4, dtype=DTYPE)
        for number in range(3):
            for part in statistics_rows(number, 0 if broadcast else rank).chunk(2):
                norm(part)
        torch.testing.assert_close(values["norm.running_mean"], norm.running_mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(values["norm.running_var"], norm.running_var, rtol=1e-12, atol=0)
        assert values["norm.num_batches_tracked"].item() == 6
        assert values["cache"].tolist() == [pytest.approx(statistics_rows(2, rank)[3:].sum().item(), rel=1e-6)] * 3
        assert sent == ([8, 1] * 3 if broadcast else [])  # mean and variance together, and the count


def orders(mesh: engine.Mesh) -> str:
    names = [f"layer{i}" for i in range(20)]
    if mesh.rank == 1:
        names[11], names[12] = names[12], names[11]
    try:
        ZeroOptimizer(nn.ModuleDict({n: nn.Linear(2, 2) for n in names}), torch.optim.SGD, mesh, lr=0.1)
    except engine.EngineError as error:
        return str(error)
    return "no error"


def test_another_order_on_a_rank_is_refused_with_the_first_difference(world: World) -> None:
    for text in world.run(Layout(data=2), orders):
        assert "the model's parameters and their groups differs over axis 'data': rank 1 (global 1) has" in text
        assert "layer12.weight" in text.partition("rank 0 (global 0) has")[0]
        assert "layer11.weight" in text.partition("rank 0 (global 0) has")[2]
        assert "layer0.weight" not in text
