"""One optimizer step over a model on any layout: microbatches, pipeline schedule, loss, gradients, clipping, update.

The one rule for averages: losses are sums with counts; the sum over all microbatches and data ranks is divided by the
global count once, for the reported loss and for the gradients. So neither microbatches nor ranks with fewer counted
rows weigh more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.comm.checks import fingerprint
from engine.comm.mesh import Mesh
from engine.device import exact_dtype, random_stream, stream_seed
from engine.errors import LayoutError, UsageError
from engine.pipeline import PipelineModel
from engine.pipeline.batches import Microbatch, map_batch, rows_of, split
from engine.pipeline.executor import Around, Executor
from engine.pipeline.recording import Recording
from engine.pipeline.schedule import Compute, Program, Schedule, forward_only, programs
from engine.pipeline.schedules import schedule_named
from engine.pipeline.verify import verify
from engine.precision import LossScaler
from engine.tensor_parallel.random import name_dropouts
from engine.weight_gradients import WeightGradients
from engine.zero import ZeroOptimizer
from engine.zero.norm import check_norm_type

Loss = Callable[[Any, Any], tuple[Tensor, Any]]
_LARGE = 2**18
"""Elements of a weight from which adding each microbatch's gradient in place pays: a sum of its own, as autograd makes
it, then takes longer than a function in Python (about 50 µs on a CPU)."""
_MAKE_GRADIENTS = ("backward", "weight_gradient")  # kinds of computations whose end completes a microbatch's gradients


@dataclass(frozen=True)
class StepResult:
    """What one training step did; 0-d tensors, equal on every rank."""

    loss: Tensor
    """Sum of the losses over the global batch, divided by `tokens`; 0 when nothing is counted."""
    grad_norm: Tensor
    """Global norm, of the step's `norm_type`, of the divided gradients before clipping."""
    tokens: Tensor
    """The global count: what the loss function counted, over all microbatches and data ranks."""
    skipped: Tensor
    """Whether no update was made, because the scaled gradients were not finite. bool."""
    loss_scale: Tensor
    """What the losses of this step were multiplied by before backward; 1 without loss scaling."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found; 0-d tensors, equal on every rank. `loss` and `tokens` as in StepResult."""

    loss: Tensor
    tokens: Tensor


