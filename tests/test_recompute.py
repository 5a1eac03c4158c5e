"""Recomputation in PipelineModel: the numbers of plain PyTorch, and of the same run without it with dropout; what is
kept for backward, in bytes; what stays as it is; what is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import engine
from engine import LayerSpec, Layout, PipelineModel, plan_mesh
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt, train_plain
from tests.test_parity import ADAMW, TOLERANCE, worst_error
from tests.world import World, refusals

DOUBLE = torch.float64
SIZES = {"layers": 4, "hidden": 8, "heads": 2, "sequence": 4, "vocabulary": 12}


def watch_gradients(optimizer: engine.zero.ZeroOptimizer) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    finish = optimizer.finish_gradients

    def finish_and_look(*args: Any) -> Tensor:
        norm = finish(*args)
        found.append(optimizer.full_gradients())
        return norm

    optimizer.finish_gradients = finish_and_look
    return found


# ---- the same numbers ------------------------------------------------------------------------------------------------


def ids(number: int, rows: int) -> tuple[Tensor, Tensor]:
    tokens = (torch.arange(rows * 5).view(rows, 5) ** 2 + 5 * number) % SIZES["vocabulary"]
    targets = tokens[:, 1:].clone()
    targets[0, :2] = -100
    return tokens[:, :-1].contiguous(), targets


def train_gpt(mesh: engine.Mesh, schedule: str, choices: list[Any], sequence_parallel: bool) -> list[dict[str, Any]]:
    results = []
    config = GPTConfig(**SIZES, tied=True, sequence_parallel=sequence_parallel)
    for choice in choices:
        layers = gpt_layers(config, mesh.tensor, DOUBLE)
        options: dict[str, Any] = {"interleaved": {"chunks": 2}, "zero_bubble_v": {"chunks": 2, "placement": "v"}}
        model = PipelineModel(layers, mesh, balance="uniform", recompute=choice, **options.get(schedule, {}))
        start = engine.full_state_dict(model, mesh)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, bucket_mib=0.003, **ADAMW)
        step = engine.TrainStep(
            model, optimizer, next_token_loss(mesh.tensor), mesh, microbatches=3, schedule=schedule, clip_grad_norm=0.05
        )
        gradients = watch_gradients(optimizer)
        here, ranks = mesh.data.rank, mesh.data.size
        done = [step(*(x.chunk(ranks)[here] for x in ids(number, 3 * ranks))) for number in range(2)]
        results.append(
            {
                "start": start,
                "losses": [result.loss.item() for result in done],
                "norms": [result.grad_norm.item() for result in done],
                "gradients": gradients,
                "weights": engine.full_state_dict(model, mesh),
            }
        )
    return results


@pytest.mark.parametrize(
    ("layout", "schedule", "sequence_parallel"),
    [
        (Layout(pipeline=2), "1f1b", False),
        (Layout(pipeline=2), "interleaved", False),
        (Layout(data=2, pipeline=2), "gpipe", False),
        (Layout(pipeline=2), "zero_bubble_v", False),
        (Layout(pipeline=2, tensor=2), "1f1b", True),
        (Layout(pipeline=2, tensor=2), "zero_bubble", True),
        (Layout(tensor=2), "1f1b", False),
    ],
    ids=str,
)
def test_training_equals_plain_pytorch(world: World, layout: Layout, schedule: str, sequence_parallel: bool) -> None:
    choices = ["full", 2, ["*.up", "3.qkv", "*.norm", "5"]]
    results = world.run(layout, train_gpt, schedule, choices, sequence_parallel)[0]
    plain = plain_gpt(**SIZES, tied=True).double()
    plain.load_state_dict(results[0]["start"])
    wanted = train_plain(plain, [ids(number, 3 * layout.data) for number in range(2)], clip=0.05, **ADAMW)
    for result in results:
        for part in ("losses", "norms", "gradients", "weights"):
            assert worst_error(result[part], wanted[part]) < TOLERANCE, part


class Block(nn.Module):
    """Takes and gives a pair inside a stage; the second is a running sum of all layers' outputs, or None."""

    def __init__(self, streams: random.Streams, p: float, first: bool, last: bool):
        super().__init__()
        self.first, self.last = first, last
        self.mlp = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Tanh(), nn.Dropout(p))
        self.up = ColumnParallelLinear(4, 8, streams.comm, dtype=DOUBLE)
        self.drop = random.Dropout(p, streams, split_dim=-1)
        self.down = RowParallelLinear(8, 4, streams.comm, dtype=DOUBLE)

    def forward(self, given: Any) -> Any:
        x, total = (given, None) if self.first else given
        y = self.mlp(x)
        x = x + self.down(self.drop(self.up(y).tanh()))
        total = y if total is None else total + y
        return x + total if self.last else (x, total)


