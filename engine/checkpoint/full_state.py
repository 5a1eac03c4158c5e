"""One plain state dict of a model that lies over many ranks, and back.

Names and shapes are those of one nn.Sequential over all layers in one process, so plain PyTorch loads what comes out
and makes what goes in.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.comm.full import full_entries, full_tensors
from engine.comm.mesh import Mesh
from engine.errors import UsageError, did_you_mean
from engine.placement import REPLICATED, placements_of, ties_of
from engine.precision import LOW, sum_dtype
from engine.zero import ZeroOptimizer
from engine.zero.sharing import unshared_load


@torch.no_grad()
def full_state_dict(
    model: nn.Module, mesh: Mesh, *, rank: int | None = None, optimizer: ZeroOptimizer | None = None
) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer at full size, as independent CPU tensors, in layer order.

    A tied parameter appears under each of its names, the first layer's being the canonical one. Every rank of the
    mesh must call it. With `rank`, only that global rank gets the dict and the others an empty one.

    optimizer: the one over this model, for a state that loses nothing: trained parameters of fp16 and bf16 come as the
    fp32 values that it updates. None: as they are in the model.
    """
    check_order("full_state_dict(model, mesh)", model, mesh)
    if rank is not None and not 0 <= rank < mesh.layout.world_size:
        raise UsageError(f"rank={rank} is outside the mesh: ranks go from 0 to {mesh.layout.world_size - 1}")
    local = local_state(model)
    if optimizer is not None:
        _check_optimizer(optimizer, model)
        masters = optimizer.masters()
        local = {name: masters.get(id(x), x) for name, x in local.items()}
    return full_tensors(local, placements_of(model), mesh, rank=rank)


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, mesh: Mesh, state: Mapping[str, Tensor], optimizer: ZeroOptimizer | None = None
) -> None:
    """Fill the model with `state`, every rank taking its shards of its layers.

    state: as `full_state_dict` returns it, the whole on every rank; a tied parameter may be left out under all but
    its first name. optimizer: the one over this model, when there is one; with `share_parameters` it must be given. Its
    fp32 masters become values of fp32 as they are, and follow those of fp16 and bf16. Every rank of the mesh must call
    it.

    Of several data ranks, rank 0's values count. Raises UsageError on every rank, before anything is changed, when any
    rank's state has missing or unexpected names, wrong shapes, or different values for tied names, or a needed
    optimizer was left out.
    """
    check_order("load_full_state_dict(model, mesh, state, optimizer=optimizer)", model, mesh)
    if optimizer is not None:
        _check_optimizer(optimizer, model)
        optimizer.parameters_replaced(model)
    local, placements = local_state(model), placements_of(model)
    expected = {name: shape for stage in full_entries(local, placements, mesh) for name, shape, _ in stage}
    canonical = canonical_names(model, mesh)
    problems = _problems(state, expected, canonical)
    unshared = "" if optimizer is not None else unshared_load(model, mesh)
    somewhere = mesh.world.any(bool(problems or unshared))
    if unshared:
        raise UsageError(f"nothing was loaded: {unshared}")
    if problems:
        raise UsageError(f"the state does not fit the model, nothing was loaded: {problems}")
    if somewhere:
        raise UsageError(
            "what another rank was given does not fit the model or its optimizer, nothing was loaded: see its error"
        )
    full = {name: state[name] if name in state else state[canonical[name]] for name in local}
    wide = [name for name, x in local.items() if x.dtype in LOW and full[name].dtype not in LOW and x.requires_grad]
    wide = mesh.data.broadcast_object(wide if optimizer is not None else [], 0)
    exact: dict[int, Tensor] = {}
    for name, target in local.items():
        shard = placements.get(name, REPLICATED).shard(full[name], mesh.tensor.rank, mesh.tensor.size)
        if name in wide:
            own = shard.to(target.device, sum_dtype(target.dtype), copy=True)  # the caller's state stays as it is
            shard = exact[id(target)] = mesh.data.broadcast(own, 0)
        if optimizer is None or optimizer.writes(target):
            target.copy_(shard)
        mesh.data.broadcast(target, 0)
    if optimizer is not None:
        optimizer.parameters_written(exact)


def _check_optimizer(optimizer: object, model: nn.Module) -> None:
    if not isinstance(optimizer, ZeroOptimizer):
        raise UsageError(f"optimizer= is a {type(optimizer).__name__}: give the model's ZeroOptimizer, or leave it out")
    if optimizer.model is not model:
        raise UsageError("optimizer= was built over another model than this one")


def check_order(call: str, model: object, mesh: object) -> None:
    """Refuse arguments that are no model and no mesh, most likely in another order."""
    for name, value, kind in (("model", model, nn.Module), ("mesh", mesh, Mesh)):
        if not isinstance(value, kind):
            raise UsageError(f"{name} is a {type(value).__name__}: the order is {call}")


def local_state(model: nn.Module) -> dict[str, Tensor]:
    """Return this stage's parameters and persistent buffers by name, as they lie in memory."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def canonical_names(model: nn.Module, mesh: Mesh) -> dict[str, str]:
    """Return, for every name of a shared parameter but its first, that first name; over all stages."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for tie in ties_of(model):
        first[id(model.get_parameter(tie.name))] = tie.canonical
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            found[name] = canonical
    stages = [mesh.pipeline.broadcast_object(found, stage) for stage in range(mesh.pipeline.size)]
    return {name: canonical for stage in stages for name, canonical in stage.items()}


def equal_values(a: Tensor, b: Tensor) -> bool:
    """Whether all values are the same, of which NaN is one."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _problems(
    state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], canonical: Mapping[str, str]
) -> str:
    """Return what keeps `state` from being loaded; an empty string for nothing."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}, and a dict of tensors by name is wanted, on every rank"
    strange = [f"{name} is a {type(value).__name__}" for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        return f"no tensors: {', '.join(strange[:8])}"
    found = misfits({name: tuple(value.shape) for name, value in state.items()}, expected, canonical)
    if found:
        return found
    torn = [
        f"{name} differs from {first}, to which it is tied"
        for name, first in canonical.items()
        if name in state and first in state and not equal_values(state[name], state[first])
    ]
    return _listed("torn ties", torn) if torn else ""


def misfits(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], canonical: Mapping[str, str]
) -> str:
    """Return which names are missing or unexpected and which shapes are wrong; an empty string for none. A tied name
    may be missing where its first one, in `canonical`, is not.
    """
    missing = [name for name in expected if name not in shapes and canonical.get(name, name) not in shapes]
    unexpected = [name + did_you_mean(name, missing) for name in shapes if name not in expected]
    wrong = [
        f"{name} is {shapes[name]}, the model has {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
    return "; ".join(_listed(label, found) for label, found in problems if found)


def _listed(label: str, found: list[str]) -> str:
    return f"{label}: {', '.join(found[:8])}{f' and {len(found) - 8} more' if len(found) > 8 else ''}"