class TrainStep:
    """Training steps, evaluations and predictions of one model. Every rank of the mesh must make the same calls.

    `steps`: how many training steps are done. All random numbers of a step are a function of the seed and this number:
    set it, on every rank, to take up an earlier run where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        loss: Loss,
        mesh: Mesh,
        *,
        microbatches: int = 1,
        schedule: str | Schedule = "1f1b",
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        loss_scale: float | Literal["dynamic"] | LossScaler | None = None,
    ) -> None:
        """model: a PipelineModel, or any module where pipeline = 1. loss(output, target): returns (sum, count), a 0-d
        sum over the rows it counts and how many those are (a number or 0-d tensor). microbatches: equal parts of this
        data rank's rows, run one by one. schedule: `1f1b`, `gpipe`, `zero_bubble`, for a model with chunks in a loop
        `interleaved`, for one with two in a V `zero_bubble_v`; or a function (stages, microbatches) -> for each rank,
        its `Compute`s in order, see `engine.pipeline.schedule`. clip_grad_norm: clip gradients to this global norm.
        norm_type: of it, 2.0, or inf for the largest absolute value.
        loss_scale: for fp16, see LossScaler: a step whose gradient norm is not finite then updates nothing, on any
        rank. None does not look.

        Raises UsageError on every rank, before anything is sent, for options that cannot work or differ between the
        ranks, and for a schedule that cannot run, with the action at fault; LayoutError for a schedule that does not
        fit the model's chunks.
        """
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise UsageError(f"microbatches={microbatches!r}: a step has at least 1")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise UsageError(
                f"clip_grad_norm={clip_grad_norm!r}: gradients are clipped to a norm above 0; None does not clip"
            )
        check_norm_type(norm_type)
        if mesh.layout.pipeline > 1 and not isinstance(model, PipelineModel):
            raise UsageError(
                f"pipeline({mesh.layout.pipeline}) needs a PipelineModel, got {type(model).__name__}: "
                f"list its layers as LayerSpecs"
            )
        if optimizer.model is not model:
            raise UsageError("the optimizer was built over another model: pass ZeroOptimizer the model of this step")
        self.model, self.optimizer, self.loss, self.mesh = model, optimizer, loss, mesh
        self.microbatches, self.clip_grad_norm, self.norm_type = microbatches, clip_grad_norm, norm_type
        self._executor = Executor(model, mesh.pipeline, mesh.device)
        self._training, named = self._planned(schedule)
        self._weight_gradients = self._apart_from_autograd()
        self._groups = len(optimizer.param_groups)
        computed = [each for each in self._training if isinstance(each, Compute) and each.kind in _MAKE_GRADIENTS]
        self._last = set({each.stage: each for each in computed}.values())  # of each virtual stage here, in a step
        self._schedule = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "own")
        self._recording: Recording | None = None
        self._evaluations: dict[int, Program] = {}
        scaler = loss_scale if isinstance(loss_scale, LossScaler) or loss_scale is None else LossScaler(loss_scale)
        self.scaler = scaler
        options = {
            "microbatches": microbatches,
            "schedule": named,
            "clip_grad_norm": clip_grad_norm,
            "norm_type": norm_type,
            "loss_scale": repr(scaler),
        }
        mesh.world.check_equal("TrainStep's options", options)
        self.steps = 0
        dropouts = name_dropouts(model)
        self._streams = list(dict.fromkeys(dropout.streams for dropout in dropouts.values()))
        for comm in (mesh.data, mesh.tensor):
            told = [f"{name}: {dropout}, {dropout.streams}" for name, dropout in dropouts.items()]
            comm.check_equal("the dropouts of TrainStep's model", told)

    def __call__(self, inputs: Any, targets: Any) -> StepResult:
        """Train on one batch: forward and backward of every microbatch, gradients reduced as the optimizer's
        `accumulate` says, one update.

        inputs, targets: this data rank's rows (dim 0 of every tensor), equal on all its tensor and pipeline ranks;
        moved to the mesh's device. Inputs go to the first layer: a tensor as it is, a tuple as *args, a dict as
        **kwargs. Inside, torch's generators run on a stream of (seed, data rank, stage, step); afterwards they are as
        before.

        Raises LayoutError for rows that do not divide by the microbatches, UsageError for a loss without a gradient
        and, with `mesh.checks`, for rows that are not equal on all tensor and pipeline ranks.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("a training step inside torch.inference_mode() would have no gradients: leave it first")
        if self.mesh.checks:
            self._check_rows(inputs, targets)
        batches = self._even_microbatches(inputs, targets)
        self._meet_added_groups()
        self.optimizer.zero_grad()
        sums = self._no_sums()

        def finish(output: Any, i: int) -> Tensor:
            total, count = self._call_loss(self.loss, output, batches[i].target)
            self._add(sums, total, count)
            return total if self.scaler is None else self.scaler.scale(total)

        placed = self._around(rows_of(inputs, targets))
        with self._random_stream("step"), torch.enable_grad(), self._recorded(placed) as around:
            self._executor.run(self._training, batches, finish, around, self._weight_gradients)
        self.steps += 1
        loss, tokens = self._share(sums)
        divisor = torch.where(tokens == 0, torch.ones_like(tokens), tokens)
        scale = 1.0 if self.scaler is None else self.scaler.value
        grad_norm = self.optimizer.finish_gradients(divisor * scale, self.clip_grad_norm, self.norm_type)
        skipped = self.scaler is not None and not self.scaler.accept(grad_norm)
        if skipped:
            self.optimizer.zero_grad()
        else:
            self.optimizer.step()
        told = torch.tensor(skipped, device=self.mesh.device), torch.full_like(loss, scale)
        return StepResult(loss, grad_norm, tokens, *told)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record when each computation of the training steps inside the block begins and ends, on every rank.

        Every rank of the mesh must enter it around the same steps; `save(path)` of what it gives writes them. The ranks
        of a pipeline meet at the start of each such step. Raises UsageError inside another record().
        """
        if self._recording is not None:
            raise UsageError("this step is being recorded already: leave the record() around it first")
        self._recording = Recording(self.mesh, self._schedule, self._executor.virtual, self.microbatches)
        try:
            yield self._recording
        finally:
            self._recording = None

    def evaluate(self, inputs: Any, targets: Any, loss: Loss | None = None) -> Evaluation:
        """Return the loss over all data ranks' rows, without gradients, in eval mode; the mode and the generators are
        put back.

        Rows may be any number, also 0, also different on every data rank. `loss`: another loss function for this call.
        """
        batches = self._any_microbatches(inputs, targets, least=0)
        sums = self._no_sums()

        def finish(output: Any, i: int) -> Tensor:
            total, count = self._call_loss(loss or self.loss, output, batches[i].target)
            self._add(sums, total, count)
            return total

        with self._evaluating():
            self._executor.run(self._forwards(len(batches)), batches, finish)
        value, tokens = self._share(sums)
        return Evaluation(loss=value, tokens=tokens)

    def predict(self, inputs: Any) -> Tensor:
        """Return what the last stage returns for this data rank's rows, on every pipeline rank, without gradients, in
        eval mode.

        Any number of rows. An output that is sharded over the tensor axis stays so: `mesh.tensor.all_gather(output,
        dim=-1)`. Only the data rank's own tensor and pipeline ranks must call it. Raises UsageError when the model's
        output is not one tensor.
        """
        batches = self._any_microbatches(inputs, None, least=1)
        outputs: list[Any] = []

        def finish(output: Any, _i: int) -> Any:
            outputs.append(output)
            return output

        with self._evaluating():
            self._executor.run(self._forwards(len(batches)), batches, finish)
            pipeline = self.mesh.pipeline
            last = self._executor.last_rank
            wrong = next((type(output).__name__ for output in outputs if not isinstance(output, Tensor)), None)
            joined = None
            if outputs and wrong is None:
                try:
                    joined = torch.cat(outputs)
                except RuntimeError as error:  # the other ranks wait to be told
                    wrong = f"tensors that cannot be joined: {error}"
            told = pipeline.broadcast_object(wrong if joined is None else (joined.shape, joined.dtype), last)
            if isinstance(told, str):
                raise UsageError(f"predict joins one tensor over the microbatches, the model returned {told}")
            shape, dtype = told
            result = torch.empty(shape, dtype=dtype, device=self.mesh.device) if joined is None else joined
            return pipeline.broadcast(result, last)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _planned(self, schedule: str | Schedule) -> tuple[Program, object]:
        """Return this rank's program of a step, verified, and what tells schedules apart."""
        plan = schedule if callable(schedule) else schedule_named(schedule)
        stages = self._executor.virtual
        actions = plan(stages, self.microbatches)
        program = verify(actions, stages, self.microbatches, ahead=self._executor.ahead)[self.mesh.pipeline.rank]
        return program, actions if callable(schedule) else schedule

    def _apart_from_autograd(self) -> WeightGradients | None:
        """Return what takes weight gradients: all where the schedule places them, else those of the weights that gain
        from being added to in place; None where there are none.
        """
        sinks = self.optimizer.gradient_sinks()
        if any(isinstance(each, Compute) and each.kind == "weight_gradient" for each in self._training):
            return WeightGradients(sinks)
        large = any(p.requires_grad and p.numel() >= _LARGE for p in self.model.parameters())
        return WeightGradients(sinks, least=_LARGE) if large and self.microbatches > 1 else None

    def _meet_added_groups(self) -> None:
        """After `add_param_group`, which every rank calls, other outputs may have gradients that cross a stage."""
        if len(self.optimizer.param_groups) != self._groups:
            self._groups = len(self.optimizer.param_groups)
            self._executor.forget()

    def _forwards(self, microbatches: int) -> Program:
        """Return this rank's program of an evaluation."""
        if microbatches not in self._evaluations:
            stages = self._executor.virtual
            derived = programs(forward_only(stages, microbatches), stages, ahead=self._executor.ahead)
            self._evaluations[microbatches] = derived[self.mesh.pipeline.rank]
        return self._evaluations[microbatches]

    def _call_loss(self, loss: Loss, output: Any, target: Any) -> tuple[Tensor, Any]:
        result = loss(output, target)
        if not (
            isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].dim() == 0
        ):
            raise UsageError(
                "the loss function must return (sum, count): a 0-d tensor, not a mean, and how many rows it counts"
            )
        count = result[1]
        number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
        # A count on an accelerator is not looked at: that would wait for the device.
        seen = number and not (isinstance(count, Tensor) and count.device.type != "cpu")
        if not number or (seen and not 0 <= float(count) < float("inf")):
            raise UsageError(f"the loss function's count is {count!r}: it must be one finite number, at least 0")
        return result

    def _no_sums(self) -> Tensor:
        return torch.zeros(2, dtype=exact_dtype(self.mesh.device), device=self.mesh.device)

    def _add(self, sums: Tensor, total: Tensor, count: Any) -> None:
        sums[0] += total.detach()
        sums[1] += count.detach().reshape(()) if isinstance(count, Tensor) else count

    def _share(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global loss and count. Of equal sums in one data rank, the last stage's tensor rank 0 gives it."""
        if not (self._executor.is_last and self.mesh.tensor.rank == 0):
            sums.zero_()
        total, count = self.mesh.world.all_reduce(sums)
        return torch.where(count == 0, torch.zeros_like(total), total / count), count

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.optimizer.wait_parameters()  # what runs then may use another module's
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._random_stream("evaluate"):
                yield
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def _random_stream(self, purpose: str) -> Iterator[None]:
        here = self.mesh.coordinate
        with random_stream(
            stream_seed(purpose, self.mesh.seed, here.data, here.pipeline, self.steps), self.mesh.device
        ):
            yield

    def _around(self, rows: int) -> Around:
        """Return what a step does around each forward and backward, see `_place_streams` and `_last`."""
        place = self._place_streams(rows)

        def around(action: Compute) -> AbstractContextManager[None]:
            if action.kind not in _MAKE_GRADIENTS:
                return place(action)
            reduced = self.optimizer.microbatch(last=action in self._last, stage=action.stage)
            return _within(place(action), reduced) if self._streams else reduced

        return around

    def _recorded(self, around: Around) -> AbstractContextManager[Around]:
        return nullcontext(around) if self._recording is None else self._recording.step(around)

    def _place_streams(self, rows: int) -> Around:
        """Return what tells the model's Streams, for each forward and backward, the step and which rows of the global
        batch the microbatch holds: the data ranks' rows lie one after another.
        """
        if not self._streams:
            return lambda _: nullcontext()
        data, each = self.mesh.data, rows // self.microbatches
        first = data.rank * rows
        # A plain stream only needs rows that no other rank has: with as many microbatches each, these are none's.
        if any(streams.mode == "reproducible" for streams in self._streams):
            counts = data.all_gather(torch.tensor([rows], dtype=torch.int32, device=self.mesh.device))
            first = sum(counts.tolist()[: data.rank])

        @contextmanager
        def around(action: Compute) -> Iterator[None]:
            start = first + action.microbatch * each
            with ExitStack() as stack:
                for streams in self._streams:
                    once = action.kind == "forward"  # a backward may run a part of the forward again
                    stack.enter_context(streams.at(self.steps, range(start, start + each), once=once))
                yield

        return around

    def _check_rows(self, inputs: Any, targets: Any) -> None:
        """Refuse rows that differ between the tensor and pipeline ranks of one data rank. With `mesh.checks` only."""
        found: list[str] = []
        map_batch((inputs, targets), lambda x: found.append(fingerprint(x)))
        for comm in (self.mesh.tensor, self.mesh.pipeline):
            comm.check_equal("the batch given to TrainStep, which all tensor and pipeline ranks share,", found)

    def _even_microbatches(self, inputs: Any, targets: Any) -> list[Microbatch]:
        rows = rows_of(inputs, targets)
        if rows % self.microbatches:
            raise LayoutError(
                f"a batch of {rows} rows does not divide into {self.microbatches} microbatches: give each data rank "
                f"a multiple of {self.microbatches} rows, or choose microbatches that divide {rows}"
            )
        return split(inputs, targets, self.mesh.device, [rows // self.microbatches] * self.microbatches)

    def _any_microbatches(self, inputs: Any, targets: Any, least: int) -> list[Microbatch]:
        """Cut into at most `microbatches` parts that differ by at most one row."""
        rows = rows_of(inputs, targets)
        parts = max(min(self.microbatches, rows), least)
        return split(inputs, targets, self.mesh.device, [rows // parts + (i < rows % parts) for i in range(parts)])


@contextmanager
def _within(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