class Plain(nn.Module):
    """Two of them without dropout, as torch has it: (x, y) -> x + the sum of both layers' y."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Tanh())
        self.up, self.down = nn.Linear(4, 8, dtype=DOUBLE), nn.Linear(8, 4, dtype=DOUBLE)


def plain_forward(layers: nn.Sequential, x: Tensor) -> Tensor:
    for pair in (layers[0:2], layers[2:4], layers[4:6]):
        total: Any = 0.0
        for layer in pair:
            y = layer.mlp(x)
            x, total = x + layer.down(layer.up(y).tanh()), total + y
        x = x + total
    return x


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.shape[0]


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, 4, generator=generator, dtype=DOUBLE) for _ in range(2))  # type: ignore[return-value]


def ties(index: int) -> dict[str, str] | None:
    """Of six layers on three stages: `a` on all stages and twice on the middle one, `b` within one."""
    held = {**({"a": "up.weight"} if 1 <= index <= 4 else {}), **({"b": "mlp.0.weight"} if index >= 4 else {})}
    return held or None


def train_blocks(mesh: engine.Mesh, p: float, mode: Any, choices: list[Any]) -> list[Any]:
    results = []
    for choice in choices:
        streams = random.Streams(mesh.tensor, seed=mesh.seed, mode=mode)
        specs = [LayerSpec(Block, streams, p, i % 2 == 0, i % 2 == 1, tied=ties(i)) for i in range(6)]
        balance = {2: [2, 4], 3: [2, 2, 2]}[mesh.layout.pipeline]  # pairs stay within a stage
        model = PipelineModel(specs, mesh, balance=balance, recompute=choice)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("0.", "3.mlp")))
        start = engine.full_state_dict(model, mesh)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
        step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=4)
        gradients = watch_gradients(optimizer)
        done = [step(*rows(8, number)) for number in range(2)]
        numbers = [(result.loss.item(), result.grad_norm.item()) for result in done]
        evaluated = step.evaluate(*rows(5, 9)).loss.item()
        results.append((start, numbers, gradients, engine.full_state_dict(model, mesh), evaluated))
    return results


CHOICES = [None, "full", 3, ["*.drop", "*.mlp", "1.up", "2"]]


def test_ties_over_three_stages_frozen_layers_and_tuples_equal_plain_pytorch(world: World) -> None:
    for results in world.run(Layout(pipeline=3), train_blocks, 0.0, "plain", CHOICES):
        for start, numbers, gradients, weights, evaluated in results:
            plain = nn.Sequential(*(Plain() for _ in range(6)))
            for index in (2, 3, 4):
                plain[index].up.weight = plain[1].up.weight
            plain[5].mlp[0].weight = plain[4].mlp[0].weight
            plain.load_state_dict(start)
            plain[0].requires_grad_(False)
            plain[3].mlp.requires_grad_(False)
            trained = {name: q for name, q in plain.named_parameters() if q.requires_grad}
            optimizer = torch.optim.SGD(trained.values(), lr=0.1)
            for number, (loss, norm) in enumerate(numbers):
                optimizer.zero_grad()
                inputs, targets = rows(8, number)
                wanted = squared(plain_forward(plain, inputs), targets)[0] / 8
                wanted.backward()
                assert loss == pytest.approx(wanted.item(), rel=1e-12)
                assert norm == pytest.approx(nn.utils.clip_grad_norm_(trained.values(), 1e9).item(), rel=1e-12)
                assert worst_error(gradients[number], {name: q.grad for name, q in trained.items()}) < 1e-12
                optimizer.step()
            assert worst_error(weights, dict(plain.state_dict())) < 1e-12
            inputs, targets = rows(5, 9)
            assert evaluated == pytest.approx((squared(plain_forward(plain, inputs), targets)[0] / 5).item(), rel=1e-12)


@pytest.mark.parametrize("mode", ["plain", "reproducible"])
@pytest.mark.parametrize("layout", [Layout(pipeline=3), Layout(pipeline=2, tensor=2)], ids=str)
def test_dropout_has_the_same_masks_again(world: World, layout: Layout, mode: str) -> None:
    choices = CHOICES if layout.pipeline == 3 else [None, "full", ["*.mlp", "*.drop"]]
    for without, *others in world.run(layout, train_blocks, 0.4, mode, choices):
        assert without[1] != without[1][::-1]
        for result in others:
            for got, wanted in zip(result, without, strict=True):
                assert worst_error(got, wanted) == 0.0


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Of which plain autograd keeps the inputs of three products and the outputs of three tanhs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.outer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.outer(self.inner(x))


class Held:
    """Counts the tensors that autograd keeps: each place in memory once, parameters not."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.counts: dict[tuple[int, int], int] = {}
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        return Kept(self, tensor)


