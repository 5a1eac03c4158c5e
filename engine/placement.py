"""How one parameter lies over the axes: sharded over tensor or replicated, gradient full or partial, tied over stages.

Declared by the module class that owns the parameter, in a dict `placements` from the parameter's own name to a
Placement: a value on the module survives deepcopy, `to("meta")` and `to_empty`, an attribute on a tensor does not.
Whoever syncs gradients, counts a norm or saves weights reads it from here. Pure: nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.errors import LayoutError, UsageError, did_you_mean

Gradient = Literal["equal", "sum"]


@dataclass(frozen=True)
class Part:
    """One of the parts that lie one after another along a cut dim, each of which is cut by itself: of a fused
    projection the queries, keys and values, of which every rank holds its heads.
    """

    size: int
    """Elements of the whole part along the dim."""
    heads: int | None = None
    """Units of equal size that are not cut, such as attention heads. Where there are fewer than ranks, each is held by
    size / heads neighbouring ranks, whose gradients are summed.
    """
    padded: bool = False
    """Whether a size that does not divide is filled up with zeros behind the last element."""

    def __post_init__(self) -> None:
        if self.size < 1 or (self.heads is not None and (self.heads < 1 or self.size % self.heads)):
            raise LayoutError(f"{self}: a part has at least 1 element, and its heads divide it")
        if self.heads is not None and self.padded:
            raise UsageError(f"{self}: whole heads are not padded: leave heads or padded out")

    def slices(self, ranks: int) -> int:
        """Return into how many different slices the part is cut: one for each rank, or as many as it has heads.

        Raises LayoutError where neither fits.
        """
        if self.heads is None or self.heads % ranks == 0:
            return ranks
        if ranks % self.heads:
            raise LayoutError(
                f"{self.heads} heads do not divide over {ranks} ranks, nor {ranks} ranks over the heads: use a "
                f"multiple or a divisor of {ranks} heads"
            )
        return self.heads

    def length(self, ranks: int) -> int:
        """Return the elements of a rank's slice, with padding. Raises LayoutError for a size that does not divide."""
        slices = self.slices(ranks)
        return -(-self.size // slices) if self.padded else divide(self.size, slices, f"a part of {self.size} elements")

    def index(self, rank: int, ranks: int) -> int:
        """Return which slice a rank holds."""
        return rank * self.slices(ranks) // ranks


@dataclass(frozen=True)
class Placement:
    """Where one parameter's elements and gradient lie over the tensor axis."""

    dim: int | None = None
    """Dim that is cut into contiguous shards over the tensor axis; None: every rank holds the whole."""
    gradient: Gradient = "equal"
    """Of a replicated parameter: `equal` on every tensor rank already, or partial, to be summed (`sum`)."""
    parts: tuple[Part, ...] = ()
    """What lies along the dim, where it is not one part that divides; a shard is a slice of each, in this order."""

    def __post_init__(self) -> None:
        if self.gradient not in ("equal", "sum"):
            raise UsageError(f"gradient={self.gradient!r}: a placement's gradient is 'equal' or 'sum'")
        if self.dim is not None and self.gradient == "sum":
            raise UsageError(
                f"dim={self.dim}, gradient='sum': a sharded parameter has its own gradient, not a part of one"
            )
        if self.parts and self.dim is None:
            raise UsageError(f"parts={self.parts}: only a dim that is cut has parts: give dim=")

    def shape(self, full: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of one shard of a tensor of shape `full` over `size` ranks."""
        shape = list(full)
        if self.dim is None:
            return tuple(shape)
        if self.parts:
            whole = sum(part.size for part in self.parts)
            if shape[self.dim] != whole:
                raise LayoutError(f"dim {self.dim} of shape {tuple(full)} is not the {whole} elements of its parts")
            shape[self.dim] = sum(self.lengths(size))
        else:
            shape[self.dim] = divide(shape[self.dim], size, f"dim {self.dim} of shape {tuple(full)}")
        return tuple(shape)

    def full_shape(self, shard: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the whole tensor's shape, from the shape of one of its `size` shards."""
        shape = list(shard)
        if self.dim is not None:
            shape[self.dim] = sum(part.size for part in self.parts) if self.parts else shape[self.dim] * size
        return tuple(shape)

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return the elements of a shard along the dim, part by part."""
        return tuple(part.length(size) for part in self.parts)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return what position `rank` of `size` holds of `full`: a view of it where there are no parts."""
        if self.dim is None:
            return full
        length = self.shape(full.shape, size)[self.dim]
        if not self.parts:
            return full.narrow(self.dim, rank * length, length)
        slices = []
        for part, whole in zip(self.parts, full.split([part.size for part in self.parts], self.dim), strict=True):
            length = part.length(size)
            start = min(part.index(rank, size) * length, part.size)
            slices.append(whole.narrow(self.dim, start, min(length, part.size - start)))
            if slices[-1].shape[self.dim] < length:
                slices.append(_zeros_along(whole, self.dim, length - slices[-1].shape[self.dim]))
        return torch.cat(slices, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, in memory of its own, from the shards of all ranks in rank order."""
        if self.dim is None:
            return shards[0].clone()
        size = len(shards)
        if not self.parts:
            return torch.cat(list(shards), self.dim)
        wholes = []
        for number, part in enumerate(self.parts):
            first = sum(self.lengths(size)[:number])
            held = [shard.narrow(self.dim, first, part.length(size)) for shard in shards]
            whole = torch.cat(held[:: size // part.slices(size)], self.dim)
            wholes.append(whole.narrow(self.dim, 0, part.size))
        return torch.cat(wholes, self.dim)

    def padding(self, rank: int, size: int) -> int:
        """Return how many elements at the end of this shard, along the dim, are padding. For at most one part."""
        if len(self.parts) != 1 or not self.parts[0].padded:
            return 0
        length = self.parts[0].length(size)
        return length - min(length, max(0, self.parts[0].size - rank * length))

    def is_copied(self, size: int) -> bool:
        """Whether several of `size` ranks hold the same elements of a cut dim."""
        return any(part.slices(size) < size for part in self.parts)

    def partial(self, gradient: Tensor, rank: int, size: int) -> list[tuple[Tensor, int, int]]:
        """Return the pieces of a shard's gradient of which other ranks hold summands, each as (view, index, count): of
        `count` such pieces over the axis this rank has one of number `index`.
        """
        if self.dim is None:
            return [(gradient, 0, 1)] if self.gradient == "sum" else []
        found = []
        pieces = gradient.split(self.lengths(size), self.dim) if self.parts else ()
        for part, piece in zip(self.parts, pieces, strict=True):
            if part.slices(size) < size:
                found.append((piece, part.index(rank, size), part.slices(size)))
        return found

    def counted(self, shard: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the elements [start, stop) of the flat shard that this rank counts, so that each element of the whole
        is counted by one rank. Raises LayoutError for copies along another dim than the first.
        """
        numel = math.prod(shard)
        if self.dim is None:
            return ((0, numel),) if rank == 0 else ()
        if not self.is_copied(size):
            return ((0, numel),)
        if self.dim != 0:
            raise LayoutError(f"{self}: fewer heads than {size} ranks need the parts to lie along dim 0")
        row, first, found = numel // shard[0], 0, []
        for part, length in zip(self.parts, self.lengths(size), strict=True):
            if rank % (size // part.slices(size)) == 0:
                found.append((first * row, (first + length) * row))
            first += length
        return tuple(found)


def _zeros_along(like: Tensor, dim: int, length: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return like.new_zeros(shape)


REPLICATED = Placement()


@dataclass(frozen=True)
class Tied:
    """One parameter that several pipeline stages hold: its gradient is the sum over `stages`, counted once."""

    key: str
    """The user's name of the tie."""
    canonical: str
    """Full name of the first layer's parameter."""
    stages: tuple[int, ...]
    """Ranks of the pipeline axis that hold a copy. The first has the first layer, and owns it; the others ascend."""
    name: str
    """Full name of the first copy on this rank."""


def cut(dim: int, parts: Sequence[Part], size: int) -> Placement:
    """Return the placement of a dim that is cut into `size` shards of these parts. One part that divides into a slice
    for each rank needs no mention, so that equal layouts are equal placements. Raises LayoutError for parts that cannot
    be cut.
    """
    alone = len(parts) == 1 and parts[0].slices(size) == size and parts[0].size % size == 0
    for part in parts:
        part.length(size)
    return Placement(dim, parts=() if alone else tuple(parts))


class StageModule(nn.Module):
    """A module that holds one pipeline stage of a model, and knows which of its parameters other stages hold too."""

    ties: tuple[Tied, ...] = ()

    def on_any_stage(self, flag: bool) -> bool:
        """Return whether any pipeline rank says so. Every rank of the pipeline axis must call it."""
        return flag

    def stage_of(self, name: str) -> int:
        """Return the virtual stage that has the parameter called `name`."""
        del name
        return 0


def divide(total: int, parts: int, what: str) -> int:
    """Return total // parts. Raises LayoutError, naming `what`, when it does not divide."""
    if parts < 1 or total % parts:
        raise LayoutError(
            f"{what}: {total} does not divide by {parts}: use a multiple of {parts}, or a size that divides {total}"
        )
    return total // parts


def replicated(module: nn.Module, *, gradient: Gradient) -> nn.Module:
    """Declare every parameter below `module` replicated over the tensor axis, and return the module.

    `gradient="sum"` is for parameters that each tensor rank uses on a part of the work (a norm per head, a norm under
    sequence parallelism): their gradients are then summed over the tensor axis before use. Call it the same on all
    ranks. Raises UsageError when one of them is sharded.
    """
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        declared: Mapping[str, Placement] = getattr(part, "placements", {})
        for name in own:
            if declared.get(name, REPLICATED).dim is not None:
                raise UsageError(f"{type(part).__name__}'s {name!r} is sharded over the tensor axis, not replicated")
        if own:
            part.placements = {name: Placement(gradient=gradient) for name in own}  # type: ignore[assignment]
    return module


def placements_of(module: nn.Module) -> dict[str, Placement]:
    """Return the placement of every parameter of `module` by full name, shared ones under each of their names.

    Raises UsageError for a declared name that is no parameter of its module.
    """
    found: dict[str, Placement] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        declared: Mapping[str, Placement] = getattr(part, "placements", {})
        own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
        for name in declared:
            if name not in own and name not in part._parameters:
                raise UsageError(
                    f"{type(part).__name__} places {name!r}, which is none of its parameters{did_you_mean(name, own)}"
                )
        for name in own:
            found[f"{prefix}.{name}" if prefix else name] = declared.get(name, REPLICATED)
    return found


def ties_of(module: nn.Module) -> tuple[Tied, ...]:
    """Return the parameters of `module` that other pipeline stages hold too, in one order on every stage."""
    return module.ties if isinstance(module, StageModule) else ()


def stage_of(module: nn.Module, name: str) -> int:
    """Return the virtual pipeline stage that has the parameter of `module` called `name`."""
    return module.stage_of(name) if isinstance(module, StageModule) else 0
