"""Linear layers whose matrix is shared by the ranks of the tensor axis.

A column-parallel layer cuts the outputs, a row-parallel one the inputs, so that a column-parallel layer, anything
elementwise and a row-parallel layer need one all-reduce forward and one backward. Shapes: T = comm.size. Method:
Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.comm.autograd import all_reduce_identity, identity_all_reduce
from engine.comm.communicator import Communicator
from engine.placement import Placement, divide

Init = Callable[[Tensor], Any]


def _draw(
    in_features: int, out_features: int, bias: bool, init: Init | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Draw the full weight and bias from torch's generator in nn.Linear's order and with its bounds."""
    weight = torch.empty(out_features, in_features, dtype=dtype)
    with torch.no_grad():
        if init is None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            init(weight)
        if not bias:
            return weight, None
        bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
        return weight, nn.init.uniform_(torch.empty(out_features, dtype=dtype), -bound, bound)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs cut over the tensor axis.

    Input (..., in_features), equal on all ranks of `comm`; output (..., out_features / T), this rank's part.
    `weight`: (out_features / T, in_features); `bias`: (out_features / T,). Its backward sums the input gradient over
    `comm`, so all of its ranks must run both.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = True,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the full weight as nn.Linear(in_features, out_features) would, and keep this rank's rows of it.

        All ranks of `comm` must have torch's generator in the same state. `init(weight)` fills the full
        (out_features, in_features) weight in place instead of nn.Linear's default. Initialising the shard afterwards
        is wrong: equal generators give equal shards. Raises LayoutError when out_features does not divide by T.
        """
        super().__init__()
        divide(out_features, comm.size, f"ColumnParallelLinear: out_features over axis {comm.name!r}")
        self.in_features, self.out_features, self.comm = in_features, out_features, comm
        self.placements = {"weight": Placement(dim=0), "bias": Placement(dim=0)}
        weight, full_bias = _draw(in_features, out_features, bias, init, dtype)
        self.weight = keep_shard(weight, self.placements["weight"], comm)
        bias_shard = None if full_bias is None else keep_shard(full_bias, self.placements["bias"], comm)
        self.register_parameter("bias", bias_shard)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(identity_all_reduce(x, self.comm), self.weight, self.bias)

    def extra_repr(self) -> str:
        return _describe(self, "out_features")


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs cut over the tensor axis.

    Input (..., in_features / T), this rank's part; output (..., out_features), summed over `comm` and equal on all
    its ranks. `weight`: (out_features, in_features / T); `bias`: (out_features,), whole on every rank and added once,
    after the sum. All ranks of `comm` must run it.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = True,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As ColumnParallelLinear, keeping this rank's columns. Raises LayoutError when in_features does not divide
        by T.
        """
        super().__init__()
        divide(in_features, comm.size, f"RowParallelLinear: in_features over axis {comm.name!r}")
        self.in_features, self.out_features, self.comm = in_features, out_features, comm
        self.placements = {"weight": Placement(dim=1)}
        weight, full_bias = _draw(in_features, out_features, bias, init, dtype)
        self.weight = keep_shard(weight, self.placements["weight"], comm)
        self.register_parameter("bias", None if full_bias is None else nn.Parameter(full_bias))

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce_identity(F.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return _describe(self, "in_features")


def keep_shard(full: Tensor, placement: Placement, comm: Communicator) -> nn.Parameter:
    """Return this rank's shard of a drawn weight, in memory of its own."""
    return nn.Parameter(placement.shard(full, comm.rank, comm.size).clone(memory_format=torch.contiguous_format))


def _describe(layer: ColumnParallelLinear | RowParallelLinear, cut: str) -> str:
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    listed = ", ".join(f"{k}={v}" + (f" / {layer.comm.size}" if k == cut else "") for k, v in sizes.items())
    return f"{listed}, bias={layer.bias is not None}"
