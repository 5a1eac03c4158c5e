"""What parallelize refuses beyond a plan's own names and sizes: layers that others read, state that would be lost, what
is cut already, what fails on one rank only.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import placements_of
from engine.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Divided,
    Plan,
    Replicated,
    Row,
    Sharded,
    Vocab,
    describe,
    lora,
    parallelize,
)
from tests.world import World, refusals

Mesh = engine.Mesh


def planned(n: int = 2) -> engine.Communicator:
    """A communicator that refuses to send."""
    return engine.plan_mesh(Layout(tensor=n), 0).tensor


def both(module: nn.Module, plan: Plan) -> str:
    """Return the one error of describe and parallelize, which leave all as it was."""
    before = {name: (id(each), dict(vars(each))) for name, each in module.named_modules()}
    first, second = refusals([lambda: describe(plan, module, 2), lambda: parallelize(module, planned(), plan)])
    assert first == second
    assert {name: (id(each), dict(vars(each))) for name, each in module.named_modules()} == before
    return first


# ---- layers whose weights their parent reads -------------------------------------------------------------------------


class Encoder(nn.TransformerEncoderLayer):
    pass


@pytest.mark.parametrize(
    ("key", "style", "reader"),
    [
        ("layers.*.linear1", Column(), "'layers.0' is a Encoder"),
        ("layers.*.linear2", Row(), "'layers.0' is a Encoder"),
        ("layers.*.linear1.weight", Sharded(), "'layers.0' is a Encoder"),
        ("layers.*.norm1.weight", Sharded(), "'layers.0' is a Encoder"),
        ("layers.*.self_attn.out_proj", Row(), "'layers.0.self_attn' is a MultiheadAttention"),
        ("layers.*.self_attn.in_proj_weight", Sharded(), "'layers.0.self_attn' is a MultiheadAttention"),
    ],
)
def test_layers_whose_weights_their_parent_reads_itself_are_refused(key: str, style: Any, reader: str) -> None:
    encoder = nn.TransformerEncoder(Encoder(8, 2, 16, batch_first=True), 2)
    text = both(encoder, Plan({key: style}))
    assert f"(plan key {key!r}): {reader}, whose code reads the weights of its layers itself" in text
    assert parallelize(encoder, planned(), Plan({"layers": Replicated(gradient="sum")})) is encoder


def test_a_parent_that_is_the_whole_module_is_seen_and_one_that_calls_its_layers_is_not_refused() -> None:
    text = both(nn.MultiheadAttention(8, 2), Plan({"out_proj": Row()}))
    assert "'out_proj' (plan key 'out_proj'): the whole module is a MultiheadAttention, whose code reads" in text
    decoder = nn.TransformerDecoderLayer(8, 2, 16)
    parallelize(decoder, planned(), Plan({"linear1": Column(), "linear2": Row()}))
    assert decoder.linear1.weight.shape == (8, 8)


# ---- what is cut already ---------------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 36
        self.up = nn.Linear(8, 36)
        self.scale = nn.Parameter(torch.ones(36))
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(4, 8)


FIRST = Plan(
    {"a.up": Column(), "a.scale": Sharded(), "a.norm": Replicated(gradient="sum"), "a.table": Vocab()},
    {"a": {"heads": Divided()}},
)


@pytest.mark.parametrize(
    ("styles", "attributes", "part"),
    [
        ({"a.up": Column()}, {}, "'a.up' (plan key 'a.up'): a parameter of shape (18, 8) lies cut along dim 0,"),
        ({"a.up.weight": Sharded()}, {}, "lies cut along dim 0, over the tensor axis already, and Sharded would"),
        ({"a.scale": Sharded()}, {}, "a parameter of shape (18,) lies cut along dim 0, over the tensor axis already"),
        ({"a.scale": Replicated()}, {}, "and Replicated would place it anew: place each parameter once"),
        ({"a": Replicated()}, {}, "'a.scale' (plan key 'a'): a parameter of shape (18,)"),
        ({"a.table": Vocab()}, {}, "a parameter of shape (2, 8) lies cut along dim 0,"),
        ({"a.norm": Replicated()}, {}, "a parameter of shape (8,) lies whole, with gradients summed,"),
        ({"b.up": Column()}, {"a": {"heads": Divided()}}, "'a' has parameters that are cut over the tensor axis"),
    ],
)
def test_what_is_cut_already_is_not_cut_again(styles: Any, attributes: Any, part: str) -> None:
    model = parallelize(nn.ModuleDict({"a": Heads(), "b": Heads()}), planned(), FIRST)
    before = placements_of(model)
    assert part in both(model, Plan(styles, attributes))
    assert placements_of(model) == before


def test_a_plan_of_attributes_alone_is_not_applied_twice() -> None:
    plan = Plan({}, {"a": {"heads": Divided()}})
    model = copy.deepcopy(parallelize(nn.ModuleDict({"a": Heads(), "b": Heads()}), planned(), plan))
    assert "'heads' of 'a' was changed by a plan before, to 18, and would be divided once more" in both(model, plan)
    parallelize(model, planned(), Plan({}, {"b": {"heads": Divided()}}))
    assert [model[each].heads for each in "ab"] == [18, 18]


def test_a_second_plan_may_cut_the_rest() -> None:
    model = parallelize(nn.ModuleDict({"a": Heads(), "b": Heads()}), planned(), FIRST)
    parallelize(
        model, planned(), Plan({"b.up": Column(), "a.norm": Replicated(gradient="sum")}, {"b": FIRST.attributes["a"]})
    )
    assert [model[each].heads for each in "ab"] == [18, 18]
    assert [tuple(model[each].up.weight.shape) for each in "ab"] == [(18, 8), (18, 8)]


# ---- what would be lost ----------------------------------------------------------------------------------------------


def extra(name: str) -> nn.Module:
    layer = nn.Embedding(4, 4) if name == "table" else nn.Linear(4, 4)
    if name in ("buffer", "table"):
        layer.register_buffer("seen", torch.zeros(1))
    elif name == "module":
        layer.adapter = nn.Linear(4, 2)
    elif name == "parameter":
        layer.scale = nn.Parameter(torch.ones(4))
    elif name == "hook":
        layer.weight.register_hook(lambda grad: 2 * grad)
    elif name == "accumulated":
        layer.bias.register_post_accumulate_grad_hook(lambda _: None)
    elif name == "state":
        layer.register_state_dict_post_hook(lambda *_: None)
    elif name == "saving":
        layer.register_state_dict_pre_hook(lambda *_: None)
    elif name == "before":
        layer.register_load_state_dict_pre_hook(lambda *_: None)
    else:
        layer.register_load_state_dict_post_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("buffer", "buffers 'seen'"),
        ("table", "buffers 'seen'"),
        ("module", "modules of its own 'adapter'"),
        ("parameter", "parameters 'scale'"),
        ("hook", "hooks on 'weight'"),
        ("accumulated", "hooks on 'bias'"),
        ("state", "hooks on its state dict"),
        ("saving", "hooks on its state dict"),
        ("before", "hooks on its state dict"),
        ("after", "hooks on its state dict"),
    ],
)
def test_a_layer_with_what_a_parallel_one_would_not_have_is_refused(name: str, what: str) -> None:
    style = Vocab() if name == "table" else Column()
    text = both(nn.ModuleDict({name: extra(name)}), Plan({name: style}))
    kind = "Embedding" if name == "table" else "Linear"
    assert f"this {kind} has {what}, which {type(style).__name__} would drop: remove them first" in text


def test_a_sharded_parameter_with_hooks_is_refused() -> None:
    assert "it has hooks, which Sharded would drop" in both(extra("hook"), Plan({"weight": Sharded()}))


# ---- attributes ------------------------------------------------------------------------------------------------------


class Guarded(nn.Module):
    """Of its numbers one cannot be set, and one not to everything."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.width, self._count = 4, 6

    @property
    def fixed(self) -> int:
        return 6

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        if value % 2:
            raise ValueError("only even counts")
        self._count = value


