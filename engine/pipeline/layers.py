"""A model as a list of layers, of which each rank builds only its stage's.

Names are those of one nn.Sequential over all layers (`3.up.weight`) on every layout, and layer i is drawn from a
generator seeded by (seed, i), so neither depends on where the layer lives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.comm.mesh import Mesh
from engine.device import random_stream, stream_seed
from engine.errors import UsageError, did_you_mean
from engine.pipeline import partition
from engine.pipeline.profile import layer_times
from engine.pipeline.recompute import Recompute, check_recompute, recompute_parts
from engine.pipeline.schedule import Stages
from engine.placement import StageModule, Tied, placements_of

_BALANCES = ("compute", "uniform", "measured")


@dataclass(frozen=True, init=False)
class LayerSpec:
    """How to build one layer.

    LayerSpec(module_class, *args, tied={"key": "path.of.parameter"}, cost=None, **kwargs)

    `args` and `kwargs` go to `module_class` when the layer is built. A head that shares its weight with the embedding:
    LayerSpec(Embedding, ..., tied={"words": "weight"}) first, LayerSpec(Head, ..., tied={"words": "proj.weight"}) last.
    """

    module_class: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)
    """From a key to the parameter of this layer that all layers with that key share; it takes the first such layer's
    value.
    """
    cost: float | None = None
    """Relative work of this layer, in place of the counted one, when stages are balanced."""

    def __init__(
        self,
        module_class: Callable[..., nn.Module],
        *args: Any,
        tied: Mapping[str, str] | None = None,
        cost: float | None = None,
        **kwargs: Any,
    ) -> None:
        values = {"module_class": module_class, "args": args, "kwargs": kwargs, "tied": dict(tied or {}), "cost": cost}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def build(self) -> nn.Module:
        """Build the layer, drawing its weights from torch's generator."""
        return self.module_class(*self.args, **self.kwargs)

    def __str__(self) -> str:
        return getattr(self.module_class, "__name__", repr(self.module_class))


