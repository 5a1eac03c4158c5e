"""Layers, or modules inside them, whose forward runs again in backward: between the two only their inputs are kept.

torch.utils.checkpoint does it, so autocast and torch's generators are as in the first run. A chosen module becomes one
of a class made here, which repr shows; its parameters, buffers and all names stay.
"""

from __future__ import annotations

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
        # One by one, so that torch finds the tensors among them.
        result = checkpoint(part, *args, *kwargs.values(), use_reentrant=False)
        part.check_inputs((args, kwargs))
        return result

    members = {"__call__": call_again, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(f"Recomputed[{kind.__name__}]", (kind,), members)


class _Part:
    """One call of a module, which may be made several times and finds the same each time."""

    def __init__(self, module: nn.Module, call: Any, positional: int, names: tuple[str, ...]) -> None:
        self.module, self.call, self.positional, self.names = module, call, positional, names
        self.versions: list[int] | None = None

    def __call__(self, *values: Any) -> Any:
        args, kwargs = values[: self.positional], dict(zip(self.names, values[self.positional :], strict=True))
        if self.versions is None:
            self.versions = _versions(values)
            return self.call(self.module, *args, **kwargs)
        self.check_inputs(values)
        # What forward adds to a buffer, as running statistics, is there already.
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers() if 0 not in buffer.stride()]
        try:
            return self.call(self.module, *args, **kwargs)
        finally:
            for buffer, value in kept:
                buffer.data.copy_(value)  # not a change in autograd's eyes: the value is what it was

    def check_inputs(self, values: Any) -> None:
        """Refuse inputs that are no longer what the first run found: the second would silently give something else."""
        if _versions(values) != self.versions:
            kind = type(self.module).__name__
            raise UsageError(
                f"{kind}: its input was changed in place, by itself or by a later layer, and cannot be run again from "
                f"it: change a copy, or leave this module out of recompute"
            )


def _versions(values: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(values) if not tensor.is_inference()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
