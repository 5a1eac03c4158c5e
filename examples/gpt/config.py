"""What can be set for a training run, and where it is read from: a YAML file, then the command line.

Every field is an option of the same name (`--optimizer.learning_rate 1e-3`); an unknown one is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from jsonargparse import auto_cli, set_parsing_settings

import engine
from examples.gpt.model import GPTConfig

BYTES = 256  # tokens are bytes
PROGRAM = "examples.gpt.train"


class UserError(ValueError):
    """A mistake in the configuration or the data: shown as one line, without a traceback."""


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning rate over time, and how its state lies over the data axis."""

    learning_rate: float = 2e-3
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = 30
    """Steps over which the learning rate rises linearly from 0."""
    final_fraction: float = 0.05
    """Part of `learning_rate` that is left at the last step; between them it falls along a cosine."""
    weight_decay: float = 0.1
    """Decay of the matrices; embeddings, norms and biases have none."""
    clip_grad_norm: float | None = 1.0
    """Gradients are clipped to this global 2-norm; null: they are not."""
    zero_stage: int = 2
    """0: plain data parallelism, 1: optimizer state is sharded over the data axis, 2: gradients too."""

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"optimizer.learning_rate={self.learning_rate}: must be above 0")
        require(self.warmup_steps >= 0, f"optimizer.warmup_steps={self.warmup_steps}: must be at least 0")
        require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"optimizer.clip_grad_norm={self.clip_grad_norm}: must be above 0; null does not clip",
        )
        require(self.zero_stage in (0, 1, 2), f"optimizer.zero_stage={self.zero_stage}: must be 0, 1 or 2")
        require(
            0 <= self.final_fraction <= 1, f"optimizer.final_fraction={self.final_fraction}: must be between 0 and 1"
        )


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on the bytes of text files, over data x pipeline x tensor ranks.

    torchrun --standalone --nproc-per-node 8 -m examples.gpt.train --config examples/gpt/config.yaml
    """

    layout: engine.Layout = field(default_factory=lambda: engine.Layout(data=2, pipeline=2, tensor=2))
    """Sizes of the three axes; their product is the number of processes. data=-1 takes as many as were started."""
    model: GPTConfig = field(default_factory=lambda: GPTConfig(sequence=64))
    """Sizes of the model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    data: str | None = None
    """Text file, or folder of text files, to learn from; null: the source of Python's standard library."""
    validation_fraction: float = 0.1
    """Part of the text, at its end, that is never trained on."""
    steps: int = 500
    """Optimizer steps."""
    batch: int = 16
    """Rows of one step, over all data ranks together."""
    microbatches: int = 2
    """Parts into which each data rank's rows are cut, so that the pipeline's stages work at the same time."""
    evaluate_every: int = 100
    """Steps between two evaluations on the held-out text; the last step is always followed by one."""
    validation_rows: int = 256
    """Most rows of one evaluation, over all data ranks together; spread evenly over the held-out text."""
    sample_prompt: str = "def "
    """What every sample starts with."""
    sample_rows: int = 3
    """Samples to draw after training."""
    sample_bytes: int = 160
    """Bytes to add to the prompt in each sample; 0: draw no samples."""
    temperature: float = 0.7
    """Divides the logits before sampling: below 1 favours likely bytes."""
    seed: int = 0
    """Decides weights, batches and samples. The same seed gives the same batches on every layout."""
    device: str = "auto"
    """cpu, cuda or npu; auto takes an accelerator where there is one."""
    timeout: float = 60.0
    """Seconds that a rank waits for the others before it gives up."""
    out: str = "runs"
    """Folder that gets one folder for each run, and `latest`, a link to the newest."""
    name: str | None = None
    """Name of this run's folder; null: date and time."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "microbatches", "evaluate_every", "validation_rows", "sample_rows"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: must be at least 1")
        require(self.sample_bytes >= 0, f"sample_bytes={self.sample_bytes}: must be at least 0")
        require(self.temperature > 0, f"temperature={self.temperature}: must be above 0")
        require(self.sample_prompt != "", "sample_prompt is empty: a sample needs at least one byte to start from")
        require(
            0 < self.validation_fraction < 1,
            f"validation_fraction={self.validation_fraction}: must be between 0 and 1",
        )
        require(
            self.name is None or (re.fullmatch(r"[\w.-]*\w[\w.-]*", self.name) is not None and self.name != "latest"),
            f"name={self.name!r}: a folder's name of letters, digits, '-', '_' and '.', and not 'latest'",
        )
        self._check_model()

    def _check_model(self) -> None:
        tensor, heads, vocabulary = self.layout.tensor, self.model.heads, self.model.vocabulary
        require(
            heads % tensor == 0,
            f"model.heads={heads} do not divide over tensor({tensor}): use a multiple of {tensor} heads",
        )
        require(
            vocabulary >= BYTES,
            f"model.vocabulary={vocabulary}: tokens are bytes, so {BYTES} ids are needed: use at least {BYTES}",
        )
        sequence = self.model.sequence
        require(
            sequence % tensor == 0 or not self.model.sequence_parallel,
            f"model.sequence={sequence} does not divide over tensor({tensor}), as sequence_parallel needs: "
            f"use {-(-sequence // tensor) * tensor}",
        )


def check_batch(config: TrainConfig, data: int) -> None:
    """Raise UserError when the batch does not divide over `data` data ranks and their microbatches."""
    parts = data * config.microbatches
    fitting = max(1, round(config.batch / parts)) * parts
    require(
        config.batch % parts == 0,
        f"batch={config.batch} rows do not divide into data({data}) x microbatches({config.microbatches}) = {parts} "
        f"equal parts: use batch={fitting}, or other microbatches",
    )


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration from the command line's `arguments` and the files they name.

    Raises UserError, or an EngineError, for anything that cannot be read or does not fit.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        config: TrainConfig = auto_cli(
            TrainConfig, args=list(arguments), as_positional=False, exit_on_error=False, allow_abbrev=False
        )
    except ArgumentError as error:
        raise UserError(_on_one_line(str(error)) + _nearest_option(str(error))) from error
    except (engine.EngineError, UserError):
        raise
    except ValueError as error:
        raise UserError(_on_one_line(str(error))) from error
    return config


def check_started(layout: engine.Layout, arguments: Sequence[str]) -> None:
    """Raise UserError when the layout needs several processes and this one was not started by torchrun."""
    processes = abs(layout.data) * layout.pipeline * layout.tensor
    command = f"torchrun --standalone --nproc-per-node {processes} -m {PROGRAM} {shlex.join(arguments)}".rstrip()
    require(
        processes == 1 or "RANK" in os.environ,
        f"{layout} needs {processes} processes, but this one was started alone. Start them with: {command}",
    )


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _nearest_option(message: str) -> str:
    """Return a hint for a misspelt option in jsonargparse's message; it has none of its own."""
    found = re.search(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)'", message)
    if found is None:
        return ""
    wrong = found.group(1) or found.group(2)
    names = list(_option_names(TrainConfig))
    # Within a group of a YAML file the message has only the last part of the name.
    near = difflib.get_close_matches(wrong, [*names, *(name.rpartition(".")[2] for name in names)], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _option_names(config: Any, prefix: str = "") -> Iterable[str]:
    types = get_type_hints(config)
    for each in fields(config):
        yield prefix + each.name
        if is_dataclass(types[each.name]):
            yield from _option_names(types[each.name], f"{prefix}{each.name}.")