class PipelineModel(StageModule):
    """This rank's stages of a list of layers. Each layer's output is the next one's only argument, as in nn.Sequential.

    `virtual`: the virtual stages and their ranks. `stages`: the layers of each virtual stage. `layers`: the indices
    that live here. `costs`: of each layer of the model, what stages were balanced by, in seconds where it was measured;
    None where it was not needed. `ties`: the parameters that other ranks hold too. Its forward runs this stage's
    layers: with pipeline = 1 the whole model.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        mesh: Mesh,
        *,
        balance: str | Sequence[int] = "compute",
        chunks: int = 1,
        placement: str = "loop",
        recompute: Recompute = None,
        sample: Any = None,
    ) -> None:
        """Build this rank's layers on the CPU, under generators seeded by (mesh.seed, layer), and move them to
        mesh.device.

        balance: `compute` cuts by the elements of the parameters of two or more dims, embedding tables excepted, a
        tied head's included, or a spec's own `cost`; `uniform` by number of layers; `measured` by the time of a forward
        and backward of each layer, which every rank runs, one layer at a time (`engine.pipeline.profile`), whatever the
        specs' `cost`; a list by the number of layers for each stage. chunks: virtual stages on each rank, each a run of
        layers, for schedules that go through the ranks several times; `balance` then cuts into pipeline x chunks
        stages. placement: `loop`, stage s is on rank s mod pipeline, or `v`, there and back.

        recompute: what keeps only its inputs for backward, where its forward runs again: None, nothing; `full`, every
        layer; a number k, the layers 0, k, 2 k, ... of the model; a list of patterns, the modules whose names match one
        (`"*.mlp"`, `"3.attention"`). Dropout has the same masks again, buffers that forward changes change once, and
        layers that communicate do so again. Such a module may not change its input in place. sample: for `measured`,
        what layer 0 takes for one microbatch: a tensor, a tuple of arguments or a dict of keywords.

        Every rank must pass the same. Nothing is sent, except that with `recompute` or `measured` all ranks of the mesh
        talk, and must build the model at the same time.

        Raises LayoutError when the layers do not fill the stages, UsageError for a wrong tie, a parameter that two
        layers here have in common without one, an unknown placement, a layer whose work cannot be counted or that fails
        when it is measured, a missing or needless sample, and something to recompute that is not there; the last three
        on every rank.
        """
        super().__init__()
        self.specs, self.mesh = tuple(specs), mesh
        for spec in self.specs:
            if not isinstance(spec, LayerSpec):
                raise UsageError(
                    f"PipelineModel takes LayerSpecs, got {type(spec).__name__}: wrap it as LayerSpec(class, ...)"
                )
        check_recompute(recompute)
        self.virtual = Stages(mesh.layout.pipeline, chunks, placement)
        self.costs = _costs(self.specs, self.virtual.count, balance, mesh, sample)
        self.stages = _cut(self.costs, len(self.specs), self.virtual.count, balance)
        self.stage = mesh.coordinate.pipeline
        self.layers = tuple(index for stage in self.virtual.on(self.stage) for index in self.stages[stage])
        for index in self.layers:
            self.add_module(str(index), _build(self.specs, index, mesh.seed))
        self._refuse_shared()
        self.ties = self._tie()
        recompute_parts(self, recompute, mesh)
        self.to(mesh.device)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.virtual.rank_of(0) == self.stage

    @property
    def is_last(self) -> bool:
        """Whether this rank gives the outputs."""
        return self.virtual.rank_of(self.virtual.count - 1) == self.stage

    def parts(self) -> dict[int, Callable[..., Any]]:
        """Return what runs each virtual stage that lives here; the first layer of one takes all arguments."""
        if self.virtual.chunks == 1:
            return {self.stage: self}
        return {stage: partial(self._run, self.stages[stage]) for stage in self.virtual.on(self.stage)}

    def on_any_stage(self, flag: bool) -> bool:
        """Return whether any pipeline rank says so. Every rank of the pipeline axis must call it."""
        return self.mesh.pipeline.any(flag)

    def stage_of(self, name: str) -> int:
        """Return the virtual stage that has the parameter called `name`, as `named_parameters` calls it."""
        layer = int(name.partition(".")[0])
        return next(stage for stage in self.virtual.on(self.stage) if layer in self.stages[stage])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage's layers in order; the first takes all arguments. Raises UsageError where they are of several
        stages that do not follow one another.
        """
        if self.virtual.chunks > 1 and self.virtual.ranks > 1:
            raise UsageError(
                f"this rank's layers are of {self.virtual.chunks} stages, with other ranks' between them: run the "
                f"model with TrainStep, or one stage with model.parts()[stage]"
            )
        return self._run(self.layers, *args, **kwargs)

    def _run(self, layers: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        first, *rest = (self.get_submodule(str(index)) for index in layers)
        x = first(*args, **kwargs)
        for layer in rest:
            x = layer(x)
        return x

    def _refuse_shared(self) -> None:
        """Refuse a parameter that two layers were built with: where these are on two ranks it would be two."""
        owners: dict[int, tuple[int, str]] = {}
        for index in self.layers:
            for path, parameter in self.get_submodule(str(index)).named_parameters():
                other, where = owners.setdefault(id(parameter), (index, path))
                tied = path in self.specs[index].tied.values()
                if other != index and parameter.requires_grad and not tied:
                    raise UsageError(
                        f"{other}.{where} and {index}.{path} are one parameter, and on two ranks would be two: build "
                        f"it in each layer, and tie them: LayerSpec(..., tied={{'shared': {path!r}}})"
                    )

    def _tie(self) -> tuple[Tied, ...]:
        """Make the tied parameters of this stage one object, with the first layer's value; return those of several
        stages.
        """
        holders: dict[str, list[int]] = defaultdict(list)
        for index, spec in enumerate(self.specs):
            if len(set(spec.tied.values())) < len(spec.tied):
                raise UsageError(
                    f"layer {index} ({spec}) ties one parameter under several keys, {spec.tied}: use one key"
                )
            for key in spec.tied:
                holders[key].append(index)
        ties = []
        for key, indices in holders.items():
            if len(indices) == 1:
                raise UsageError(
                    f"tied key {key!r} is on layer {indices[0]} ({self.specs[indices[0]]}) only: name the other too"
                )
            stages = self._holders(indices)
            here = [index for index in indices if index in self.layers]
            if not here:
                continue
            first = self._first_layer(indices[0])
            for index in here:
                _share(self.get_submodule(str(index)), self.specs[index], first, self.specs[indices[0]], key)
            if len(stages) > 1:
                canonical, name = (f"{i}.{self.specs[i].tied[key]}" for i in (indices[0], here[0]))
                ties.append(Tied(key, canonical, stages, name))
        return tuple(ties)

    def _holders(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that hold any of the layers, the first layer's first, then ascending."""
        ranks = [
            self.virtual.rank_of(stage) for index in indices for stage, run in enumerate(self.stages) if index in run
        ]
        return (ranks[0], *sorted(set(ranks) - {ranks[0]}))

    def _first_layer(self, index: int) -> nn.Module:
        """Return layer `index`: the one that lives here, else a copy drawn once more from the same seed."""
        return self.get_submodule(str(index)) if index in self.layers else _build(self.specs, index, self.mesh.seed)


def _build(specs: Sequence[LayerSpec], index: int, seed: int) -> nn.Module:
    with random_stream(stream_seed("layer", seed, index), torch.device("cpu")), torch.device("cpu"):
        return specs[index].build()


def _parameter(layer: nn.Module, spec: LayerSpec, key: str) -> nn.Parameter:
    path = spec.tied[key]
    known = dict(layer.named_parameters(remove_duplicate=False))
    if path not in known:
        raise UsageError(f"tied key {key!r}: {spec} has no parameter {path!r}{did_you_mean(path, known)}")
    return known[path]


def _share(layer: nn.Module, spec: LayerSpec, first: nn.Module, first_spec: LayerSpec, key: str) -> None:
    """Make `layer`'s tied parameter the one of `first`, after checking that they are of one kind."""
    own, shared = _parameter(layer, spec, key), _parameter(first, first_spec, key)
    if own.shape != shared.shape or own.dtype != shared.dtype:
        raise UsageError(
            f"tied key {key!r}: {spec}'s {spec.tied[key]} is {own.dtype} {tuple(own.shape)}, "
            f"the first layer's is {shared.dtype} {tuple(shared.shape)}"
        )
    placed, first_placed = placements_of(layer)[spec.tied[key]], placements_of(first)[first_spec.tied[key]]
    if placed != first_placed:
        raise UsageError(f"tied key {key!r}: {spec} places it as {placed}, the first layer as {first_placed}")
    owner, _, name = spec.tied[key].rpartition(".")
    layer.get_submodule(owner)._parameters[name] = shared


def _costs(
    specs: Sequence[LayerSpec], stages: int, balance: str | Sequence[int], mesh: Mesh, sample: Any
) -> tuple[float, ...] | None:
    """Return what each layer costs; None where the cut does not depend on it."""
    if isinstance(balance, str) and balance not in _BALANCES:
        raise UsageError(
            f"balance={balance!r}{did_you_mean(balance, _BALANCES)}: choose {', '.join(_BALANCES)}, "
            f"or give the number of layers for each stage"
        )
    if (balance == "measured") != (sample is not None):
        raise UsageError(
            "balance='measured' runs the layers, and needs sample=: what layer 0 takes for one microbatch"
            if sample is None
            else f"sample= is for balance='measured', and balance is {balance!r}: leave it out"
        )
    if balance not in ("compute", "measured") or stages == 1 or len(specs) < stages:
        return None
    if balance == "compute":
        return tuple(_cost(spec, index) for index, spec in enumerate(specs))
    return layer_times(lambda index: _build(specs, index, mesh.seed), [str(spec) for spec in specs], mesh, sample)


def _cut(costs: Sequence[float] | None, layers: int, stages: int, balance: str | Sequence[int]) -> tuple[range, ...]:
    if not isinstance(balance, str):
        return partition.explicit(balance, layers, stages)
    return partition.uniform(layers, stages) if costs is None else partition.by_cost(costs, stages)


def _cost(spec: LayerSpec, index: int) -> float:
    """Count the elements that a layer multiplies with: its parameters of two or more dims, tables that are looked up
    excepted.
    """
    if spec.cost is not None:
        return spec.cost
    try:
        with torch.device("meta"):
            layer = spec.build()
    except Exception as error:
        raise UsageError(
            f"balance='compute' builds every layer on the meta device to count its work, but layer {index} ({spec}) "
            f"cannot be: {type(error).__name__}: {error}. Give LayerSpec(cost=...), or balance='uniform'"
        ) from error
    tables = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Embedding) or getattr(m, "is_table", False)}
    return float(sum(p.numel() for p in layer.parameters() if p.dim() >= 2 and id(p) not in tables))
