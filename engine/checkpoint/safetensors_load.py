"""A model's weights from safetensors files, every rank reading only its slices.

Files are as Hugging Face writes them: `model.safetensors`, or parts of a limited size and
`model.safetensors.index.json`, which says which part holds which tensor. Format: 8 bytes with the length of a JSON
header, the header with each tensor's dtype, shape and place, then the values
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.full_state import canonical_names, check_order, equal_values, local_state, misfits
from engine.checkpoint.safetensors_format import FILE, INDEX, Header, read_header
from engine.comm.full import full_entries
from engine.comm.mesh import Mesh
from engine.errors import EngineError, UsageError
from engine.placement import REPLICATED, Placement, placements_of
from engine.zero import ZeroOptimizer
from engine.zero.sharing import unshared_load


@dataclass(frozen=True)
class _Stored:
    """One tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def load_safetensors(
    model: nn.Module, mesh: Mesh, path: str | os.PathLike[str], optimizer: ZeroOptimizer | None = None
) -> None:
    """Fill the model from safetensors files, every rank reading its shards of its layers and nothing else.

    path: a file; or a folder with `model.safetensors`, or with parts and their `model.safetensors.index.json`. Every
    rank must see the same files. Names and shapes are those of `full_state_dict`; a tied parameter is needed under one
    of its names. Values of another floating dtype are converted. Parameters and buffers on the meta device get memory
    on the mesh's device. optimizer: the one over this model, when there is one. Every rank of the mesh must call it.

    Raises UsageError on every rank, before anything is changed, for files that cannot be read or are damaged in header
    or length, missing or unexpected names, wrong shapes or dtypes, different values under tied names, a buffer on the
    meta device that no file has, or a needed optimizer that was left out; also where ranks see files that differ in
    names, shapes or dtypes. Values are not compared between ranks. Needs `pip install 'engine3d[hf]'`.
    """
    check_order("load_safetensors(model, mesh, path, optimizer=optimizer)", model, mesh)
    if optimizer is not None and not isinstance(optimizer, ZeroOptimizer):
        raise UsageError(f"optimizer= is a {type(optimizer).__name__}: give the model's ZeroOptimizer, or leave it out")
    safe_open, their_error = _library()
    if optimizer is not None:
        optimizer.parameters_replaced(model)
    stored, fault = _find(path)
    local, placements = local_state(model), placements_of(model)
    entries = [entry for stage in full_entries(local, placements, mesh) for entry in stage]
    canonical = canonical_names(model, mesh)
    fault = fault or misfits(_shapes(stored, canonical), {name: shape for name, shape, _ in entries}, canonical)
    fault = fault or _dtype_problems(stored, {name: dtype for name, _, dtype in entries})
    fault = fault or _lost_buffers(model, local)
    reader = _Reader(safe_open, stored, mesh)
    fault = fault or reader.unreadable(their_error) or _torn(reader, local, placements, canonical)
    if optimizer is None:
        fault = fault or unshared_load(model, mesh)
    if mesh.world.any(bool(fault)):
        raise UsageError(f"nothing was loaded: {fault or 'another rank cannot load these files: see its error'}")
    mesh.world.check_equal("what load_safetensors found", [(n, s.shape, s.dtype) for n, s in stored.items()])
    names = _sources(local, stored, canonical)
    filled: dict[int, Tensor] = {}
    for name, target in local.items():
        real = filled.get(id(target))
        if real is None:
            shard = reader.shard(names[name], placements.get(name, REPLICATED))
            real = target if not target.is_meta else _materialised(target, mesh)
            if optimizer is None or optimizer.writes(target):
                real.copy_(shard)
            filled[id(target)] = real
        if real is not target:
            _put(model, name, real)
    if optimizer is not None:
        optimizer.parameters_written()


class _Reader:
    """Reads slices; a file is open only while something of it is read."""

    def __init__(self, safe_open: Any, stored: Mapping[str, _Stored], mesh: Mesh) -> None:
        self._open, self._stored, self._mesh = safe_open, stored, mesh

    def unreadable(self, their_error: type[Exception]) -> str:
        """Return which file the library does not take, and why; it may be stricter than `read_header`."""
        for path in dict.fromkeys(each.path for each in self._stored.values()):
            try:
                with self._open(path, framework="pt"):
                    pass
            except (their_error, OSError, TypeError, ValueError) as error:
                return f"{path}: {error}"
        return ""

    def shard(self, name: str, placement: Placement) -> Tensor:
        """Return what this rank holds of a tensor, in the file's dtype, on the CPU."""
        rank, size = self._mesh.tensor.rank, self._mesh.tensor.size
        where = self._stored[name]
        with self._open(where.path, framework="pt") as file:
            source = file.get_slice(name)
            if placement.dim is None:
                whole: Tensor = file.get_tensor(name)
                return whole
            before = (slice(None),) * placement.dim
            pieces: list[Tensor] = []
            for start, stop, padding in slices_of(placement, where.shape, rank, size):
                index = (*before, slice(start, stop))
                if start < stop:
                    pieces.append(source[index])
                if padding:
                    filler = (*where.shape[: placement.dim], padding, *where.shape[placement.dim + 1 :])
                    pieces.append(torch.zeros(filler, dtype=where.dtype))
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, placement.dim)


