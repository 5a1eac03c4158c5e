"""Where every parameter slice lies: buckets of whole parameters, cut into one equal shard for each data rank. Pure.

Parameters fill buckets in their order, a bucket for each kind (dtype, virtual stage, `apart`) at a time; a bucket is
closed before it would pass the size limit (a larger parameter has one of its own) and padded until it divides by the
data axis. Parameters that one
data rank updates whole have buckets of their own: there a shard is some of the parameters and padding, and the ranks'
work is balanced. Equal inputs give equal plans on every rank.
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
    work: float | None = None
    """Of a parameter that one data rank updates whole: what that costs, in any unit. None: cut wherever it falls."""


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
    whole: bool = False
    """Whether each parameter lies in one shard."""

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.shard * self.shards

    @property
    def used(self) -> int:
        """Elements without the padding at the end."""
        return self.slices[-1].stop

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The elements [start, stop) that are no parameter's, as runs: between slices, and at the end."""
        starts = [*(each.start for each in self.slices), self.numel]
        stops = [0, *(each.stop for each in self.slices)]
        return tuple((stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)

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


_Kind = tuple[torch.dtype, int, bool, bool]  # dtype, virtual stage, apart, whole


def plan_buckets(
    parameters: Sequence[ParameterInfo], bucket_bytes: float, shards: int, *, first: int = 0
) -> tuple[Bucket, ...]:
    """Lay `parameters`, from number `first` on, out in buckets of at most `bucket_bytes` each, for `shards` data ranks.

    A bucket of parameters with `work` is larger where it would have fewer of them than there are ranks: each rank's
    segment is as long as the longest.
    """
    buckets: list[Bucket] = []
    filling: dict[_Kind, list[int]] = {}
    sizes: dict[_Kind, int] = {}
    loads = [0.0] * shards

    def close(kind: _Kind) -> None:
        indices = filling.pop(kind)
        dtype, stage, apart, whole = kind
        place = _whole_parameters if whole else _cut_anywhere
        slices, shard = place(parameters, indices, loads)
        buckets.append(Bucket(dtype, slices, shard, shards, stage, apart, whole))

    for index, parameter in enumerate(parameters[first:], first):
        kind = (parameter.dtype, parameter.stage, parameter.apart, parameter.work is not None)
        enough = len(filling.get(kind, ())) >= (shards if parameter.work is not None else 1)
        if enough and (sizes[kind] + parameter.numel) * parameter.dtype.itemsize > bucket_bytes:
            close(kind)
        sizes[kind] = parameter.numel + (sizes[kind] if kind in filling else 0)
        filling.setdefault(kind, []).append(index)
    for kind in list(filling):
        close(kind)
    return tuple(buckets)


def balanced(works: Sequence[float], loads: list[float]) -> list[int]:
    """Return which rank does each piece of work: the longest first, each by the rank with least to do.

    loads: what every rank has to do already; it is brought up to date. Afterwards two ranks differ by at most the
    largest piece, where they did before.
    """
    ranks = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda index: (-works[index], index)):
        ranks[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[ranks[index]] += works[index]
    return ranks


def _cut_anywhere(
    parameters: Sequence[ParameterInfo], indices: Sequence[int], loads: Sequence[float]
) -> tuple[tuple[Slice, ...], int]:
    """Return the slices, and the length of a shard, of parameters that lie one after another."""
    slices = _in_a_row(parameters, indices, 0)
    return slices, -(-slices[-1].stop // len(loads))


def _whole_parameters(
    parameters: Sequence[ParameterInfo], indices: Sequence[int], loads: list[float]
) -> tuple[tuple[Slice, ...], int]:
    """Return the same of parameters of which each data rank's shard has some whole. loads: of all ranks so far."""
    ranks = balanced([parameters[index].work or 0.0 for index in indices], loads)
    of_rank = [[i for i, owner in zip(indices, ranks, strict=True) if owner == rank] for rank in range(len(loads))]
    shard = max(sum(parameters[index].numel for index in own) for own in of_rank)
    slices = [each for rank, own in enumerate(of_rank) for each in _in_a_row(parameters, own, rank * shard)]
    return tuple(slices), shard


def _in_a_row(parameters: Sequence[ParameterInfo], indices: Sequence[int], start: int) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    for index in indices:
        slices.append(Slice(index, start, start + parameters[index].numel))
        start = slices[-1].stop
    return tuple(slices)
