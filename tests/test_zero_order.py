"""Ranks whose backward makes gradients ready in another order still sum each parameter with itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine import Layout
from engine.zero import ZeroOptimizer
from tests.world import World


class Pair(nn.Module):
    """Two parameters of one size: were they swapped on a rank, nothing but the values would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))


def train_in_another_order(
    mesh: engine.Mesh, stage: int, bucket_mib: float
) -> tuple[list[str], dict[str, list[float]]]:
    model, arrived = Pair(), []
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, bucket_mib=bucket_mib, lr=1.0)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    factor = {"a": 1.0 + mesh.rank, "b": 100.0 * (1 + mesh.rank)}
    # Backward goes through what was computed last first.
    names = ("a", "b") if mesh.rank == 0 else ("b", "a")
    parts = [(getattr(model, name) * factor[name]).sum() for name in names]
    (parts[0] + parts[1]).backward()
    optimizer.finish_gradients()
    optimizer.step()
    return arrived, {name: (-parameter).tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("bucket_mib", [1e-5, 25.0], ids=["a bucket each", "one bucket"])
def test_gradients_that_are_ready_in_another_order_meet_their_own(world: World, stage: int, bucket_mib: float) -> None:
    (first, sums), (second, others) = world.run(Layout(data=2), train_in_another_order, stage, bucket_mib)
    assert (first, second) == (["b", "a"], ["a", "b"]), "the orders differ"
    assert sums == others == {"a": [3.0] * 4, "b": [300.0] * 4}