def slices_of(placement: Placement, shape: tuple[int, ...], rank: int, size: int) -> list[tuple[int, int, int]]:
    """Return the elements [start, stop) along a cut dim of which a rank's shard is made, in their order, each with how
    many that are padding follow it.
    """
    assert placement.dim is not None
    if not placement.parts:
        length = placement.shape(shape, size)[placement.dim]
        return [(rank * length, (rank + 1) * length, 0)]
    found, first = [], 0
    for part, length in zip(placement.parts, placement.lengths(size), strict=True):
        start = min(part.index(rank, size) * length, part.size)
        stop = min(start + length, part.size)
        found.append((first + start, first + stop, length - (stop - start)))
        first += part.size
    return found


def _library() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError("load_safetensors needs the safetensors package: pip install 'engine3d[hf]'") from error
    return safe_open, SafetensorError


# ---- what is there ---------------------------------------------------------------------------------------------------


def _find(path: str | os.PathLike[str]) -> tuple[dict[str, _Stored], str]:
    """Return all tensors of a file or folder by name, from the headers alone, or why they cannot be read."""
    try:
        where = Path(path)
        if where.is_dir():
            if (where / FILE).exists():
                return _stored({where / FILE: read_header(where / FILE)}), ""
            if not (where / INDEX).exists():
                there = ", ".join(sorted(each.name for each in where.iterdir())[:8]) or "nothing"
                return {}, f"{where} has neither {FILE} nor {INDEX}: there is {there}"
            return _indexed(where)
        if where.name.endswith(".index.json"):
            return {}, f"{where} is an index: give its folder, {where.parent}"
        return _stored({where: read_header(where)}), ""
    except (OSError, TypeError, ValueError) as error:  # ValueError: damaged, or no path at all
        return {}, f"{path}: {error}"


def _indexed(folder: Path) -> tuple[dict[str, _Stored], str]:
    try:
        places = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = {folder / name: read_header(folder / name) for name in dict.fromkeys(places.values())}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        if isinstance(error, EngineError):
            raise
        return {}, f"{folder / INDEX} is damaged ({error!r}): a JSON object with a weight_map is wanted"
    stored = _stored(files)
    wrong = [name for name in stored if name not in places or stored[name].path.name != places[name]]
    wrong += [name for name in places if name not in stored]
    if wrong:
        return {}, f"{folder / INDEX} and its files disagree about {', '.join(wrong[:8])}: write them together"
    return stored, ""


def _stored(files: Mapping[Path, Header]) -> dict[str, _Stored]:
    return {name: _Stored(path, shape, dtype) for path, each in files.items() for name, (shape, dtype) in each.items()}


# ---- what does not fit -----------------------------------------------------------------------------------------------


def _shapes(stored: Mapping[str, _Stored], canonical: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name; that of a tied parameter under its first name too."""
    shapes = {name: each.shape for name, each in stored.items()}
    for name, first in canonical.items():
        if name in shapes:
            shapes.setdefault(first, shapes[name])
    return shapes


def _dtype_problems(stored: Mapping[str, _Stored], expected: Mapping[str, torch.dtype]) -> str:
    wrong = [
        f"{name} is {stored[name].dtype}, the model has {dtype}"
        for name, dtype in expected.items()
        if name in stored and stored[name].dtype != dtype
        if not (stored[name].dtype.is_floating_point and dtype.is_floating_point)
    ]
    return f"wrong dtype: {', '.join(wrong[:8])}" if wrong else ""


def _lost_buffers(model: nn.Module, local: Mapping[str, Tensor]) -> str:
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in local]
    return (
        f"{', '.join(lost[:8])}: a buffer on the meta device that is no part of the state: build the modules that own "
        f"them anew on a real device first"
        if lost
        else ""
    )


def _torn(
    reader: _Reader, local: Mapping[str, Tensor], placements: Mapping[str, Placement], canonical: Mapping[str, str]
) -> str:
    """Compare this rank's shards of tied names that the files hold several times."""
    names = set(reader._stored)
    for name, first in canonical.items():
        if name in local and name in names and first in names:
            placement = placements.get(name, REPLICATED)
            if not equal_values(reader.shard(name, placement), reader.shard(first, placement)):
                return f"torn ties: {name} differs from {first}, to which it is tied"
    return ""


def _sources(
    local: Mapping[str, Tensor], stored: Mapping[str, _Stored], canonical: Mapping[str, str]
) -> dict[str, str]:
    """Return under which name the files hold each tensor."""
    found = {}
    for name in local:
        first = canonical.get(name, name)
        aliases = (name, first, *(alias for alias, to in canonical.items() if to == first))
        found[name] = next(alias for alias in aliases if alias in stored)
    return found


def _materialised(meta: Tensor, mesh: Mesh) -> Tensor:
    real = torch.empty_like(meta, device=mesh.device)
    return nn.Parameter(real, meta.requires_grad) if isinstance(meta, nn.Parameter) else real


def _put(model: nn.Module, name: str, real: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    held[own] = real