class Kept:
    def __init__(self, held: Held, tensor: Tensor) -> None:
        self.held, self.tensor = held, tensor
        self.bytes = tensor.numel() * tensor.element_size()
        self.place = (tensor.data_ptr(), tensor.untyped_storage().data_ptr())
        if self.place[1] not in held.parameters:
            held.counts[self.place] = held.counts.get(self.place, 0) + 1
            held.now += self.bytes if held.counts[self.place] == 1 else 0
            held.most = max(held.most, held.now)

    def __del__(self) -> None:
        if self.place[1] not in self.held.parameters:
            self.held.counts[self.place] -= 1
            self.held.now -= self.bytes if self.held.counts[self.place] == 0 else 0


def measure(mesh: engine.Mesh, choices: list[Any]) -> list[Any]:
    found = []
    for choice in choices:
        model = PipelineModel([LayerSpec(Deep) for _ in range(8)], mesh, balance="uniform", recompute=choice)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
        step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=6)
        x = torch.ones(12, 16)
        held = Held(model)
        with saved_tensors_hooks(held.pack, lambda kept: kept.tensor):
            step(x, 2 * x)
        trained = [layer.runs for layer in model.children()]
        step.evaluate(x, x)
        evaluated = [layer.runs - before for layer, before in zip(model.children(), trained, strict=True)]
        found.append((held.most / (2 * 16 * 4), held.now, trained, evaluated))
    return found


def test_only_the_inputs_of_what_runs_again_are_kept(world: World) -> None:
    # On rank 0 of 2, four layers and two of the six microbatches, of one tensor each, are in flight.
    choices = [None, "full", 2, ["*.inner"]]
    none, full, second, inner = world.run(Layout(pipeline=2), measure, choices)[0]
    # A layer keeps its input and three outputs; its output is the next layer's input, and the last of a stage is sent.
    assert none[0] == 2 * (1 + 4 * 3)
    assert full[0] == 2 * 4
    # Layer 0 keeps its input; 1 and 3 their input and three outputs, of which the last is what layer 2 keeps.
    assert second[0] == 2 * (1 + (1 + 3) + (1 + 3))
    # The input of each inner part, what the outer part begins with and what it gives.
    assert inner[0] == 2 * (1 + 4 * 2)
    assert [now for _, now, _, _ in (none, full, second, inner)] == [0] * 4
    assert [trained for _, _, trained, _ in (none, full, second, inner)] == [[6] * 4, [12] * 4, [12, 6] * 2, [6] * 4]
    assert all(evaluated == [6] * 4 for _, _, _, evaluated in (none, full, second, inner))


def test_names_modes_and_copies_stay_and_the_choice_is_seen() -> None:
    mesh = plan_mesh(Layout(), 0, seed=3)
    plain = PipelineModel([LayerSpec(Deep) for _ in range(4)], mesh)
    model = PipelineModel([LayerSpec(Deep) for _ in range(4)], mesh, recompute=["*.inner", "3", "3.outer"])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    chosen = [name for name, module in model.named_modules() if "Recomputed[" in repr(module).splitlines()[0]]
    assert chosen == ["0.inner", "1.inner", "2.inner", "3"], "of two inside one another the outer one"
    assert all(isinstance(layer, Deep) for layer in model.children())
    assert "(3): Recomputed[Deep](" in repr(model)
    twin = copy.deepcopy(model)
    x = torch.ones(2, 16)
    twin(x).sum().backward()
    assert [layer.runs for layer in twin.children()] == [1, 1, 1, 2]
    assert [layer.runs for layer in model.children()] == [0] * 4
    plain(x).sum().backward()
    for (name, got), wanted in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad), name
    with torch.no_grad():
        model(x)
    assert [layer.runs for layer in model.children()] == [1] * 4


def test_running_statistics_change_once_and_hooks_and_keywords_work() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, dtype=DOUBLE)
            self.linear = nn.Linear(4, 4, dtype=DOUBLE)

        def forward(self, x: Tensor, *, debug: float = 1.0, pair: Any = ()) -> Tensor:
            return self.linear(self.norm(x) * debug).tanh() + sum(pair)

    mesh = plan_mesh(Layout(), 0)
    models = [PipelineModel([LayerSpec(Norm), LayerSpec(Norm)], mesh, recompute=choice) for choice in (None, "full")]
    x, other = rows(6)
    for model in models:
        model(x, debug=2.0, pair=(other, x)).square().sum().backward()
    for (name, wanted), got in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(wanted, got), name
    assert models[1].get_buffer("0.norm.num_batches_tracked") == 1
    for wanted, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(wanted.grad, got.grad)


