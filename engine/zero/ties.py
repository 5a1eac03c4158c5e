"""Gradients that are summed over other axes: of tied parameters, whose copies live on several pipeline stages, and of
parameters of which each tensor rank has a part of the gradient.

They are summed before they are reduced over the data axis: afterwards each stage would hold other elements of a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.mesh import Mesh
from engine.placement import Placement, Tied, ties_of
from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named


def own_ties(model: nn.Module, named: Sequence[Named]) -> list[tuple[Tied, nn.Parameter]]:
    """Return the trainable ties, under the names that this stage's parameters go by."""
    names = {id(parameter): name for name, parameter in named}
    found = [(tie, model.get_parameter(tie.name)) for tie in ties_of(model)]
    return [(replace(tie, name=names[id(p)]), p) for tie, p in found if id(p) in names]


def share(tie: Tied, x: Tensor, pipeline: Communicator, how: Literal["copy", "sum"]) -> None:
    """Give every copy of `x` the owner's value, or the sum over the stages, added in stage order: bitwise equal
    everywhere.

    Every stage of `tie` must call it; the others must not. Two stages of a longer pipeline talk without the ones
    between.
    """
    owner, *others = tie.stages
    if pipeline.rank != owner:
        if how == "sum":
            pipeline.send(x, owner)
        pipeline.recv(x, owner)
        return
    if how == "sum":
        parts = pipeline.exchange(recvs=[(torch.empty_like(x), stage) for stage in others])
        for part in parts:
            x.add_(part)
    pipeline.exchange(sends=[(x, stage) for stage in others])


def sum_over_axes(
    buckets: Sequence[FlatBucket],
    named: Sequence[Named],
    placements: Mapping[str, Placement],
    ties: Sequence[tuple[Tied, nn.Parameter]],
    mesh: Mesh,
) -> None:
    """Sum what is each tensor rank's part over the tensor axis, then what is tied over the stages that have it, in the
    buckets that are `apart`. Every rank of the mesh must call it. named: the parameters, as the plans index them.
    """
    local: dict[str, Tensor] = {}
    for bucket in buckets:
        if bucket.plan.apart:
            bucket.fill()
            local |= {named[each.index][0]: bucket.local(place) for place, each in enumerate(bucket.plan.slices)}
    tensor = mesh.tensor
    if tensor.size > 1:
        names = [name for name, _ in named if name in local]
        sum_partial([p for n in names for p in placements[n].partial(local[n], tensor.rank, tensor.size)], tensor)
    for tie, _ in ties:
        share(tie, local[tie.name], mesh.pipeline, "sum")


def sum_partial(pieces: Sequence[tuple[Tensor, int, int]], tensor: Communicator) -> None:
    """Sum in place over the tensor axis what `Placement.partial` found in gradients. Every rank of it must call it."""
    for dtype in dict.fromkeys(gradient.dtype for gradient, _, _ in pieces):
        of_dtype = [piece for piece in pieces if piece[0].dtype == dtype]
        # A place for each piece of the axis: the ranks that hold another one add zeros.
        places = [gradient.new_zeros(count, gradient.numel()) for gradient, _, count in of_dtype]
        for (gradient, index, _), place in zip(of_dtype, places, strict=True):
            place[index].view(gradient.shape).copy_(gradient)
        flat = tensor.all_reduce(torch.cat([place.view(-1) for place in places]))
        for (gradient, index, count), total in zip(of_dtype, flat.split([p.numel() for p in places]), strict=True):
            gradient.copy_(total.view(count, *gradient.shape)[index])
