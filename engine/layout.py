"""Axis sizes, rank order and rank arithmetic: which rank sits where, and who shares an axis with it.

Pure: no process group, no torch. Rank order is tensor fastest, then data, then pipeline, so tensor groups, which
talk most, are neighbours on one host: rank = (pipeline * D + data) * T + tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from engine.errors import LayoutError, UsageError, did_you_mean

Axis = Literal["data", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True)
class Coordinate:
    """Position of one rank along each axis, each from 0."""

    data: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return f"data {self.data}, pipeline {self.pipeline}, tensor {self.tensor}"


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes. `data=-1` means "as many as the started processes give" (see `resolve`).

    Raises LayoutError for a size that is not a positive integer.
    """

    data: int = 1
    """Replicas that train on different rows."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    tensor: int = 1
    """Ranks that share the matrices of each layer."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool):
                raise LayoutError(f"{axis}={size!r}: the size of an axis is an integer")
            if size < 1 and not (axis == "data" and size == -1):
                rule = "at least 1, or -1 to fill up" if axis == "data" else "at least 1"
                raise LayoutError(f"{axis}={size}: the size of this axis is {rule}")

    def __str__(self) -> str:
        return f"data({self.data}) x pipeline({self.pipeline}) x tensor({self.tensor})"

    def resolve(self, world_size: int) -> Layout:
        """Return this layout for `world_size` started processes, with data=-1 replaced by its size.

        Raises LayoutError when the product of the sizes is not `world_size`.
        """
        model = self.pipeline * self.tensor
        if self.data == -1:
            if world_size % model:
                raise LayoutError(
                    f"pipeline({self.pipeline}) x tensor({self.tensor}) = {model} ranks hold one replica, which does "
                    f"not divide the {world_size} that were started: start a multiple of {model}"
                )
            return replace(self, data=world_size // model)
        if self.world_size != world_size:
            raise LayoutError(
                f"{self} = {self.world_size} ranks, but {world_size} {'was' if world_size == 1 else 'were'} started: "
                + self._fix(world_size)
            )
        return self

    def _fix(self, world_size: int) -> str:
        """Name the one axis that could be changed to fit, or else how many to start."""
        for axis in AXES:
            others = self.world_size // getattr(self, axis)
            fitting = world_size // others
            if fitting and world_size % others == 0:
                verb = "lower" if fitting < getattr(self, axis) else "raise"
                return f"{verb} {axis} to {fitting} or start {self.world_size}"
        return f"start {self.world_size}, or choose sizes whose product is {world_size}"

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises LayoutError while data is -1."""
        if self.data == -1:
            raise LayoutError("data=-1 has no size yet: call layout.resolve(world_size) first")
        return self.data * self.pipeline * self.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of global rank `rank`. Raises LayoutError when it is outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside {self}: ranks go from 0 to {self.world_size - 1}")
        replica, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(replica, self.data)
        return Coordinate(data=data, pipeline=pipeline, tensor=tensor)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the global rank at `coordinate`. Raises LayoutError when a position is outside its axis."""
        for axis in AXES:
            position, size = getattr(coordinate, axis), getattr(self, axis)
            if not 0 <= position < size:
                raise LayoutError(f"{axis} {position} is outside {self}: positions go from 0 to {size - 1}")
        return (coordinate.pipeline * self.data + coordinate.data) * self.tensor + coordinate.tensor

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the global ranks of `rank`'s group along `axis`, in axis order.

        Raises UsageError for an unknown axis, LayoutError for a rank outside the world.
        """
        _check_axis(axis)
        here = self.coordinate(rank)
        return tuple(self.rank(replace(here, **{axis: i})) for i in range(getattr(self, axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every group along `axis`, ordered by first rank: the order in which all ranks make them."""
        _check_axis(axis)
        return tuple(
            self.ranks(axis, rank) for rank in range(self.world_size) if getattr(self.coordinate(rank), axis) == 0
        )


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise UsageError(f"unknown axis {axis!r}{did_you_mean(axis, AXES)}: the axes are {', '.join(AXES)}")
