"""Data parallelism with sharded optimizer state: reduce gradients in buckets, step this rank's shard, gather
parameters.

Stage 0 is plain data parallelism: gradients all-reduced, everything updated everywhere. Stage 1 reduce-scatters the
gradients and keeps optimizer state for a shard only; stage 2 also keeps only that shard of the gradients, but where
the ranks share memory: there whole buckets stay, which backward fills and the others read, and stage 2 may share the
parameters instead. Method: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.comm.full import full_tensors
from engine.comm.mesh import Mesh
from engine.comm.work import Work
from engine.errors import UsageError
from engine.placement import Tied, placements_of, ties_of
from engine.zero.buckets import FlatBucket
from engine.zero.consolidate import consolidated
from engine.zero.groups import Named, agreed_groups, check_replicas, check_shards, keeps_whole, options_of
from engine.zero.inner import Inner
from engine.zero.matrices import matrix_work
from engine.zero.norm import clip_factor, global_norm
from engine.zero.offload import HostBuckets
from engine.zero.plan import ParameterInfo, plan_buckets
from engine.zero.sharing import SharedParameters
from engine.zero.ties import share

_MIB = 2**20


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the shards of a model. torch's LR schedulers work on it.

    The model's parameters become views of flat memory, and stay the same objects. A training step is: backward any
    number of times, then `finish_gradients`, `step`, `zero_grad`; all three are collective over the mesh. A parameter
    that took no part in backward has a zero gradient and is stepped with it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        mesh: Mesh,
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        stage: int = 2,
        bucket_mib: float = 25,
        share_parameters: bool = False,
        offload: bool = False,
        **optimizer_kwargs: Any,
    ) -> None:
        """Every rank of the mesh must call it, with models equal in names, shapes and order over the data and tensor
        axes.

        Parameters and buffers take data rank 0's values, parameters replicated over the tensor axis also tensor rank
        0's.

        groups: torch's parameter groups, `params` a list of (name, parameter); together every parameter that requires
        a gradient. None: all in one. Beside its options a group may say `optimizer`, another class for it, and `shard`:
        "flat" cuts its parameters wherever a rank's shard ends, "tensor" gives each whole to one rank, at its full
        shape, for an update that is not elementwise (torch.optim.Muon). stage: 0, 1 or 2, see above. bucket_mib: MiB of
        gradients that are reduced together. optimizer_kwargs: of `optimizer_class`.

        share_parameters: all data ranks hold one copy of the trained parameters in common, so nothing is gathered and
        they take memory once. For stage 2, where the data ranks share memory (CPU ranks of one host, transport `shm`).
        Only `step` and `load_full_state_dict` may write them then: what else changes one in place is an error at the
        next `step`, as far as its version counter tells (a change through `.data` is seen by all ranks, and not found),
        and so is memory that was moved (`model.share_memory()`, with torch's sharing strategy `file_system`). Copies
        (`copy.deepcopy`, for an average of weights) are each rank's own.

        offload: optimizer states, and the values that are updated, lie in the host's memory, where the optimizer runs;
        gradient shards come there and updated parameters go back, one bucket while another is updated. For stage 2.

        Raises UsageError on every rank for a model, groups or options that do not fit, or that differ between ranks,
        before anything is changed.
        """
        options = {"stage": stage, "bucket_mib": bucket_mib, "share_parameters": share_parameters, "offload": offload}
        placed = agreed_groups(model, optimizer_class, mesh, groups, options, optimizer_kwargs)
        self._mesh, self._model, self._stage = mesh, model, stage
        shares = share_parameters and mesh.data.size > 1
        self._named = [each for _, members in placed for each in members]
        self._holders = _holders(model, self._named)
        self._placements = placements_of(model)
        if mesh.checks:
            check_shards(mesh, self._placements, self._named)
        self._ties = _own_ties(model, self._named)
        _broadcast(model, self._placements, self._ties, mesh)
        self._infos = [
            ParameterInfo(name, p.numel(), p.dtype, group, self._counted(name, p), self._work(options, name, p))
            for group, (options, members) in enumerate(placed)
            for name, p in members
        ]
        parameters = [parameter for _, parameter in self._named]
        self._buckets = [
            FlatBucket(plan, parameters, mesh.data, mesh.device, stage=stage, share=shares)
            for plan in plan_buckets(self._infos, bucket_mib * _MIB, mesh.data.size)
        ]
        self._host = HostBuckets(self._buckets, mesh.device) if offload else None
        self._inner = Inner(
            optimizer_class,
            placed,
            optimizer_kwargs,
            self._buckets,
            self._infos,
            self._placements,
            mesh.tensor,
            self._host,
        )
        self._phase = "collecting"
        outer = [
            {**options_of(group), "params": [p for _, p in members]}
            for group, (_, members) in zip(self._inner.param_groups, placed, strict=True)
        ]
        super().__init__(outer, {})  # groups of another class must not get this one's defaults
        self.defaults = self._inner.defaults
        self._ready = True
        self._shared = SharedParameters(mesh, self._named, self._buckets) if shares else None

    # ---- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_gradients(self, divisor: float | Tensor = 1.0, max_norm: float | None = None) -> Tensor:
        """Sum the gradients over the data axis, divide them by `divisor` once, clip them, and return the norm before
        clipping.

        divisor: a number or 0-d tensor, equal on every rank; `mesh.data.size` gives DDP's mean. max_norm: clip to
        this global 2-norm, None: do not. Returns a 0-d tensor, equal on every rank. Every rank of the mesh must call
        it, once, after its last backward. Raises UsageError when it was already called for this step, or `zero_grad`
        was not since the last, or a parameter was moved, cast, replaced or frozen since construction.
        """
        if self._phase == "finished":
            raise UsageError("finish_gradients was already called for this step: call step() and zero_grad() first")
        if self._phase == "stepped":
            raise UsageError("the last step's gradients are still there: call zero_grad() before the next backward")
        if isinstance(divisor, int | float) and not divisor > 0:
            raise UsageError(f"divisor={divisor!r}: the summed gradient is divided by a number above 0")
        if max_norm is not None and not max_norm > 0:
            raise UsageError(
                f"max_norm={max_norm!r}: gradients are clipped to a norm above 0; None leaves them as they are"
            )
        self._check_parameters()
        if self._mesh.checks:
            check_replicas(self._mesh, self._placements, self._named)
        for bucket in self._buckets:
            bucket.adopt_gradients()
        self._sum_partial()
        for tie, parameter in self._ties:
            share(tie, _gradient(parameter), self._mesh.pipeline, "sum")
        self._reduce()
        norm = global_norm(self._counted_parts(), self._mesh.world) / divisor
        scale = divisor if max_norm is None else divisor / clip_factor(norm, max_norm)
        for bucket in self._buckets:
            bucket.reduced.div_(scale)
        self._phase = "finished"
        return norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from the finished gradients. Every rank of the mesh must call it.

        Raises UsageError before `finish_gradients`, and for a closure; on every rank when a shared parameter was
        changed in place, or its memory moved, on any.
        """
        if closure is not None:
            raise UsageError("step takes no closure: gradients must be finished on every rank before it")
        if self._phase != "finished":
            raise UsageError("step() before finish_gradients(): the gradients are still each rank's own")
        self._inner.set_options(self.param_groups)
        if self._shared is not None:
            self._shared.meet_unchanged()
        for number in range(len(self._buckets)):
            self._inner.step(number)
        if self._stage > 0 and self._shared is None:
            _settle([bucket.start_gather() for bucket in self._buckets])
        torch.autograd.graph.increment_version([parameter for _, parameter in self._named])
        if self._host is not None:
            self._host.remember()
        self.parameters_written()
        self._phase = "stepped"

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (torch's signature)
        """Drop all gradients. Nothing is sent. Gradients that live in buckets are zeroed there, whatever
        `set_to_none` says.
        """
        for bucket in self._buckets:
            bucket.zero_gradients()
        self._phase = "collecting"

    # ---- to look at ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """Return the finished gradients by full name, at full size, as CPU copies on every rank: summed, divided,
        clipped.

        A tied parameter appears once, under its first name. Every rank of the mesh must call it, between
        `finish_gradients` and `step`; raises UsageError at any other time.
        """
        if self._phase != "finished":
            raise UsageError(
                "full_gradients() works after finish_gradients() and before step(): at other times they are not whole"
            )
        local: dict[str, Tensor] = {}
        for bucket in self._buckets:
            whole = bucket.whole_gradients()
            for parameter, each in bucket.parameters:
                local[self._named[each.index][0]] = whole[each.start : each.stop].view(parameter.shape)
        copies = self._copies()
        order = [name for name, _ in self._model.named_parameters() if name in local and name not in copies]
        return full_tensors({name: local[name] for name in order}, self._placements, self._mesh)

    @torch.no_grad()
    def consolidate(self, *, rank: int | None = None) -> dict[str, Any]:
        """Return the full optimizer state by parameter name, as CPU copies, in the format that
        torch.distributed.checkpoint.state_dict names: {"state": {name: {key: value}}, "param_groups": [{"params":
        [name, ...], option: value}]}.

        State of the parameter's shape is at full size; step counts and other single values are as they are. Names are
        those of one nn.Sequential over all layers; a tied parameter appears once, under its first. In plain PyTorch
        `set_optimizer_state_dict(model, optimizer, state)` takes it. Every rank of the mesh must call it; with `rank`,
        only that global rank gets the dict, and the others an empty one. Raises UsageError on every rank for state that
        is neither one value for each element nor a single one, in a group of `shard="flat"`.
        """
        groups = [options_of(group) for group in self.param_groups]
        copies = self._copies()
        return consolidated(self._inner, self._buckets, self._infos, groups, copies, self._placements, self._mesh, rank)

    @property
    def model(self) -> nn.Module:
        """The model whose parameters are updated."""
        return self._model

    def parameters_replaced(self, model: nn.Module) -> None:
        """Take notice that `model`'s parameters were given new values, by `load_full_state_dict`.

        Raises UsageError when the optimizer was built over another model, or between `finish_gradients` and `step`,
        where the gradients of the old values would be applied to the new.
        """
        if model is not self._model:
            raise UsageError("optimizer= was built over another model than the one that is loaded")
        if self._phase == "finished":
            raise UsageError(
                "loading between finish_gradients() and step() would apply old gradients to new weights: "
                "step first, or drop them with optimizer.zero_grad()"
            )

    def writes(self, x: Tensor) -> bool:
        """Whether this rank fills `x`, of the model's state, when it is loaded: of shared parameters data rank 0 does
        for all.
        """
        return self._shared is None or self._mesh.data.rank == 0 or all(x is not p for _, p in self._named)

    def parameters_written(self) -> None:
        """Take notice that the parameters have new values, which any rank may have written for the others where they
        are shared. Every rank of the mesh must call it.
        """
        if self._shared is not None:
            self._shared.written()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction: buckets and shards are laid out once. Raises UsageError."""
        if getattr(self, "_ready", False):
            raise UsageError("groups are fixed at construction: pass groups= to ZeroOptimizer")
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """The state is in shards that fit this layout alone. Raises UsageError."""
        raise UsageError(
            "the optimizer's state is sharded over this layout and cannot be saved as one dict: "
            "save the weights with engine.full_state_dict(model, mesh), the state with optimizer.consolidate()"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002 (torch's signature)
        """See `state_dict`. Raises UsageError."""
        raise UsageError("the optimizer's state is sharded over this layout and cannot be loaded from one dict")

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _counted(self, name: str, parameter: Tensor) -> tuple[tuple[int, int], ...]:
        """Return the elements of the parameter that this tensor and pipeline position counts in the norm."""
        if any(tie.name == name and tie.stages[0] != self._mesh.pipeline.rank for tie, _ in self._ties):
            return ()
        return self._placements[name].counted(parameter.shape, self._mesh.tensor.rank, self._mesh.tensor.size)

    def _copies(self) -> frozenset[str]:
        """Return this stage's tied parameters that another stage owns."""
        return frozenset(tie.name for tie, _ in self._ties if self._mesh.pipeline.rank != tie.stages[0])

    def _work(self, options: Mapping[str, Any], name: str, parameter: Tensor) -> float | None:
        """Return what updating the whole parameter costs, where it is not cut over the data axis."""
        if not keeps_whole(options):
            return None
        return matrix_work(self._placements[name].full_shape(parameter.shape, self._mesh.tensor.size))

    def _check_parameters(self) -> None:
        displaced = [self._named[index][0] for bucket in self._buckets for index in bucket.displaced()]
        displaced += [name for name, holder, key, parameter in self._holders if holder.get(key) is not parameter]
        frozen = [name for name, parameter in self._named if not parameter.requires_grad]
        known = {id(parameter) for _, parameter in self._named}
        trained = {id(p): name for name, p in self._model.named_parameters() if p.requires_grad}
        displaced += [name for name, parameter in self._named if id(parameter) not in trained and name not in frozen]
        added = [name for each, name in trained.items() if each not in known]
        for names, what, old in (
            (displaced, "moved, cast or replaced", "would go on updating the old one"),
            (frozen, "frozen", "would go on updating the old one"),
            (added, "added or unfrozen", "does not update it"),
        ):
            if names:
                raise UsageError(
                    f"{names[0]!r} was {what} after ZeroOptimizer was built, which {old}: do that first, then build "
                    f"the optimizer"
                )

    def _sum_partial(self) -> None:
        """Sum over the tensor axis the gradients that are each rank's part of one."""
        if self._mesh.tensor.size == 1:
            return
        rank, size = self._mesh.tensor.rank, self._mesh.tensor.size
        partial = [
            piece for name, p in self._named for piece in self._placements[name].partial(_gradient(p), rank, size)
        ]
        for dtype in dict.fromkeys(gradient.dtype for gradient, _, _ in partial):
            of_dtype = [piece for piece in partial if piece[0].dtype == dtype]
            # A place for each piece of the axis: the ranks that hold another one add zeros.
            places = [gradient.new_zeros(count, gradient.numel()) for gradient, _, count in of_dtype]
            for (gradient, index, _), place in zip(of_dtype, places, strict=True):
                place[index].view(gradient.shape).copy_(gradient)
            flat = self._mesh.tensor.all_reduce(torch.cat([place.view(-1) for place in places]))
            for (gradient, index, count), total in zip(of_dtype, flat.split([p.numel() for p in places]), strict=True):
                gradient.copy_(total.view(count, *gradient.shape)[index])

    def _reduce(self) -> None:
        """Sum every bucket over the data axis, in the plan's order. Kept gradients fly together; borrowed memory is
        used in turn.
        """
        if all(bucket.keep_gradients for bucket in self._buckets):
            _settle([bucket.start_reduction(None) for bucket in self._buckets])
            return
        largest: dict[torch.dtype, int] = {}
        for bucket in self._buckets:
            largest[bucket.plan.dtype] = max(largest.get(bucket.plan.dtype, 0), bucket.plan.numel)
        borrowed = {dtype: torch.empty(n, dtype=dtype, device=self._mesh.device) for dtype, n in largest.items()}
        for bucket in self._buckets:
            _settle([bucket.start_reduction(borrowed[bucket.plan.dtype])])

    def _counted_parts(self) -> Iterable[Tensor]:
        for bucket in self._buckets:
            for start, stop in bucket.plan.counted(bucket.start, bucket.stop, self._infos):
                yield bucket.gradient(start, stop)


def _holders(
    model: nn.Module, named: Sequence[Named]
) -> list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]]:
    """Return every place in the model that holds a trained parameter, as (its name, a module's parameters, the key in
    them, it).
    """
    names = {id(parameter): name for name, parameter in named}
    return [
        (names[id(parameter)], module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in names
    ]


def _settle(works: Sequence[Work | None]) -> None:
    """Wait for what was started."""
    for work in works:
        if work is not None:
            work.wait()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; a parameter without one gets zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _own_ties(model: nn.Module, named: Sequence[Named]) -> list[tuple[Tied, nn.Parameter]]:
    """Return the trainable ties, under the names that this stage's parameters go by."""
    names = {id(parameter): name for name, parameter in named}
    found = [(tie, model.get_parameter(tie.name)) for tie in ties_of(model)]
    return [(replace(tie, name=names[id(p)]), p) for tie, p in found if id(p) in names]


@torch.no_grad()
def _broadcast(
    model: nn.Module, placements: Mapping[str, Any], ties: Sequence[tuple[Tied, nn.Parameter]], mesh: Mesh
) -> None:
    """Make all copies equal: tensor rank 0's of replicated parameters, the first stage's of tied ones, then data rank
    0's of all.
    """
    for name, parameter in model.named_parameters():
        if placements[name].dim is None:
            mesh.tensor.broadcast(parameter, 0)
    for tie, parameter in ties:
        share(tie, parameter, mesh.pipeline, "copy")
    for tensor in (*model.parameters(), *model.buffers()):
        mesh.data.broadcast(tensor, 0)
