"""Groups that are added to an optimizer which has trained: as torch's own add_param_group, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import engine
from engine import LayerSpec, Layout
from engine.zero import ZeroOptimizer
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.plain_gpt import plain_gpt
from tests.test_zero_matrices import Polar
from tests.world import TRANSPORT, World, refusals

DTYPE = torch.float64
STEPS = 2  # before each addition and after the last
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.3}),
}
# Options of the added groups: an own rate, the class's defaults; or another class, which gets whole matrices.
FLAT = [{"lr": 0.02, "weight_decay": 0.1}, {}]
WHOLE = [{"optimizer": Polar, "shard": "tensor", "lr": 0.03}, {"optimizer": Polar, "shard": "tensor", "lr": 0.01}]


class Net(nn.Module):
    """`middle` is frozen at first, `late` comes later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 5, dtype=DTYPE)
        self.middle = nn.Linear(5, 5, bias=False, dtype=DTYPE).requires_grad_(False)
        self.last = nn.Linear(5, 3, dtype=DTYPE)

    def grow(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.late = nn.Linear(3, 3, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.middle(self.first(x).tanh()).tanh())
        return self.late(y.tanh()) if hasattr(self, "late") else y


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(12, 4, dtype=DTYPE, generator=torch.Generator().manual_seed(10 * step + rank))


def named(module: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters()]


def first_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.0}]


def added(model: Net, number: int, seed: int) -> list[tuple[str, nn.Parameter]]:
    if number == 0:
        model.middle.requires_grad_(True)
        return named(model.middle, "middle")
    model.grow(seed)
    return named(model.late, "late")


def train(mesh: engine.Mesh, cases: list[tuple[str, bool, dict[str, Any]]]) -> list[Any]:
    found = []
    for kind, whole, options in cases:
        model, (optimizer_class, given) = Net(), OPTIMIZERS[kind]
        groups = first_groups(model)
        optimizer = ZeroOptimizer(model, optimizer_class, mesh, groups=groups, bucket_mib=1e-4, **options, **given)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        kept = []
        for step in range(3 * STEPS):
            if step and step % STEPS == 0:
                before = optimizer.consolidate()["state"]
                number = step // STEPS - 1
                members = added(model, number, 7 + mesh.rank)  # other values on each rank: the first one's count
                optimizer.add_param_group({"params": members, **(WHOLE if whole else FLAT)[number]})
                kept.append(same(before, optimizer.consolidate()["state"]))
            for half in range(2):
                with optimizer.microbatch(last=half == 1):
                    model(rows(step, mesh.data.rank)[half::2]).square().sum().backward()
            optimizer.finish_gradients(mesh.data.size)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((kept, weights, optimizer.consolidate(), scheduler.get_last_lr()))
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = [(name, key) for name, values in one.items() for key in values]
    return one.keys() == other.keys() and all(torch.equal(one[n][k], other[n][k]) for n, k in keys)


def train_plain(kind: str, whole: bool, data: int) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    model, (optimizer_class, given) = Net(), OPTIMIZERS[kind]
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in first_groups(model)]
    optimizers: list[torch.optim.Optimizer] = [optimizer_class(groups, **given)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.8)]
    for step in range(3 * STEPS):
        if step and step % STEPS == 0:
            number = step // STEPS - 1
            members = [p for _, p in added(model, number, 7)]
            if whole:
                optimizers.append(Polar(members, lr=WHOLE[number]["lr"]))
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizers[-1], 0.8))
            else:
                optimizers[0].add_param_group({"params": members, **FLAT[number]})
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(model(rows(step, rank)).square().sum() for rank in range(data)) / data).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    rates = [rate for scheduler in schedulers for rate in (g["lr"] for g in scheduler.optimizer.param_groups)]
    return dict(model.state_dict()), get_optimizer_state_dict(model, optimizers), rates


WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "gather": "forward"},
    {"stage": 2},
    {"stage": 2, "accumulate": "full"},
    {"stage": 2, "offload": True},
]


@pytest.mark.parametrize(("data", "transport"), [(1, None), (2, "torch"), (3, None)])
def test_added_groups_train_as_torchs_and_nothing_else_moves(world: World, data: int, transport: str | None) -> None:
    cases = [(kind, whole, way) for way in WAYS for kind, whole in (("adamw", False), ("sgd", False), ("adamw", True))]
    if data > 1 and (transport or TRANSPORT) == "shm":
        cases.append(("adamw", False, {"stage": 2, "share_parameters": True}))
    options = {} if transport is None else {"transport": transport}
    wanted = {(kind, whole): train_plain(kind, whole, data) for kind, whole, _ in cases}
    for results in world.run(Layout(data=data), train, cases, **options):
        for (kind, whole, way), (kept, weights, state, rates) in zip(cases, results, strict=True):
            plain, plain_state, plain_rates = wanted[kind, whole]
            assert kept == [True, True], way
            for name, value in plain.items():
                torch.testing.assert_close(
                    weights[name], value, rtol=1e-12, atol=1e-13, msg=f"{kind} {whole} {way} {name}"
                )
            assert state["state"].keys() == plain_state["state"].keys()
            for name, values in plain_state["state"].items():
                for key, value in values.items():
                    torch.testing.assert_close(
                        state["state"][name][key],
                        value,
                        rtol=1e-12,
                        atol=1e-13,
                        msg=f"{kind} {whole} {way} {name} {key}",
                    )
            assert [group["params"] for group in state["param_groups"]] == [
                group["params"] for group in plain_state["param_groups"]
            ]
            assert rates == pytest.approx(plain_rates, rel=1e-14)


