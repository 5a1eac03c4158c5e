"""Whole tensors from the pieces that ranks hold: shards over the tensor axis, layers over the pipeline axis.

Used wherever a person wants to see one model: full state dicts, full gradients. Not for the training step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.comm.mesh import Mesh
from engine.placement import REPLICATED, Placement

Entry = tuple[str, tuple[int, ...], torch.dtype]


def full_entries(local: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> list[list[Entry]]:
    """Return (name, full shape, dtype) of every stage's tensors, a list for each stage. Every rank of the mesh must
    call it.
    """
    size = mesh.tensor.size
    own = [(name, placements.get(name, REPLICATED).full_shape(x.shape, size), x.dtype) for name, x in local.items()]
    return [mesh.pipeline.broadcast_object(own, stage) for stage in range(mesh.pipeline.size)]


def full_tensors(
    local: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh, *, rank: int | None = None
) -> dict[str, Tensor]:
    """Return independent CPU copies of all stages' tensors at full size, in layer order; with `rank`, an empty dict
    elsewhere.

    `local`: this stage's tensors, of this rank's shard shapes, equal over the data axis. Every rank of the mesh must
    call it.
    """
    full: dict[str, Tensor] = {}
    for stage, entries in enumerate(full_entries(local, placements, mesh)):
        for name, shape, dtype in entries:
            if stage == mesh.pipeline.rank:
                whole = _joined(local[name].detach(), placements.get(name, REPLICATED), mesh.tensor)
            else:
                whole = torch.empty(shape, dtype=dtype, device=mesh.device)
            mesh.pipeline.broadcast(whole, stage)
            if rank is None or rank == mesh.rank:
                full[name] = whole.cpu()
    if mesh.pipeline.size > 1:
        # A rank may hold layers from several places of the model. Of a pipeline, names begin with the layer's number.
        full = dict(sorted(full.items(), key=lambda item: int(item[0].partition(".")[0])))
    return full


def _joined(shard: Tensor, placement: Placement, comm: Communicator) -> Tensor:
    """Return the whole of a parameter, in memory of its own."""
    if placement.dim is None:
        return shard.clone()
    if not placement.parts:
        return comm.all_gather(shard, placement.dim)
    return placement.join(comm.all_gather(shard.unsqueeze(0)).unbind())
