"""How one parameter lies over the axes: sharded over tensor or replicated, gradient full or partial, tied over stages.

Declared by the module class that owns the parameter, in a dict `placements` from the parameter's own name to a
Placement: a value on the module survives deepcopy, `to("meta")` and `to_empty`, an attribute on a tensor does not.
Whoever syncs gradients, counts a norm or saves weights reads it from here. Pure: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from engine.errors import LayoutError, UsageError, did_you_mean

Gradient = Literal["equal", "sum"]


@dataclass(frozen=True)
class Placement:
    """Where one parameter's elements and gradient lie over the tensor axis."""

    dim: int | None = None
    """Dim that is cut into equal contiguous shards over the tensor axis; None: every rank holds the whole."""
    gradient: Gradient = "equal"
    """Of a replicated parameter: `equal` on every tensor rank already, or partial, to be summed (`sum`)."""

    def __post_init__(self) -> None:
        if self.gradient not in ("equal", "sum"):
            raise UsageError(f"gradient={self.gradient!r}: a placement's gradient is 'equal' or 'sum'")
        if self.dim is not None and self.gradient == "sum":
            raise UsageError(
                f"dim={self.dim}, gradient='sum': a sharded parameter has its own gradient, not a part of one"
            )

    def shape(self, full: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of one shard of a tensor of shape `full` over `size` ranks."""
        shape = list(full)
        if self.dim is not None:
            shape[self.dim] = divide(shape[self.dim], size, f"dim {self.dim} of shape {tuple(full)}")
        return tuple(shape)

    def full_shape(self, shard: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the whole tensor's shape, from the shape of one of its `size` shards."""
        shape = list(shard)
        if self.dim is not None:
            shape[self.dim] *= size
        return tuple(shape)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return the view of `full` that position `rank` of `size` holds."""
        if self.dim is None:
            return full
        length = self.shape(full.shape, size)[self.dim]
        return full.narrow(self.dim, rank * length, length)


REPLICATED = Placement()


@dataclass(frozen=True)
class Tied:
    """One parameter that several pipeline stages hold: its gradient is the sum over `stages`, counted once."""

    key: str
    """The user's name of the tie."""
    canonical: str
    """Full name of the first layer's parameter."""
    stages: tuple[int, ...]
    """Pipeline stages that hold a copy, ascending; the first owns it."""
    name: str
    """Full name of the copy on this stage."""


class StageModule(nn.Module):
    """A module that holds one pipeline stage of a model, and knows which of its parameters other stages hold too."""

    ties: tuple[Tied, ...] = ()


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
