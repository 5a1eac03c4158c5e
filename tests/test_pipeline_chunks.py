"""Models of several chunks on each rank, gpipe, interleaved and users' schedules: equal to one plain process in float64
to 1e-10 relative; names, states, evaluation and prediction; and what is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout, PipelineModel, plan_mesh
from engine.errors import LayoutError, UsageError
from engine.pipeline.schedule import Compute, Stages
from engine.pipeline.schedules import one_f_one_b
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt, train_plain
from tests.test_parity import ADAMW, TOLERANCE, worst_error
from tests.world import World, WorldError, refusals

SIZES = {"layers": 6, "hidden": 8, "heads": 2, "sequence": 4, "vocabulary": 12}
STEPS = 3


@dataclass(frozen=True)
class Case:
    schedule: Any
    layout: Layout
    microbatches: int
    tied: bool
    chunks: int = 2
    placement: str = "loop"
    stage: int = 2
    balance: Any = "uniform"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.__name__
        size = f"d{self.layout.data}p{self.layout.pipeline}t{self.layout.tensor}"
        tied = "tied" if self.tied else "own"
        more = ("" if self.balance == "uniform" else "-uneven") + ("-sequence" if self.sequence_parallel else "")
        return f"{name}-{size}-c{self.chunks}{self.placement}-m{self.microbatches}-z{self.stage}-{tied}{more}"


def eager(stages: Stages, microbatches: int) -> list[list[Compute]]:
    """A user's own: each microbatch's forward as soon as can be, backwards in odd order; first and last rank differ."""
    plan: list[list[Compute]] = []
    for rank in range(stages.ranks):
        own, order = stages.on(rank), [*range(microbatches)]
        if rank % 2:
            order = [*order[1::2], *order[::2]]
        plan.append([Compute("forward", stage, i) for stage in own for i in order])
        plan[-1] += [Compute("backward", stage, i) for stage in reversed(own) for i in order]
    return plan


GRID = [
    Case(schedule, Layout(pipeline=ranks), microbatches, tied)
    for schedule, ranks, microbatches, tied in itertools.product(
        ("gpipe", "interleaved"), (2, 4), (1, 3, 4, 8), (False, True)
    )
]
OTHERS = [
    Case("gpipe", Layout(pipeline=2), 3, True, chunks=1),
    Case("gpipe", Layout(pipeline=4), 3, True, placement="v"),
    Case("gpipe", Layout(pipeline=2), 4, False, chunks=4, placement="v"),
    Case("interleaved", Layout(pipeline=2), 5, True, chunks=4),
    Case("interleaved", Layout(pipeline=1), 3, True),
    Case("gpipe", Layout(pipeline=1), 3, False, chunks=1),
    Case("interleaved", Layout(data=2, pipeline=2, tensor=2), 3, True, stage=1),
    Case("gpipe", Layout(data=2, pipeline=2), 2, True, stage=0, placement="v"),
    Case(eager, Layout(pipeline=2), 5, True, chunks=1),
    Case(eager, Layout(pipeline=3), 4, False, placement="v"),
]


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Global batches of two rows a microbatch. Unequal numbers of targets are ignored."""
    generator = torch.Generator().manual_seed(7)
    rows = case.layout.data * case.microbatches * 2
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(SIZES["vocabulary"], (rows, SIZES["sequence"] + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for row in range(rows):
            targets[row, : (row * row + row) % 4] = -100
        batches.append((ids[:, :-1].contiguous(), targets))
    return batches


def train(mesh: engine.Mesh, case: Case) -> dict[str, Any]:
    config = GPTConfig(**SIZES, tied=case.tied, sequence_parallel=case.sequence_parallel)
    layers = gpt_layers(config, mesh.tensor, torch.float64)
    model = PipelineModel(layers, mesh, balance=case.balance, chunks=case.chunks, placement=case.placement)
    result: dict[str, Any] = {"start": engine.full_state_dict(model, mesh), "losses": [], "norms": [], "gradients": []}
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=case.stage, bucket_mib=0.003, **ADAMW)
    options: dict[str, Any] = {"microbatches": case.microbatches, "schedule": case.schedule, "clip_grad_norm": 0.05}
    step = engine.TrainStep(model, optimizer, next_token_loss(mesh.tensor), mesh, **options)
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
    inputs, targets = batches_of(case)[0]
    result["evaluation"] = step.evaluate(inputs[here:], targets[here:]).loss.item()
    output = step.predict(inputs[: 2 + here])
    result["prediction"] = mesh.tensor.all_gather(output, dim=-1)
    return result


@pytest.mark.parametrize("case", [*GRID, *OTHERS], ids=str)
def test_training_with_chunks_equals_plain_pytorch(world: World, case: Case) -> None:
    check_against_plain(world, case)


def check_against_plain(world: World, case: Case) -> None:
    results = world.run(case.layout, train, case)
    plain = plain_gpt(**SIZES, tied=case.tied).double()
    plain.load_state_dict(results[0]["start"])
    wanted = train_plain(plain, batches_of(case), clip=0.05, **ADAMW)
    assert list(results[0]["start"]) == list(plain.state_dict())
    assert list(results[0]["gradients"][0]) == list(wanted["gradients"][0])
    for part in ("losses", "norms", "gradients", "weights"):
        assert worst_error(results[0][part], wanted[part]) < TOLERANCE, part
    inputs, targets = batches_of(case)[0]
    total = count = 0.0
    for here in range(case.layout.data):
        logits = plain(inputs[here:]).flatten(0, 1)
        total += nn.functional.cross_entropy(logits, targets[here:].flatten(), reduction="sum").item()
        count += (targets[here:] != -100).sum().item()
    for rank, result in enumerate(results):
        assert result["evaluation"] == pytest.approx(total / count, rel=TOLERANCE)
        rows = 2 + case.layout.coordinate(rank).data
        assert worst_error(result["prediction"], plain(inputs[:rows]).detach()) < TOLERANCE
        for part in ("losses", "norms", "weights"):
            assert worst_error(result[part], results[0][part]) == 0.0


# ---- models ----------------------------------------------------------------------------------------------------------


def test_chunks_are_placed_in_a_loop_or_a_v_and_names_stay_those_of_one_sequential() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(9)]
    whole = PipelineModel(specs, plan_mesh(Layout(), 0, seed=3)).state_dict()
    for placement, places in (("loop", [[0, 1, 2, 5, 6], [3, 4, 7, 8]]), ("v", [[0, 1, 2, 7, 8], [3, 4, 5, 6]])):
        models = [
            PipelineModel(
                specs, plan_mesh(Layout(pipeline=2), rank, seed=3), balance="uniform", chunks=2, placement=placement
            )
            for rank in range(2)
        ]
        assert [list(model.layers) for model in models] == places
        parts = {name: value for model in models for name, value in model.state_dict().items()}
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)
        assert [(m.is_first, m.is_last) for m in models] == (
            [(True, False), (False, True)] if placement == "loop" else [(True, True), (False, False)]
        )


