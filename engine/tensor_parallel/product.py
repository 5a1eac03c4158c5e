"""The matrix products of the parallel linear layers, with their collectives placed so that they overlap.

    column_product   replicated input, or split along a dim and gathered here -> each rank's own outputs
    row_product      each rank's summand -> replicated sum, or split along a dim

Every rank of `comm` must call each, forward and backward, in the same order. Method: Megatron-LM, arXiv:1909.08053,
section 3, and its sequence-parallel form, arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.comm.autograd import apply, reduce_scatter_all_gather
from engine.comm.communicator import Communicator
from engine.weight_gradients import weight_gradient_of


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: Tensor | None,
    comm: Communicator,
    dim: int | None,
    padding: int,
) -> tuple[Tensor, Tensor | None]:
    """Return x W^T + b, and x A^T where there is an adapter A, of which each rank uses only a part.

    x: (..., in), equal on all ranks; with `dim` this rank's part along it, gathered here. weight: (out / T, in), bias:
    (out / T,), adapter: (rank, in). Results: (..., out / T) and (..., rank) of the gathered input. Only `x` as it is
    given is kept for backward. The last `padding` rows of the weight give outputs that have no gradient, and hold
    anything. In backward the input gradient is summed (with `dim`: reduce-scattered) while the others are
    computed. One backward only.
    """
    x, weight = autocast(x), autocast(weight)
    bias = None if bias is None else autocast(bias)
    if adapter is None:
        return apply(_ColumnProduct, x, weight, bias, None, comm, dim, padding), None
    return cast(tuple[Tensor, Tensor], apply(_ColumnProduct, x, weight, bias, autocast(adapter), comm, dim, padding))


def row_product(partial: Tensor, comm: Communicator, dim: int | None) -> Tensor:
    """Return the sum of the ranks' `partial`, which is used up; with `dim` only this rank's part along it.

    Backward: the gradient itself; with `dim` the parts' gradients joined.
    """
    return apply(_SumInPlace, partial, comm) if dim is None else reduce_scatter_all_gather(partial, comm, dim)


def autocast(x: Tensor) -> Tensor:
    """Return `x` as a linear layer takes it under torch.autocast: a function of its own is not cast by torch."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter: Tensor | None,
        comm: Communicator,
        dim: int | None,
        padding: int,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.comm, ctx.dim, ctx.real = comm, dim, weight.shape[0] - padding
        ctx.of_weight, ctx.of_adapter = weight_gradient_of(weight), adapter is not None and weight_gradient_of(adapter)
        needs_x, needs_weight, _, needs_adapter, *_ = ctx.needs_input_grad
        matrices = (weight, adapter) if needs_x else (None, None)
        ctx.save_for_backward(x if needs_weight or needs_adapter else None, *matrices)
        whole = x if dim is None else comm.all_gather(x, dim)
        y = F.linear(whole, weight, bias)
        return y if adapter is None else (y, F.linear(whole, adapter))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Launch what is sent, compute while it flies, finish."""
        comm, dim = ctx.comm, ctx.dim
        x, weight, adapter = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_adapter, *_ = ctx.needs_input_grad
        gathered = None if x is None or dim is None else _launch(comm, comm.all_gather, x, dim)
        summed: Callable[[], Tensor] | None = None
        if needs_x:
            grad_x = grads[0][..., : ctx.real] @ weight[: ctx.real]
            if adapter is not None:
                grad_x += grads[1] @ adapter
            summed = (
                _launch(comm, comm.all_reduce, grad_x)
                if dim is None
                else _launch(comm, comm.reduce_scatter, grad_x, dim)
            )
        grad_bias = grads[0].reshape(-1, grads[0].shape[-1]).sum(0) if needs_bias else None
        whole = gathered() if gathered else x
        grad_weight = ctx.of_weight(grads[0], whole) if needs_weight else None
        grad_adapter = ctx.of_adapter(grads[1], whole) if needs_adapter else None
        return summed() if summed else None, grad_weight, grad_bias, grad_adapter, None, None, None


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Communicator) -> Tensor:
        ctx.mark_dirty(partial)
        comm.all_reduce(partial)
        return partial

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _launch(comm: Communicator, collective: Callable[..., Any], *args: Any) -> Callable[[], Tensor]:
    """Start a collective and return what waits for its result. Where it could not overlap, it is done at once."""
    if comm.overlaps:
        return cast(Callable[[], Tensor], collective(*args, async_op=True).wait)
    result = collective(*args)
    return lambda: cast(Tensor, result)
