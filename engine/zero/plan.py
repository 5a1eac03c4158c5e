"""Where every parameter slice lies: buckets of whole parameters, cut into one equal shard for each data rank. Pure.

Parameters fill buckets in their order, a bucket for each kind (dtype, virtual stage, `apart`) at a time; a bucket is
closed before it would pass the size limit (a larger parameter has one of its own) and padded until it divides by the
data axis. Equal inputs give equal plans on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan needs of one parameter."""

    name: str
    numel: int
    dtype: torch.dtype
    group: int
    """Index of its parameter group."""
    counted: tuple[tuple[int, int], ...]
    """The elements [start, stop) that this rank counts in the gradient norm: each is counted by exactly one tensor and
    pipeline position.
    """
    stage: int = 0
    """The virtual pipeline stage that has it: buckets are of one, whose gradients are ready together."""
    apart: bool = False
    """Whether its gradient is first summed over other axes, so that it is reduced once, after the last backward."""


@dataclass(frozen=True)
class Slice:
    """One parameter's place in a bucket, in elements."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Range:
    """A run of elements of a bucket that share a key."""

    start: int
    stop: int
    key: Hashable


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced and gathered together."""

    dtype: torch.dtype
    slices: tuple[Slice, ...]
    shard: int
    """Elements of each data rank's shard."""
    shards: int
    """Number of data ranks."""
    stage: int = 0
    """Of all its parameters."""
    apart: bool = False
    """Of all its parameters."""

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.shard * self.shards

    @property
    def used(self) -> int:
        """Elements without padding."""
        return self.slices[-1].stop

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where data rank `rank`'s shard starts and stops."""
        return rank * self.shard, (rank + 1) * self.shard

    def ranges(self, start: int, stop: int, key: Callable[[int], Hashable]) -> tuple[Range, ...]:
        """Return the used elements of [start, stop) as runs of equal `key(parameter index)`, neighbours joined."""
        found: list[Range] = []
        for each in self.slices:
            low, high = max(start, each.start), min(stop, each.stop)
            if low >= high:
                continue
            if found and found[-1].stop == low and found[-1].key == key(each.index):
                found[-1] = Range(found[-1].start, high, found[-1].key)
            else:
                found.append(Range(low, high, key(each.index)))
        return tuple(found)

    def counted(self, start: int, stop: int, parameters: Sequence[ParameterInfo]) -> tuple[tuple[int, int], ...]:
        """Return the elements of [start, stop) that this rank counts in the norm, as runs, neighbours joined."""
        found: list[tuple[int, int]] = []
        for each in self.slices:
            for first, last in parameters[each.index].counted:
                low, high = max(start, each.start + first), min(stop, each.start + last)
                if low >= high:
                    continue
                if found and found[-1][1] == low:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
        return tuple(found)


def plan_buckets(parameters: Sequence[ParameterInfo], bucket_bytes: float, shards: int) -> tuple[Bucket, ...]:
    """Lay `parameters` out in buckets of at most `bucket_bytes` each, for `shards` data ranks."""
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, int, bool], list[Slice]] = {}

    def close(kind: tuple[torch.dtype, int, bool]) -> None:
        slices = filling.pop(kind)
        dtype, stage, apart = kind
        buckets.append(Bucket(dtype, tuple(slices), -(-slices[-1].stop // shards), shards, stage, apart))

    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.stage, parameter.apart)
        slices = filling.get(kind)
        if slices and (slices[-1].stop + parameter.numel) * parameter.dtype.itemsize > bucket_bytes:
            close(kind)
        slices = filling.setdefault(kind, [])
        start = slices[-1].stop if slices else 0
        slices.append(Slice(index, start, start + parameter.numel))
    for kind in list(filling):
        close(kind)
    return tuple(buckets)