def test_a_stage_runs_alone_and_the_model_only_as_a_whole() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    x = torch.randn(2, 4)
    model = PipelineModel(specs, plan_mesh(Layout(pipeline=2), 1), balance="uniform", chunks=2)
    assert torch.equal(model.parts()[3](x), model.get_submodule("3")(x))
    with pytest.raises(UsageError, match=r"layers are of 2 stages, with other ranks' between them"):
        model(x)
    whole = PipelineModel(specs, plan_mesh(Layout(), 0), balance="uniform", chunks=2)
    assert torch.equal(whole(x), whole.parts()[1](whole.parts()[0](x)))


def test_the_rank_of_the_first_layer_owns_a_tie() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4, tied={"k": "weight"} if i in (1, 2, 3) else None) for i in range(4)]
    models = [
        PipelineModel(specs, plan_mesh(Layout(pipeline=2), rank), balance="uniform", chunks=2) for rank in range(2)
    ]
    assert [[(t.canonical, t.stages, t.name) for t in model.ties] for model in models] == [
        [("1.weight", (1, 0), "2.weight")],
        [("1.weight", (1, 0), "1.weight")],
    ]
    assert models[1].get_parameter("1.weight") is models[1].get_parameter("3.weight")
    assert torch.equal(models[0].get_parameter("2.weight"), models[1].get_parameter("1.weight"))


