"""A model's weights into safetensors files, one tensor at a time: rank 0 holds its shards and the whole, no more.

Rank 0 writes what the others send. New files lie under other names until all are whole, so that a run that ends early
leaves the old weights as they were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.checkpoint.full_state import canonical_names, check_order, local_state
from engine.checkpoint.safetensors_format import Entry, check_entries, divide_into_files
from engine.checkpoint.safetensors_writer import Writer
from engine.comm.full import full_entries
from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.placement import REPLICATED, Placement, placements_of


@torch.no_grad()
def save_safetensors(
    model: nn.Module, mesh: Mesh, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write every parameter and persistent buffer at full size, as Hugging Face does: `model.safetensors`, or parts of
    at most `max_shard_bytes` of values each (more where one tensor alone is larger) with
    `model.safetensors.index.json`. A tied parameter is written once, under its first name.

    folder: on the machine of global rank 0, which writes; made where it is missing. Weights of an earlier save are
    removed once the new ones are whole on the disk; until then the new parts have names that no file there has, with a
    number after `model` if need be. One step replaces old by new, so a save killed at any point leaves all old values
    or all new ones to be read, by `load_safetensors` and by Hugging Face; the next save removes what else it left. One
    save at a time may write a folder. Every rank of the mesh must call it; rank 0 holds one whole tensor and its shards
    at a time, the others their shards and, on later stages, one tensor.

    Raises UsageError on every rank for a model on the meta device, for a parameter named `__metadata__`, which the
    format keeps for itself, and where rank 0 cannot write; the old weights are then as they were. DtypeError for a
    dtype that the format does not have. Does not need the safetensors package.
    """
    check_order("save_safetensors(model, mesh, folder)", model, mesh)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes={max_shard_bytes!r}: the bytes of a file are an integer of at least 1")
    local, placements = local_state(model), placements_of(model)
    stages = full_entries(local, placements, mesh)
    canonical = canonical_names(model, mesh)
    homes = {entry[0]: stage for stage, each in enumerate(stages) for entry in each if entry[0] not in canonical}
    entries = [entry for each in stages for entry in each if entry[0] in homes]
    check_entries(entries)
    if mesh.world.any(any(value.is_meta for value in local.values())):
        raise UsageError("save_safetensors: the model is on the meta device and has no values: load or draw them first")
    files = divide_into_files(entries, max_shard_bytes)
    writer = Writer(folder, files) if mesh.rank == 0 else None
    if mesh.world.any(writer is not None and bool(writer.fault)):
        raise UsageError(f"nothing was written: {_fault(writer)}")
    for number, file in enumerate(files):
        if writer is not None:
            writer.begin(number)
        for entry in file:
            whole = _whole(entry, homes[entry[0]], local, placements, mesh)
            if writer is not None and whole is not None:
                writer.add(whole)
            del whole
    if writer is not None:
        writer.finish()
    if mesh.world.any(writer is not None and bool(writer.fault)):
        raise UsageError(f"the weights were not written: {_fault(writer)}")


def _fault(writer: Writer | None) -> str:
    return "rank 0 cannot write: see its error" if writer is None else writer.fault


def _whole(
    entry: Entry, stage: int, local: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh
) -> Tensor | None:
    """Return a tensor at full size on global rank 0, None elsewhere. Data rank 0's values count."""
    name, shape, dtype = entry
    if mesh.data.rank != 0:
        return None
    whole = None
    if mesh.pipeline.rank == stage:
        whole = _joined(local[name].detach(), placements.get(name, REPLICATED), mesh)
    if mesh.tensor.rank != 0:
        return None
    if stage != 0 and mesh.pipeline.rank == stage:
        assert whole is not None
        mesh.pipeline.send(whole.contiguous(), 0)
    if stage != 0 and mesh.pipeline.rank == 0:
        whole = mesh.pipeline.recv(torch.empty(shape, dtype=dtype, device=mesh.device), stage)
    return whole if mesh.pipeline.rank == 0 else None


def _joined(shard: Tensor, placement: Placement, mesh: Mesh) -> Tensor | None:
    """Return the whole on tensor rank 0."""
    if placement.dim is None or mesh.tensor.size == 1:
        return shard if mesh.tensor.rank == 0 else None
    shards = mesh.tensor.gather(shard, 0)
    return None if shards is None else placement.join(shards)
