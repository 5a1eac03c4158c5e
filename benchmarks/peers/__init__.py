"""The systems that the training benchmark measures beside this engine, each as its users run it.

A system is a function `build(work, device)` that every rank of a job calls once, with torch's default process group
open. It returns `step(ids)`: one optimizer step over the global batch, ids (batch, sequence + 1), of which the rank
takes its own rows. The step returns the mean loss over what this rank's loss covers as a 0-d tensor, or None where
the rank has no loss; each token of the batch must be covered equally often over the ranks. Another trainer joins by
name: `--peers my_package.my_module:build`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from benchmarks.work import Work
from engine.errors import UsageError, did_you_mean
from engine.layout import AXES

Step = Callable[[Tensor], Tensor | None]
Build = Callable[[Work, torch.device], Step]


@dataclass(frozen=True)
class Peer:
    """Where a system is, what it needs and what it can split."""

    build: str
    """`module:function`."""
    axes: tuple[str, ...]
    """The axes of a layout that it splits; the others must be 1."""
    needs: str = "torch"
    """The package that must be installed."""
    tolerance: float = 1e-4
    """Relative difference that its loss may have from this engine's."""
    alone: bool = False
    """Whether it does all work in one process, whatever the layout."""


_HERE = "benchmarks.peers"
SHARED = "engine_shared"
PEERS = {
    SHARED: Peer("", AXES),  # this engine itself, all data ranks with one copy of the parameters
    "plain": Peer(f"{_HERE}.data_parallel:plain", AXES, alone=True),
    "ddp": Peer(f"{_HERE}.data_parallel:ddp", ("data",)),
    "zero1": Peer(f"{_HERE}.data_parallel:zero1", ("data",)),
    "fsdp2": Peer(f"{_HERE}.data_parallel:fsdp2", ("data",)),
    "deepspeed": Peer(f"{_HERE}.data_parallel:deepspeed_zero2", ("data",), needs="deepspeed", tolerance=1e-3),
    "dtensor": Peer(f"{_HERE}.tensor_parallel:dtensor", ("tensor",)),
    "torch_1f1b": Peer(f"{_HERE}.pipeline:torch_1f1b", ("pipeline",)),
    "torch_pipeline": Peer(f"{_HERE}.schedules:torch_pipeline", ("pipeline",)),
    "torch_pipeline_balanced": Peer(f"{_HERE}.schedules:torch_pipeline_balanced", ("pipeline",)),
    "torch_3d": Peer(f"{_HERE}.pipeline:torch_3d", AXES),
}


def find_peer(name: str, work: Work) -> Peer:
    """Return the system called `name`, or `module:function`.

    Raises UsageError when it is unknown or cannot do this work.
    """
    layout = work.layout
    if ":" in name:
        return Peer(name, AXES, needs=name.split(".", maxsplit=1)[0].split(":", maxsplit=1)[0])
    if name not in PEERS:
        raise UsageError(
            f"unknown peer {name!r}{did_you_mean(name, PEERS)}: choose {', '.join(PEERS)}, or module:function"
        )
    peer = PEERS[name]
    for axis in AXES:
        if getattr(layout, axis) > 1 and axis not in peer.axes:
            raise UsageError(
                f"peer {name} splits {' and '.join(peer.axes)} only, so it cannot do the work of {layout}: leave it out"
            )
    if name == SHARED and (work.stage != 2 or work.device != "cpu"):
        raise UsageError(f"peer {name} is this engine at ZeRO stage 2 on the CPU: leave it out")
    if layout.world_size == 1 and not peer.alone:
        raise UsageError(f"peer {name} needs more than one process, {layout} is one: leave it out, or take plain")
    if name == "torch_3d" and layout.pipeline == 1:
        raise UsageError(f"peer torch_3d needs a pipeline axis above 1, not {layout}: leave it out")
    if "pipeline" in peer.axes and not peer.alone and work.microbatches < layout.pipeline:
        raise UsageError(
            f"peer {name} needs at least as many microbatches as stages, {work.microbatches} < {layout.pipeline}: "
            f"raise --accumulation, or leave it out"
        )
    return peer


def check_installed(name: str, peer: Peer) -> None:
    """Raise UsageError when the package that the peer needs is absent, or a `module:function` is not there."""
    if importlib.util.find_spec(peer.needs) is None:
        hint = ": run `make peers`" if name in PEERS else ""
        raise UsageError(f"peer {name} was asked for, but the package {peer.needs} is not installed{hint}")
    if name not in PEERS:
        try:
            load(name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"peer {name} cannot be loaded: {error}") from error


def load(build: str) -> Build:
    """Import `module:function`."""
    module, _, function = build.partition(":")
    return cast(Build, getattr(importlib.import_module(module), function))
