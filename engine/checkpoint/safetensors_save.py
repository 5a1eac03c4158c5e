"""A model's weights into safetensors files, one tensor at a time: rank 0 holds its shards and the whole, no more.

Rank 0 writes what the others send. New files lie under other names until all are whole, so that a run that ends early
leaves the old ones as they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from engine.checkpoint.full_state import canonical_names, check_order, local_state
from engine.checkpoint.safetensors_format import (
    FILE,
    INDEX,
    Entry,
    check_dtypes,
    divide_into_files,
    header_bytes,
    part_name,
    size_of,
    write_values,
)
from engine.comm.full import full_entries
from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.placement import REPLICATED, Placement, placements_of

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@torch.no_grad()
def save_safetensors(
    model: nn.Module, mesh: Mesh, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write every parameter and persistent buffer at full size, as Hugging Face does: `model.safetensors`, or parts of
    at most `max_shard_bytes` of values each (more where one tensor alone is larger) with
    `model.safetensors.index.json`. A tied parameter is written once, under its first name.

    folder: on the machine of global rank 0, which writes; made where it is missing. Weights of an earlier save are
    replaced once the new ones are whole on the disk. Every rank of the mesh must call it; rank 0 holds one whole tensor
    and its shards at a time, the others their shards and, on later stages, one tensor.

    Raises UsageError on every rank for a model on the meta device and where rank 0 cannot write; the old files are then
    as they were. DtypeError for a dtype that the format does not have. Does not need the safetensors package.
    """
    check_order("save_safetensors(model, mesh, folder)", model, mesh)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes={max_shard_bytes!r}: the bytes of a file are an integer of at least 1")
    local, placements = local_state(model), placements_of(model)
    stages = full_entries(local, placements, mesh)
    canonical = canonical_names(model, mesh)
    homes = {entry[0]: stage for stage, each in enumerate(stages) for entry in each if entry[0] not in canonical}
    entries = [entry for each in stages for entry in each if entry[0] in homes]
    check_dtypes(entries)
    if mesh.world.any(any(value.is_meta for value in local.values())):
        raise UsageError("save_safetensors: the model is on the meta device and has no values: load or draw them first")
    files = divide_into_files(entries, max_shard_bytes)
    writer = _Writer(folder, files) if mesh.rank == 0 else None
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


def _fault(writer: _Writer | None) -> str:
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


class _Writer:
    """Writes the files one after another. After a fault it takes what comes and writes nothing, so that no rank waits
    for it.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Sequence[Sequence[Entry]]) -> None:
        self.fault = ""
        self._files = files
        self._file: BinaryIO | None = None
        self._names = [part_name(number, len(files)) for number in range(len(files))]
        try:
            self._folder = Path(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            self.fault = f"{folder}: {error}"

    def begin(self, number: int) -> None:
        self._try(lambda: self._begin(number))

    def add(self, whole: Tensor) -> None:
        self._try(lambda: write_values(self._open, whole))

    def finish(self) -> None:
        self._try(self._finish)
        if self.fault:
            self._drop()

    def _try(self, call: Callable[[], None]) -> None:
        if self.fault:
            return
        try:
            call()
        except OSError as error:
            self.fault = f"{self._folder}: {error}"

    @property
    def _open(self) -> BinaryIO:
        assert self._file is not None
        return self._file

    def _begin(self, number: int) -> None:
        self._close()
        self._file = self._partial(self._names[number]).open("wb")
        self._open.write(header_bytes(self._files[number]))

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        self._close()
        names = list(self._names)
        if len(names) > 1:
            places = {entry[0]: name for name, file in zip(names, self._files, strict=True) for entry in file}
            total = sum(size_of(entry) for file in self._files for entry in file)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            names.append(INDEX)
            with self._partial(INDEX).open("w") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
        for name in names:
            self._partial(name).replace(self._folder / name)
        old = [each for each in self._folder.iterdir() if _OURS.fullmatch(each.name) and each.name not in names]
        for each in sorted(old, key=lambda path: path.name == FILE):  # who reads now prefers this one: it goes last
            each.unlink()

    def _partial(self, name: str) -> Path:
        return self._folder / f"{name}.partial"

    def _drop(self) -> None:
        """Take back what was written under other names."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        for name in (*self._names, INDEX):
            with contextlib.suppress(OSError):  # what is left over is written over by the next save
                self._partial(name).unlink()
