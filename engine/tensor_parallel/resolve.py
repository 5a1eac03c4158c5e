"""A plan applied to the names and shapes of one module: what becomes of each parameter, or why it cannot.

Works on modules on the meta device too; nothing is sent and nothing is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from engine.errors import EngineError, LayoutError, UsageError, did_you_mean
from engine.placement import REPLICATED, Part, Placement
from engine.tensor_parallel.replacement import hooks_of, placements_after
from engine.tensor_parallel.styles import Divided, Plan, Replicated, Sharded, Style, cut_parts

_READ_BY_PARENT = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules whose own code takes the weights of the layers in them, always or in eval mode, and does not call these."""


@dataclass(frozen=True)
class Step:
    """One module that is replaced, or one parameter that is placed."""

    names: tuple[str, ...]
    """Every name that it has in the whole module."""
    style: Style
    placements: Mapping[str, Placement]
    """Of the replaced module's own parameters by name; of a placed parameter the only value."""

    @property
    def placement(self) -> Placement:
        """That of the one parameter that is placed."""
        (placement,) = self.placements.values()
        return placement


@dataclass(frozen=True)
class Change:
    """One attribute of a module that becomes smaller."""

    module: str
    attribute: str
    old: int
    new: int


@dataclass(frozen=True)
class Entry:
    """What becomes of one parameter."""

    name: str
    shape: tuple[int, ...]
    placement: Placement
    key: str | None
    """The plan's key that names it or its module; None where none does."""
    tied: str | None
    """Its first name, where it has several and this is another."""


@dataclass(frozen=True)
class Shared:
    """One module that returns heads of which several ranks hold the same."""

    module: str
    heads: int
    """Of the whole: fewer than ranks."""


@dataclass(frozen=True)
class Resolution:
    steps: tuple[Step, ...]
    changes: tuple[Change, ...]
    entries: tuple[Entry, ...]
    shared: tuple[Shared, ...]


def resolve(module: nn.Module, plan: Plan, size: int) -> Resolution:
    """Return what `plan` makes of `module` over `size` ranks.

    Raises UsageError for a key that matches nothing, a module or parameter that two keys match, a style that does not
    fit, tied parameters that are cut differently, what is cut already, layers whose weights their parent reads itself,
    attributes that cannot be set, heads of what is no module; LayoutError for sizes that cannot be cut.
    """
    if not isinstance(module, nn.Module) or not isinstance(plan, Plan):
        raise UsageError(
            f"a module and a Plan are wanted, not a {type(module).__name__} and a {type(plan).__name__}: wrap a dict "
            f"of styles as Plan({{...}})"
        )
    owners = dict(module.named_modules(remove_duplicate=False))
    modules = {name: each for name, each in owners.items() if name}
    placed = _placed_before(owners)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    steps: list[Step] = []
    named: dict[str, tuple[str, Placement]] = {}  # from a parameter to its key and placement
    for key, style in plan.styles.items():
        for names in _matched(key, style, modules, parameters):
            step = _step(key, style, names, owners, parameters, placed, size)
            steps.append(step)
            for name in names:
                for below, placement in _below(name, step).items():
                    if below in named:
                        raise UsageError(
                            f"parameter {below!r} is matched twice, by plan keys {named[below][0]!r} and {key!r}: "
                            f"leave one out, or name it more closely"
                        )
                    named[below] = (key, placement)
    changes = _changes(plan, modules, placed, size)
    return Resolution(tuple(steps), changes, _entries(parameters, named), _shared(plan, modules, size))


def matches(key: str, name: str) -> bool:
    """Return whether a dotted name fits a key, of which a component `*` stands for one component."""
    wanted, found = key.split("."), name.split(".")
    return len(wanted) == len(found) and all(a in ("*", b) for a, b in zip(wanted, found, strict=True))


# ---- which names -----------------------------------------------------------------------------------------------------


