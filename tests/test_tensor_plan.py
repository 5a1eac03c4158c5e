"""Plans: what a module computes is as before, and what cannot be cut is refused before anything is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import REPLICATED, Part, Placement, cut, placements_of
from engine.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Divided,
    Plan,
    Replicated,
    Row,
    RowParallelLinear,
    Sharded,
    Vocab,
    VocabParallelEmbedding,
    describe,
    parallelize,
)
from engine.tensor_parallel.resolve import matches
from tests.world import World, refusals

Mesh = engine.Mesh
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-11, "atol": 1e-11}
IDS = torch.tensor([[3, 10, 0, 7], [5, 6, 1, 9]])


class Attention(nn.Module):
    """Fused projection of queries and fewer keys and values, a scale in each head, causal."""

    def __init__(self, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.width = heads, keys, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * keys) * self.width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, self.width))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.heads * self.width, self.keys * self.width, self.keys * self.width]
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1))
        k, v = (each.repeat_interleave(self.heads // self.keys, 1) for each in (k, v))
        scores = (q * self.scale) @ k.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, keys: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = Attention(16, 8, keys)
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """11 words, which divide by neither 2 nor 4; a head tied to the table, with a bias that the model knows twice."""

    def __init__(self, keys: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16, padding_idx=0)
        self.blocks = nn.ModuleList([Block(keys) for _ in range(2)])
        self.pool = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)
        self.head.weight = self.table.weight
        self.bias = self.head.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.pool(x)))


def build(keys: int = 4, **where: Any) -> Net:
    torch.manual_seed(3)
    with torch.device(where.get("device", "cpu")):
        return Net(keys).double()


def plan_of(keys: int = 4, **more: Any) -> Plan:
    qkv = (Part(16, heads=8), Part(2 * keys, heads=keys), Part(2 * keys, heads=keys))
    words = (Part(11, padded=True),)
    styles = {
        "table": Vocab(),
        "blocks.*.attention.qkv": Column(parts=qkv),
        "blocks.*.attention.scale": Replicated(gradient="sum"),
        "blocks.*.attention.out": Row(parts=(Part(16, heads=8),)),
        "blocks.*.up": Column(),
        "blocks.*.down": Row(),
        "pool": Column(gather_output=True),
        "head": Column(parts=words, gather_output=True),
        "bias": Sharded(parts=words),
        **more,
    }
    attention = {"heads": Divided(), "keys": Divided()} if keys % 4 == 0 else {"heads": Divided()}
    return Plan(styles, {"blocks.*.attention": attention})


def test_a_star_stands_for_one_component() -> None:
    assert matches("layers.*.up", "layers.0.up")
    assert matches("*.up", "a.up")
    assert matches("up", "up")
    for key, name in (("layers.*.up", "layers.0.a.up"), ("*", "a.b"), ("up", "a.up"), ("l*.up", "layers.up")):
        assert not matches(key, name)


# ---- the same numbers ------------------------------------------------------------------------------------------------


def run(mesh: Mesh, keys: int) -> dict[str, Any]:
    model = build(keys)
    assert parallelize(model, mesh.tensor, plan_of(keys)) is model
    if keys == 1:
        assert model.blocks[0].attention.keys == 1
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    y = model(IDS)
    (y * torch.sin(torch.arange(y.numel(), dtype=DOUBLE)).view_as(y)).sum().backward()
    optimizer.finish_gradients(1.0)
    return {
        "y": y.detach(),
        "gradients": optimizer.full_gradients(),
        "state": engine.full_state_dict(model, mesh),
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "tied": model.head.weight is model.table.weight and model.bias is model.head.bias,
    }


@pytest.mark.parametrize("keys", [4, 1])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_module_before(world: World, n: int, keys: int) -> None:
    plain = build(keys)
    y = plain(IDS)
    (y * torch.sin(torch.arange(y.numel(), dtype=DOUBLE)).view_as(y)).sum().backward()
    named, state = dict(plain.named_parameters()), plain.state_dict()
    for got in world.run(Layout(tensor=n), run, keys):
        torch.testing.assert_close(got["y"], y.detach(), **TIGHT)
        assert list(got["gradients"]) == list(named)
        for name, parameter in named.items():
            torch.testing.assert_close(got["gradients"][name], parameter.grad, **TIGHT, msg=name)
        assert list(got["state"]) == list(state)
        assert all(torch.equal(got["state"][name], state[name]) for name in state)
        assert got["shapes"]["table.weight"] == (-(-11 // n), 16)
        assert got["shapes"]["blocks.1.attention.qkv.weight"] == (16 // n + 4 * max(1, keys // n), 16)
        assert got["shapes"]["blocks.1.down.weight"] == (16, 24 // n)
        assert got["tied"]


def run_split(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
    whole = Replicated(gradient="sum")  # each rank uses it on its part of the sequence
    styles = {
        **plan_of().styles,
        "table": Vocab(sequence_dim=1),
        "blocks.*.norm": whole,
        "blocks.*.attention.qkv": Column(parts=(16, 8, 8), sequence_dim=1),
        "blocks.*.attention.out": Row(sequence_dim=1),
        "blocks.*.up": Column(sequence_dim=1),
        "blocks.*.down": Row(sequence_dim=1),
        "pool": whole,
        "head": Column(parts=(Part(11, padded=True),), gather_output=True, sequence_dim=1),
    }
    model = parallelize(build(), mesh.tensor, Plan(styles, plan_of().attributes))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    y = model(IDS)
    (y * torch.sin(torch.arange(y.numel(), dtype=DOUBLE)).view_as(y)).sum().backward()
    optimizer.finish_gradients(1.0)
    return y.detach(), optimizer.full_gradients()


@pytest.mark.parametrize("n", [2, 4])
def test_a_plan_can_split_the_sequence_between_the_matrices(world: World, n: int) -> None:
    plain = build()
    y = plain(IDS)
    (y * torch.sin(torch.arange(y.numel(), dtype=DOUBLE)).view_as(y)).sum().backward()
    for got, gradients in world.run(Layout(tensor=n), run_split):
        torch.testing.assert_close(got, y.detach(), **TIGHT)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, **TIGHT, msg=name)


def planned(n: int = 2, rank: int = 0) -> engine.Communicator:
    """A communicator that refuses to send."""
    return engine.plan_mesh(Layout(tensor=n), rank).tensor


def test_each_rank_keeps_its_shard_and_nothing_else_changes() -> None:
    for rank in range(2):
        plain, model = build(), build()
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].eval()
        kept = [model.blocks[0].norm, model.blocks[0].attention, model.blocks]
        generator = torch.get_rng_state()
        parallelize(model, planned(rank=rank), plan_of())
        assert torch.equal(torch.get_rng_state(), generator), "nothing is drawn"
        assert kept == [model.blocks[0].norm, model.blocks[0].attention, model.blocks]
        placed = placements_of(model)
        assert list(placed) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
        for name, full in plain.named_parameters(remove_duplicate=False):
            shard = model.get_parameter(name)
            assert torch.equal(shard, placed[name].shard(full, rank, 2))
            assert shard.dtype == DOUBLE
            assert shard.untyped_storage().nbytes() == shard.numel() * 8 or placed[name].dim is None
            assert shard.requires_grad == (name != "blocks.0.up.weight")
        assert placed["bias"] == cut(0, [Part(11, padded=True)], 2) == placed["table.weight"]
        assert placed["blocks.0.up.weight"] == Placement(0)
        assert placed["blocks.0.attention.scale"] == Placement(gradient="sum")
        assert placed["blocks.0.norm.weight"] == REPLICATED
        assert isinstance(model.table, VocabParallelEmbedding)
        assert isinstance(model.blocks[0].up, ColumnParallelLinear)
        assert isinstance(model.blocks[0].down, RowParallelLinear)
        assert model.blocks[0].down.training
        assert not model.blocks[1].down.training
        assert (model.blocks[1].attention.heads, model.blocks[1].attention.keys) == (4, 2)
        assert model.blocks[1].attention.width == 2


def test_a_module_on_meta_is_cut_there() -> None:
    model = parallelize(build(device="meta"), planned(4, 3), plan_of())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.head.weight.shape == (3, 16)
    assert model.head.weight is model.table.weight


def test_a_layer_under_several_names_is_cut_once() -> None:
    shared = nn.Linear(4, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    parallelize(model, planned(), Plan({"*.0": Column()}))
    assert model["a"][0] is model["b"][0]
    assert model["a"][0].weight.shape == (4, 4)


# ---- refused ---------------------------------------------------------------------------------------------------------


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def odd_modules() -> nn.ModuleDict:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    parts = {"hooked": hooked, "twice": Twice(4, 4), "norm": nn.LayerNorm(4), "odd": nn.Linear(6, 10)}
    parts["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.ModuleDict(parts)


REFUSED: list[tuple[Plan, tuple[str, ...]]] = [
    (plan_of(**{"blocks.*.upp": Column()}), ("plan key 'blocks.*.upp' matches none", "(did you mean 'blocks.*.up'?)")),
    (plan_of(**{"blocks.*.attention.scal": Replicated()}), ("(did you mean 'blocks.*.attention.scale'?)",)),
    (
        plan_of(**{"blocks.1.up": Column()}),
        ("'blocks.1.up.weight' is matched twice", "'blocks.*.up' and 'blocks.1.up'"),
    ),
    (plan_of(**{"blocks.1": Replicated()}), ("is matched twice, by plan keys", "and 'blocks.1'")),
    (plan_of(**{"blocks.*.norm": Column()}), ("'blocks.0.norm' (plan key 'blocks.*.norm')", "this is a LayerNorm")),
    (plan_of(pool=Vocab()), ("'pool' (plan key 'pool'): Vocab is for nn.Embedding, and this is a Linear",)),
    (plan_of(pool=Sharded()), ("Sharded is for parameters, and 'pool' is a module",)),
    (plan_of(**{"blocks.*.norm.bias": Row()}), ("Row is for modules, and 'blocks.0.norm.bias' is a parameter",)),
    (plan_of(**{"blocks.*.norm.bias": Sharded(dim=1)}), ("dim=1 is outside its shape (16,)",)),
    (
        plan_of(pool=Column(parts=(8, 9))),
        ("'pool' (plan key 'pool'): ", "its parts are 8 + 9 = 17 elements, but dim 0 has 16"),
    ),
    (
        plan_of(pool=Column(parts=(13, 3))),
        ("a part of 13 elements: 13 does not divide by 2: use a multiple of 2",),
    ),
    (plan_of(pool=Column(parts=(Part(15, heads=3), 1))), ("3 heads do not divide over 2 ranks",)),
    (
        plan_of(pool=Row(parts=(Part(16, heads=1),))),
        ("neither padded nor held by several ranks", "divide by 2"),
    ),
    (
        plan_of(pool=Column(parts=(Part(16, heads=1),), gather_output=True)),
        ("gather_output=True with", "use at least 2 heads"),
    ),
    (plan_of(pool=Column(sequence_dim=-1)), ("'pool' (plan key 'pool')", "sequence_dim=-1 is the dim of the features")),
    (plan_of(bias=Sharded(parts=(4, 6))), ("its parts are 4 + 6 = 10 elements, but dim 0 has 11",)),
    (plan_of(head=Replicated()), ("'head.weight' and 'table.weight' are one tied parameter", "key 'table'")),
    (plan_of(bias=Replicated()), ("are one tied parameter", "alike")),
    (Plan({"pool": Column()}, {"blocks.*.atention": {}}), ("matches no module (did you mean 'blocks.*.attention'?)",)),
    (
        Plan({}, {"blocks.*.attention": {"head": Divided()}}),
        (
            "'head' of 'blocks.0.attention' is missing (did you mean 'heads'?): its whole numbers are",
            "heads, keys, width",
        ),
    ),
    (Plan({}, {"blocks.*.attention": {"qkv": Divided()}}), ("'qkv' of 'blocks.0.attention' is a Linear",)),
    (
        Plan({}, {"blocks.*.attention": {"heads": Divided()}, "blocks.0.attention": {"heads": Divided()}}),
        ("'heads' of 'blocks.0.attention' is changed twice",),
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_plan_cannot_do_is_refused_before_anything_is_sent_or_changed(number: int) -> None:
    plan, parts = REFUSED[number]
    model = build()
    before = {name: (id(module), dict(vars(module))) for name, module in model.named_modules()}
    texts = refusals([lambda: parallelize(model, planned(), plan), lambda: describe(plan, build(device="meta"), 2)])
    for text in texts:
        for part in parts:
            assert part in text
    assert {name: (id(module), dict(vars(module))) for name, module in model.named_modules()} == before


def test_layers_that_do_more_than_their_class_are_refused() -> None:
    texts = refusals(
        [lambda key=key: describe(Plan({key: Column()}), odd_modules(), 2) for key in ("hooked", "normed", "twice")]
        + [lambda: describe(Plan({"odd": Column()}), odd_modules(), 4)]
    )
    assert (
        "'hooked' (plan key 'hooked'): this Linear has hooks or parametrizations, which Column would drop" in texts[0]
    )
    assert "has hooks or parametrizations" in texts[1]
    assert "this Twice has a forward of its own, which Column would not run" in texts[2]
    assert "'odd' (plan key 'odd')" in texts[3]
    assert "10 does not divide by 4: use a multiple of 4" in texts[3]


def test_plans_and_arguments_that_are_none_are_refused() -> None:
    model = build()
    texts = refusals(
        [
            lambda: Plan({"pool": Column}),  # type: ignore[dict-item]
            lambda: Plan({"pool": "colum"}),  # type: ignore[dict-item]
            lambda: Plan({}, {"pool": {"in_features": 2}}),  # type: ignore[dict-item]
            lambda: Column(parts=3),  # type: ignore[arg-type]
            lambda: Row(parts=()),
            lambda: Column(parts=(1.5,)),  # type: ignore[arg-type]
            lambda: Replicated(gradient="mean"),  # type: ignore[arg-type]
            lambda: parallelize(model, engine.plan_mesh(Layout(tensor=2), 0), plan_of()),  # type: ignore[arg-type]
            lambda: parallelize(model, planned(), {"pool": Column()}),  # type: ignore[arg-type]
            lambda: parallelize({}, planned(), plan_of()),  # type: ignore[arg-type]
            lambda: describe(plan_of(), model, 0),
        ]
    )
    for text, part in zip(
        texts,
        [
            "plan key 'pool': Column is the class and no style: write Column()",
            "plan key 'pool': 'colum' (did you mean 'Column'?) is no style: give one of Column(...), Row(...)",
            "in_features = 2: give Divided(...)",
            "parts=3: give a sequence of sizes or Parts",
            "parts=(): give at least one size",
            "1.5 is neither a size nor a Part",
            "gradient='mean'",
            "comm is a Mesh: give a Communicator",
            "not a Net and a dict",
            "not a dict and a Plan",
            "size=0: the size of the tensor axis",
        ],
        strict=True,
    ):
        assert part in text


def disagree(mesh: Mesh) -> list[Any]:
    model, other, third = build(), build(), build()
    with torch.no_grad():
        other.pool.weight[0, 0] += mesh.rank
    third.pool.weight.requires_grad_(mesh.rank == 0)
    plan = plan_of() if mesh.rank == 0 else plan_of(pool=Row(split_input=True))
    before = copy.deepcopy(model.state_dict())
    texts = refusals(
        [
            lambda: parallelize(model, mesh.tensor, plan),
            lambda: parallelize(other, mesh.tensor, plan_of()),
            lambda: parallelize(third, mesh.tensor, plan_of()),
        ]
    )
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return [*texts, same and type(other.pool) is nn.Linear]


def test_ranks_with_other_plans_or_weights_are_told_so(world: World) -> None:
    for plan, weights, frozen, unchanged in world.run(Layout(tensor=2), disagree):
        assert "parallelize's plan differs over axis 'tensor': rank 1 (global 1) has" in plan
        assert "the module given to parallelize" in weights
        assert "differs over axis 'tensor'" in weights
        assert "the module given to parallelize" in frozen
        assert unchanged


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_says_what_goes_where() -> None:
    text = describe(plan_of(keys=1), build(1, device="meta"), 2)
    rows = {line.split("  ")[0]: [cell.strip() for cell in line.split("  ")[1:] if cell] for line in text.splitlines()}
    copied = "2 in 1 head, each on 2 ranks, gradients summed"
    assert rows["parameter"] == ["whole", "each of 2", "lies"]
    assert rows["table.weight"] == ["11 x 16", "6 x 16", "dim 0 cut: 11, padded with 1"]
    assert rows["bias"] == ["11", "6", "dim 0 cut: 11, padded with 1"]
    assert rows["head.weight"] == ["11 x 16", "6 x 16", "dim 0 cut: 11, padded with 1; tied to table.weight"]
    assert rows["blocks.[0-1].norm.weight"] == ["16", "16", "whole on each rank"]
    assert rows["blocks.[0-1].attention.scale"] == ["2", "2", "whole on each rank, gradients summed"]
    assert rows["blocks.[0-1].attention.qkv.bias"] == [
        "20",
        "12",
        f"dim 0 cut: 16 in 8 heads + {copied} + {copied}",
    ]
    assert rows["blocks.[0-1].down.weight"] == ["16 x 24", "16 x 12", "dim 1 cut"]
    assert rows["blocks.[0-1].attention.heads"] == ["8", "4"]
    assert describe(Plan({}), nn.Linear(2, 3), 2).splitlines()[2].split() == [
        *("weight", "3", "x", "2", "3", "x", "2"),
        *("whole", "on", "each", "rank"),
    ]
