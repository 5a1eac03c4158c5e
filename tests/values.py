"""What ranks hold in tests of the collectives, the plain answers to it, and how a call ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OPS = ("sum", "mean", "max", "min", "prod")


def held(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What `rank` holds: no two elements and no two ranks alike, products exact."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) % 11 + 1) * (rank + 2) + torch.arange(numel) * 0.25).view(shape).to(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The plain answer."""
    stacked = torch.stack(parts)
    if op in ("sum", "prod"):
        return getattr(stacked, op)(0, dtype=stacked.dtype)
    return stacked.mean(0) if op == "mean" else getattr(stacked, f"a{op}")(0)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the call's result, or the name and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def waited(result: Any) -> Any:
    """Wait if `result` is a Work."""
    return result.wait() if hasattr(result, "wait") else result
