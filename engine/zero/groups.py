"""What ZeroOptimizer is given: a model, a class, parameter groups; checked on every rank before use."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.checks import fingerprint
from engine.comm.mesh import Mesh
from engine.device import exact_dtype
from engine.errors import DtypeError, UsageError, did_you_mean
from engine.placement import REPLICATED, Placement, StageModule, ties_of
from engine.precision import LOW, TRAINED

Named = tuple[str, nn.Parameter]
# Their update of an element depends on all others, or they need gradients that a bucket does not carry.
_NEVER = frozenset({"LBFGS", "SparseAdam"})
# Their update of an element depends on the others of its parameter.
_WHOLE = frozenset({"Muon", "Adafactor"})
_SHARDS = ("flat", "tensor")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters, and without what says how it lies on the ranks."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer", "shard")}


def keeps_whole(group: Mapping[str, Any]) -> bool:
    """Whether each parameter of the group is updated whole, by one data rank (`shard="tensor"`)."""
    return bool(group.get("shard", "flat") == "tensor")


def agreed_groups(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    mesh: Mesh,
    groups: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> list[tuple[dict[str, Any], list[Named]]]:
    """Return the parameter groups, once every rank was given the same, and something that can work. Raises UsageError
    on every rank.
    """
    stage, bucket_mib = options["stage"], options["bucket_mib"]
    check_classes(model, optimizer_class, mesh)
    if stage not in (0, 1, 2):
        raise UsageError(f"stage={stage!r}: ZeRO stages are 0, 1 and 2")
    if not (isinstance(bucket_mib, int | float) and bucket_mib > 0):
        raise UsageError(f"bucket_mib={bucket_mib!r}: a bucket needs a size above 0 MiB")
    for name in ("share_parameters", "broadcast_buffers", "offload"):
        if not isinstance(options[name], bool):
            raise UsageError(f"{name}={options[name]!r}: give True or False")
    _check_accumulation(stage, options["accumulate"])
    if options["gather"] not in ("step", "forward"):
        raise UsageError(
            f"gather={options['gather']!r}: choose 'step' (whole at the end of it) or 'forward' (whole where used)"
        )
    if options["gather"] == "forward" and (stage == 0 or options["share_parameters"]):
        raise UsageError(
            "gather='forward': at stage 0 and with share_parameters=True nothing is gathered: leave it out"
        )
    check_dtypes(model, options["wire_dtype"])
    check_options(optimizer_class, kwargs, own=("groups", *options))
    placed = named_groups(model, groups)
    check_kinds(mesh, placed, optimizer_class)
    check_same(mesh, model, placed, optimizer_class, {**options, **kwargs, "wire_dtype": str(options["wire_dtype"])})
    if options["share_parameters"]:
        check_sharing(mesh, stage)
    if options["offload"]:
        check_offload(mesh, stage, placed)
    check_ties(mesh, model, placed)
    return placed


def _check_accumulation(stage: int, accumulate: object) -> None:
    if accumulate not in (None, "full", "shard"):
        raise UsageError(
            f"accumulate={accumulate!r}: choose 'full' (one reduction in a step) or 'shard' (one in each microbatch)"
        )
    if accumulate == "shard" and stage < 2:
        raise UsageError(
            f"accumulate='shard' keeps a shard of the gradients, which is stage 2, and stage={stage} keeps all of "
            f"them: take stage=2, or accumulate='full'"
        )


def check_dtypes(model: nn.Module, wire_dtype: object) -> None:
    if wire_dtype not in (None, *LOW):
        raise DtypeError(f"wire_dtype={wire_dtype}: choose torch.bfloat16, torch.float16, or None for no rounding")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in TRAINED:
            raise DtypeError(
                f"{name!r} is {parameter.dtype}: trained parameters are one of {', '.join(map(str, TRAINED))}"
            )


def named_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None
) -> list[tuple[dict[str, Any], list[Named]]]:
    """Return (options, members) of every group, after checking that they hold each trainable parameter exactly once."""
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if groups is None:
        return [({}, [(name, p) for name, p in model.named_parameters() if p.requires_grad])]
    placed: set[int] = set()
    result = []
    for number, group in enumerate(groups):
        members = _members(number, group, trainable, placed)
        result.append(({key: value for key, value in group.items() if key not in ("params", "param_names")}, members))
    left = [name for key, name in trainable.items() if key not in placed]
    if left:
        raise UsageError(
            f"{len(left)} parameters require a gradient but are in no group, the first is {left[0]!r}: "
            f"add them, or freeze them"
        )
    return result


def _members(number: int, group: Mapping[str, Any], trainable: Mapping[int, str], placed: set[int]) -> list[Named]:
    """Return the members of one group, under the model's names for them; frozen ones are left out. placed: the ids of
    what is in a group; brought up to date.
    """
    members: list[Named] = []
    if isinstance(group.get("params"), set | frozenset | Tensor | None):
        raise UsageError(f"group {number}: params must be an ordered list of (name, parameter) pairs")
    for each in group["params"]:
        if not (isinstance(each, tuple) and len(each) == 2):
            raise UsageError(
                f"group {number}: params are (name, parameter) pairs, as model.named_parameters() gives them"
            )
        name, parameter = each
        if not parameter.requires_grad:
            continue
        if id(parameter) not in trainable:
            raise UsageError(f"group {number}: {name!r} is no parameter of the model")
        if id(parameter) in placed:
            raise UsageError(f"group {number}: {name!r} is in two groups")
        placed.add(id(parameter))
        members.append((trainable[id(parameter)], parameter))
    return members


def check_added(model: nn.Module, group: object, placed: Sequence[tuple[dict[str, Any], list[Named]]]) -> list[Named]:
    """Return the members of a group that is added to those that are there. Nothing is sent."""
    if not isinstance(group, Mapping):
        raise UsageError(f"add_param_group takes a group, a dict with 'params' and options, not {type(group).__name__}")
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    there = {id(parameter) for _, members in placed for _, parameter in members}
    return _members(len(placed), group, trainable, there)


def check_classes(model: nn.Module, optimizer_class: type[torch.optim.Optimizer], mesh: Mesh) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"ZeroOptimizer takes the model, not {type(model).__name__}: parameters go into groups=")
    if not _is_optimizer(optimizer_class):
        raise UsageError(
            f"optimizer_class={optimizer_class!r}: give a torch optimizer's class, and its options as keywords"
        )
    if mesh.layout.pipeline > 1 and not isinstance(model, StageModule):
        raise UsageError(
            f"pipeline({mesh.layout.pipeline}) needs a PipelineModel, got {type(model).__name__}: each stage would "
            f"count the same parameters in the norm"
        )


def check_kinds(
    mesh: Mesh,
    groups: Sequence[tuple[dict[str, Any], list[Named]]],
    optimizer_class: type[torch.optim.Optimizer],
    *,
    first: int = 0,
) -> None:
    """Refuse, on every rank, groups, from number `first` on, whose optimizer cannot work on what their `shard` gives
    it, on any.
    """
    found = [_misfit(number, group, optimizer_class) for number, group in enumerate(groups, first)]
    problems = [text for text in found if text]
    if mesh.world.any(bool(problems)):
        raise UsageError(problems[0] if problems else "a parameter group of another rank does not fit: see its error")


def _misfit(
    number: int, group: tuple[dict[str, Any], list[Named]], optimizer_class: type[torch.optim.Optimizer]
) -> str:
    """Return what is wrong with one parameter group; an empty string for nothing."""
    options, members = group
    kind, shard = options.get("optimizer", optimizer_class), options.get("shard", "flat")
    if not _is_optimizer(kind):
        return f"group {number}: optimizer={kind!r}: give a torch optimizer's class, and its options beside it"
    if shard not in _SHARDS:
        hint = did_you_mean(str(shard), _SHARDS)
        return f"group {number}: shard={shard!r}{hint}: 'flat' cuts parameters anywhere, 'tensor' gives whole ones"
    bases = {base.__name__ for base in kind.__mro__}
    if bases & _NEVER:
        return f"{kind.__name__} does not update each element by itself, so it cannot work on a shard"
    if bases & _WHOLE and shard == "flat" and members:
        return (
            f"{kind.__name__} updates whole matrices, so it cannot work on a shard that is cut anywhere: give it a "
            f"group in groups= with 'optimizer': {kind.__name__} and 'shard': 'tensor'"
        )
    flat = [(name, tuple(p.shape)) for name, p in members if p.dim() != 2]
    if "Muon" in bases and flat:
        return (
            f"{kind.__name__} updates matrices, but {flat[0][0]!r} of group {number} has shape {flat[0][1]}: put it "
            f"into a group of another class, such as 'optimizer': torch.optim.AdamW"
        )
    if kind is not optimizer_class:
        try:
            check_options(kind, options_of(options), own=(), whose=f"group {number}")
        except UsageError as error:
            return str(error)
    return ""


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def check_options(
    optimizer_class: type[torch.optim.Optimizer],
    given: Mapping[str, Any],
    own: Sequence[str],
    whose: str = "ZeroOptimizer",
) -> None:
    """Refuse options that neither ZeroOptimizer (`own`) nor the class has. A class that takes any keyword judges them
    itself. whose: of what gave them, for the message.
    """
    accepted = inspect.signature(optimizer_class).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values()):
        return
    theirs = [name for name in accepted if name != "params"]
    for name in given:
        if name not in theirs:
            ours = f"its own are {', '.join(own)}; " if own else ""
            raise UsageError(
                f"{whose} has no option {name!r}{did_you_mean(name, (*own, *theirs))}: {ours}"
                f"{optimizer_class.__name__}'s are {', '.join(theirs)}"
            )


def check_same(
    mesh: Mesh,
    model: nn.Module,
    groups: Sequence[tuple[dict[str, Any], list[Named]]],
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    *,
    what: str = "ZeroOptimizer",
) -> None:
    """Refuse, on every rank, options, of `what`, or models that differ between the ranks."""
    plain = (bool, int, float, str, tuple, type(None))
    settings = {key: value for key, value in options.items() if isinstance(value, plain)}
    mesh.world.check_equal(f"{what}'s options", (optimizer_class.__name__, sorted(settings.items())))
    shapes = [
        (
            sorted((key, value) for key, value in group.items() if isinstance(value, plain)),
            group.get("optimizer", optimizer_class).__name__,
            [(name, tuple(p.shape), str(p.dtype)) for name, p in members],
        )
        for group, members in groups
    ]
    others = [(name, tuple(b.shape)) for name, b in model.named_buffers()]
    order = [name for name, _ in model.named_parameters()]
    for comm in (mesh.data, mesh.tensor):
        comm.check_equal("the model's parameters and their groups", (shapes, others, order))


def check_sharing(mesh: Mesh, stage: int) -> None:
    """Refuse, on every rank, one copy of the parameters where the data ranks of any have no memory in common."""
    if stage != 2:
        raise UsageError(
            f"share_parameters=True is for stage 2, not stage={stage}: at stage 0 and 1 leave it out, or take stage=2"
        )
    if mesh.planned:
        return
    apart = mesh.data.size > 1 and not mesh.data.reads_in_place
    if mesh.world.any(apart):
        here = f"those of this rank talk over {mesh.data.transport!r} on {mesh.device.type}"
        raise UsageError(
            f"share_parameters=True needs data ranks that share memory (CPU ranks of one host, transport='shm'), and "
            f"{here if apart else 'those of another rank do not'}: leave it out"
        )


def check_offload(mesh: Mesh, stage: int, groups: Sequence[tuple[dict[str, Any], list[Named]]]) -> None:
    """Refuse states on the host where they are not a shard, or updates that talk with other ranks."""
    if stage != 2:
        raise UsageError(f"offload=True is for stage 2, not stage={stage}: leave it out, or take stage=2")
    if mesh.tensor.size > 1 and any(keeps_whole(options) for options, _ in groups):
        raise UsageError(
            f"offload=True updates on the host, where whole parameters cannot be gathered over "
            f"tensor({mesh.tensor.size}): leave it out, or use no group with 'shard': 'tensor'"
        )


def check_shards(mesh: Mesh, placements: Mapping[str, Placement], named: Sequence[Named]) -> None:
    """Refuse, on every rank, shards that are equal on all tensor ranks and not constant: the sign of a weight that was
    initialised after it was cut, by equal generators. With `mesh.checks` only.
    """
    if mesh.tensor.size == 1 or mesh.planned:
        return
    size = mesh.tensor.size
    shards = [
        (name, p)
        for name, p in named
        if placements[name].dim is not None and not placements[name].is_copied(size) and p.numel()
    ]
    own = {name: fingerprint(p) for name, p in shards}
    others = [mesh.tensor.broadcast_object(own, rank) for rank in range(mesh.tensor.size)]
    for name, p in shards:
        if all(other[name] == own[name] for other in others) and bool((p != p.flatten()[0]).any()):
            raise UsageError(
                f"{name!r} is cut over the tensor axis, but its shards are equal on all {mesh.tensor.size} ranks: it "
                f"was initialised after the cut; pass init= to the layer, which fills the full weight"
            )


def check_replicas(mesh: Mesh, placements: Mapping[str, Placement], reduced: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse, on every rank, reduced gradients of replicated parameters that are not equal on all tensor ranks: the
    sign of one that each uses on its own part of the work, and nobody declared so. With `mesh.checks` only. reduced:
    by name, the elements that this data rank has.

    Compared are norm and sum, to a thousandth: less than what a part is off by, more than rounding.
    """
    if mesh.tensor.size == 1 or mesh.planned:
        return
    own = torch.zeros(len(reduced), 2, dtype=exact_dtype(mesh.device), device=mesh.device)
    for place, (name, part) in enumerate(reduced):
        if placements[name] == REPLICATED and part.numel():
            gradient = part.to(own.dtype)
            own[place] = torch.stack([gradient.norm(), gradient.sum() / part.numel() ** 0.5])
    found = mesh.tensor.all_gather(own.unsqueeze(0))  # (tensor ranks, parameters, 2)
    scale = found[:, :, 0].amax(0)
    apart = (found - found[0]).abs().amax(dim=(0, 2)) > 1e-3 * scale + 1e-9 * scale.amax()
    wrong = [(name, found[:, place, 0].tolist()) for place, (name, _) in enumerate(reduced) if apart[place]]
    if not mesh.world.any(bool(wrong)):
        return
    if not wrong:
        raise UsageError("a gradient of another rank differs over its tensor axis: see its error")
    name, norms = wrong[0]
    raise UsageError(
        f"the gradient of {name!r} differs between the ranks of axis 'tensor' (norms "
        f"{', '.join(f'{norm:.4g}' for norm in norms)}), which hold it alike, as its placement says: if each uses it "
        f"on a part of the work, as norms do under sequence parallel, declare it with "
        f"engine.placement.replicated(module, gradient='sum')"
    )


def check_ties(mesh: Mesh, model: nn.Module, groups: Sequence[tuple[dict[str, Any], list[Named]]]) -> None:
    """Refuse, on every rank, a tied parameter that some stages train and others do not, or train with other options."""
    placed = {
        id(parameter): (number, repr(sorted(options.items())))
        for number, (options, members) in enumerate(groups)
        for _, parameter in members
    }
    own = {tie.key: placed.get(id(model.get_parameter(tie.name)), "frozen") for tie in ties_of(model)}
    first: dict[str, tuple[int, object]] = {}
    for stage in range(mesh.pipeline.size):
        for key, what in mesh.pipeline.broadcast_object(own, stage).items():
            known = first.setdefault(key, (stage, what))
            if known[1] != what:
                raise UsageError(
                    f"the parameter tied as {key!r} is in group {known[1]} on stage {known[0]} and {what} on stage "
                    f"{stage}: give every copy the same group and options, or freeze every copy"
                )
