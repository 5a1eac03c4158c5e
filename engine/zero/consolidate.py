"""The optimizer's full state by parameter name, from what every rank keeps: shards over the data axis, whole
parameters, shards over the tensor axis, layers over the pipeline.

Not for the training step: tensors are put together one after another, and Python objects travel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.comm.full import full_tensors
from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.placement import Placement
from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named
from engine.zero.inner import Inner, Piece
from engine.zero.plan import ParameterInfo

_Tensors = dict[str, dict[str, Tensor]]  # by key of the state, then by parameter
_Single = dict[str, dict[str, Any]]  # by parameter, then by key


@dataclass(frozen=True)
class _Held:
    """What travels of a tensor before its values do."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def consolidated(
    inner: Inner,
    buckets: Sequence[FlatBucket],
    infos: Sequence[ParameterInfo],
    groups: Sequence[dict[str, Any]],
    copies: Collection[str],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    rank: int | None,
) -> dict[str, Any]:
    """Return the state dict that `ZeroOptimizer.consolidate` describes. infos: of the parameters, indexed by the
    buckets' plans. groups: the options of every parameter group. copies: tied parameters that another stage owns.

    Every rank of the mesh must call it. Raises UsageError on every rank for a rank outside the mesh, and for state
    whose place in the parameter is not known.
    """
    if rank is not None and not 0 <= rank < mesh.layout.world_size:
        raise UsageError(f"rank={rank} is outside the mesh: ranks go from 0 to {mesh.layout.world_size - 1}")
    _check_state(inner, mesh)
    shards: _Tensors = {}
    wholes: _Tensors = {}
    single: _Single = {info.name: {} for info in infos}
    for number, bucket in enumerate(buckets):
        if inner.matrices[number] is None:
            _join_runs(bucket, inner.pieces[number], infos, shards, single)
        else:
            _share_wholes(bucket, inner.pieces[number], infos, mesh, wholes, single)
    placed = _members([(info.name, info.group) for info in infos if info.name not in copies], mesh)
    state: _Single = {name: {} for name, _ in placed}
    for stage in range(mesh.pipeline.size):
        for name, values in mesh.pipeline.broadcast_object(single, stage).items():
            if name in state:
                state[name].update(values)
    for tensors, where in ((shards, placements), (wholes, {})):
        for key in _agreed_keys(tensors, mesh):
            local = {name: x for name, x in tensors.get(key, {}).items() if name not in copies}
            for name, x in full_tensors(local, where, mesh, rank=rank).items():
                state[name][key] = x
    if rank is not None and rank != mesh.rank:
        return {}
    full_groups = [
        {**options, "params": [name for name, group in placed if group == number]}
        for number, options in enumerate(groups)
    ]
    return {"state": {name: values for name, values in state.items() if values}, "param_groups": full_groups}


def whole_gradients(buckets: Sequence[FlatBucket], named: Sequence[Named]) -> dict[str, Tensor]:
    """Return the finished gradients by name, of this rank's shard shapes, whole over the data axis, all of whose ranks
    must call it.
    """
    local: dict[str, Tensor] = {}
    for bucket in buckets:
        whole = bucket.whole_gradients()
        for parameter, each in bucket.parameters:
            local[named[each.index][0]] = whole[each.start : each.stop].view(parameter.shape)
    return local


def _check_state(inner: Inner, mesh: Mesh) -> None:
    """Refuse, on every rank, state of a run that is neither one value for each element nor a single one, on any."""
    problem = ""
    for matrices, pieces in zip(inner.matrices, inner.pieces, strict=True):
        for piece in pieces if matrices is None else ():
            for key, value in piece.state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != piece.tensor.shape:
                    problem = (
                        f"the state {key!r} that {type(piece.optimizer).__name__} keeps has shape {tuple(value.shape)} "
                        f"for {piece.tensor.numel()} elements of group {piece.group}, neither one value for each nor a "
                        f"single one: an update that is not elementwise needs 'shard': 'tensor' in its group"
                    )
    if mesh.world.any(bool(problem)):
        raise UsageError(problem or "the optimizer's state on another rank cannot be put together: see its error")