@pytest.mark.parametrize("attribute", ["fixed", "count"])
def test_an_attribute_that_cannot_be_set_leaves_all_as_it_was(attribute: str) -> None:
    model = nn.ModuleDict({"a": Guarded()})
    plan = Plan({"a.up": Column()}, {"a": {"width": Divided(), attribute: Divided()}})
    (text,) = refusals([lambda: parallelize(model, planned(), plan)])
    if attribute == "fixed":
        assert text in both(model, plan)
        assert "'fixed' of 'a' is a property without a setter, with the value 6" in text
    else:
        assert "'count' of 'a' cannot be set from 6 to 3: only even counts" in text
    assert (model["a"].width, model["a"].count, type(model["a"].up)) == (4, 6, nn.Linear)


# ---- ranks that disagree ---------------------------------------------------------------------------------------------


def apart(mesh: Mesh) -> list[Any]:
    odd = mesh.rank == 1

    def cut(key: str = "a.up", columns: int = 36, heads: int = 36, plan: Any = None) -> Tensor:
        model = nn.ModuleDict({"a": Heads()})
        model["a"].up, model["a"].heads = nn.Linear(8, columns), heads
        nn.init.zeros_(model["a"].up.weight)
        nn.init.zeros_(model["a"].up.bias)
        nn.init.zeros_(model["a"].table.weight)
        try:
            parallelize(model, mesh.tensor, plan or Plan({key: Column()}, {"a": {"heads": Divided()}}))
        finally:
            assert (type(model["a"].up), model["a"].heads) == (nn.Linear, heads)
        return model["a"].up.weight

    return refusals(
        [
            lambda: cut(key="a.upp" if odd else "a.up"),
            lambda: cut(columns=35 if odd else 36),
            lambda: cut(plan={"a.up": Column()} if odd else None),
            lambda: cut(heads=12 if odd else 36),
            lambda: cut(key="a.upp"),
            lambda: cut(key="a.upp" if odd else "a.norm"),
        ]
    )


