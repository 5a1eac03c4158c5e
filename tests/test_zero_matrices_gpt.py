"""A GPT whose matrices are updated whole, beside AdamW, equals one plain process: losses, norms, weights and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import engine
from engine import Layout
from engine.zero import ZeroOptimizer
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt
from tests.world import World

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "sequence": 8, "vocabulary": 30}  # 4 tensor ranks fill up to 32
ROWS = 12

CASES: list[tuple[Layout, dict[str, Any], dict[str, Any], int, float | None]] = [
    (
        Layout(data=2, pipeline=2, tensor=2),
        {"tied": True, "key_heads": 1, "sequence_parallel": True},
        {"stage": 2, "bucket_mib": 0.003},
        2,
        0.05,
    ),
    (Layout(data=2, tensor=4), {"tied": False, "key_heads": 2}, {"stage": 2, "accumulate": "full"}, 1, None),
    (Layout(data=3), {"tied": True, "key_heads": 4}, {"stage": 1}, 2, None),
]


class Smooth(torch.optim.Optimizer):
    """Steps along the momentum, brought nearer to orthogonal by an iteration that gradients of any rank will do for."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                x = momentum / momentum.norm()
                for _ in range(2):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(x, alpha=group["lr"])


def grouped(model: nn.Module, named: bool) -> list[dict[str, Any]]:
    """Vectors, the tables (of which a tied one lies on two stages), and the other matrices."""
    kinds: list[list[Any]] = [[], [], []]
    for name, p in model.named_parameters():
        table = any(word in name for word in ("token", "position", "project"))
        kinds[0 if p.dim() < 2 else 1 if table else 2].append((name, p) if named else p)
    own = {"optimizer": Smooth, "shard": "tensor", "weight_decay": 0.05}
    return [{"params": kinds[0]}, {"params": kinds[1], "lr": 0.1, **own}, {"params": kinds[2], "lr": 0.3, **own}]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three global batches, with unequal numbers of ignored targets in their rows."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        ids = torch.randint(SIZES["vocabulary"], (ROWS, SIZES["sequence"] + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for row in range(ROWS):
            targets[row, : (row * row + row) % 5] = -100
        found.append((ids[:, :-1].contiguous(), targets))
    return found


def train(
    mesh: engine.Mesh, shape: dict[str, Any], options: dict[str, Any], microbatches: int, clip: float | None
) -> Any:
    model = engine.PipelineModel(gpt_layers(GPTConfig(**SIZES, **shape), mesh.tensor, torch.float64), mesh)
    start = engine.full_state_dict(model, mesh)
    groups = grouped(model, named=True)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, groups=groups, lr=0.01, **options)
    loss = next_token_loss(mesh.tensor, SIZES["vocabulary"])
    step = engine.TrainStep(model, optimizer, loss, mesh, microbatches=microbatches, clip_grad_norm=clip)
    rank, size = mesh.data.rank, mesh.data.size
    done = [step(*(x.tensor_split(size)[rank] for x in batch)) for batch in batches()]
    numbers = [x.item() for each in done for x in (each.loss, each.grad_norm)]
    return start, numbers, engine.full_state_dict(model, mesh), optimizer.consolidate()["state"]


def train_plain(shape: dict[str, Any], clip: float | None, start: dict[str, Tensor]) -> Any:
    model = plain_gpt(**SIZES, tied=shape["tied"], key_heads=shape["key_heads"]).double()
    model.load_state_dict(start)
    rest, *matrices = grouped(model, named=False)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([rest], lr=0.01, foreach=False)]
    for group in matrices:
        options = {key: value for key, value in group.items() if key not in ("params", "optimizer", "shard")}
        optimizers.append(Smooth(group["params"], **options))
    numbers = []
    for inputs, targets in batches():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        numbers += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item()]
        for optimizer in optimizers:
            optimizer.step()
    return numbers, dict(model.state_dict()), get_optimizer_state_dict(model, optimizers)["state"]


def close(got: Tensor, wanted: Tensor) -> bool:
    """Whether all elements differ by at most 1e-10 of the largest."""
    return bool((got - wanted).abs().max() <= 1e-10 * wanted.abs().max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_a_gpt_of_matrices_and_vectors_trains_as_in_one_process(world: World, case: Any) -> None:
    layout, shape, options, microbatches, clip = case
    results = world.run(layout, train, shape, options, microbatches, clip)
    numbers, weights, state = train_plain(shape, clip, results[0][0])
    for _, own_numbers, own, own_state in results:
        assert own_numbers == pytest.approx(numbers, rel=1e-10)
        for name, value in weights.items():
            assert close(own[name], value), name
        assert own_state.keys() == state.keys()
        for name, values in state.items():
            assert all(close(own_state[name][key], value) for key, value in values.items()), name
