"""The gradient norm and the clip factor: one function each, for every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.device import exact_dtype
from engine.errors import UsageError

_RUN = 1 << 16  # elements


def check_clipping(divisor: float | Tensor, max_norm: float | None, norm_type: float) -> None:
    """Refuse what gradients cannot be divided by or clipped to."""
    if isinstance(divisor, int | float) and not divisor > 0:
        raise UsageError(f"divisor={divisor!r}: the summed gradient is divided by a number above 0")
    if max_norm is not None and not max_norm > 0:
        raise UsageError(
            f"max_norm={max_norm!r}: gradients are clipped to a norm above 0; None leaves them as they are"
        )
    check_norm_type(norm_type)


def check_norm_type(norm_type: float) -> None:
    """Refuse a norm that is not computed."""
    if norm_type not in (2, math.inf):
        raise UsageError(f"norm_type={norm_type!r}: choose 2.0, or float('inf') for the largest absolute value")


def global_norm(parts: Iterable[Tensor], world: Communicator, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradient elements, a 0-d tensor (float64, on HCCL float32) that is equal on every rank.

    parts: the elements that this rank counts; each element of the model is counted by exactly one rank. norm_type: 2.0,
    or inf for the largest absolute value. Every rank of the mesh must call it, also with no parts.
    """
    dtype = exact_dtype(world.device)
    if norm_type == math.inf:
        return _largest([part.abs().max().to(dtype) for part in parts if part.numel()], dtype, world)
    squares = [_norm(part).to(dtype).square() for part in parts if part.numel()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=world.device)
    return world.all_reduce(total).sqrt()


def _largest(values: Sequence[Tensor], dtype: torch.dtype, world: Communicator) -> Tensor:
    """Return the largest value on any rank; NaN where there is one, which a maximum over ranks may lose."""
    own = torch.stack(list(values)).max() if values else torch.zeros((), dtype=dtype, device=world.device)
    bad = own.isnan()
    largest, somewhere = world.all_reduce(torch.stack([own.masked_fill(bad, 0.0), bad.to(dtype)]), "max").unbind()
    return largest.masked_fill(somewhere > 0, math.nan)


def _norm(part: Tensor) -> Tensor:
    """Return the 2-norm, of half-precision elements in float32: their squares' sum is soon beyond their range.

    On a CPU torch adds all squares up one after another, which in float32 loses as much as 1e-2 of the norm of 8
    million elements, and more or less of it in shards: so norms of short runs are added up, in float64.
    """
    dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor
    if part.device.type != "cpu" or part.numel() <= _RUN:
        norm = torch.linalg.vector_norm(part, dtype=dtype)
    else:
        runs = [torch.linalg.vector_norm(run, dtype=dtype) for run in part.reshape(-1).split(_RUN)]
        norm = torch.linalg.vector_norm(torch.stack(runs), dtype=torch.float64)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