# ---- under TrainStep, on stages ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), output.shape[0]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, dtype=DTYPE, generator=generator), torch.randn(8, 4, dtype=DTYPE, generator=generator)


def unfrozen(model: nn.Module, number: int) -> list[tuple[str, nn.Parameter]]:
    """The block that is trained from now on: the second, which the second stage has, then the first."""
    block = f"{1 - number}."
    return [(name, p.requires_grad_()) for name, p in model.named_parameters() if name.startswith(block)]


def on_stages(mesh: engine.Mesh, schedules: list[str]) -> list[Any]:
    found = []
    for schedule in schedules:
        model = engine.PipelineModel([LayerSpec(Block) for _ in range(3)], mesh, balance=[1, 2])
        start = engine.full_state_dict(model, mesh)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("2."))
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.05)
        train_step = engine.TrainStep(model, optimizer, squared, mesh, microbatches=2, schedule=schedule)
        norms, told = [], 0
        for step in range(6):
            if step and step % 2 == 0:
                optimizer.add_param_group({"params": unfrozen(model, step // 2 - 1), "lr": 0.02})
                told = len(optimizer.gradient_sinks())
            x, y = (each.tensor_split(mesh.data.size)[mesh.data.rank] for each in batch(step))
            norms.append(train_step(x, y).grad_norm.item())
        found.append((start, norms, told, engine.full_state_dict(model, mesh), optimizer.consolidate()))
    return found


def test_a_train_step_goes_on_with_what_is_unfrozen_on_any_stage(world: World) -> None:
    for found in world.run(Layout(pipeline=2, data=2), on_stages, ["1f1b", "zero_bubble"]):
        for start, norms, told, weights, state in found:
            model = nn.Sequential(*(Block() for _ in range(3)))
            model.load_state_dict(start)
            model[:2].requires_grad_(False)
            optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.05)
            for step in range(6):
                if step and step % 2 == 0:
                    optimizer.add_param_group({"params": [p for _, p in unfrozen(model, step // 2 - 1)], "lr": 0.02})
                optimizer.zero_grad()
                x, y = batch(step)
                (squared(model(x), y)[0] / 8).backward()
                trained = [p for p in model.parameters() if p.requires_grad]
                assert norms[step] == pytest.approx(nn.utils.clip_grad_norm_(trained, 1e9).item(), rel=1e-12)
                optimizer.step()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-13)
            assert told in (2, 4)  # the handed-over gradients of this stage's blocks, weight and bias
            groups = [group["params"] for group in state["param_groups"]]
            assert groups == [[f"{n}.linear.weight", f"{n}.linear.bias"] for n in (2, 1, 0)]


GPT = {"layers": 1, "hidden": 8, "heads": 2, "sequence": 6, "vocabulary": 11}
LAYERS = [("1",), ("0", "3"), ("2",)]  # trained from the first step; the tied tables with all beside them; the MLP


def of_layers(model: nn.Module, number: int) -> list[tuple[str, nn.Parameter]]:
    return [(n, p.requires_grad_()) for n, p in model.named_parameters() if n.partition(".")[0] in LAYERS[number]]


def tokens(step: int) -> Tensor:
    shape = (8, GPT["sequence"] + 1)
    return torch.randint(GPT["vocabulary"], shape, generator=torch.Generator().manual_seed(step))


def add_to_gpt(mesh: engine.Mesh, schedule: str) -> Any:
    model = engine.PipelineModel(gpt_layers(GPTConfig(**GPT), mesh.tensor, DTYPE), mesh)
    start = engine.full_state_dict(model, mesh)
    model.requires_grad_(False)
    groups = [{"params": of_layers(model, 0)}]
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, groups=groups, lr=0.05, bucket_mib=1e-3)
    loss = next_token_loss(mesh.tensor, GPT["vocabulary"])
    step = engine.TrainStep(model, optimizer, loss, mesh, microbatches=2, schedule=schedule)
    norms = []
    for number in range(6):
        if number and number % 2 == 0:
            optimizer.add_param_group({"params": of_layers(model, number // 2), "lr": 0.02})
        own = tokens(number).tensor_split(mesh.data.size)[mesh.data.rank]
        norms.append(step(own[:, :-1], own[:, 1:]).grad_norm.item())
    return start, norms, engine.full_state_dict(model, mesh)


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(data=2, tensor=2), Layout(pipeline=2, tensor=2), Layout(data=2, pipeline=2)],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_tied_and_tensor_parallel_parameters_are_added(world: World, layout: Layout, schedule: str) -> None:
    for start, norms, weights in world.run(layout, add_to_gpt, schedule):
        model = plain_gpt(**GPT, tied=True).double()
        model.load_state_dict(start)
        model.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for _, p in of_layers(model, 0)], lr=0.05)
        for number, norm in enumerate(norms):
            if number and number % 2 == 0:
                optimizer.add_param_group({"params": [p for _, p in of_layers(model, number // 2)], "lr": 0.02})
            optimizer.zero_grad()
            ids = tokens(number)
            nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            assert norm == pytest.approx(nn.utils.clip_grad_norm_(trained, 1e9).item(), rel=1e-10)
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


# ---- what comes along, and what is refused -------------------------------------------------------------------------


class Grown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight.float()
        return self.norm(y) if hasattr(self, "norm") else y


def along(mesh: engine.Mesh) -> Any:
    model = Grown()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    seen = []
    for step in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        with optimizer.microbatch(last=True):
            (model(x).sum() * 0.0).backward()
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                model.weight.fill_(2.0)  # before the group is added: the masters follow all the same
            model.norm = nn.BatchNorm1d(4)
            model.norm.running_mean.fill_(float(mesh.rank))
            model.norm.bias.requires_grad_(False).fill_(float(mesh.rank))
            optimizer.add_param_group({"params": list(model.norm.named_parameters(prefix="norm"))})
            seen.append((model.norm.running_mean.tolist(), model.norm.bias.tolist()))
    return seen, model.weight.tolist(), model.norm.running_mean.tolist()


def test_masters_follow_and_new_modules_take_the_first_ranks_values_and_statistics(world: World) -> None:
    results = world.run(Layout(data=2), along)
    for seen, weights, _ in results:
        assert seen == [([0.0] * 4, [0.0] * 4)]
        assert weights == [2.0] * 4
    assert results[0][2] == results[1][2] != [0.0] * 4


def refused(mesh: engine.Mesh) -> Any:
    model = Net()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.05)
    model.middle.requires_grad_(True)
    model.grow(7)
    both = [*named(model.middle, "middle"), *named(model.late, "late")]

    def add(params: Any, **options: Any) -> Any:
        return lambda: optimizer.add_param_group({"params": params, **options})

    def trained() -> Any:
        with optimizer.microbatch(last=True):
            model(rows(0, mesh.rank)).square().sum().backward()

    calls = [
        add([p for _, p in both]),
        add([*both, ("again", model.first.weight)]),
        add([both[0], both[0]]),
        add([("stranger", nn.Parameter(torch.zeros(2)))]),
        add([("sum", model.late.weight + 1.0)]),
        add({p for _, p in both}),
        add(both[::-1] if mesh.rank else both),
        add(both, lr=0.1 + mesh.rank),
        add(both if mesh.rank else both[1:]),
        add(both if mesh.rank else [both[0][1]]),
        add(both, optimizer=torch.optim.Muon),
        add(both, shard="whole"),
    ]
    texts = refusals(calls)
    with pytest.raises(ValueError, match="weight_decay"):
        add(both, optimizer=torch.optim.SGD, weight_decay=-1.0)()
    trained()
    texts += refusals([add(both)])
    optimizer.zero_grad()
    before = len(optimizer.param_groups)
    add(both[:1])()
    texts += refusals([optimizer.finish_gradients])  # the other one is in no group yet
    add(both[1:])()
    trained()
    optimizer.finish_gradients()
    texts += refusals([add([])])
    optimizer.step()
    add([])()
    return texts, before, [len(group["params"]) for group in optimizer.param_groups]


def test_what_cannot_be_added_is_refused_on_every_rank_and_nothing_has_changed(world: World) -> None:
    expected = [
        ("group 1: params are (name, parameter) pairs",) * 2,
        ("group 1: 'again' is in two groups",) * 2,
        ("group 1: 'middle.weight' is in two groups",) * 2,
        ("group 1: 'stranger' is no parameter of the model",) * 2,
        ("group 1: 'sum' is no parameter of the model",) * 2,
        ("group 1: params must be an ordered list",) * 2,
        ("the model's parameters and their groups differs over axis 'data': rank 1 (global 1) has",) * 2,
        ("group 1's options differs over axis 'world': rank 1 (global 1) has",) * 2,
        ("the model's parameters and their groups differs over axis 'data': rank 1 (global 1) has",) * 2,
        ("group 1: params are (name, parameter) pairs", "that another rank adds does not fit"),
        ("Muon updates whole matrices",) * 2,
        ("group 1: shard='whole'",) * 2,
        ("add_param_group in the midst of a step",) * 2,
        ("'late.weight' was added or unfrozen",) * 2,
        ("add_param_group in the midst of a step",) * 2,
    ]
    for rank, (texts, groups, members) in enumerate(world.run(Layout(data=2), refused)):
        for text, parts in zip(texts, expected, strict=True):
            assert parts[rank] in text
        assert groups == 1
        assert members == [4, 1, 1, 0]
