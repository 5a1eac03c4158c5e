"""A parameter group that is added to an optimizer which has trained: checked on every rank before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.mesh import Mesh
from engine.errors import EngineError, UsageError
from engine.placement import Placement, Tied, placements_of, stage_of
from engine.zero.buckets import FlatBucket
from engine.zero.groups import (
    Named,
    check_added,
    check_dtypes,
    check_kinds,
    check_offload,
    check_same,
    check_ties,
    keeps_whole,
)
from engine.zero.inner import Kind, full_options, kinds_of
from engine.zero.matrices import matrix_work
from engine.zero.plan import ParameterInfo
from engine.zero.watch import WatchedParameters

Placed = tuple[dict[str, Any], list[Named]]
"""The options of a parameter group, and its members."""


class Addition:
    """One group that every rank was given alike, and that can work."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        group: Mapping[str, Any],
        placed: Sequence[Placed],
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        problem: str,
    ) -> None:
        """placed: the groups that are there. options: of ZeroOptimizer. problem: what else is wrong on this rank. Every
        rank of the mesh must call it. Raises UsageError on every rank, or what the group's class does for its options.
        """
        members: list[Named] = []
        try:
            members = check_added(model, group, placed)
            check_dtypes(model, options["wire_dtype"])
            self.placements = placements_of(model)
        except EngineError as error:
            problem = problem or str(error)
        if mesh.world.any(bool(problem)):
            raise UsageError(problem or "the parameter group that another rank adds does not fit: see its error")
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        self.placed: Placed = (own, members)
        number = len(placed)
        check_kinds(mesh, [self.placed], optimizer_class, first=number)
        check_same(mesh, model, [self.placed], optimizer_class, own, what=f"group {number}")
        if options["offload"]:
            check_offload(mesh, options["stage"], [self.placed])
        check_ties(mesh, model, [*placed, self.placed])
        self.kinds: list[Kind] = kinds_of(optimizer_class, [own], kwargs, first=number)
        self.options: dict[str, Any] = full_options(self.kinds)[0][0]


def why_not_now(phase: str, buckets: Sequence[FlatBucket], watched: WatchedParameters) -> str:
    """Return why no group can be added now on this rank; an empty string for no reason."""
    begun = phase == "collecting" and any(bucket.starts or any(bucket.touched) for bucket in buckets)
    if begun or phase == "finished":
        return (
            "add_param_group in the midst of a step, whose gradients are there: call it after step() or zero_grad(), "
            "before the next backward"
        )
    try:
        watched.check_places()
    except UsageError as error:
        return str(error)
    return ""


def fresh_parts(
    model: nn.Module, members: Sequence[Named], known: Collection[nn.Module]
) -> tuple[list[Named], list[nn.Module]]:
    """Return the parameters that nobody has made equal on all ranks yet, `members` and what new modules hold beside
    them, and the new modules: those that are not among the `known`.
    """
    modules = [module for module in model.modules() if module not in known]
    ids = {id(p) for module in modules for p in module.parameters(recurse=False) if not p.requires_grad}
    ids |= {id(p) for _, p in members}
    return [(name, p) for name, p in model.named_parameters() if id(p) in ids], modules


def rename(model: nn.Module, named: list[Named], infos: list[ParameterInfo]) -> None:
    """Bring the names up to date: a module that was put around others gives their parameters new ones."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named[:] = [(names[id(parameter)], parameter) for _, parameter in named]
    infos[:] = [replace(info, name=name) for info, (name, _) in zip(infos, named, strict=True)]


def infos_of(
    model: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    ties: Sequence[tuple[Tied, nn.Parameter]],
    placed: Sequence[Placed],
    first: int,
) -> list[ParameterInfo]:
    """Return what the plan needs to know of the groups' parameters at this tensor and pipeline position. placed: the
    groups, from number `first` on.
    """
    rank, size = mesh.tensor.rank, mesh.tensor.size
    tied = {tie.name: tie for tie, _ in ties}

    def info(name: str, parameter: Tensor, group: int, whole: bool) -> ParameterInfo:
        tie, placement = tied.get(name), placements[name]
        counts = tie is None or tie.stages[0] == mesh.pipeline.rank
        counted = placement.counted(parameter.shape, rank, size) if counts else ()
        apart = tie is not None or (size > 1 and bool(placement.partial(parameter, rank, size)))
        work = matrix_work(placement.full_shape(parameter.shape, size)) if whole else None
        stage = stage_of(model, name)
        return ParameterInfo(name, parameter.numel(), parameter.dtype, group, counted, stage, apart, work)

    return [
        info(name, parameter, group, keeps_whole(own))
        for group, (own, members) in enumerate(placed, first)
        for name, parameter in members
    ]
