"""ZeroOptimizer by itself: stages, bucket sizes, optimizers, groups, norms, partial and tied gradients, misuse."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import EngineError
from engine.placement import Placement, replicated
from engine.tensor_parallel import ColumnParallelLinear
from engine.zero import ZeroOptimizer
from engine.zero.norm import clip_factor
from tests.world import World, refusals


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3)).to(dtype)


def batch(number: int, count: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(count, n, generator=generator, dtype=torch.float64).to(dtype) for n in (5, 3))  # type: ignore[return-value]


def groups_of(model: nn.Module, named: bool) -> list[dict[str, Any]]:
    """Decay for the matrices only: groups change inside a bucket, and inside a shard."""
    pick = (lambda n, p: (n, p)) if named else (lambda _, p: p)
    return [
        {"params": [pick(n, p) for n, p in model.named_parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [pick(n, p) for n, p in model.named_parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def train_plain(name: str, clip: float | None, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    model, (kind, options) = small_model(), OPTIMIZERS[name]
    optimizer = kind(groups_of(model, named=False), **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    norms = []
    for number in range(steps):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item())
        optimizer.step()
        scheduler.step()
    return norms, dict(model.state_dict())


def train_sharded(mesh: engine.Mesh, name: str, clip: float | None, stage: int, bucket_mib: float) -> Any:
    model, (kind, options) = small_model(), OPTIMIZERS[name]
    optimizer = ZeroOptimizer(
        model, kind, mesh, groups=groups_of(model, named=True), stage=stage, bucket_mib=bucket_mib, **options
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    norms = []
    for number in range(4):
        inputs, targets = (x.tensor_split(mesh.data.size)[mesh.data.rank] for x in batch(number))
        if number % 2:
            model.zero_grad()  # drops the views: they are taken up again
        else:
            optimizer.zero_grad()
        # In two backward calls: gradients accumulate.
        for half in range(2):
            (model(inputs[half::2]) - targets[half::2]).square().sum().backward()
        norms.append(optimizer.finish_gradients(12 * 3, clip).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms, dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_stage_and_optimizer_equals_plain_training_with_groups_and_a_schedule(
    world: World, name: str, stage: int
) -> None:
    clip = 0.3 if name in ("sgd", "adamw") else None
    wanted_norms, wanted = train_plain(name, clip)
    for norms, weights in world.run(Layout(data=3), train_sharded, name, clip, stage, 25):
        assert norms == pytest.approx(wanted_norms, rel=1e-10)
        for key, value in wanted.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)


def train_with_buckets(mesh: engine.Mesh, sizes: list[float], stage: int) -> list[dict[str, Tensor]]:
    results = []
    for bucket_mib in sizes:
        model = small_model(torch.float32)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, bucket_mib=bucket_mib, lr=0.01)
        for number in range(5):
            inputs, targets = (x[mesh.data.rank :: mesh.data.size] for x in batch(number, dtype=torch.float32))
            (model(inputs) - targets).square().sum().backward()
            optimizer.finish_gradients(36.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    return results


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bucket_size_and_stage_change_no_bit_on_two_ranks(world: World, stage: int) -> None:
    # One element, one parameter, less than the largest parameter, more than the model.
    results = world.run(Layout(data=2), train_with_buckets, [1e-9, 35 * 4 / 2**20, 60 / 2**20, 25.0], stage)
    reference = world.run(Layout(data=2), train_with_buckets, [25.0], 0)[0][0]
    for of_rank in results:
        for weights in of_rank:
            assert all(torch.equal(weights[name], reference[name]) for name in reference)


# ---- norms and gradients ----------------------------------------------------------------------------


class Holder(nn.Module):
    """Parameters whose gradient is what the test says."""

    def __init__(self, values: dict[str, Tensor], placements: dict[str, Placement]):
        super().__init__()
        self.placements = placements
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def tensor_norm(mesh: engine.Mesh, norm_type: float) -> Any:
    model = Holder(
        {"shard": torch.zeros(1), "norm": torch.zeros(1), "part": torch.zeros(1)},
        {"shard": Placement(dim=0), "part": Placement(gradient="sum")},
    )
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    model.shard.grad = torch.tensor([3.0 + mesh.tensor.rank])
    model.norm.grad = torch.tensor([12.0])
    model.part.grad = torch.tensor([40.0 + 4 * mesh.tensor.rank])
    norm = optimizer.finish_gradients(1.0, max_norm=1.0, norm_type=norm_type).item()
    gradients = optimizer.full_gradients()
    optimizer.step()
    return norm, {name: g.tolist() for name, g in gradients.items()}, model.part.item()


# 3, 4 and 12 give 13; the partial gradients 40 and 44 are one of 84, the largest: sqrt(13^2 + 84^2) = 85.
@pytest.mark.parametrize(("norm_type", "wanted"), [(2.0, 85.0), (math.inf, 84.0)])
def test_the_norm_counts_shards_each_replicated_parameters_once_and_sums_partial_ones(
    world: World, norm_type: float, wanted: float
) -> None:
    for norm, gradients, part in world.run(Layout(tensor=2), tensor_norm, norm_type):
        assert norm == pytest.approx(wanted, rel=1e-6)
        assert gradients["shard"] == pytest.approx([3 / wanted, 4 / wanted], rel=1e-5)
        assert gradients["norm"] == pytest.approx([12 / wanted], rel=1e-5)
        assert part == pytest.approx(-84 / wanted, rel=1e-5)


def test_the_clip_factor_is_torchs() -> None:
    for norm, factor in ((2.0, 1 / 2.000001), (0.5, 1.0), (0.0, 1.0), (1.0, 1 / 1.000001)):
        assert clip_factor(torch.tensor(norm, dtype=torch.float64), 1.0).item() == pytest.approx(factor, rel=1e-12)


def tied_gradients(mesh: engine.Mesh, steps: int) -> Any:
    tie = {"tied": {"table": "weight"}}
    model = engine.PipelineModel(
        [engine.LayerSpec(nn.Linear, 2, 2, bias=False, **tie), engine.LayerSpec(nn.Linear, 2, 2, bias=False, **tie)],
        mesh,
        balance="uniform",
    )
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.1)
    norms, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for layer in model.layers:  # gradient 2 from the first use, 3 from the second
            (model.get_parameter(f"{layer}.weight") * (2.0 + layer)).sum().backward()
        norms.append(optimizer.finish_gradients(mesh.data.size).item())
        gradients.append({name: g.tolist() for name, g in optimizer.full_gradients().items()})
        optimizer.step()
    return norms, gradients, engine.full_state_dict(model, mesh)


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=2), Layout(data=2), Layout(data=2, pipeline=2)], ids=str)
def test_a_tied_parameter_has_one_gradient_counted_once_and_stays_equal(world: World, layout: Layout) -> None:
    for norms, gradients, weights in world.run(layout, tied_gradients, 5):
        assert norms == pytest.approx([10.0] * 5, rel=1e-6)  # sqrt(4 * 5^2): not 7.2, 14.1 or 5
        assert gradients == [{"0.weight": [[5.0, 5.0], [5.0, 5.0]]}] * 5
        assert torch.equal(weights["0.weight"], weights["1.weight"])


def tie_apart(mesh: engine.Mesh) -> list[str]:
    texts = []
    for case in ("frozen", "decay"):
        specs = [engine.LayerSpec(nn.Linear, 2, 2, bias=False, tied={"table": "weight"}) for _ in range(2)]
        model = engine.PipelineModel(specs, mesh, balance="uniform")
        if case == "frozen" and mesh.pipeline.rank == 0:
            model.requires_grad_(False)
        groups = [{"params": list(model.named_parameters()), "weight_decay": 0.5 * mesh.pipeline.rank}]
        try:
            ZeroOptimizer(model, torch.optim.SGD, mesh, groups=None if case == "frozen" else groups, lr=0.1)
        except EngineError as error:
            texts.append(str(error))
    return texts


def test_a_tie_that_stages_train_differently_is_refused_on_every_rank(world: World) -> None:
    for frozen, decay in world.run(Layout(pipeline=2), tie_apart):
        assert "tied as 'table' is in group frozen on stage 0" in frozen
        assert "tied as 'table' is in group (0, \"[('weight_decay', 0.0)]\") on stage 0" in decay


def half_norm(mesh: engine.Mesh) -> float:
    model = nn.Linear(100, 100, bias=False).half()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    model.weight.grad = torch.full_like(model.weight, 900.0)
    return optimizer.finish_gradients().item()


def test_the_norm_of_half_precision_gradients_does_not_overflow(world: World) -> None:
    assert world.run(Layout(), half_norm) == [pytest.approx(90000.0, rel=1e-3)]


def seen_ends(mesh: engine.Mesh) -> Any:
    """Ties over the first and last of four stages, and one over the middle ones."""
    spec = engine.LayerSpec
    model = engine.PipelineModel(
        [
            spec(nn.Linear, 2, 2, bias=False, tied={"ends": "weight"}),
            spec(nn.Linear, 2, 2, bias=False, tied={"middle": "weight"}),
            spec(nn.Linear, 2, 2, bias=False, tied={"middle": "weight"}),
            spec(nn.Linear, 2, 2, bias=False, tied={"ends": "weight"}),
        ],
        mesh,
        balance="uniform",
    )
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    (model.get_parameter(f"{mesh.pipeline.rank}.weight") * 10.0**mesh.pipeline.rank).sum().backward()
    optimizer.finish_gradients()
    return {name: g[0, 0].item() for name, g in optimizer.full_gradients().items()}


def test_several_ties_over_different_stages_do_not_meet(world: World) -> None:
    assert world.run(Layout(pipeline=4), seen_ends) == [{"0.weight": 1001.0, "1.weight": 110.0}] * 4


def start_apart(mesh: engine.Mesh) -> Any:
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(ColumnParallelLinear(2, 4, mesh.tensor), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(float(mesh.rank))
    with torch.no_grad():
        model[1].weight.fill_(float(mesh.rank) + 1)
    shard = model[0].weight.clone()
    ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    return shard, model[0].weight.detach().clone(), model[1].weight.tolist(), model[1].running_mean.tolist()


def test_construction_makes_copies_equal_but_leaves_the_shards_of_the_tensor_axis(world: World) -> None:
    found = world.run(Layout(data=2, tensor=2), start_apart)
    for rank, (_, shard, weight, running) in enumerate(found):
        assert torch.equal(shard, found[rank % 2][0])  # data rank 0's shard of this tensor rank
        assert weight == [1.0, 1.0]
        assert running == [float(rank % 2)] * 2  # buffers: from data rank 0, each tensor rank its own
    assert not torch.equal(found[0][1], found[1][1])


# ---- edges ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.frozen = nn.Parameter(torch.tensor([5.0]), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.low = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))


def train_odd(mesh: engine.Mesh, stage: int) -> Any:
    model = Odd()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, stage=stage, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        factor = float(mesh.rank + 1)
        loss = (model.three * factor).sum() + model.scalar * 8 + (model.transposed * torch.tensor([1.0, 2.0])).sum()
        (loss + model.low.float().sum() + model.none.sum()).backward()
        optimizer.finish_gradients(mesh.data.size)
        optimizer.step()
    copied = copy.deepcopy(model)
    return {name: value.detach().clone() for name, value in copied.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fewer_elements_than_ranks_empty_frozen_scalar_strided_and_mixed_parameters(world: World, stage: int) -> None:
    for weights in world.run(Layout(data=4), train_odd, stage):
        assert weights["three"].tolist() == [1 - 2.5, 2 - 2.5, 3 - 2.5]  # two steps of 0.5 * mean(1, 2, 3, 4)
        assert weights["none"].shape == (0, 8)
        assert weights["frozen"].tolist() == [5.0]
        assert weights["scalar"].item() == 2 - 8
        assert weights["transposed"].tolist() == [[-1.0, 1.0], [0.0, 2.0], [1.0, 3.0]]
        assert weights["low"].tolist() == [0.0, 1.0]


def unused_on_one(mesh: engine.Mesh) -> Any:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    before = model[1].weight.item()
    used = model[0].weight.sum() + (model[1].weight.sum() * 4 if mesh.rank == 0 else 0)
    used.backward()
    optimizer.finish_gradients(mesh.data.size)
    optimizer.step()
    return before - model[1].weight.item()


def test_a_branch_used_on_one_data_rank_gets_its_share_everywhere(world: World) -> None:
    assert world.run(Layout(data=2), unused_on_one) == pytest.approx([2.0, 2.0])


def sum_marked(mesh: engine.Mesh) -> list[float]:
    model = nn.Sequential(replicated(nn.LayerNorm(2), gradient="sum"), nn.LayerNorm(2))
    optimizer = ZeroOptimizer(copy.deepcopy(model), torch.optim.SGD, mesh, lr=1.0)
    for parameter in optimizer._model.parameters():
        parameter.grad = torch.full_like(parameter, float(mesh.tensor.rank + 1))
    optimizer.finish_gradients()
    return [g[0].item() for g in optimizer.full_gradients().values()]


def test_modules_marked_as_partial_are_summed_over_the_tensor_axis_and_others_are_not(world: World) -> None:
    for rank, values in enumerate(world.run(Layout(tensor=3), sum_marked)):
        assert values[:2] == [6.0, 6.0], rank
        assert values[2] in (1.0, 2.0, 3.0)


# ---- misuse --------------------------------------------------------------------------------------------------------


def misuse(mesh: engine.Mesh) -> list[str]:
    def make(**options: Any) -> ZeroOptimizer:
        return ZeroOptimizer(small_model(), torch.optim.SGD, mesh, **{"lr": 0.1, **options})

    def other_model() -> None:
        ZeroOptimizer(nn.Linear(5, 7 + mesh.rank), torch.optim.SGD, mesh, lr=0.1)

    def swapped() -> None:
        names = ("b", "a") if mesh.rank else ("a", "b")
        ZeroOptimizer(nn.ModuleDict({n: nn.Linear(2, 2) for n in names}), torch.optim.SGD, mesh, lr=0.1)

    model = small_model()
    named = list(model.named_parameters())
    stranger = nn.Parameter(torch.zeros(2))
    ready = make()
    finished = make()
    finished.finish_gradients()

    def grouped(params: list[Any]) -> None:
        ZeroOptimizer(model, torch.optim.SGD, mesh, groups=[{"params": params}], lr=0.1)

    def again() -> None:
        finished.step()
        finished.finish_gradients()

    calls: list[Any] = [
        lambda: make(stage=3),
        lambda: make(bucket_mib=0),
        lambda: make(bucket_mib="25"),
        lambda: make(lr=0.1 + mesh.rank),
        lambda: ZeroOptimizer(small_model(), torch.optim.LBFGS, mesh),
        other_model,
        swapped,
        lambda: grouped(named[1:]),
        lambda: grouped([*named, named[0]]),
        lambda: grouped([*named, ("x", stranger)]),
        lambda: grouped([p for _, p in named]),
        ready.step,
        ready.full_gradients,
        lambda: ready.step(lambda: None),  # type: ignore[arg-type]
        lambda: ready.finish_gradients(1.0, max_norm=-1.0),
        lambda: ready.finish_gradients(0),
        ready.state_dict,
        lambda: ready.add_param_group({"params": [stranger]}),
        finished.finish_gradients,
        again,
    ]
    return refusals(calls)


def test_misuse_is_one_clear_error_on_every_rank(world: World) -> None:
    expected = [
        "stage=3: ZeRO stages are 0, 1 and 2",
        "bucket_mib=0: a bucket needs a size above 0 MiB",
        "bucket_mib='25': a bucket needs a size above 0 MiB",
        "ZeroOptimizer's options differs over axis 'world': rank 1 (global 1) has",
        "LBFGS does not update each element by itself",
        "the model's parameters and their groups differs over axis 'data'",
        "the model's parameters and their groups differs over axis 'data'",
        "1 parameters require a gradient but are in no group, the first is '0.weight'",
        "'0.weight' is in two groups",
        "'x' is no parameter of the model",
        "params are (name, parameter) pairs",
        "step() before finish_gradients()",
        "full_gradients() works after finish_gradients()",
        "step takes no closure",
        "max_norm=-1.0",
        "divisor=0: the summed gradient is divided by a number above 0",
        "save the weights with engine.full_state_dict",
        "group 1: params are (name, parameter) pairs",
        "finish_gradients was already called for this step",
        "call zero_grad() before the next backward",
    ]
    for texts in world.run(Layout(data=2), misuse):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def changed_under_the_optimizer(mesh: engine.Mesh) -> list[str]:
    changes: list[Any] = [
        lambda model: model.float(),
        lambda model: model.load_state_dict(small_model().state_dict(), assign=True),
        lambda model: model[3].weight.requires_grad_(False),
        lambda model: model.load_state_dict(small_model().state_dict()),  # in place: allowed
        lambda model: model.__setitem__(0, small_model()[0]),  # as `parallelize` exchanges a module
        lambda model: model.append(torch.nn.Linear(2, 2, dtype=torch.float64)),
    ]
    texts = []
    for change in changes:
        model = small_model()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
        change(model)
        try:
            optimizer.finish_gradients()
        except EngineError as error:
            texts.append(str(error))
        else:
            texts.append("no error")
    return texts


def test_a_parameter_that_was_cast_replaced_or_added_under_the_optimizer_is_refused(world: World) -> None:
    for cast, replaced, frozen, in_place, exchanged, added in world.run(Layout(data=2), changed_under_the_optimizer):
        assert "'0.weight' was moved, cast or replaced after ZeroOptimizer was built" in cast
        assert "'0.weight' was moved, cast or replaced" in replaced
        assert frozen == "no error"  # as in plain torch, it is not stepped any more
        assert in_place == "no error"
        assert "'0.weight' was moved, cast or replaced after ZeroOptimizer was built" in exchanged
        assert "was added or unfrozen after ZeroOptimizer was built, which does not update it" in added
        assert "give it to add_param_group before the next backward, freeze it" in added


def sparse_gradient(mesh: engine.Mesh) -> list[str]:
    def train(accumulate: str, announced: bool) -> None:
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, mesh, accumulate=accumulate, lr=0.1)
        with optimizer.microbatch(last=True) if announced else nullcontext():
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.finish_gradients()

    return refusals([lambda w=w, a=a: train(w, a) for w in ("full", "shard") for a in (False, True)])


def test_a_sparse_gradient_is_refused_on_every_rank(world: World) -> None:
    for texts in world.run(Layout(data=2), sparse_gradient):
        assert all("sparse=False" in text for text in texts)


def built_again(mesh: engine.Mesh) -> Any:
    model = nn.Linear(3, 1, bias=False)
    first = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(first)  # keeps it alive
    second = ZeroOptimizer(model, torch.optim.SGD, mesh, lr=1.0)
    with second.microbatch(last=True):
        (model.weight.sum() * (mesh.rank + 1)).backward()
    second.finish_gradients()
    return second.full_gradients()["weight"].tolist(), refusals([first.finish_gradients]), scheduler.last_epoch


def test_an_optimizer_that_was_built_before_takes_no_gradient_from_the_one_that_trains(world: World) -> None:
    for gradients, texts, _ in world.run(Layout(data=2), built_again):
        assert gradients == [[3.0] * 3]
        assert "'weight' was moved, cast or replaced after ZeroOptimizer was built" in texts[0]


def memory(mesh: engine.Mesh, stage: int) -> tuple[int, int, int]:
    model = nn.Linear(1000, 100, bias=False)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, lr=0.1)
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.finish_gradients()
    gradients = sum(bucket._gradients.numel() for bucket in optimizer._buckets)
    inside = {bucket._gradients.untyped_storage().data_ptr() for bucket in optimizer._buckets}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    left = sum(g.numel() for g in grads if g.untyped_storage().data_ptr() not in inside)
    optimizer.step()
    state = sum(v.numel() for s in optimizer._inner.state.values() for v in s.values() if v.dim())
    return state, gradients, left


@pytest.mark.parametrize(("stage", "state", "gradients"), [(0, 200000, 100000), (1, 50000, 100000), (2, 50000, 25000)])
def test_each_stage_keeps_what_it_says(world: World, stage: int, state: int, gradients: int) -> None:
    for found in world.run(Layout(data=4), memory, stage):
        assert found == (state, gradients, 0)


def options_apart(mesh: engine.Mesh) -> list[str]:
    model = small_model()
    named = list(model.named_parameters())

    def make(groups: Any) -> Any:
        return lambda: ZeroOptimizer(model, torch.optim.SGD, mesh, groups=groups, stage=0, lr=0.1)

    return refusals(
        [
            make([{"params": named, "lr": 0.1 * (1 + mesh.rank)}]),
            make([{"params": set(named)}]),
            make([{"lr": 0.1}]),
            lambda: ZeroOptimizer(model.parameters(), torch.optim.SGD, mesh, lr=0.1),  # type: ignore[arg-type]
            lambda: ZeroOptimizer(model, torch.optim.SGD(model.parameters()), mesh, lr=0.1),  # type: ignore[arg-type]
        ]
    )


def test_groups_that_differ_or_have_no_order_and_wrong_kinds_are_refused(world: World) -> None:
    for lr, unordered, none, parameters, instance in world.run(Layout(data=2), options_apart):
        assert "the model's parameters and their groups differs over axis 'data'" in lr
        assert "params must be an ordered list" in unordered
        assert "params must be an ordered list" in none
        assert "ZeroOptimizer takes the model, not generator" in parameters
        assert "give a torch optimizer's class" in instance


def plain_on_stages(mesh: engine.Mesh) -> list[str]:
    return refusals([lambda: ZeroOptimizer(small_model(), torch.optim.SGD, mesh, lr=0.1)])


def test_a_plain_module_on_several_stages_is_refused(world: World) -> None:
    assert all("needs a PipelineModel, got Sequential" in t for (t,) in world.run(Layout(pipeline=2), plain_on_stages))


class HasTies(nn.Linear):
    ties = True


def own_attribute(mesh: engine.Mesh) -> float:
    optimizer = ZeroOptimizer(HasTies(2, 2), torch.optim.SGD, mesh, lr=0.1)
    return optimizer.finish_gradients().item()


def test_a_modules_own_attribute_named_ties_is_its_own(world: World) -> None:
    assert world.run(Layout(), own_attribute) == [0.0]
