"""The gradient norm and the clip factor: one function each, for every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.device import exact_dtype


def global_norm(parts: Iterable[Tensor], world: Communicator) -> Tensor:
    """Return the 2-norm of all gradient elements, a 0-d tensor (float64, on HCCL float32) that is equal on every rank.

    parts: the elements that this rank counts; each element of the model is counted by exactly one rank. Every rank of
    the mesh must call it, also with no parts.
    """
    dtype = exact_dtype(world.device)
    squares = [_norm(part).to(dtype).square() for part in parts if part.numel()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=world.device)
    return world.all_reduce(total).sqrt()


def _norm(part: Tensor) -> Tensor:
    """Return the 2-norm, of half-precision elements in float32: their squares' sum is soon beyond their range."""
    half = part.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float32 if half else None)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
