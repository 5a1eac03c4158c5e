"""The gradient of heads of which several ranks hold the same, summed where they are used.

With fewer key heads than tensor ranks, neighbours hold a copy of one head and each has its summand of the head's
gradient. What is linear in the gradient may come before the sum, but a norm that works in float32 rounds each summand,
and the rounded summands are not the rounded sum. So they are summed behind the norm, and the sum goes back through
the norm once, on the first of the ranks; the others go on with zeros. All gradients below stay parts of a sum over the
ranks, as their placements say.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.placement import Part


def sum_shared_heads(module: nn.Module, heads: int, comm: Communicator) -> None:
    """Let the gradient of what `module` returns be summed over the ranks of `comm` that share a head.

    heads: of the whole, fewer than ranks and a divisor of their number, so the module returns a tensor of one head, in
    any shape that is equal on all ranks. Nothing is sent here; in each backward of the module there is one all-reduce
    of `heads` times that tensor, in the gradient's dtype, and all ranks of `comm` must run it.
    """
    module.register_forward_hook(partial(_behind, Part(heads, heads=heads), comm))


def _behind(part: Part, comm: Communicator, module: nn.Module, _args: Any, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise UsageError(
            f"a plan gives {type(module).__name__} heads={part.heads}, but it returns a {type(output).__name__}: leave "
            f"heads out, or name a module that returns a tensor"
        )
    return apply(_IdentitySumOnFirst, output, part, comm)


class _IdentitySumOnFirst(torch.autograd.Function):
    """Forward: `x` itself. Backward: on the first rank that holds this head the ranks' sum, on the others zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, comm: Communicator) -> Tensor:
        ctx.part, ctx.comm = part, comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), part, comm = grads, ctx.part, ctx.comm
        heads, head = part.slices(comm.size), part.index(comm.rank, comm.size)
        places = grad.new_zeros(heads, *grad.shape)  # ranks that hold another head add zeros to this one
        places[head].copy_(grad)
        comm.all_reduce(places)
        first = comm.rank % (comm.size // heads) == 0
        return places[head] if first else torch.zeros_like(grad), None, None
