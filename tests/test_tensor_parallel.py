"""Layers over the tensor axis against nn.Linear and nn.Embedding in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.errors import LayoutError
from engine.placement import replicated
from engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.vocabulary_cases import wave
from tests.world import World

Mesh = engine.Mesh
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def fill(weight: Tensor) -> None:
    """An initialiser that draws: twice the number of values that the plain one does."""
    weight.copy_(torch.randn(weight.shape, dtype=weight.dtype) + torch.rand(weight.shape, dtype=weight.dtype))


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# ---- drawing ---------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CASES = [(bias, init, dtype) for bias in (True, False) for init in (None, fill) for dtype in DTYPES]


def draw(mesh: Mesh) -> list[dict[str, Any]]:
    results = []
    for number, (bias, init, dtype) in enumerate(CASES):
        torch.manual_seed(number)
        column = ColumnParallelLinear(12, 8, mesh.tensor, bias=bias, init=init, dtype=dtype)
        row = RowParallelLinear(12, 8, mesh.tensor, bias=bias, init=init, dtype=dtype)
        table = VocabParallelEmbedding(12, 5, mesh.tensor, init=init, dtype=dtype)
        results.append(
            {
                "column.weight": column.weight.detach(),
                "column.bias": None if column.bias is None else column.bias.detach(),
                "row.weight": row.weight.detach(),
                "row.bias": None if row.bias is None else row.bias.detach(),
                "table.weight": table.weight.detach(),
                "generator": torch.get_rng_state(),
                "contiguous": all(p.is_contiguous() for m in (column, row, table) for p in m.parameters()),
                "own": max(p.untyped_storage().nbytes() for p in (column.weight, row.weight)),
            }
        )
    return results


def draw_plainly(number: int, bias: bool, init: Any, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(number)
    made: dict[str, Any] = {}
    for name in ("column", "row"):
        if init is None:
            layer = nn.Linear(12, 8, bias=bias, dtype=dtype)
        else:
            # nn.Linear's own order, with another weight: weight, then bias with bound 1 / sqrt(in_features).
            layer = nn.utils.skip_init(nn.Linear, 12, 8, bias=bias, dtype=dtype)
            with torch.no_grad():
                init(layer.weight)
                if bias:
                    layer.bias.uniform_(-1 / math.sqrt(12), 1 / math.sqrt(12))
        made[f"{name}.weight"] = layer.weight.detach()
        made[f"{name}.bias"] = layer.bias.detach() if bias else None
    if init is None:
        made["table.weight"] = nn.Embedding(12, 5, dtype=dtype).weight.detach()
    else:
        made["table.weight"] = torch.empty(12, 5, dtype=dtype)
        init(made["table.weight"])
    return {**made, "generator": torch.get_rng_state()}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_shards_are_bitwise_slices_of_the_plain_layers(world: World, n: int) -> None:
    cut = {"column.weight": 0, "column.bias": 0, "row.weight": 1, "table.weight": 0}
    for rank, results in enumerate(world.run(Layout(tensor=n), draw)):
        for number, ((bias, init, dtype), got) in enumerate(zip(CASES, results, strict=True)):
            plain = draw_plainly(number, bias, init, dtype)
            for name, dim in cut.items():
                if plain[name] is None:
                    assert got[name] is None
                else:
                    assert got[name].dtype == dtype
                    assert torch.equal(got[name], plain[name].chunk(n, dim)[rank]), (name, bias, init, dtype)
            assert (got["row.bias"] is None) == (not bias)
            assert not bias or torch.equal(got["row.bias"], plain["row.bias"]), "the row bias is whole everywhere"
            assert torch.equal(got["generator"], plain["generator"]), "the generator stands where plain layers leave it"
            assert got["contiguous"]
            assert got["own"] == 12 * 8 // n * dtype.itemsize, "a shard keeps no more than its own memory"


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    comm = engine.plan_mesh(Layout(tensor=4), 0).tensor
    for make, what, size in (
        (lambda: ColumnParallelLinear(8, 6, comm), "ColumnParallelLinear: out_features", 6),
        (lambda: RowParallelLinear(6, 8, comm), "RowParallelLinear: in_features", 6),
    ):
        with pytest.raises(LayoutError) as caught:
            make()
        assert str(caught.value) == (
            f"{what} over axis 'tensor': {size} does not divide by 4: "
            f"use a multiple of 4, or a size that divides {size}"
        )
    assert VocabParallelEmbedding(10, 8, comm).weight.shape == (3, 8), "a vocabulary is padded instead"


def test_a_layer_says_what_it_is() -> None:
    comm = engine.plan_mesh(Layout(tensor=2), 1).tensor
    model = nn.Sequential(
        ColumnParallelLinear(4, 6, comm), RowParallelLinear(6, 4, comm, bias=False), VocabParallelEmbedding(8, 4, comm)
    )
    assert repr(model).splitlines()[1:-1] == [
        "  (0): ColumnParallelLinear(in_features=4, out_features=6 / 2, bias=True)",
        "  (1): RowParallelLinear(in_features=6 / 2, out_features=4, bias=False)",
        "  (2): VocabParallelEmbedding(num_embeddings=8 / 2, embedding_dim=4)",
    ]


# ---- forward and backward --------------------------------------------------------------------------------------------

IDS = torch.tensor([[0, 11, 5, 5], [7, 3, 0, 8]])


class Net(nn.Module):
    """Embedding, column, row and column again, whose output stays split."""

    def __init__(self, comm: engine.Communicator, bias: bool) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(12, 8, comm, dtype=DOUBLE)
        self.up = ColumnParallelLinear(8, 16, comm, bias=bias, dtype=DOUBLE)
        self.down = RowParallelLinear(16, 8, comm, bias=bias, dtype=DOUBLE)
        self.out = ColumnParallelLinear(8, 12, comm, bias=bias, dtype=DOUBLE)

    def forward(self, ids: Tensor, more: Tensor, strided: bool = False) -> Tensor:
        x = self.table(ids) + more
        y = torch.tanh(self.up(with_gaps(x) if strided else x))
        return self.out(x + self.down(with_gaps(y) if strided else y))


class PlainNet(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, dtype=DOUBLE)
        self.up = nn.Linear(8, 16, bias=bias, dtype=DOUBLE)
        self.down = nn.Linear(16, 8, bias=bias, dtype=DOUBLE)
        self.out = nn.Linear(8, 12, bias=bias, dtype=DOUBLE)

    def forward(self, ids: Tensor, more: Tensor) -> Tensor:
        x = self.table(ids) + more
        return self.out(x + self.down(torch.tanh(self.up(x))))


CUT = {"table.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "out.weight": 0, "out.bias": 0}


def with_gaps(x: Tensor) -> Tensor:
    """The same values in memory that is neither contiguous nor dense."""
    return torch.stack([x, torch.zeros_like(x)], -1).transpose(0, 1)[..., 0].transpose(0, 1)


def forward_backward(mesh: Mesh, bias: bool, strided: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    net = Net(mesh.tensor, bias)
    more = wave(1, 2, 4, 8).requires_grad_()
    y = net(IDS, more, strided)
    weight = wave(2, 2, 4, 12).chunk(mesh.tensor.size, -1)[mesh.tensor.rank]
    (weight * y * y).sum().backward()
    return {"y": y.detach(), "more": more.grad, **{name: p.grad for name, p in net.named_parameters()}}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_outputs_and_all_gradients_equal_plain_layers(world: World, n: int, bias: bool, strided: bool) -> None:
    torch.manual_seed(5)
    plain = PlainNet(bias)
    more = wave(1, 2, 4, 8).requires_grad_()
    y = plain(IDS, more)
    (wave(2, 2, 4, 12) * y * y).sum().backward()
    for rank, got in enumerate(world.run(Layout(tensor=n), forward_backward, bias, strided)):
        torch.testing.assert_close(got["y"], y.detach().chunk(n, -1)[rank], **TIGHT)
        torch.testing.assert_close(got["more"], more.grad, **TIGHT)
        assert {name for name, _ in plain.named_parameters()} == set(got) - {"y", "more"}
        for name, p in plain.named_parameters():
            expected = p.grad.chunk(n, CUT[name])[rank] if name in CUT else p.grad
            torch.testing.assert_close(got[name], expected, **TIGHT, msg=f"gradient of {name}")


def row_with_bias(mesh: Mesh) -> tuple[Tensor, Tensor]:
    n, r = mesh.tensor.size, mesh.tensor.rank
    row = RowParallelLinear(4, 3, mesh.tensor, dtype=DOUBLE)
    with torch.no_grad():
        row.weight.copy_(torch.arange(12.0).view(3, 4).chunk(n, 1)[r])
        row.bias.copy_(torch.tensor([100.0, 200.0, 300.0]))
    y = row(torch.tensor([[1.0, 10.0, 100.0, 1000.0]], dtype=DOUBLE).chunk(n, 1)[r])
    (y * torch.tensor([2.0, 3.0, 5.0])).sum().backward()
    return y.detach(), row.bias.grad


@pytest.mark.parametrize("n", [2, 4])
def test_the_row_bias_is_added_once(world: World, n: int) -> None:
    """Rows 0..3, 4..7, 8..11 times 1, 10, 100, 1000, plus 100, 200, 300."""
    for y, gradient in world.run(Layout(tensor=n), row_with_bias):
        assert y.tolist() == [[3210.0 + 100, 7654.0 + 200, 12098.0 + 300]]
        assert gradient.tolist() == [2.0, 3.0, 5.0]


def copied(mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(5)
    net = Net(mesh.tensor, bias=True)
    twin = copy.deepcopy(net)
    meta = copy.deepcopy(net).to("meta")
    empty = copy.deepcopy(net).to("meta").to_empty(device="cpu")
    empty.load_state_dict(net.state_dict())
    more = wave(1, 2, 4, 8)
    y = net(IDS, more)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    return {
        "empty": torch.equal(empty(IDS, more), y),
        "untouched": torch.equal(net(IDS, more), y),
        "moved": not torch.equal(twin(IDS, more), y),
        "meta": all(p.is_meta for p in meta.parameters()),
        "comm": all(m.table.comm is mesh.tensor for m in (twin, meta, empty)),
        "placed": [
            engine.placement.placements_of(m) == engine.placement.placements_of(net) for m in (twin, meta, empty)
        ],
    }


def test_layers_survive_deepcopy_and_meta(world: World) -> None:
    for got in world.run(Layout(tensor=2), copied):
        assert got == {
            "empty": True,
            "untouched": True,
            "moved": True,
            "meta": True,
            "comm": True,
            "placed": [True, True, True],
        }


def look_up(mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(5)
    table = VocabParallelEmbedding(12, 3, mesh.tensor, dtype=DOUBLE)
    return {
        "high": error_of(lambda: table(torch.tensor([3, 12]))),
        "low": error_of(lambda: table(torch.tensor([[-1]]))),
        "none": tuple(table(torch.empty(2, 0, dtype=torch.int64)).shape),
        "one": table(torch.tensor(7)).detach(),
        "int32": table(IDS.int().t()).detach(),
        "afterwards": mesh.tensor.any(mesh.rank == 1),
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ids_of_any_shape_are_looked_up_and_others_refused_on_every_rank(world: World, n: int) -> None:
    torch.manual_seed(5)
    plain = nn.Embedding(12, 3, dtype=DOUBLE)
    for got in world.run(Layout(tensor=n), look_up):
        text = "VocabParallelEmbedding: id {} is outside the vocabulary: ids go from 0 to 11"
        assert got["high"] == ("UsageError", text.format(12))
        assert got["low"] == ("UsageError", text.format(-1))
        assert got["none"] == (2, 0, 3)
        assert torch.equal(got["one"], plain(torch.tensor(7)))
        assert torch.equal(got["int32"], plain(IDS.t()))
        assert got["afterwards"] is (n > 1)


# ---- replicated parameters do not drift -------------------------------------------------------------------


class HeadNorm(nn.Module):
    """Normalises this rank's heads with a scale that all heads share: each rank has a part of its gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.scale.numel()))
        return (heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale).flatten(-2)


