"""Parallel linear layers whose weight is stored as (in, out), as Hugging Face's Conv1D of GPT-2 stores it, so that
names and shapes stay those of the model's files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.errors import LayoutError
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_Layer = TypeVar("_Layer", ColumnParallelLinear, RowParallelLinear)


class ColumnParallelConv1D(ColumnParallelLinear):
    """As ColumnParallelLinear; `weight`: (in_features, out_features / T)."""

    @classmethod
    def from_conv1d(cls, conv: nn.Module, comm: Communicator, **options: Any) -> ColumnParallelLinear:
        """Take over this rank's part of `conv`, with from_linear's options and errors. Nothing is sent."""
        return _stored_transposed(cls.from_linear(_as_linear(conv), comm, **options))

    def matrix(self) -> Tensor:
        """Return the (local out, local in) matrix that forward multiplies with."""
        return self.weight.t()


class RowParallelConv1D(RowParallelLinear):
    """As RowParallelLinear; `weight`: (in_features / T, out_features)."""

    @classmethod
    def from_conv1d(cls, conv: nn.Module, comm: Communicator, **options: Any) -> RowParallelLinear:
        """Take over this rank's part of `conv`, with from_linear's options and errors. Nothing is sent."""
        return _stored_transposed(cls.from_linear(_as_linear(conv), comm, **options))

    def matrix(self) -> Tensor:
        """Return the (local out, local in) matrix that forward multiplies with."""
        return self.weight.t()


def _as_linear(conv: nn.Module) -> nn.Linear:
    """Return a linear layer that looks at the same values."""
    weight, bias = conv.get_parameter("weight"), conv.get_parameter("bias")
    declared = (getattr(conv, "nx", weight.shape[0]), getattr(conv, "nf", weight.shape[1]))
    if tuple(weight.shape) != declared:
        raise LayoutError(
            f"from_conv1d: the weight has shape {tuple(weight.shape)}, but the layer declares {declared}: give a whole "
            f"Conv1D"
        )
    linear = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), weight.requires_grad)
    linear.bias = bias
    return linear


def _stored_transposed(layer: _Layer) -> _Layer:
    placement = layer.placements["weight"]
    assert placement.dim is not None
    layer.placements = {**layer.placements, "weight": replace(placement, dim=1 - placement.dim)}
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), layer.weight.requires_grad)
    layer._shard = layer.weight.shape
    return layer
