"""What a plan says: for names of modules and parameters, how each lies over the tensor axis. Data, nothing is sent.

A key is a dotted name as in `named_modules` and `named_parameters`, in which a component `*` stands for exactly one
component: `"layers.*.attention.q_proj"` is that projection of each layer. There are no other wildcards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import LayoutError, UsageError, did_you_mean
from engine.placement import Gradient, Part, Placement, cut, divide

Parts = Sequence[int | Part] | None


@dataclass(frozen=True)
class Column:
    """A linear layer whose outputs are cut: ColumnParallelLinear."""

    parts: Parts = None
    """What lies along the outputs, each cut by itself, in sizes or Parts that sum to out_features; None: one part."""
    gather_output: bool = False
    """Whether each rank gets the whole output, as before, and not its part."""
    sequence_dim: int | None = None
    """Dim along which the input is this rank's part, under sequence parallelism."""

    def __post_init__(self) -> None:
        _check_dim("Column(sequence_dim", self.sequence_dim)
        object.__setattr__(self, "parts", as_parts(self.parts))


@dataclass(frozen=True)
class Row:
    """A linear layer whose inputs are cut: RowParallelLinear."""

    parts: Parts = None
    """What lies along the inputs, in sizes or Parts that sum to in_features; None: one part."""
    split_input: bool = False
    """Whether the input is whole on each rank, and not its part."""
    sequence_dim: int | None = None
    """Dim along which the output is this rank's part, under sequence parallelism."""

    def __post_init__(self) -> None:
        _check_dim("Row(sequence_dim", self.sequence_dim)
        object.__setattr__(self, "parts", as_parts(self.parts))


@dataclass(frozen=True)
class Vocab:
    """An embedding whose rows are cut, filled up where they do not divide: VocabParallelEmbedding."""

    sequence_dim: int | None = None
    """Dim along which the output is this rank's part, under sequence parallelism."""

    def __post_init__(self) -> None:
        _check_dim("Vocab(sequence_dim", self.sequence_dim)


@dataclass(frozen=True)
class Sharded:
    """One parameter of a module whose code works with a part of it as with the whole."""

    dim: int = 0
    """Dim that is cut."""
    parts: Parts = None
    """What lies along the dim, in sizes or Parts that sum to its size; None: one part."""

    def __post_init__(self) -> None:
        if self.dim is None:
            raise UsageError("Sharded(dim=None): give the dim that is cut as an integer, counted from 0")
        _check_dim("Sharded(dim", self.dim)
        object.__setattr__(self, "parts", as_parts(self.parts))


@dataclass(frozen=True)
class Replicated:
    """A parameter, or all below a module, that each rank holds whole, as whatever the plan does not name."""

    gradient: Gradient = "equal"
    """`sum` where each rank uses it on a part of the work: a norm per head, a norm under sequence parallelism."""
    heads: int | None = None
    """Of modules that work on so many key or value heads and return a tensor of them, such as a norm: where ranks share
    a head, its gradient is summed before it goes back through the module, which may round it. With `sum` only.
    """

    def __post_init__(self) -> None:
        if self.gradient not in ("equal", "sum"):
            raise UsageError(f"Replicated(gradient={self.gradient!r}): the gradient is 'equal' or 'sum'")
        if self.heads is None:
            return
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise UsageError(f"Replicated(heads={self.heads!r}): give the number of heads of the whole, at least 1")
        if self.gradient != "sum":
            raise UsageError(
                f"Replicated(heads={self.heads}): each rank works on its own heads, so its gradient is a part of a "
                f"sum: add gradient='sum'"
            )


Style = Column | Row | Vocab | Sharded | Replicated
STYLES: tuple[type[Style], ...] = (Column, Row, Vocab, Sharded, Replicated)


@dataclass(frozen=True)
class Divided:
    """A module's whole number about a size that is cut, such as its number of heads: a rank's is 1 / T of it."""

    heads: int | None = None
    """Where the number counts what belongs to each of so many heads: it is divided by the ranks that share one, as
    the queries for each key head are, and stays where no head is shared.
    """

    def apply(self, value: int, size: int, what: str) -> int:
        """Return a rank's number. Raises LayoutError, naming `what`, where it does not divide."""
        if self.heads is None:
            return divide(value, size, what)
        return divide(value, size // Part(self.heads, heads=self.heads).slices(size), what)


@dataclass(frozen=True)
class Plan:
    """How a module is cut over the tensor axis. Raises UsageError for what is no style or no Divided."""

    styles: Mapping[str, Style]
    """From a key (see the top of the file) to the style of the modules or parameters that it names."""
    attributes: Mapping[str, Mapping[str, Divided]] = field(default_factory=dict)
    """From a key for modules to those of their attributes that change with the sizes."""

    def __post_init__(self) -> None:
        _check_keys("Plan(styles)", self.styles)
        _check_keys("Plan(attributes)", self.attributes)
        for key, style in self.styles.items():
            _check_style(key, style)
        for key, changes in self.attributes.items():
            _check_keys(f"plan attributes {key!r}", changes)
            for name, change in changes.items():
                if not isinstance(change, Divided):
                    given = "Divided without brackets" if change is Divided else repr(change)
                    raise UsageError(f"plan attributes {key!r}: {name} = {given}: give Divided(...)")


def _check_keys(what: str, given: object) -> None:
    """Refuse what is no mapping from names."""
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{what}: a {type(given).__name__} is no dict: give one, as in Plan({{'layers.*.up': Column()}})"
        )
    wrong = next((key for key in given if not isinstance(key, str)), None)
    if wrong is not None or None in given:
        raise UsageError(f"{what}: key {wrong!r} is a {type(wrong).__name__}: keys are dotted names, in strings")


def _check_style(key: str, style: object) -> None:
    if isinstance(style, STYLES):
        return
    known = [kind.__name__ for kind in STYLES]
    if isinstance(style, type) and style in STYLES:
        raise UsageError(f"plan key {key!r}: {style.__name__} is the class and no style: write {style.__name__}()")
    given = style.__name__ if isinstance(style, type) else repr(style)
    raise UsageError(
        f"plan key {key!r}: {given}{did_you_mean(given, known)} is no style: give one of "
        f"{', '.join(f'{name}(...)' for name in known)}"
    )


def _check_dim(what: str, dim: object) -> None:
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise UsageError(f"{what}={dim!r}): a dim is an integer, counted from 0")


def as_parts(parts: Parts) -> tuple[Part, ...] | None:
    """Return sizes and Parts as Parts. Raises UsageError for anything else."""
    if parts is None:
        return None
    if isinstance(parts, int | str | Part):
        raise UsageError(f"parts={parts!r}: give a sequence of sizes or Parts, as in parts=(64, 64)")
    made = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | Part):
            raise UsageError(f"parts={parts!r}: {part!r} is neither a size nor a Part")
        made.append(part if isinstance(part, Part) else Part(part))
    if not made:
        raise UsageError("parts=(): give at least one size, or leave parts out")
    return tuple(made)


def cut_parts(dim: int, parts: Parts, total: int, size: int) -> Placement:
    """Return how `dim`, of `total` elements in these parts, is cut over `size` ranks. Raises LayoutError for parts that
    do not sum to it or cannot be cut.
    """
    chosen = as_parts(parts) or (Part(total),)
    whole = sum(part.size for part in chosen)
    if whole != total:
        sizes = " + ".join(str(part.size) for part in chosen)
        raise LayoutError(f"its parts are {sizes} = {whole} elements, but dim {dim} has {total}: let them sum to it")
    return cut(dim, chosen, size)