def test_chunks_that_the_layers_do_not_fill_are_refused() -> None:
    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
    mesh = plan_mesh(Layout(pipeline=2), 0)
    with pytest.raises(LayoutError, match="3 layers cannot fill 4 pipeline stages"):
        PipelineModel(specs, mesh, chunks=2)
    with pytest.raises(LayoutError, match="names 2 stages, the layout has 4"):
        PipelineModel(specs, mesh, balance=[1, 2], chunks=2)
    with pytest.raises(LayoutError, match="chunks=0: "):
        PipelineModel(specs, mesh, chunks=0)
    with pytest.raises(UsageError, match=r"placement='V' \(did you mean 'v'\?\)|placement='V': choose loop, v"):
        PipelineModel(specs, mesh, placement="V")


# ---- tied in the middle, frozen, in place ----------------------------------------------------------------------------


class Layer(nn.Module):
    """Draws in its constructor; keeps what it returns for its backward, and changes its input in place."""

    def __init__(self, width: int = 4, in_place: bool = True):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(1.5) if self.in_place else x * 1.5).tanh()


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, 4, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def ties(index: int) -> dict[str, str] | None:
    return {"k": "linear.weight"} if index in (1, 2, 5) else None


def train_layers(mesh: engine.Mesh, schedule: str, chunks: int, placement: str, frozen: int) -> Any:
    each = 8 // (chunks * mesh.layout.pipeline)
    # A stage may change what it receives. Between layers of one stage plain PyTorch forbids it.
    specs = [LayerSpec(Layer, in_place=i > 0 and i % each == 0, tied=ties(i)) for i in range(8)]
    model = PipelineModel(specs, mesh, balance="uniform", chunks=chunks, placement=placement)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.split(".")[0]) >= frozen)
    start = engine.full_state_dict(model, mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=3, schedule=schedule)
    results = [step(*rows(6, seed)) for seed in range(2)]
    return start, [(r.loss.item(), r.grad_norm.item()) for r in results], engine.full_state_dict(model, mesh)


@pytest.mark.parametrize(
    ("schedule", "chunks", "placement"),
    [("interleaved", 2, "loop"), ("gpipe", 2, "v"), ("zero_bubble", 1, "loop"), ("zero_bubble_v", 2, "v")],
)
@pytest.mark.parametrize(("ranks", "frozen"), [(2, 0), (4, 0), (2, 1), (1, 0)])
def test_ties_in_the_middle_frozen_stages_and_inputs_changed_in_place(
    world: World, schedule: str, chunks: int, placement: str, ranks: int, frozen: int
) -> None:
    start, steps, weights = world.run(Layout(pipeline=ranks), train_layers, schedule, chunks, placement, frozen)[-1]
    plain = nn.Sequential(*(Layer(in_place=False) for _ in range(8)))
    for index in (2, 5):
        plain[index].linear.weight = plain[1].linear.weight
    plain.load_state_dict(start)
    plain[:frozen].requires_grad_(False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for seed, (loss, norm) in enumerate(steps):
        optimizer.zero_grad()
        wanted = squared(plain(rows(6, seed)[0]), rows(6, seed)[1])[0] / 6
        wanted.backward()
        assert loss == pytest.approx(wanted.item(), rel=1e-12)
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(trained, 1e9).item(), rel=1e-12)
        optimizer.step()
    assert worst_error(weights, dict(plain.state_dict())) < 1e-12


def reload(mesh: engine.Mesh, state: dict[str, Tensor]) -> Any:
    model = PipelineModel(
        [LayerSpec(Layer, in_place=False, tied=ties(i)) for i in range(8)], mesh, balance="uniform", chunks=2
    )
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2, schedule="interleaved")
    step(*rows(4))
    shapes = [step.evaluate(*rows(n)).loss.item() for n in (0, 1, 3, 5)]
    return engine.full_state_dict(model, mesh), shapes


def test_a_plain_state_loads_into_chunks_and_any_number_of_rows_is_evaluated(world: World) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(Layer(in_place=False) for _ in range(8)))
    for index in (2, 5):
        plain[index].linear.weight = plain[1].linear.weight
    state = plain.state_dict()
    for loaded, losses in world.run(Layout(pipeline=2), reload, dict(state)):
        assert list(loaded) == list(state)
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        for n, loss in zip((0, 1, 3, 5), losses, strict=True):
            wanted = squared(plain(rows(n)[0]), rows(n)[1])[0].item() / max(n, 1)
            assert loss == pytest.approx(wanted, rel=1e-12)