def _matched(
    key: str, style: Style, modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]
) -> list[tuple[str, ...]]:
    """Return the names that the key matches, those of one object together. Replicated names the parameters below a
    module too.
    """
    placed = isinstance(style, Sharded | Replicated)
    pool: Mapping[str, Tensor | nn.Module] = parameters if placed else modules
    found: dict[int, list[str]] = {}
    for name, value in pool.items():
        if matches(key, name) or (isinstance(style, Replicated) and _inside(key, name)):
            found.setdefault(id(value), []).append(name)
    if found:
        return [tuple(names) for names in found.values()]
    what, other = ("parameters", "module") if placed else ("modules", "parameter")
    others: Mapping[str, Tensor | nn.Module] = modules if placed else parameters
    wrong = next((name for name in others if matches(key, name)), None)
    if wrong is not None:
        raise UsageError(f"plan key {key!r}: {type(style).__name__} is for {what}, and {wrong!r} is a {other}")
    hint = did_you_mean(key, _patterns(pool))
    raise UsageError(f"plan key {key!r} matches none of the {what}{hint}: a * stands for one component of a name")


def _inside(key: str, name: str) -> bool:
    return matches(key, ".".join(name.split(".")[: key.count(".") + 1]))


def _patterns(names: Iterable[str]) -> list[str]:
    """Return the names with numbers as `*`, each once."""
    return list(dict.fromkeys(".".join("*" if c.isdigit() else c for c in name.split(".")) for name in names))


def _below(name: str, step: Step) -> dict[str, Placement]:
    """Return the full names of the parameters that a step places, under one of its names."""
    if isinstance(step.style, Sharded | Replicated):
        return {name: step.placement}
    return {f"{name}.{own}": placement for own, placement in step.placements.items()}


def _entries(parameters: Mapping[str, Tensor], named: Mapping[str, tuple[str, Placement]]) -> tuple[Entry, ...]:
    """Return all parameters. Raises UsageError where two names of one are placed differently."""
    first: dict[int, str] = {}
    entries = []
    for name, value in parameters.items():
        key, placement = named.get(name, (None, REPLICATED))
        twin = first.setdefault(id(value), name)
        twin_key, twin_placement = named.get(twin, (None, REPLICATED))
        if placement != twin_placement:
            raise UsageError(
                f"{name!r} and {twin!r} are one tied parameter, but the plan places it as {_text(placement, key)} and "
                f"as {_text(twin_placement, twin_key)}: give both a style that cuts them alike"
            )
        entries.append(Entry(name, tuple(value.shape), placement, key, None if twin == name else twin))
    return tuple(entries)


def _text(placement: Placement, key: str | None) -> str:
    where = "no key names it" if key is None else f"key {key!r}"
    return f"{placement} ({where})"


# ---- what becomes of one ---------------------------------------------------------------------------------------------


def _step(
    key: str,
    style: Style,
    names: tuple[str, ...],
    owners: Mapping[str, nn.Module],
    parameters: Mapping[str, Tensor],
    placed: Mapping[int, Placement],
    size: int,
) -> Step:
    name = names[0]
    what = f"{name!r} (plan key {key!r})"
    try:
        own = [parameters[name]] if isinstance(style, Sharded | Replicated) else owners[name].parameters()
        _check_not_placed(style, own, placed)
        if isinstance(style, Replicated):
            return Step(names, style, {name: Placement(gradient=style.gradient)})
        for each in names:
            _check_parents(each, style, owners)
        if isinstance(style, Sharded):
            if hooks_of(parameters[name]):
                raise UsageError("it has hooks, which Sharded would drop: remove them first, and set them afterwards")
            shape = tuple(parameters[name].shape)
            if not 0 <= style.dim < len(shape):
                raise LayoutError(f"dim={style.dim} is outside its shape {shape}")
            return Step(names, style, {name: cut_parts(style.dim, style.parts, shape[style.dim], size)})
        return Step(names, style, placements_after(owners[name], style, size))
    except EngineError as error:
        raise type(error)(f"{what}: {error}") from None


def _placed_before(owners: Mapping[str, nn.Module]) -> dict[int, Placement]:
    """Return, by id, the placements that parameters have other than that of any parameter."""
    found = {}
    for owner in owners.values():
        declared: Mapping[str, Placement] = getattr(owner, "placements", {})
        for name, value in owner._parameters.items():
            if value is not None and declared.get(name, REPLICATED) != REPLICATED:
                found[id(value)] = declared[name]
    return found


def _check_not_placed(style: Style, parameters: Iterable[Tensor], placed: Mapping[int, Placement]) -> None:
    """Refuse what is cut already, or whose gradients are summed already and would no more be."""
    for parameter in parameters:
        before = placed.get(id(parameter))
        if before is None or (before.dim is None and isinstance(style, Replicated) and style.gradient == "sum"):
            continue
        how = "whole, with gradients summed," if before.dim is None else f"cut along dim {before.dim},"
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} lies {how} over the tensor axis already, and "
            f"{type(style).__name__} would place it anew: place each parameter once, and leave this out of the plan"
        )


