"""torch.distributed.pipelining's schedule of the name that the work has, with two cuts of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import engine
from benchmarks.engine_model import engine_model
from benchmarks.peers import Step
from benchmarks.peers.gpt import adamw, gpt, halves, mean_loss
from benchmarks.work import Work

# torch's zero bubble of one chunk on each rank is its interleaved one with one.
SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


def even_cut(work: Work) -> list[range]:
    """Return the layers of each stage: an equal share of the blocks, the embedding with the first and the head with the
    last.
    """
    stages, layers = work.stages.count, work.model.layers
    ends = [0, *(1 + layers // stages * stage for stage in range(1, stages)), layers + 2]
    return [range(ends[stage], ends[stage + 1]) for stage in range(stages)]


def torch_pipeline(work: Work, device: torch.device) -> Step:
    """The usual cut, `even_cut`."""
    return _pipeline(work, device, list(gpt(work.model, work.seed)), even_cut(work))


def torch_pipeline_balanced(work: Work, device: torch.device) -> Step:
    """The engine's own cut."""
    cut = engine_model(work, engine.plan_mesh(work.layout, dist.get_rank())).stages
    return _pipeline(work, device, halves(gpt(work.model, work.seed)), cut)


def _pipeline(work: Work, device: torch.device, whole: Sequence[nn.Module], cut: Sequence[range]) -> Step:
    stages = work.stages
    own = stages.on(dist.get_rank())
    modules = [nn.Sequential(*(whole[layer] for layer in cut[stage])).to(device) for stage in own]
    cells = [PipelineStage(module, stage, stages.count, device) for module, stage in zip(modules, own, strict=True)]
    kind = SCHEDULES[work.schedule]
    which = cells[0] if issubclass(kind, PipelineScheduleSingle) else cells
    schedule = kind(which, work.microbatches, loss_fn=mean_loss)
    optimizer = adamw([parameter for module in modules for parameter in module.parameters()])

    def step(ids: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (ids[:, :-1].contiguous(),) if 0 in own else ()
        last = {"target": ids[:, 1:].contiguous(), "losses": losses} if stages.count - 1 in own else {}
        # Joining the microbatches' logits would cost time and memory for nothing.
        schedule.step(*inputs, **last, return_outputs=False)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step
