"""Layers, or modules inside them, whose forward runs again in backward: between the two only their inputs are kept.

torch.utils.checkpoint does it, so autocast and torch's generators are as in the first run; so are generators of a
module's own or among its inputs, and lists and dicts among these, also if they are changed. A chosen module becomes one
of a class made here, which repr shows; its parameters, buffers and all names stay.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.comm.mesh import Mesh
from engine.errors import UsageError, did_you_mean

Recompute = str | int | Sequence[str] | None
"""What is run again: None, nothing; `full`, every layer; a number k, the layers 0, k, 2 k, ... of the model; patterns
of module names, as `*.mlp` or `3.attention`, in which `*` is anything (`fnmatch`)."""


def check_recompute(recompute: Recompute) -> None:
    """Raise UsageError for what is none of these."""
    if recompute is None or recompute == "full":
        return
    if isinstance(recompute, str):
        raise UsageError(
            f"recompute={recompute!r}{did_you_mean(recompute, ['full'])}: choose None, 'full', a number k for every "
            f"k-th layer, or a list of patterns, as ['*.mlp']"
        )
    if isinstance(recompute, int) and not isinstance(recompute, bool):
        if recompute < 1:
            raise UsageError(f"recompute={recompute}: every k-th layer is run again, for a k of at least 1")
        return
    patterns = list(recompute) if isinstance(recompute, list | tuple) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"recompute={recompute!r}: a list has patterns of module names, at least one, as ['*.mlp']")


def recompute_parts(model: nn.Module, recompute: Recompute, mesh: Mesh) -> None:
    """Make the chosen modules run again in backward. model: its children are this rank's layers, by their index.

    Of chosen modules one inside another, the outer one is taken. Hooks on a chosen module run again with it. With
    `recompute`, every rank of the mesh must call it; the ranks compare what they were given, and which patterns match.
    On a plan of several stages (`plan_mesh`) nobody knows the others' names, and a pattern that matches nothing is not
    found.

    Raises UsageError on every rank for choices that differ or a pattern that matches no module of any stage.
    """
    if recompute is None:
        return
    mesh.world.check_equal("recompute", recompute)
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if _runs(name, module)}
    if isinstance(recompute, list | tuple):
        _check_matches(recompute, named, mesh)
    chosen = {name for name in named if _is_chosen(name, recompute)}
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    done: set[int] = set()  # a module may have several names
    for name, module in named.items():
        if name in chosen and not _inside(name, chosen) and id(module) not in done:
            done.add(id(module))
            kind = type(module)
            if kind not in classes:
                classes[kind] = _recomputed(kind)
            module.__class__ = classes[kind]


def _runs(name: str, module: nn.Module) -> bool:
    """Whether a module is a layer or inside one, and has a forward: lists of modules have none."""
    return name != "" and ("forward" in vars(module) or type(module).forward is not nn.Module.forward)


def _is_chosen(name: str, recompute: Recompute) -> bool:
    if isinstance(recompute, list | tuple):
        return any(fnmatchcase(name, pattern) for pattern in recompute)
    every = recompute if isinstance(recompute, int) else 1
    return "." not in name and int(name) % every == 0


def _inside(name: str, chosen: set[str]) -> bool:
    return any(name[: at.start()] in chosen for at in re.finditer(r"\.", name))


def _check_matches(patterns: Sequence[str], names: Mapping[str, nn.Module], mesh: Mesh) -> None:
    pipeline = mesh.pipeline
    if mesh.planned and pipeline.size > 1:
        return
    found = [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
    anywhere = pipeline.all_reduce(torch.tensor(found, dtype=torch.int32, device=mesh.device), "max").tolist()
    unmatched = next((pattern for pattern, hit in zip(patterns, anywhere, strict=True) if not hit), None)
    if unmatched is None:
        return
    own = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    known = {name for stage in range(pipeline.size) for name in pipeline.broadcast_object(own, stage)}
    raise UsageError(
        f"recompute: {unmatched!r} matches no module of any stage{did_you_mean(unmatched, sorted(known))}: names begin "
        f"with the layer's number, as '3.mlp'"
    )


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class like `kind`, whose modules run again in backward what they run in forward."""
    call = kind.__call__

    def call_again(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(self, *args, **kwargs)
        part = _Part(self, call, len(args), tuple(kwargs))
        values = (*args, *kwargs.values())  # one by one, so that torch finds the tensors among them
        result = checkpoint(part, *values, use_reentrant=False)
        part.check_inputs(values)
        return result

    members = {"__call__": call_again, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(f"Recomputed[{kind.__name__}]", (kind,), members)


class _Part:
    """One call of a module, which may be made several times and finds the same each time."""

    def __init__(self, module: nn.Module, call: Any, positional: int, names: tuple[str, ...]) -> None:
        self.module, self.call, self.positional, self.names = module, call, positional, names
        self.versions: list[int] | None = None
        self.containers: dict[int, Any] = {}  # by place: what lists, tuples and dicts held, which a module may change
        self.states: list[tuple[torch.Generator, Tensor]] = []  # of generators besides torch's own

    def __call__(self, *values: Any) -> Any:
        if self.versions is None:
            self.versions = [tensor._version for tensor in _tensors(values)]
            self.containers = {i: _copied(x) for i, x in enumerate(values) if isinstance(x, list | tuple | dict)}
            self.states = [(each, each.get_state()) for each in self._generators(values)]
            return self._run(values)
        self.check_inputs(values)
        # What forward did to buffers, as to running statistics, is there already; so with what it drew.
        kept = [(owner, name, x, None if 0 in x.stride() else x.clone()) for owner, name, x in _buffers(self.module)]
        drawn = [(generator, generator.get_state()) for generator, _ in self.states]
        for generator, state in self.states:
            generator.set_state(state)
        try:
            return self._run(tuple(map(_copied, self._first(values))))
        finally:
            for owner, name, buffer, value in kept:
                if value is not None:
                    buffer.data.copy_(value)  # not a change in autograd's eyes: the value is what it was
                owner._buffers[name] = buffer
            for generator, state in drawn:
                generator.set_state(state)

    def check_inputs(self, values: Sequence[Any]) -> None:
        """Refuse inputs that are no longer what the first run found: the second would silently give something else."""
        if [tensor._version for tensor in _tensors(self._first(values))] != self.versions:
            kind = type(self.module).__name__
            raise UsageError(
                f"{kind}: its input was changed in place, by itself or by a later layer, and cannot be run again from "
                f"it: change a copy, or leave this module out of recompute"
            )

    def _run(self, values: Sequence[Any]) -> Any:
        kwargs = dict(zip(self.names, values[self.positional :], strict=True))
        return self.call(self.module, *values[: self.positional], **kwargs)

    def _first(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values as the first run found them."""
        return tuple(self.containers.get(i, x) for i, x in enumerate(values))

    def _generators(self, values: Sequence[Any]) -> list[torch.Generator]:
        """Return the generators among the values and the module's attributes. Raises UsageError for an iterator."""
        leaves = list(_leaves(values))
        once = next((leaf for leaf in leaves if isinstance(leaf, Iterator)), None)
        if once is not None:
            raise UsageError(
                f"{type(self.module).__name__}: its input has a {type(once).__name__}, which can be gone through only "
                f"once, and the module runs again in backward: give it a list, or leave this module out of recompute"
            )
        attributes = (x for module in self.module.modules() for x in vars(module).values())
        found = {id(x): x for x in (*leaves, *attributes) if isinstance(x, torch.Generator)}
        return list(found.values())


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every buffer with the module and the name that have it."""
    for owner in module.modules():
        yield from ((owner, name, x) for name, x in owner._buffers.items() if x is not None)


def _copied(value: Any) -> Any:
    """Return lists, tuples and dicts of the same leaves, which are changed without the given ones."""
    if isinstance(value, dict):
        mapping = copy.copy(value)
        for key, each in value.items():
            mapping[key] = _copied(each)
        return mapping
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = map(_copied, value)
        return items
    if not isinstance(value, tuple):
        return value
    inside = [_copied(each) for each in value]
    if all(each is before for each, before in zip(inside, value, strict=True)):
        return value
    return value._make(inside) if hasattr(value, "_make") else type(value)(inside)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors whose changes are counted."""
    yield from (leaf for leaf in _leaves(values) if isinstance(leaf, Tensor) and not leaf.is_inference())


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value
