"""What all ranks must know of each other's gradients before they are reduced to the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.comm.mesh import Mesh
from engine.placement import Tied
from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named
from engine.zero.ties import share
from engine.zero.watch import EqualBuffers


def agreed_flags(
    buckets: Sequence[FlatBucket],
    named: Sequence[Named],
    ties: Sequence[tuple[Tied, nn.Parameter]],
    buffers: EqualBuffers | None,
    mesh: Mesh,
) -> tuple[set[int], list[bool], list[bool]]:
    """Return, equal on all ranks that have them: the parameters that got no gradient anywhere; of each bucket whether
    any data rank has gradients that came after it was started; of each buffer whether any has written it.

    named: the parameters, as the plans index them. Every rank of the mesh must call it.
    """
    touched = dict.fromkeys(range(len(named)), False)
    for bucket in buckets:
        touched |= {each.index: flag for each, flag in zip(bucket.plan.slices, bucket.touched, strict=True)}
    left = [bucket.left for bucket in buckets]
    written = buffers.changed() if buffers is not None else []
    flags = torch.tensor([*touched.values(), *left, *written], dtype=torch.int32, device=mesh.device)
    mesh.data.all_reduce(mesh.tensor.all_reduce(flags, "max"), "max")
    places = {name: place for place, (name, _) in enumerate(named)}
    for tie, _ in ties:
        share(tie, flags[places[tie.name] :][:1], mesh.pipeline, "sum")
    found = [bool(flag) for flag in flags.tolist()]
    first, second = len(touched), len(touched) + len(left)
    return {index for index in touched if not found[index]}, found[first:second], found[second:]
