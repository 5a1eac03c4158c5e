"""An existing module, rewritten in place by a plan so that the ranks of the tensor axis share its matrices.

    plan = Plan({"layers.*.up": Column(), "layers.*.down": Row()})
    print(describe(plan, model, 2))
    parallelize(model, mesh.tensor, plan)

Names and the shapes of the whole stay as they were, so full state dicts are those of the module before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.errors import EngineError, UsageError
from engine.tensor_parallel.linear import keep_shard
from engine.tensor_parallel.replacement import parallel_layer
from engine.tensor_parallel.resolve import Change, Resolution, Step, resolve
from engine.tensor_parallel.shared_heads import sum_shared_heads
from engine.tensor_parallel.styles import Column, Plan, Row, Sharded, Vocab

_SAMPLES = 64


def parallelize(module: nn.Module, comm: Communicator, plan: Plan) -> nn.Module:
    """Cut `module` over `comm` as `plan` says, in place, and return it.

    Every rank of `comm` must call it, with the same plan and a module of the same names, shapes and weights: each keeps
    its shard of the weights that are there, and of nothing else. Linear layers and embeddings that the plan names are
    replaced by parallel ones, the other modules stay. A tied parameter stays one. dtype, device and requires_grad stay,
    hooks on the whole too; build optimizers afterwards. Works on the meta device, where the weights are read later
    (`engine.checkpoint.load_safetensors`).

    Raises on every rank, before anything is changed, UsageError or LayoutError for whatever `describe` refuses, also
    where it does so for another rank's plan or module only; and UsageError where plans, modules or the attributes that
    change differ over `comm`, or a setter refuses its new value.
    """
    if not isinstance(comm, Communicator):
        raise UsageError(
            f"parallelize(module, comm, plan): comm is a {type(comm).__name__}: give a Communicator, as mesh.tensor is"
        )
    resolution = _resolved_alike(module, comm, plan)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    comm.check_equal("parallelize's plan", (list(plan.styles.items()), list(plan.attributes.items())))
    comm.check_equal(
        "the module given to parallelize, as (name, shape, dtype, requires_grad, a sum of samples),",
        [(name, tuple(p.shape), p.dtype, p.requires_grad, _sample(p)) for name, p in parameters.items()],
    )
    if plan.attributes:
        comm.check_equal(
            "the attributes that parallelize changes, as (module, name, value),",
            [(change.module, change.attribute, change.old) for change in resolution.changes],
        )
    _set_attributes(module, resolution.changes)
    held = Counter(id(parameter) for parameter in parameters.values())
    tied = {id(p): p for p in parameters.values() if held[id(p)] > 1}  # kept alive: an id may be given out again
    del parameters
    shards: dict[int, nn.Parameter] = {}
    for step in resolution.steps:
        if isinstance(step.style, Column | Row | Vocab):
            _replace(module, step, comm, tied, shards)
            continue
        if isinstance(step.style, Sharded):
            _shard(module, step, comm, tied, shards)
        _declare(module, step)
    for shared in resolution.shared:
        sum_shared_heads(module.get_submodule(shared.module), shared.heads, comm)
    return module


def _resolved_alike(module: nn.Module, comm: Communicator, plan: Plan) -> Resolution:
    """Return `resolve`'s result. Raises its error; and where it raises on other ranks only, an error that says so."""
    resolution, refused = None, None
    try:
        resolution = resolve(module, plan, comm.size)
    except EngineError as error:
        refused = error
    try:
        comm.check_equal(
            "parallelize: another rank was given a plan or module that does not work: see its error, which",
            None if refused is None else str(refused),
        )
    except EngineError:
        if refused is None:
            raise
    if resolution is None:
        assert refused is not None
        raise refused
    return resolution


def _set_attributes(root: nn.Module, changes: Sequence[Change]) -> None:
    """Set all attributes, or none where one cannot be set. Each module keeps the names of its own that were changed,
    in `divided_attributes`: of a whole number nobody can see whether it was divided.
    """
    for number, change in enumerate(changes):
        try:
            setattr(root.get_submodule(change.module), change.attribute, change.new)
        except Exception as error:
            for done in changes[:number]:
                setattr(root.get_submodule(done.module), done.attribute, done.old)
            raise UsageError(
                f"plan attributes: {change.attribute!r} of {change.module!r} cannot be set from {change.old} to "
                f"{change.new}: {error}: leave it out of the plan, or let its setter take that"
            ) from error
    for change in changes:
        owner = root.get_submodule(change.module)
        owner.divided_attributes = (*getattr(owner, "divided_attributes", ()), change.attribute)  # type: ignore[assignment]


@torch.no_grad()
def _sample(parameter: Tensor) -> float | None:
    """Return a sum that tells weights drawn apart from equal ones; None on the meta device."""
    if parameter.is_meta or not parameter.numel():
        return None
    flat = parameter.detach().flatten()
    return float(flat[:: -(-flat.numel() // _SAMPLES)].double().sum())


def _replace(
    root: nn.Module, step: Step, comm: Communicator, tied: Mapping[int, Tensor], shards: dict[int, nn.Parameter]
) -> None:
    """Put a parallel layer in the place of a plain one, under all its names."""
    plain = root.get_submodule(step.names[0])
    assert isinstance(step.style, Column | Row | Vocab)
    layer = parallel_layer(plain, step.style, comm)
    for name, full in plain.named_parameters(recurse=False, remove_duplicate=False):
        if id(full) in tied:
            layer._parameters[name] = shards.setdefault(id(full), layer.get_parameter(name))
    for name in step.names:
        parent, _, own = name.rpartition(".")
        root.get_submodule(parent)._modules[own] = layer


def _shard(
    root: nn.Module, step: Step, comm: Communicator, tied: Mapping[int, Tensor], shards: dict[int, nn.Parameter]
) -> None:
    """Put a rank's part in the place of one parameter, under all its names."""
    full = root.get_parameter(step.names[0])
    if id(full) in shards:
        shard = shards[id(full)]
    else:
        shard = keep_shard(full.detach(), step.placement, comm)
        shard.requires_grad_(full.requires_grad)
        if id(full) in tied:
            shards[id(full)] = shard
    for name in step.names:
        parent, _, own = name.rpartition(".")
        root.get_submodule(parent)._parameters[own] = shard


def _declare(root: nn.Module, step: Step) -> None:
    """Let the owner of a parameter say how it lies."""
    for name in step.names:
        parent, _, own = name.rpartition(".")
        owner = root.get_submodule(parent)
        owner.placements = {**getattr(owner, "placements", {}), own: step.placement}  # type: ignore[assignment]