class Block(nn.Module):
    def __init__(self, make_column: Callable[..., nn.Module], make_row: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=DOUBLE)
        self.up = make_column(8, 16)
        self.heads = replicated(HeadNorm(4), gradient="sum")
        self.down = make_row(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.heads(self.up(self.norm(x)))))


def squares(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (y - target).square().sum(), target.numel()


ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def train_blocks(mesh: Mesh, stage: int, disturb: bool) -> dict[str, Any]:
    comm = mesh.tensor
    torch.manual_seed(5)
    model = nn.Sequential(
        *(
            Block(
                lambda i, o: ColumnParallelLinear(i, o, comm, dtype=DOUBLE),
                lambda i, o: RowParallelLinear(i, o, comm, dtype=DOUBLE),
            )
            for _ in range(2)
        )
    )
    if disturb and comm.rank:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if engine.placement.placements_of(model)[name].dim is None:
                    parameter.add_(0.5 * comm.rank)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, **ADAMW)
    step = engine.TrainStep(model, optimizer, squares, mesh, microbatches=2, clip_grad_norm=0.5)
    result: dict[str, Any] = {"start": {name: p.detach().clone() for name, p in model.named_parameters()}, "norms": []}
    for number in range(5):
        x, target = wave(20 + number, 8, 8), wave(30 + number, 8, 8)
        here, size = mesh.data.rank, mesh.data.size
        result["norms"].append(step(x.chunk(size)[here], target.chunk(size)[here]).grad_norm.item())
    result["end"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def train_blocks_plainly() -> dict[str, Any]:
    torch.manual_seed(5)

    def linear(i: int, o: int) -> nn.Module:
        return nn.Linear(i, o, dtype=DOUBLE)

    model = nn.Sequential(*(Block(linear, linear) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    result: dict[str, Any] = {"norms": []}
    for number in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(wave(20 + number, 8, 8)), wave(30 + number, 8, 8)).backward()
        result["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    result["end"] = {name: p.detach() for name, p in model.named_parameters()}
    return result


BLOCK_CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.mark.parametrize(
    ("layout", "stage"),
    [(Layout(tensor=2), 2), (Layout(tensor=4), 0), (Layout(data=2, tensor=2), 2), (Layout(data=2, tensor=2), 1)],
    ids=str,
)
@pytest.mark.parametrize("disturb", [False, True], ids=["equal start", "unequal start"])
def test_replicated_parameters_stay_bitwise_equal_and_all_follow_plain_training(
    world: World, layout: Layout, stage: int, disturb: bool
) -> None:
    results = world.run(layout, train_blocks, stage, disturb)
    plain = train_blocks_plainly()
    assert max(plain["norms"]) > 0.5, "the case must clip"
    for rank, got in enumerate(results):
        place = layout.coordinate(rank)
        assert got["norms"] == results[0]["norms"]
        assert got["norms"] == pytest.approx(plain["norms"], rel=1e-10)
        for name, value in plain["end"].items():
            dim = BLOCK_CUT.get(name.partition(".")[2])
            expected = value if dim is None else value.chunk(layout.tensor, dim)[place.tensor]
            torch.testing.assert_close(got["end"][name], expected, rtol=1e-10, atol=1e-10, msg=name)
            twin = place.tensor if dim is not None else 0  # rank 0 .. T - 1 are data rank 0's tensor ranks
            for when in ("start", "end"):
                assert torch.equal(got[when][name], results[twin][when][name]), f"{name} at the {when}"
        assert not torch.equal(got["end"]["0.norm.weight"], got["start"]["0.norm.weight"])