def _check_parents(name: str, style: Style, owners: Mapping[str, nn.Module]) -> None:
    """Refuse a layer, or a parameter of one, of which another module reads the weights itself."""
    parent = name.rpartition(".")[0]
    readers = [parent, parent.rpartition(".")[0]] if isinstance(style, Sharded) else [parent]
    for reader in readers:
        if isinstance(owners[reader], _READ_BY_PARENT):
            given = type(owners[reader]).__name__
            raise UsageError(
                f"{f'{reader!r} is' if reader else 'the whole module is'} a {given}, whose code reads the weights of "
                f"its layers itself and does not call them, always or in eval mode: it would take a part for the "
                f"whole; leave this out of the plan, or write the {given} with layers that its forward calls"
            )


# ---- heads that ranks share ------------------------------------------------------------------------------------------


def _shared(plan: Plan, modules: Mapping[str, nn.Module], size: int) -> tuple[Shared, ...]:
    """Return each module once whose heads are fewer than ranks, where the plan gives their number."""
    found: dict[int, Shared] = {}
    for key, style in plan.styles.items():
        if not isinstance(style, Replicated) or style.heads is None:
            continue
        names = [name for name in modules if matches(key, name)]
        if not names:
            raise UsageError(
                f"plan key {key!r}: it names parameters, and heads={style.heads} is for the module that returns the "
                f"heads: name that"
            )
        try:
            slices = Part(style.heads, heads=style.heads).slices(size)
        except LayoutError as error:
            raise LayoutError(f"plan key {key!r}: {error}") from None
        for name in names if slices < size else ():
            found.setdefault(id(modules[name]), Shared(name, style.heads))
    return tuple(found.values())


# ---- attributes ------------------------------------------------------------------------------------------------------


def _changes(
    plan: Plan, modules: Mapping[str, nn.Module], placed: Mapping[int, Placement], size: int
) -> tuple[Change, ...]:
    found: dict[tuple[int, str], Change] = {}
    for key, changes in plan.attributes.items():
        names = {id(module): name for name, module in reversed(list(modules.items())) if matches(key, name)}
        if not names:
            raise UsageError(f"plan attributes {key!r} matches no module{did_you_mean(key, _patterns(modules))}")
        for name in reversed(names.values()):
            held = [placed[id(p)].dim for p in modules[name].parameters() if id(p) in placed]
            if changes and any(dim is not None for dim in held):
                raise UsageError(
                    f"plan attributes {key!r}: {name!r} has parameters that are cut over the tensor axis already, and "
                    f"its attributes would be divided once more: cut it by one plan, together with its attributes"
                )
            for attribute, change in changes.items():
                where = (id(modules[name]), attribute)
                if where in found:
                    raise UsageError(f"attribute {attribute!r} of {name!r} is changed twice: leave one out")
                if attribute in getattr(modules[name], "divided_attributes", ()):
                    raise UsageError(
                        f"plan attributes {key!r}: {attribute!r} of {name!r} was changed by a plan before, to "
                        f"{getattr(modules[name], attribute)}, and would be divided once more: apply a plan once"
                    )
                found[where] = _change(name, modules[name], attribute, change, size)
    return tuple(found.values())


def _change(name: str, module: nn.Module, attribute: str, change: Divided, size: int) -> Change:
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or isinstance(value, bool):
        known = [each for each, held in vars(module).items() if isinstance(held, int) and not isinstance(held, bool)]
        what = f"is a {type(value).__name__}" if hasattr(module, attribute) else "is missing"
        raise UsageError(
            f"plan attributes: {attribute!r} of {name!r} {what}{did_you_mean(attribute, known)}: its whole numbers are "
            f"{', '.join(known)}"
        )
    on_class = inspect.getattr_static(type(module), attribute, None)
    if isinstance(on_class, property) and on_class.fset is None:
        raise UsageError(
            f"plan attributes: {attribute!r} of {name!r} is a property without a setter, with the value {value}: name "
            f"the attributes that it is made of, or give it a setter"
        )
    return Change(name, attribute, value, change.apply(value, size, f"{attribute} of {name!r}"))