class Fails(nn.Module):
    def __init__(self, layer: int):
        super().__init__()
        self.layer, self.calls = layer, 0
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.layer == 2 and self.calls == 6:
            raise ZeroDivisionError("planted in the forward of one stage")
        return self.linear(x)


def train_until_one_fails(mesh: engine.Mesh) -> None:
    model = PipelineModel([LayerSpec(Fails, i) for i in range(4)], mesh, balance="uniform", chunks=2)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=4, schedule="interleaved")
    for seed in range(3):
        step(*rows(8, seed))


def test_one_rank_that_raises_while_sends_are_under_way_ends_all(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(Layout(pipeline=2), train_until_one_fails)
    assert caught.value.cause == 0
    assert "planted in the forward of one stage" in caught.value.reports[0]
    assert "CommunicationError: rank" in caught.value.reports[1]


# ---- what is refused -------------------------------------------------------------------------------------------------


def backward_first(stages: Stages, microbatches: int) -> Any:
    plan = [list(actions) for actions in one_f_one_b(stages, microbatches)]
    plan[1] = [Compute("backward", 1, 0), *[a for a in plan[1] if a != Compute("backward", 1, 0)]]
    return plan


def never_ends(stages: Stages, microbatches: int) -> Any:
    f, b = (lambda s, i: Compute("forward", s, i)), (lambda s, i: Compute("backward", s, i))
    return [[f(0, 0), b(0, 0), f(0, 1), b(0, 1)], [f(1, 1), b(1, 1), f(1, 0), b(1, 0)]]


def nothing(stages: Stages, microbatches: int) -> Any:
    return []


def refuse(mesh: engine.Mesh, chunks: int) -> list[str]:
    model = PipelineModel([LayerSpec(Layer, in_place=False) for _ in range(4)], mesh, balance="uniform", chunks=chunks)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)

    def make(schedule: Any) -> engine.TrainStep:
        return engine.TrainStep(model, optimizer, squared, mesh, microbatches=2, schedule=schedule)

    fits, other = ("1f1b", "interleaved") if chunks == 1 else ("interleaved", "1f1b")
    names = (other, "zero_bubble_v", "gpip", 5)
    functions = (backward_first, never_ends, nothing) if chunks == 1 else ("zero_bubble",)
    with mesh.ledger as ledger:
        texts = refusals([lambda s=s: make(s) for s in (*names, *functions)])
    differ = refusals([lambda: make("gpipe" if mesh.rank else eager)])
    make(fits)(*rows(4))  # the mesh still works
    return [*texts, *differ, str(sum(ledger.wire_bytes_by_axis().values()))]


BROKEN = [
    "zero_bubble_v needs 2 chunks on each rank, placed in a V, not ",
    "schedule='gpip' (did you mean 'gpipe'?): choose 1f1b, gpipe, interleaved, zero_bubble, zero_bubble_v",
    "schedule=5: choose 1f1b, gpipe, interleaved, zero_bubble, zero_bubble_v",
]


def test_schedules_that_cannot_run_are_refused_on_every_rank_before_anything_is_sent(world: World) -> None:
    expected = [
        "interleaved needs at least 2 chunks on each rank, placed in a loop, not 1 on 2 ranks",
        *BROKEN,
        "rank 1, action 0 (backward of stage 1, microbatch 0): its forward has not run: list that before it",
        "deadlock: rank 0 waits, before backward of stage 0, microbatch 0",
        "a list of actions for each of the 2 ranks, not 0 lists",
        "TrainStep's options differs over axis 'world'",
        "0",
    ]
    for texts in world.run(Layout(pipeline=2), refuse, 1):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_schedules_that_do_not_fit_the_chunks_are_refused(world: World) -> None:
    for texts in world.run(Layout(pipeline=2), refuse, 2):
        not_two = "has one chunk on each rank, not 2 on 2 ranks, placement='loop'"
        expected = [f"1f1b {not_two}", *BROKEN, f"zero_bubble {not_two}", "differs", "0"]
        for text, part in zip(texts, expected, strict=True):
            assert part in text
