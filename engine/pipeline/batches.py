"""A batch as a user gives it, nested tuples, lists and dicts of tensors, and its microbatches. Nothing is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.errors import UsageError
from engine.tree import map_tensors

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: the arguments of the first layer, the target of the loss, and what identifies their shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    signature: object


def split(inputs: Any, targets: Any, device: torch.device, sizes: Sequence[int]) -> list[Microbatch]:
    """Move the rows to `device` and cut them into consecutive parts of `sizes` rows."""
    here = map_batch((inputs, targets), lambda x: x.to(device))
    signatures = {size: _signature(inputs, size) for size in set(sizes)}
    batches = []
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        part, target = map_batch(here, partial(_narrow, start=start, rows=size))
        args = part if isinstance(part, tuple) else () if isinstance(part, dict) else (part,)
        batches.append(Microbatch(args, part if isinstance(part, dict) else {}, target, signatures[size]))
    return batches


def _narrow(x: Tensor, start: int, rows: int) -> Tensor:
    return x[start : start + rows] if x.dim() else x


def _signature(tree: Any, rows: int) -> object:
    """Return what an activation's shape may depend on, for a part with `rows` rows; equal inputs give equal ones.

    So of an object that is no plain value only its type counts: its repr or hash may be its address.
    """
    if isinstance(tree, Tensor):
        return (tree.dtype, (rows, *tree.shape[1:]) if tree.dim() else ())
    if isinstance(tree, dict):
        return tuple((str(key), _signature(tree[key], rows)) for key in sorted(tree, key=str))
    if isinstance(tree, list | tuple):
        return tuple(_signature(value, rows) for value in tree)
    return (type(tree).__qualname__, tree if isinstance(tree, _PLAIN) else None)


def map_batch(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor of a batch; plain values and objects pass through.

    Raises UsageError for anything else that holds rows, which would reach every microbatch whole.
    """
    _check_lists(tree)
    return map_tensors(tree, function, _without_rows)


def _check_lists(tree: Any) -> None:
    if isinstance(tree, list) and any(isinstance(value, int | float) for value in tree):
        raise UsageError("a list of numbers is not cut into microbatches: make it a tensor, or a tuple of options")
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        _check_lists(value)


def _without_rows(leaf: Any) -> Any:
    held: Collection[Any] = vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    if isinstance(leaf, Set | deque):
        held = leaf
    whole = isinstance(leaf, Mapping | Iterator) or hasattr(leaf, "__array__")  # of an iterator, the first has all
    if whole or any(isinstance(x, Tensor) and x.dim() for x in held):
        raise UsageError(
            f"a {type(leaf).__name__} is not cut into microbatches: pass its tensors in tuples, lists or dicts "
            f"(torch.as_tensor for an array, dict(...) for a mapping)"
        )
    return leaf


def rows_of(inputs: Any, targets: Any) -> int:
    found: list[int] = []
    map_batch((inputs, targets), lambda x: found.append(x.shape[0]) if x.dim() else None)
    if not found:
        raise UsageError("the inputs and targets hold no tensor with rows")
    if len(set(found)) > 1:
        raise UsageError(
            f"inputs and targets have different numbers of rows, {found}: dim 0 of every tensor is for this rank's rows"
        )
    return found[0]
