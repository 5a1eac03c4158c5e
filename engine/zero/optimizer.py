"""Data parallelism with sharded optimizer state: reduce gradients in buckets, step this rank's shard, gather
parameters.

Stage 0 is plain data parallelism: gradients all-reduced, everything updated everywhere. Stage 1 reduce-scatters the
gradients and keeps optimizer state for a shard only; stage 2 also keeps only that shard of the gradients. Method: ZeRO,
arXiv:1910.02054.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.comm.full import full_tensors
from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.placement import Placement, placements_of
from engine.weight_gradients import Sink
from engine.zero.adding import Addition, Placed, fresh_parts, infos_of, rename, why_not_now
from engine.zero.agreement import agreed_flags
from engine.zero.buckets import FlatBucket, make_buckets
from engine.zero.consolidate import consolidated, whole_gradients
from engine.zero.groups import Named, agreed_groups, check_replicas, check_shards, options_of
from engine.zero.inner import Inner, Kind, full_options, kinds_of
from engine.zero.masters import set_masters, whole_masters
from engine.zero.norm import check_clipping, clip_factor, global_norm
from engine.zero.offload import HostBuckets
from engine.zero.plan import ParameterInfo
from engine.zero.reducer import Reducer
from engine.zero.sharing import SharedParameters
from engine.zero.stepping import Stepper
from engine.zero.ties import own_ties, sum_over_axes
from engine.zero.watch import EqualBuffers, WatchedParameters, make_equal, talks_over


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the shards of a model. torch's LR schedulers work on it.

    The model's parameters become views of flat memory, and stay the same objects. A training step is: backward any
    number of times, each in `microbatch`, then `finish_gradients`, `step`, `zero_grad`; all three are collective over
    the mesh. As in plain torch a parameter that got no gradient, on any rank, is not stepped: no decay either.
    Parameters of fp16 and bf16 have fp32 masters, which are what is updated, and their gradients are summed in fp32.
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
        accumulate: str | None = None,
        wire_dtype: torch.dtype | None = None,
        gather: str = "step",
        broadcast_buffers: bool = True,
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
        parameters whose gradients are reduced together. optimizer_kwargs: of `optimizer_class`.

        accumulate: where microbatches add up. `full`: each rank keeps its own sum of all gradients, which is reduced
        once, after the last backward: least traffic. `shard`: gradients are reduced in every `microbatch` and only this
        rank's shard of the sum is kept, for stage 2: least memory. None: `shard` at stage 2, else `full`. What is first
        summed over other axes (tied over stages, each tensor rank's part) is kept whole in either.

        wire_dtype: torch.bfloat16 or torch.float16 rounds what gradients are on their way between data ranks, see
        `Communicator.reduce_scatter`.

        gather: when the parameters that other ranks updated are waited for, where started collectives pay: `step` at
        the end of `step`; `forward` when a module that has them is next run, or its state dict read, so that they
        travel meanwhile (from stage 1 on). What else reads parameters then, such as `copy.deepcopy` or a module that
        uses another's, calls `wait_parameters` before.

        broadcast_buffers: buffers that any rank's forward has written (BatchNorm's) take data rank 0's values in
        `finish_gradients`, as in torch's DistributedDataParallel.

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
        options: dict[str, Any] = {
            "stage": stage,
            "bucket_mib": bucket_mib,
            "accumulate": accumulate,
            "wire_dtype": wire_dtype,
            "gather": gather,
            "broadcast_buffers": broadcast_buffers,
            "share_parameters": share_parameters,
            "offload": offload,
        }
        placed = agreed_groups(model, optimizer_class, mesh, groups, options, optimizer_kwargs)
        kinds = kinds_of(optimizer_class, [own for own, _ in placed], optimizer_kwargs)
        outer, defaults = full_options(kinds)
        self._mesh, self._model, self._stage = mesh, model, stage
        self._class, self._kwargs, self._options = optimizer_class, optimizer_kwargs, options
        self._waits_in_step = gather == "step"
        self._phase = "collecting"
        # Added groups append to these lists, which the parts below hold as well.
        self._placed: list[Placed] = []
        self._named: list[Named] = []
        self._infos: list[ParameterInfo] = []
        self._buckets: list[FlatBucket] = []
        self._modules = weakref.WeakSet[nn.Module]()
        shares = share_parameters and mesh.data.size > 1
        self._shared = SharedParameters(mesh, self._named, self._buckets) if shares else None
        self._host = HostBuckets(mesh.device) if offload else None
        self._reducer = Reducer(self._buckets)
        self._inner = Inner(self._buckets, self._infos, mesh.tensor, self._host)
        self._stepper = Stepper(self._inner, self._buckets, gathers=stage > 0 and not shares)
        self._equal = EqualBuffers(mesh.data) if broadcast_buffers else None
        self._lay_out(placed, kinds, placements_of(model))
        groups_of = [
            {**own, "params": [p for _, p in members]} for own, (_, members) in zip(outer, placed, strict=True)
        ]
        super().__init__(groups_of, {})  # groups of another class must not get this one's defaults
        self.defaults = defaults
        self._ready = True

    # ---- one step --------------------------------------------------------------------------------------------------

    def microbatch(self, *, last: bool = False, stage: int | None = None) -> AbstractContextManager[None]:
        """Return a context for one backward: `with optimizer.microbatch(last=...): loss.backward()`.

        With accumulate="shard" its gradients are reduced by the end of it; a backward outside of any keeps them whole
        until `finish_gradients`. last: no other backward follows in this step, so that with accumulate="full" the
        reduction starts as gradients are ready, where started collectives pay. stage: the virtual pipeline stage whose
        weight gradients are made, None for all. All data ranks must run the same backwards in the same order; a
        parameter may get a gradient on some of them only. TrainStep does all this by itself.
        """
        return self._reducer.microbatch(last, stage)

    @torch.no_grad()
    def finish_gradients(
        self, divisor: float | Tensor = 1.0, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Sum the gradients over the data axis, divide them by `divisor` once, clip them, and return the norm before
        clipping.

        divisor: a number or 0-d tensor, equal on every rank; `mesh.data.size` gives DDP's mean. max_norm: clip to
        this global norm, None: do not. norm_type: 2.0, or inf for the largest absolute value. Returns a 0-d tensor,
        equal on every rank. Every rank of the mesh must call it, once, after its last backward. Raises UsageError for a
        sparse gradient, when it was already called for this step or `zero_grad` was not since the last, or a parameter
        was moved, cast, replaced, added or unfrozen since.
        """
        if self._phase == "finished":
            raise UsageError("finish_gradients was already called for this step: call step() and zero_grad() first")
        if self._phase == "stepped":
            raise UsageError("the last step's gradients are still there: call zero_grad() before the next backward")
        check_clipping(divisor, max_norm, norm_type)
        self._stepper.wait()
        self._watched.check()
        self._reducer.catch_up()
        for bucket in self._buckets:
            bucket.adopt_gradients()
        unused, more, written = agreed_flags(self._buckets, self._named, self._ties, self._equal, self._mesh)
        sum_over_axes(self._buckets, self._named, self._placements, self._ties, self._mesh)
        self._reducer.start_rest(more)
        self._reducer.settle()
        self._reducer.next_step()
        if self._mesh.checks:
            parts = [part for bucket in self._buckets for part in bucket.reduced_parts()]
            check_replicas(self._mesh, self._placements, [(self._named[index][0], part) for index, part in parts])
        norm = global_norm(self._counted_parts(), self._mesh.world, norm_type) / divisor
        scale = divisor if max_norm is None else divisor / clip_factor(norm, max_norm)
        for bucket in self._buckets:
            bucket.reduced.div_(scale)
            bucket.show()
        if self._equal is not None:
            self._equal.copy_first(written)
        self._inner.leave_out(unused)
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
        self._take_over()
        self._stepper.step()
        if self._waits_in_step:
            self._stepper.wait()
        self._written()
        if self._host is not None:
            self._host.remember()
        self._phase = "stepped"

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (torch's signature)
        """Drop all gradients: each parameter's `grad` is None, whatever `set_to_none` says. `model.zero_grad()` does
        not reach what lies in buckets.

        Reductions that were started are waited for. Nothing else is sent, but after a backward that raised an error,
        in a `microbatch`, those that it had not come to: every rank of the mesh must call it then.
        """
        self._reducer.drop()
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
        local, copies = whole_gradients(self._buckets, self._named), self._copies()
        order = [name for name, _ in self._model.named_parameters() if name in local and name not in copies]
        return full_tensors({name: local[name] for name in order}, self._placements, self._mesh)

    @torch.no_grad()
    def consolidate(self, *, rank: int | None = None) -> dict[str, Any]:
        """Return the full optimizer state by parameter name, as CPU copies, in the format of torch's
        `get_optimizer_state_dict`: {"state": {name: {key: value}}, "param_groups": [{"params": [name, ...],
        option: value}]}.

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

    def wait_parameters(self) -> None:
        """Wait until the parameters are whole after a step with gather="forward". Any rank may call it, at any time."""
        self._stepper.wait()

    def gradient_sinks(self) -> dict[int, Sink]:
        """Return, by `id(parameter)`, where the gradients of the trained parameters are summed: for WeightGradients,
        which so adds products where a backward would.
        """
        return self._reducer.sinks()

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
        self.wait_parameters()

    def writes(self, x: Tensor) -> bool:
        """Whether this rank fills `x`, of the model's state, when it is loaded: of shared parameters data rank 0 does
        for all.
        """
        return self._shared is None or self._mesh.data.rank == 0 or all(x is not p for _, p in self._named)

    @torch.no_grad()
    def masters(self) -> dict[int, Tensor]:
        """Return, by `id(parameter)`, the fp32 values of fp16 and bf16 parameters, in the shapes that this rank holds.
        Every rank of the mesh must call it.
        """
        self._stepper.wait()
        return whole_masters(self._inner.memory)

    def parameters_written(self, exact: Mapping[int, Tensor] | None = None) -> None:
        """Take notice that the parameters have new values, which any rank may have written for the others where they
        are shared. exact: by `id(parameter)`, what fp16 and bf16 ones were rounded from. Every rank of the mesh must
        call it.
        """
        for bucket in self._buckets:
            bucket.parameters_to_masters()
        for host in () if self._host is None else self._host.buckets:
            host.sent()
        set_masters(self._inner.memory, exact or {})
        self._written()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, that were frozen or have come since: `param_group` as in `groups`.

        They have buckets of their own, behind the others, which stay as they are with their state. Values, and the
        buffers of new modules, are data rank 0's, gradients so far are dropped. Every rank of the mesh must call it,
        between steps: before the first, or after `step`, and before the next backward. Raises UsageError on every rank,
        before anything is changed, for a group that does not fit or that differs between ranks, for parameters that are
        in a group or not in the model, and at another time.
        """
        if not getattr(self, "_ready", False):
            super().add_param_group(param_group)
            return
        self._stepper.wait()
        groups = (param_group, self._placed, self._class, self._kwargs, self._options)
        problem = why_not_now(self._phase, self._buckets, self._watched)
        added = Addition(self._model, self._mesh, *groups, problem)
        if self._shared is not None:
            self._shared.meet_unchanged()
        self._take_over()
        self._lay_out([added.placed], added.kinds, added.placements)
        defaults, self.defaults = self.defaults, {}  # a group of another class must not get this one's
        super().add_param_group({**added.options, "params": [p for _, p in added.placed[1]]})
        self.defaults = defaults

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

    def _copies(self) -> frozenset[str]:
        """Return this stage's tied parameters that another stage owns."""
        return frozenset(tie.name for tie, _ in self._ties if self._mesh.pipeline.rank != tie.stages[0])

    def _lay_out(self, placed: Sequence[Placed], kinds: Sequence[Kind], placements: Mapping[str, Placement]) -> None:
        """Give groups that come behind those that are there buckets, optimizers and all else. Every rank of the mesh
        must call it.
        """
        mesh, model, old = self._mesh, self._model, len(self._named)
        members = [each for _, own in placed for each in own]
        if mesh.checks:
            check_shards(mesh, placements, members)
        self._placements = placements
        rename(model, self._named, self._infos)
        self._named += members
        self._ties = own_ties(model, self._named)
        new = {id(p) for _, p in members}
        fresh, modules = fresh_parts(model, members, self._modules)
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        make_equal(fresh, buffers, placements, [each for each in self._ties if id(each[1]) in new], mesh)
        self._modules.update(modules)
        self._infos += infos_of(model, mesh, placements, self._ties, placed, len(self._placed))
        self._placed += placed
        shares = self._shared is not None
        made = make_buckets(self._infos, self._named, mesh.data, self._options, first=old, share=shares)
        self._buckets += made
        if self._shared is not None:
            self._shared.written()
        for bucket in made if self._host is None else ():
            bucket.make_masters()
        # A collective of the model's own over the data axis would meet these in another order on another rank.
        alone = not any(talks_over(module, mesh.data) for module in model.modules())
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        self._reducer.take_up([places[id(parameter)] for _, parameter in self._named], early=alone)
        if self._host is not None:
            self._host.add(made)
        self._inner.add(kinds, placements)
        if not self._waits_in_step:
            self._stepper.wait_before_use(model, {id(p): index for index, (_, p) in enumerate(self._named)})
        self._watched = WatchedParameters(model, self._named, self._buckets)
        if self._equal is not None:
            self._equal.add(modules)

    def _take_over(self) -> None:
        """Have the masters follow what was written into parameters since the last step."""
        if self._watched.changed:
            for bucket in self._buckets:
                bucket.parameters_to_masters()

    def _written(self) -> None:
        self._watched.written()
        if self._shared is not None:
            self._shared.written()

    def _counted_parts(self) -> Iterable[Tensor]:
        for bucket in self._buckets:
            for start, stop in bucket.plan.counted(bucket.start, bucket.stop, self._infos):
                yield bucket.gradient(start, stop)