@pytest.mark.parametrize("n", [2, 3])
def test_what_one_rank_refuses_all_hear_of(world: World, n: int) -> None:
    results = world.run(Layout(tensor=n), apart)
    for rank, (key, columns, plan, heads, alike, each) in enumerate(results):
        other = "parallelize: another rank was given a plan or module that does not work: see its error"
        assert "the attributes that parallelize changes" in heads
        assert "differs over axis 'tensor'" in heads
        assert alike.startswith("plan key 'a.upp' matches none of the modules")
        if rank == 1:
            assert key == alike == each
            assert "'a.up' (plan key 'a.up')" in columns
            assert f"35 does not divide by {n}" in columns
            assert plan.startswith("a module and a Plan are wanted")
        else:
            assert "which differs over axis 'tensor': rank 1 (global 1) has \"plan key 'a.upp' matches none" in key
            assert all(text.startswith(other) for text in (key, columns, plan))
            assert "this is a LayerNorm" in each


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_of_another_kind_are_refused() -> None:
    layer = ColumnParallelLinear(4, 4, planned())
    calls: dict[str, Any] = {
        "Plan(styles): a NoneType is no dict": lambda: Plan(None),
        "Plan(styles): a list is no dict": lambda: Plan([("a", Column())]),
        "Plan(styles): key 1 is a int": lambda: Plan({1: Column()}),
        "Plan(styles): key None is a NoneType": lambda: Plan({None: Column()}),
        "Plan(attributes): a list is no dict": lambda: Plan({}, ["a"]),
        "plan attributes 'a': a Divided is no dict": lambda: Plan({}, {"a": Divided()}),
        "plan attributes 'a': key 3 is a int": lambda: Plan({}, {"a": {3: Divided()}}),
        "heads = Divided without brackets: give Divided(...)": lambda: Plan({}, {"a": {"heads": Divided}}),
        "plan key 'a': Vocab is the class and no style: write Vocab()": lambda: Plan({"a": Vocab}),
        "plan key 'a': Linear is no style: give one of": lambda: Plan({"a": nn.Linear}),
        "Column(sequence_dim='1'): a dim is an integer": lambda: Column(sequence_dim="1"),
        "Row(sequence_dim=1.0): a dim is an integer": lambda: Row(sequence_dim=1.0),
        "Vocab(sequence_dim=True): a dim is an integer": lambda: Vocab(sequence_dim=True),
        "Sharded(dim=None): give the dim": lambda: Sharded(dim=None),
        "Sharded(dim=0.5): a dim is an integer": lambda: Sharded(dim=0.5),
        "lora: alpha=nan: the adapter is scaled by alpha / rank": lambda: lora(layer, 1, float("nan")),
        "lora: alpha=inf": lambda: lora(layer, 1, float("inf")),
        "lora: alpha='1'": lambda: lora(layer, 1, "1"),
        "lora: alpha=True": lambda: lora(layer, 1, True),
    }
    for expected, text in zip(calls, refusals(list(calls.values())), strict=True):
        assert expected in text
    assert layer.weight.requires_grad, "nothing is frozen"
