"""Train a GPT on text over any data x pipeline x tensor layout, as a user of the engine would write it.

    torchrun --standalone --nproc-per-node 8 -m examples.gpt.train --config examples/gpt/config.yaml

The options are in config.py; `python -m examples.gpt.train --help` lists them. Everything that a run writes lies in
its own folder; `runs/latest` is a link to the newest.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import engine
from engine.device import exact_dtype, peak_memory_mib
from examples.gpt import report
from examples.gpt.config import OptimizerConfig, TrainConfig, UserError, check_batch, check_started, read_config
from examples.gpt.data import Text, own_rows, read_text, training_windows, validation_windows
from examples.gpt.model import gpt_layers, next_token_loss
from examples.gpt.run import exit_with, open_folder, rank_log
from examples.gpt.sample import sample_text

_NOT_DECAYED = ("token.weight", "position.weight", "project.weight")  # the embeddings; the last is tied to the first


def main(arguments: Sequence[str]) -> None:
    """Train as the command line's `arguments` say. Every process of the job runs this."""
    try:
        config = read_config(arguments)
        check_started(config.layout, arguments)
        with engine.init(
            config.layout, device=config.device, timeout=config.timeout, init_timeout=config.timeout, seed=config.seed
        ) as mesh:
            run(config, mesh)
    except (engine.EngineError, UserError) as error:
        exit_with(error)
    except KeyboardInterrupt:
        sys.exit(130)


def run(config: TrainConfig, mesh: engine.Mesh) -> None:
    """Train, then write and show what came of it. Collective over the mesh."""
    started = time.perf_counter()
    mesh.world.check_equal("the configuration", config)
    check_batch(config, mesh.layout.data)
    text = read_text(config.data, config.validation_fraction, config.model.sequence)
    mesh.world.check_equal("the training text (SHA-256)", text.digest)
    folder = open_folder(config, mesh)
    with rank_log(folder, mesh):
        logging.info("text: %s", text)
        step = build_step(config, mesh)
        records = fit(config, mesh, step, text, folder)
        seconds = time.perf_counter() - started
        finish(config, mesh, step, records, seconds, folder)


