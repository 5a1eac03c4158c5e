"""Low-rank adapters on parallel linear layers, arXiv:2106.09685: y = x (W + alpha / rank * B A)^T + b, W and b frozen.

A is (rank, in_features), B (out_features, rank). Each rank computes its part of B A x before the layer's own
collective, so an adapter sends nothing of its own forward, and backward its input gradient goes with the layer's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import UsageError
from engine.placement import Placement
from engine.tensor_parallel.linear import Adapter, ColumnParallelLinear, Init, RowParallelLinear, keep_shard


class LoRALinear(nn.Module):
    """A frozen parallel layer `base` with trained adapters `a` and `b`, made by `lora`.

    Column-parallel: `a` (rank, in_features) on every rank, each of which uses it for its own outputs, so its gradient
    is to be summed; `b` (out_features / T, rank), cut as the layer's outputs are. Row-parallel: `a`
    (rank, in_features / T), cut as the inputs are; `b` (out_features, rank) on every rank, each of which applies it to
    its own summand, so its gradient is to be summed. `ZeroOptimizer` sums them, as `placements` says.
    """

    def __init__(
        self, base: ColumnParallelLinear | RowParallelLinear, rank: int, alpha: float, init: Init | None
    ) -> None:
        """See `lora`."""
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        like = base.weight
        full_a = torch.empty(rank, base.in_features, dtype=like.dtype, device="meta" if like.is_meta else None)
        with torch.no_grad():
            if init is None:
                nn.init.kaiming_uniform_(full_a, a=math.sqrt(5))
            else:
                init(full_a)
        full_b = full_a.new_zeros(base.out_features, rank)
        cut, shared = base.placements["weight"], Placement(gradient="sum")
        column = isinstance(base, ColumnParallelLinear)
        self.placements = {"a": shared, "b": replace(cut, dim=0)} if column else {"a": replace(cut, dim=1), "b": shared}
        self.a = keep_shard(full_a.to(like.device), self.placements["a"], base.comm)
        self.b = keep_shard(full_b.to(like.device), self.placements["b"], base.comm)

    def forward(self, x: Tensor) -> Any:
        """Return what the layer returns, with its collectives: all ranks of its axis must run it."""
        return self.base(x, Adapter(self.a, self.b, self.scale))

    @torch.no_grad()
    def merge(self) -> ColumnParallelLinear | RowParallelLinear:
        """Add scale * B A to the layer's weight, in place, and return the layer, still frozen, to be put where this
        module was. Nothing is sent. Not to be called twice: the adapters stay as they are.
        """
        self.base.matrix().add_(self.b @ self.a, alpha=self.scale)
        return self.base

    def extra_repr(self) -> str:
        return f"rank={len(self.a)}, scale={self.scale:g}"


def lora(
    layer: ColumnParallelLinear | RowParallelLinear, rank: int, alpha: float, *, init: Init | None = None
) -> LoRALinear:
    """Freeze `layer` and return it with an adapter of `rank` columns, scaled by alpha / rank.

    A is drawn in full from torch's generator, which must stand alike on all ranks of the layer's axis, as
    nn.Linear(in_features, rank) draws its weight, or filled by `init(full A)`; B is zero, so that the output is the
    layer's at first. Raises UsageError for another kind of layer, a rank below 1, or an alpha
    that is no finite number.
    """
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        raise UsageError(f"lora takes a ColumnParallelLinear or RowParallelLinear, not a {type(layer).__name__}")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise UsageError(f"lora: rank={rank!r}: the adapter has at least 1 column")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UsageError(f"lora: alpha={alpha!r}: the adapter is scaled by alpha / rank: give a finite number")
    return LoRALinear(layer, rank, alpha, init)
