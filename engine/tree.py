"""Tensors in nested tuples, lists and dicts, as batches and outputs hold them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return the tree with `function` applied to every tensor in nested tuples, named tuples, lists and dicts, and
    `other` to every other leaf.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function, other) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        mapped = [map_tensors(value, function, other) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return other(tree)