def build_step(config: TrainConfig, mesh: engine.Mesh) -> engine.TrainStep:
    """Return the training step over this rank's part of the model."""
    model = engine.PipelineModel(gpt_layers(config.model, mesh.tensor), mesh)
    logging.info("layers %s", ", ".join(f"{i} ({model.specs[i]})" for i in model.layers))
    optimizer = engine.zero.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        mesh,
        groups=parameter_groups(model, config.optimizer.weight_decay),
        stage=config.optimizer.zero_stage,
        lr=config.optimizer.learning_rate,
        betas=(0.9, 0.95),
    )
    return engine.TrainStep(
        model,
        optimizer,
        next_token_loss(mesh.tensor, config.model.vocabulary),
        mesh,
        microbatches=config.microbatches,
        clip_grad_norm=config.optimizer.clip_grad_norm,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return torch's parameter groups: the matrices with decay; embeddings, norms and biases without."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.dim() > 1 and not name.endswith(_NOT_DECAYED)]
    decayed = {name for name, _ in matrices}
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def learning_rate_factor(config: OptimizerConfig, steps: int, step: int) -> float:
    """Return the part of the highest learning rate at `step` (from 0): linear warm-up, then a cosine."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    return config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * done)) / 2


def fit(
    config: TrainConfig, mesh: engine.Mesh, step: engine.TrainStep, text: Text, folder: Path
) -> list[report.Record]:
    """Run all steps and return their records, equal on every rank but for the speed. Collective."""
    sequence = config.model.sequence
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        step.optimizer, lambda i: learning_rate_factor(config.optimizer, config.steps, i)
    )
    held_out = own_rows(
        validation_windows(text.validation, sequence, config.validation_rows), mesh.data.rank, mesh.data.size
    )
    records: list[report.Record] = []
    console = Console()
    if mesh.rank == 0:
        print(f"{mesh.layout} = {mesh.layout.world_size} processes on {mesh.device.type}; {text}", flush=True)
    with report.Progress(console, config.steps, folder / "metrics.jsonl") if mesh.rank == 0 else nullcontext() as shown:
        for number in range(1, config.steps + 1):
            windows = training_windows(text.train, sequence, config.batch, config.seed, number)
            if number == config.steps:
                mesh.ledger.start()  # the last step's bytes go into the summary
            begun = time.perf_counter()
            result = step(*own_rows(windows, mesh.data.rank, mesh.data.size))
            mesh.ledger.stop()
            loss = result.loss.item()  # waits for the device
            speed = result.tokens.item() / (time.perf_counter() - begun)
            if not math.isfinite(loss):
                raise UserError(f"the loss of step {number} is {loss}: lower optimizer.learning_rate")
            evaluated = number % config.evaluate_every == 0 or number == config.steps
            valid_loss = float(step.evaluate(*held_out).loss) if evaluated else None
            lr = float(scheduler.get_last_lr()[0])
            scheduler.step()
            records.append(report.Record(number, loss, float(result.grad_norm), lr, speed, valid_loss))
            logging.info("%s", records[-1])
            if shown is not None:
                shown.add(records[-1])
    return records


def finish(
    config: TrainConfig,
    mesh: engine.Mesh,
    step: engine.TrainStep,
    records: Sequence[report.Record],
    seconds: float,
    folder: Path,
) -> None:
    """Write the weights, samples, curve and summary, and show them. Collective."""
    state = engine.full_state_dict(step.model, mesh, rank=0)
    samples = draw_samples(config, mesh, step)
    summary = summarise(config, mesh, records, seconds)
    if mesh.rank != 0:
        return
    torch.save(state, folder / "model.pt")
    if samples:
        (folder / "sample.txt").write_text("\n----\n".join(samples) + "\n")
    report.save_curve(records, mesh.layout, folder / "loss.png")
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    console = Console()
    report.show_samples(console, samples)
    report.show_table(console, summary, mesh.layout, folder)


def draw_samples(config: TrainConfig, mesh: engine.Mesh, step: engine.TrainStep) -> list[str]:
    """Return text drawn from the model, on the ranks of data rank 0; the others need not take part and get none."""
    if mesh.data.rank != 0 or config.sample_bytes == 0:
        return []
    return sample_text(
        step,
        mesh,
        config.sample_prompt,
        rows=config.sample_rows,
        new_bytes=config.sample_bytes,
        sequence=config.model.sequence,
        temperature=config.temperature,
        seed=config.seed,
    )


def summarise(
    config: TrainConfig, mesh: engine.Mesh, records: Sequence[report.Record], seconds: float
) -> report.Summary:
    """Return the run in one value. Collective."""
    peak = torch.tensor(peak_memory_mib(mesh.device), dtype=torch.float32, device=mesh.device)
    mesh.world.all_reduce(peak, "max")
    own_bytes = mesh.ledger.wire_bytes_by_axis()
    axes = (*engine.layout.AXES, "world")
    sent = torch.tensor([own_bytes.get(axis, 0) for axis in axes], dtype=exact_dtype(mesh.device), device=mesh.device)
    mesh.world.all_reduce(sent)
    # One rank of a layout of one holds the whole model, with its tied parameters as one; nothing is sent.
    alone = engine.plan_mesh(engine.Layout(), 0)
    whole = engine.PipelineModel(gpt_layers(config.model, alone.tensor), alone)
    tokens = config.batch * config.model.sequence
    valid_loss = records[-1].valid_loss
    assert valid_loss is not None  # the last step is always evaluated
    return report.Summary(
        layout=asdict(mesh.layout),
        world_size=mesh.layout.world_size,
        parameters=sum(parameter.numel() for parameter in whole.parameters()),
        steps=len(records),
        loss_first=records[0].loss,
        loss_last=records[-1].loss,
        valid_loss=valid_loss,
        tokens_per_second=tokens * len(records) / sum(tokens / record.tokens_per_second for record in records),
        seconds=seconds,
        peak_memory_mib=peak.item(),
        comm_bytes_per_step={axis: int(count) for axis, count in zip(axes, sent.tolist(), strict=True)},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