class Changes(nn.Module):
    """Takes a dict, and gives back the same with another `x` and one key less; draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DOUBLE)
        self.own = torch.Generator().manual_seed(seed)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, given: dict[str, Any]) -> Any:
        self.calls = self.calls + 1
        drawn = torch.rand(given["x"].shape, generator=self.own, dtype=DOUBLE)
        given["x"] = self.linear(given["x"]).tanh() * drawn + sum(given["all"])
        given["all"].append(given["x"].sin() * torch.rand((), generator=given["generator"], dtype=DOUBLE))
        given.setdefault("more", given["x"].cos())
        return given


def test_changed_dicts_and_lists_and_generators_are_again_as_they_were() -> None:
    mesh, found = plan_mesh(Layout(), 0), []
    for choice in (None, "full"):
        model = PipelineModel([LayerSpec(Changes, seed) for seed in range(3)], mesh, recompute=choice)
        for number in range(2):
            x = rows(6, number)[0].requires_grad_()
            given = {"x": x, "all": [x * 1.0], "generator": torch.Generator().manual_seed(9)}
            output = model(given)
            assert output is given
            assert len(output["all"]) == 4
            (output["x"] + output["more"]).square().sum().backward()
        draws = [torch.rand(3, generator=each) for each in (given["generator"], model.get_submodule("0").own)]
        found.append([x.grad, *draws, *model.buffers(), *(p.grad for p in model.parameters())])
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted, got)
    assert model.get_buffer("0.calls") == 2


# ---- what is refused -------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0).exp()


class Through(nn.Module):
    """Gives on what it took, for the next to spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Any:
        y = x * 1.0
        return {"x": y, "z": self.linear(y)}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DOUBLE)

    def forward(self, x: Any) -> Any:
        return {"x": x["x"], "z": self.linear(x["z"]).exp()}


class Spoil(nn.Module):
    def forward(self, x: Any) -> Any:
        return x["x"].detach().mul_(2.0).sum() * 0 + x["z"]


class Summed(nn.Module):
    def forward(self, xs: Any) -> Tensor:
        return sum(xs)


def refuse(mesh: engine.Mesh) -> list[str]:
    def build(recompute: Any) -> PipelineModel:
        return PipelineModel([LayerSpec(Deep) for _ in range(3)], mesh, balance="uniform", recompute=recompute)

    def spoil(*layers: type[nn.Module], recompute: Any) -> None:
        model = PipelineModel([LayerSpec(layer) for layer in layers], plan_mesh(Layout(), 0), recompute=recompute)
        model(rows(2)[0].requires_grad_()).sum().backward()

    texts = refusals(
        [
            lambda: build("ful"),
            lambda: build("*.inner"),
            lambda: build(0),
            lambda: build(-2),
            lambda: build(True),
            lambda: build([]),
            lambda: build(["*.inner", 3]),
            lambda: build(["*.outer", "*.iner"]),
            lambda: build(["3.*"]),
            lambda: build(2 + mesh.rank),
            lambda: spoil(Twice, InPlace, recompute="full"),
            lambda: spoil(Through, Middle, Spoil, recompute=["0"]),
            lambda: spoil(Through, Middle, Spoil, recompute=["1"]),
            lambda: PipelineModel([LayerSpec(Summed)], plan_mesh(Layout(), 0), recompute="full")(iter(rows(2))),
        ]
    )
    build(2)  # the mesh still works
    return texts


def test_wrong_choices_and_inputs_changed_in_place_are_refused_on_every_rank(world: World) -> None:
    expected = [
        "recompute='ful' (did you mean 'full'?): choose None, 'full', a number k",
        "recompute='*.inner': choose None, 'full', a number k",
        "recompute=0: every k-th layer is run again, for a k of at least 1",
        "recompute=-2: every k-th layer is run again",
        "recompute=True: a list has patterns",
        "recompute=[]: a list has patterns of module names, at least one",
        "recompute=['*.inner', 3]: a list has patterns",
        "recompute: '*.iner' matches no module of any stage (did you mean '*.inner'?): names begin with the layer's",
        "recompute: '3.*' matches no module of any stage",
        "recompute differs over axis 'world': rank 1 (global 1) has 3, rank 0 (global 0) has 2",
        "Recomputed[InPlace]: its input was changed in place, by itself or by a later layer",
        "no error",
        "Recomputed[Middle]: its input was changed in place",
        "Recomputed[Summed]: its input has a tuple_iterator, which can be gone through only once",
    ]
    for texts in world.run(Layout(pipeline=2), refuse):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text