def _join_runs(
    bucket: FlatBucket, pieces: Sequence[Piece], infos: Sequence[ParameterInfo], shards: _Tensors, single: _Single
) -> None:
    """Add the state of a bucket that is cut anywhere, put together over the data axis. Every rank of that must call
    it.
    """
    own: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for each in bucket.plan.slices:
            if each.start < piece.stop and piece.start < each.stop:
                own.setdefault(each.index, {}).update({key: _held(value) for key, value in piece.state.items()})
    comm, everywhere = bucket.comm, bucket.stage == 0
    found: dict[int, dict[str, Any]] = {}
    for rank in range(1 if everywhere else comm.size):
        for index, values in (own if everywhere else comm.broadcast_object(own, rank)).items():
            found.setdefault(index, {}).update(values)
    for index, values in found.items():
        single[infos[index].name].update({key: v for key, v in values.items() if not isinstance(v, _Held)})
    dtypes = {(key, v.dtype) for values in found.values() for key, v in values.items() if isinstance(v, _Held)}
    first, last = (0, bucket.plan.numel) if everywhere else (bucket.start, bucket.stop)
    for key, dtype in sorted(dtypes, key=str):
        flat = torch.zeros(last - first, dtype=dtype, device=bucket.flat.device)
        for piece in pieces:
            value = piece.state.get(key)
            if isinstance(value, Tensor) and value.dtype is dtype:
                flat[piece.start - first : piece.stop - first].copy_(value)
        whole = flat if everywhere else comm.all_gather(flat)
        for parameter, each in bucket.parameters:
            held = found.get(each.index, {}).get(key)
            if isinstance(held, _Held) and held.dtype is dtype:
                shards.setdefault(key, {})[infos[each.index].name] = whole[each.start : each.stop].view(parameter.shape)


def _share_wholes(
    bucket: FlatBucket,
    pieces: Sequence[Piece],
    infos: Sequence[ParameterInfo],
    mesh: Mesh,
    wholes: _Tensors,
    single: _Single,
) -> None:
    """Add the state of a bucket of whole parameters, each from the one rank that has it. Every rank of the data and
    tensor axes must call it.
    """
    index_of = {each.start: each.index for each in bucket.plan.slices if each.start < each.stop}
    own = {index_of[piece.start]: piece.state for piece in pieces}
    said = {index: {key: _held(value) for key, value in state.items()} for index, state in own.items()}
    of_data = [(rank, mesh.data.broadcast_object(said, rank)) for rank in range(mesh.data.size)]
    of_all = [(rank, mesh.tensor.broadcast_object(of_data, rank)) for rank in range(mesh.tensor.size)]
    holders = {index: (data, tensor) for tensor, rows in of_all for data, found in rows for index in found}
    described = {index: values for _, rows in of_all for _, found in rows for index, values in found.items()}
    for index, values in sorted(described.items()):
        data, tensor = holders[index]
        for key, value in values.items():
            if not isinstance(value, _Held):
                single[infos[index].name][key] = value
                continue
            x = torch.empty(value.shape, dtype=value.dtype, device=mesh.device)
            if mesh.tensor.rank == tensor:
                if mesh.data.rank == data:
                    x.copy_(own[index][key])
                mesh.data.broadcast(x, data)
            mesh.tensor.broadcast(x, tensor)
            wholes.setdefault(key, {})[infos[index].name] = x.cpu()


def _held(value: Any) -> Any:
    """Return what to say of a value: itself, where it is a single one."""
    if not isinstance(value, Tensor):
        return value
    return _Held(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu().clone()


def _members(own: list[tuple[str, int]], mesh: Mesh) -> list[tuple[str, int]]:
    """Return (name, group) of all stages' parameters, in layer order. Every rank of the pipeline axis must call it."""
    stages = [mesh.pipeline.broadcast_object(own, stage) for stage in range(mesh.pipeline.size)]
    placed = [each for stage in stages for each in stage]
    if mesh.pipeline.size > 1:
        # A stage may hold layers from several places of the model. Of a pipeline, names begin with the layer's number.
        placed.sort(key=lambda each: int(each[0].partition(".")[0]))
    return placed


def _agreed_keys(tensors: _Tensors, mesh: Mesh) -> list[str]:
    """Return the keys that any stage has, in one order. Every rank of the pipeline axis must call it."""
    every = [mesh.pipeline.broadcast_object(list(tensors), stage) for stage in range(mesh.pipeline.size)]
    return list(dict.fromkeys(key for keys in every for key in keys))
