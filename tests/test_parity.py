"""The grid: training on any layout equals one plain PyTorch process on the same global batch, in float64 to 1e-10
relative.

Compared are the loss, the norm before clipping, every parameter's gradient (as clipped), of each of three AdamW
steps, and every parameter after them. The reference starts from `full_state_dict` and uses nothing of `engine`. Every
data rank has its own number of ignored targets in every microbatch, so that a mean of means shows.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine import Layout
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt, train_plain
from tests.world import World

SEED = 20261130
TOLERANCE = 1e-10
STEPS = 3
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SIZES = {"layers": 4, "hidden": 16, "heads": 4, "sequence": 8, "vocabulary": 30}  # 4 tensor ranks fill up to 32


INACTIVE = 1e6  # a clipping norm that no gradient here reaches


@dataclass(frozen=True)
class Case:
    layout: Layout
    stage: int
    microbatches: int
    clip: float | None
    tied: bool
    rows: int = 1  # of each microbatch
    bucket_mib: float = 25
    share: bool = False  # one copy of the parameters for all data ranks
    sequence_parallel: bool = False
    key_heads: int = 4  # of 4 heads; fewer than tensor ranks are shared
    accumulate: str | None = None

    def __str__(self) -> str:
        size = f"d{self.layout.data}p{self.layout.pipeline}t{self.layout.tensor}"
        bucket = "" if self.bucket_mib == 25 else f"-b{self.bucket_mib}"
        clip = {None: "free", INACTIVE: "loose"}.get(self.clip, "clip")
        switches = f"{clip}-{'tied' if self.tied else 'own'}"
        more = ("-shared" if self.share else "") + ("-sequence" if self.sequence_parallel else "")
        more += "" if self.key_heads == SIZES["heads"] else f"-k{self.key_heads}"
        more += "" if self.accumulate is None else f"-{self.accumulate}"
        return f"{size}-z{self.stage}-m{self.microbatches}-{switches}{bucket}{more}"


def all_layouts() -> list[Layout]:
    sizes = itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 4))
    return [Layout(data=d, pipeline=p, tensor=t) for d, p, t in sizes if d * p * t <= 8]


def covering_cases() -> list[Case]:
    """A sample in which every pair of values of any two factors stands together in at least one case (greedy, from
    SEED).
    """
    switch = [False, True]
    factors: list[list[Any]] = [all_layouts(), [0, 1, 2], [1, 3, 8], [None, 0.05, INACTIVE], switch, switch, [4, 2, 1]]
    draw = random.Random(SEED)
    everything = list(itertools.product(*factors))
    draw.shuffle(everything)
    pairs = list(itertools.combinations(range(len(factors)), 2))
    wanted = {(i, j, a, b) for i, j in pairs for a in factors[i] for b in factors[j]}

    def new(values: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(i, j, values[i], values[j]) for i, j in pairs} & wanted

    chosen = []
    while wanted:
        best = max(everything, key=lambda values: len(new(values)))
        wanted -= new(best)
        chosen.append(best)
    return [
        Case(
            *values,
            1 + n % 2,
            (25, 0.003)[n % 3 == 0],
            sequence_parallel=sequence,
            key_heads=keys,
            accumulate="full" if values[1] == 2 and n % 2 else None,
        )
        for n, (*values, sequence, keys) in enumerate(chosen)
    ]


def sharing_cases() -> list[Case]:
    """One copy of the parameters for all data ranks, where ranks share memory: each axis beside data, and all three."""
    if os.environ.get("ENGINE_TRANSPORT", "shm") != "shm":
        return []
    shapes = [(2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 1), (2, 2, 2)]
    return [
        Case(Layout(data=d, pipeline=p, tensor=t), 2, 3, (0.05, None)[n % 2], n % 3 > 0, 1, (25, 0.003)[n % 2], True)
        for n, (d, p, t) in enumerate(shapes)
    ]


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Global batches; data rank r's rows are the r-th equal part. Unequal numbers of targets are ignored."""
    generator = torch.Generator().manual_seed(SEED)
    rows = case.layout.data * case.microbatches * case.rows
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(SIZES["vocabulary"], (rows, SIZES["sequence"] + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for row in range(rows):
            targets[row, : (row * row + row) % 5] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


def train_parallel(mesh: engine.Mesh, case: Case, adamw: dict[str, Any]) -> dict[str, Any]:
    """What every rank does; returns the same values on each."""
    config = GPTConfig(**SIZES, tied=case.tied, sequence_parallel=case.sequence_parallel, key_heads=case.key_heads)
    model = engine.PipelineModel(gpt_layers(config, mesh.tensor, torch.float64), mesh)
    result: dict[str, Any] = {"start": engine.full_state_dict(model, mesh), "losses": [], "norms": [], "gradients": []}
    optimizer = engine.zero.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        mesh,
        stage=case.stage,
        bucket_mib=case.bucket_mib,
        accumulate=case.accumulate,
        share_parameters=case.share,
        **adamw,
    )
    loss = next_token_loss(mesh.tensor, SIZES["vocabulary"])
    step = engine.TrainStep(model, optimizer, loss, mesh, microbatches=case.microbatches, clip_grad_norm=case.clip)
    finish = optimizer.finish_gradients

    def finish_and_look(*args: Any) -> Tensor:
        norm = finish(*args)
        result["gradients"].append(optimizer.full_gradients())
        return norm

    optimizer.finish_gradients = finish_and_look
    here, ranks = mesh.data.rank, mesh.data.size
    for inputs, targets in batches_of(case):
        done = step(inputs.tensor_split(ranks)[here], targets.tensor_split(ranks)[here])
        result["losses"].append(done.loss.item())
        result["norms"].append(done.grad_norm.item())
    result["weights"] = engine.full_state_dict(model, mesh)
    return result


def worst_error(got: Any, wanted: Any) -> float:
    """Largest difference, relative to the largest magnitude of the tensor it is in; names and counts must agree."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        return max(worst_error(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        assert len(got) == len(wanted)
        return max(worst_error(g, w) for g, w in zip(got, wanted, strict=True))
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    assert got.shape == wanted.shape
    if not (got.isfinite().all() and wanted.isfinite().all()):
        return float("inf")
    return ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)).item()


def test_a_number_that_is_none_cannot_pass_as_equal() -> None:
    nan = float("nan")
    assert worst_error([1.0, nan], [1.0, nan]) == float("inf")
    assert (
        worst_error({"a": torch.ones(2), "b": torch.tensor([1.0, nan])}, {"a": torch.ones(2), "b": torch.ones(2)}) > 1
    )


def reference(case: Case, start: dict[str, Tensor]) -> dict[str, Any]:
    model = plain_gpt(**SIZES, tied=case.tied, key_heads=case.key_heads).double()
    model.load_state_dict(start)
    return train_plain(model, batches_of(case), clip=case.clip, **ADAMW)


@pytest.mark.parametrize("case", [*covering_cases(), *sharing_cases()], ids=str)
def test_training_equals_plain_pytorch(world: World, case: Case, record_property: Any) -> None:
    results = world.run(case.layout, train_parallel, case, ADAMW)
    wanted = reference(case, results[0]["start"])
    errors = {part: worst_error(results[0][part], wanted[part]) for part in ("losses", "norms", "gradients", "weights")}
    record_property("worst_relative_error", max(errors.values()))
    assert max(errors.values()) < TOLERANCE, errors
    if case.clip is not None:
        assert (max(wanted["norms"]) > case.clip) == (case.clip != INACTIVE), "the case must clip, or must not"
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"]
        assert other["norms"] == results[0]["norms"]
        assert worst_error(other["weights"], results[0]["weights"]) == 0.0
