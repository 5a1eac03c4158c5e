"""torch.distributed.pipelining's 1F1B, alone and together with FSDP2 and DTensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers import Step
from benchmarks.peers.gpt import Block, adamw, gpt, mean_loss
from benchmarks.peers.tensor_parallel import cut_blocks
from benchmarks.work import Work


def stage_module(work: Work, stage: int) -> nn.Sequential:
    """Return one stage: an equal share of the blocks, with the embedding on the first and the head on the last."""
    stages = work.layout.pipeline
    share = work.model.layers // stages
    whole = list(gpt(work.model, work.seed))
    first = 0 if stage == 0 else 1 + stage * share
    last = len(whole) if stage == stages - 1 else 1 + (stage + 1) * share
    return nn.Sequential(*whole[first:last])


def torch_1f1b(work: Work, device: torch.device) -> Step:
    """PipelineStage and Schedule1F1B."""
    return torch_3d(work, device)


def torch_3d(work: Work, device: torch.device) -> Step:
    """FSDP2 x DTensor x 1F1B, whichever axes are above 1: each block cut over tensor, sharded over data."""
    layout = work.layout
    sizes = (layout.pipeline, layout.data, layout.tensor)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    stage, data = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    module = stage_module(work, stage).to(device)
    if layout.tensor > 1:
        cut_blocks(module, mesh["tensor"])
    blocks = [block for block in module if isinstance(block, Block)]
    if layout.data > 1:
        for each in (*blocks, module):
            fully_shard(each, mesh=mesh["data"], reshard_after_forward=False)
    kinds: dict[int, list[Tensor]] = {}
    for parameter in module.parameters():
        dims = parameter.device_mesh.ndim if hasattr(parameter, "device_mesh") else 0
        kinds.setdefault(dims, []).append(parameter)
    optimizers = [adamw(parameters) for parameters in kinds.values()]
    cell = PipelineStage(module, stage, layout.pipeline, device, group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(cell, work.microbatches, loss_fn=mean_loss)

    def step(ids: Tensor) -> Tensor | None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = ids[data * work.rows :][: work.rows]
        losses: list[Tensor] = []
        if stage == 0:
            schedule.step(rows[:, :-1].contiguous())
        elif stage == layout.pipeline - 1:
            schedule.step(target=rows[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step()
        for optimizer in optimizers:
            optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step
