"""Differentiable collectives, each named by what its forward and its backward do.

A value that every rank of the group holds alike is *replicated*; one of which each holds a part along a dim is
*split*; one of which each holds a summand is *partial*. With L the sum of all ranks' use of a replicated value, its
gradient is the sum of the ranks' gradients; that is all there is to derive:

    identity_all_reduce         replicated -> replicated, used by each rank on its own part; the gradients are summed
    all_reduce_identity         partial -> replicated; each summand has the gradient of the sum
    all_gather_reduce_scatter   split -> replicated, used by each rank on its own part; gradients are summed and split
    reduce_scatter_all_gather   partial -> split; each summand has the gradient of the whole
    all_gather_split            split -> replicated, used alike by all; each rank's part of the one gradient
    split_all_gather            replicated -> split; the gradient is put together

Every rank of `comm` must call each, forward and backward, in the same order; shapes as in Communicator. The input is
never changed. Method: the f and g of Megatron-LM (arXiv:1909.08053, section 3) and their sequence-parallel forms
(arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.placement import divide


def _sum(x: Tensor, comm: Communicator) -> Tensor:
    return x if comm.size == 1 else comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    length = divide(x.shape[dim], comm.size, f"dim {dim} of shape {tuple(x.shape)} over axis {comm.name!r}")
    return x.narrow(dim, comm.rank * length, length).contiguous()


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.comm), None


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return _sum(x, comm) if comm.size > 1 else x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllGatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return comm.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(grads[0], ctx.dim), None, None


class _ReduceScatterAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return comm.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(grads[0], ctx.dim), None, None


class _AllGatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return comm.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _part(grads[0], ctx.comm, ctx.dim), None, None


class _SplitAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _part(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(grads[0], ctx.dim), None, None


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Apply a custom function of one tensor result. torch leaves `apply` untyped. torch.compile leaves its graph here
    and runs the function as it is, since what communicates cannot be traced.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, torch.compiler.disable(_plain_apply)(function, *args))
    return _plain_apply(function, *args)


def _plain_apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def identity_all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """Forward: `x` itself. Backward: the sum of the ranks' gradients. For a replicated input of split work."""
    return apply(_IdentityAllReduce, x, comm)


def all_reduce_identity(x: Tensor, comm: Communicator) -> Tensor:
    """Forward: the sum of the ranks' `x`, in a new tensor. Backward: the gradient itself."""
    return apply(_AllReduceIdentity, x, comm)


def all_gather_reduce_scatter(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Forward: the ranks' `x` joined along `dim`. Backward: the gradients' sum, each rank its part."""
    return apply(_AllGatherReduceScatter, x, comm, dim)


def reduce_scatter_all_gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Forward: this rank's part along `dim` of the ranks' sum. Backward: the parts' gradients joined."""
    return apply(_ReduceScatterAllGather, x, comm, dim)


def all_gather_split(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Forward: the ranks' `x` joined along `dim`. Backward: this rank's part of its gradient (equal on all ranks)."""
    return apply(_AllGatherSplit, x, comm, dim)


def split_all_gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Forward: this rank's part of replicated `x` along `dim`. Backward: the parts' gradients joined."""
    return apply(_SplitAllGather, x, comm, dim)
