"""Parallel linear layers with parts, sequence parallel and overlap, each against nn.Linear in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.placement import Part, Placement, replicated
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.world import World

Mesh = engine.Mesh
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
TO_1E10 = {"rtol": 1e-10, "atol": 1e-10}


def wave(number: int, *shape: int) -> Tensor:
    """Values between -1 and 1, all different, different for each number."""
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=DOUBLE) * 0.7 + 1.3 * number).view(shape)


def here(x: Tensor, mesh: Mesh, dim: int | None) -> Tensor:
    """This rank's part along `dim`, as a leaf that takes a gradient."""
    part = x if dim is None else x.chunk(mesh.tensor.size, dim)[mesh.tensor.rank]
    return part.detach().clone().requires_grad_()


def outcome(y: Tensor, x: Tensor, module: nn.Module) -> dict[str, Any]:
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


# ---- parts and options of the column-parallel layer ------------------------------------------------------------------

HEADS = (Part(8, heads=4), Part(4, heads=2), Part(2, heads=1))
COLUMN: dict[str, dict[str, Any]] = {
    "plain": {},
    "gate and up": {"parts": (8, 8)},
    "uneven parts": {"parts": (4, 12)},
    "heads": {"parts": (Part(8, heads=4), Part(8, heads=8))},
    "gathered": {"gather_output": True},
    "gathered parts": {"gather_output": True, "parts": (4, 12)},
    "rows split": {"sequence_dim": 0},
    "sequence split": {"sequence_dim": 1, "parts": (4, 12)},
    "sequence split, counted from the end": {"sequence_dim": -2},
    "sequence split, gathered": {"sequence_dim": 1, "gather_output": True},
    "no bias": {"bias": False, "sequence_dim": 1},
    "bias returned": {"return_bias": True},
}


def run_column(mesh: Mesh, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = ColumnParallelLinear(8, 16, mesh.tensor, dtype=DOUBLE, **options)
    x = here(wave(1, 4, 8, 8), mesh, options.get("sequence_dim"))
    y = layer(x)
    if layer.return_bias:
        assert y[1] is layer.bias
        y = y[0] + y[1]
    if layer.gather_output:
        weight = wave(2, 4, 8, 16)
    else:
        place = Placement(dim=-1, parts=layer.placements["weight"].parts)
        weight = place.shard(wave(2, 4, 8, 16), mesh.tensor.rank, mesh.tensor.size)
        assert [piece.shape[-1] for piece in y.split(layer.part_sizes, -1)] == list(layer.part_sizes)
    (weight * y * y).sum().backward()
    return outcome(y, x, layer)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("case", COLUMN)
def test_a_column_parallel_layer_equals_the_plain_one(world: World, n: int, case: str) -> None:
    options = COLUMN[case]
    torch.manual_seed(5)
    plain = nn.Linear(8, 16, bias=options.get("bias", True), dtype=DOUBLE)
    x = wave(1, 4, 8, 8).requires_grad_()
    y = plain(x)
    (wave(2, 4, 8, 16) * y * y).sum().backward()
    sizes = [part if isinstance(part, int) else part.size for part in options.get("parts", (16,))]
    dim = options.get("sequence_dim")

    def own(full: Tensor, along: int, rank: int) -> Tensor:
        """The rank's equal slice of each part."""
        return torch.cat([piece.chunk(n, along)[rank] for piece in full.split(sizes, along)], along)

    for rank, got in enumerate(world.run(Layout(tensor=n), run_column, options)):
        expected = y.detach() if options.get("gather_output") else own(y.detach(), -1, rank)
        torch.testing.assert_close(got["y"], expected, **TIGHT)
        torch.testing.assert_close(got["x"], x.grad if dim is None else x.grad.chunk(n, dim)[rank], **TIGHT)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(got[name], own(parameter.grad, 0, rank), **TIGHT, msg=name)


# ---- options of the row-parallel layer -------------------------------------------------------------------------------

ROW: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts": {"parts": (4, 12)},
    "split inside": {"split_input": True},
    "parts split inside": {"split_input": True, "parts": (4, 12)},
    "rows split": {"sequence_dim": 0},
    "sequence split": {"sequence_dim": 1, "parts": (4, Part(12, heads=4))},
    "sequence split, split inside": {"sequence_dim": -2, "split_input": True},
    "no bias": {"bias": False, "sequence_dim": 1},
    "bias returned": {"return_bias": True, "sequence_dim": 1},
}


def run_row(mesh: Mesh, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = RowParallelLinear(16, 8, mesh.tensor, dtype=DOUBLE, **options)
    place = Placement(dim=-1, parts=layer.placements["weight"].parts)
    whole = wave(1, 4, 8, 16)
    mine = whole if layer.split_input else place.shard(whole, mesh.tensor.rank, mesh.tensor.size)
    x = here(mine, mesh, None)
    y = layer(x)
    if layer.return_bias:
        assert y[1] is layer.bias
        y = y[0] + y[1]
    (here(wave(2, 4, 8, 8), mesh, layer.sequence_dim).detach() * y * y).sum().backward()
    assert layer.placements["bias"].gradient == ("equal" if layer.sequence_dim is None else "sum")
    return outcome(y, x, layer)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("case", ROW)
def test_a_row_parallel_layer_equals_the_plain_one(world: World, n: int, case: str) -> None:
    options = ROW[case]
    torch.manual_seed(5)
    plain = nn.Linear(16, 8, bias=options.get("bias", True), dtype=DOUBLE)
    x = wave(1, 4, 8, 16).requires_grad_()
    y = plain(x)
    (wave(2, 4, 8, 8) * y * y).sum().backward()
    sizes = [part if isinstance(part, int) else part.size for part in options.get("parts", (16,))]
    dim = options.get("sequence_dim")
    results = world.run(Layout(tensor=n), run_row, options)
    for rank, got in enumerate(results):
        torch.testing.assert_close(got["y"], y.detach() if dim is None else y.detach().chunk(n, dim)[rank], **TIGHT)
        own = torch.cat([piece.chunk(n, -1)[rank] for piece in plain.weight.grad.split(sizes, -1)], -1)
        torch.testing.assert_close(got["weight"], own, **TIGHT)
        mine = torch.cat([piece.chunk(n, -1)[rank] for piece in x.grad.split(sizes, -1)], -1)
        torch.testing.assert_close(got["x"], x.grad if options.get("split_input") else mine, **TIGHT)
        if plain.bias is not None:
            bias = got["bias"] if dim is None else torch.stack([each["bias"] for each in results]).sum(0)
            torch.testing.assert_close(bias, plain.bias.grad, **TIGHT)


def flat_inputs(mesh: Mesh) -> list[Any]:
    """One vector, no rows at all, and an output whose gradient has no memory of its own."""
    torch.manual_seed(5)
    column = ColumnParallelLinear(8, 16, mesh.tensor, dtype=DOUBLE)
    row = RowParallelLinear(16, 8, mesh.tensor, dtype=DOUBLE)
    found = []
    for shape in ((8,), (0, 8), (3, 8)):
        x = wave(1, *shape).requires_grad_()
        y = row(torch.tanh(column(x)))
        y.sum().backward()
        found += [y.detach(), x.grad, column.weight.grad.clone()]
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_inputs_of_any_number_of_dims(world: World, n: int) -> None:
    torch.manual_seed(5)
    column, row = nn.Linear(8, 16, dtype=DOUBLE), nn.Linear(16, 8, dtype=DOUBLE)
    expected = []
    for shape in ((8,), (0, 8), (3, 8)):
        x = wave(1, *shape).requires_grad_()
        y = row(torch.tanh(column(x)))
        y.sum().backward()
        expected += [y.detach(), x.grad, column.weight.grad.clone()]
    for rank, got in enumerate(world.run(Layout(tensor=n), flat_inputs)):
        for number, (ours, plain) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(ours, plain.chunk(n)[rank] if number % 3 == 2 else plain, **TIGHT)


# ---- from nn.Linear --------------------------------------------------------------------------------------------------


def take_over(mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(5)
    linear = nn.Linear(8, 12, dtype=torch.bfloat16).eval()
    linear.bias.requires_grad_(False)
    before = torch.get_rng_state()
    column = ColumnParallelLinear.from_linear(linear, mesh.tensor, parts=(4, 8), gather_output=True, sequence_dim=0)
    row = RowParallelLinear.from_linear(
        nn.Linear(8, 4, bias=False, device="meta"), mesh.tensor, split_input=True, sequence_dim=1
    )
    return {
        "state": {name: p.detach() for name, p in column.named_parameters()},
        "same generator": torch.equal(before, torch.get_rng_state()),
        "trains": [p.requires_grad for p in column.parameters()],
        "training": column.training,
        "options": [column.gather_output, column.sequence_dim, row.split_input, row.sequence_dim],
        "own memory": column.weight.untyped_storage().data_ptr() != linear.weight.untyped_storage().data_ptr(),
        "row": (row.weight.is_meta, tuple(row.weight.shape), row.bias),
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_layer_takes_over_an_nn_linear(world: World, n: int) -> None:
    torch.manual_seed(5)
    linear = nn.Linear(8, 12, dtype=torch.bfloat16)
    for rank, got in enumerate(world.run(Layout(tensor=n), take_over)):
        for name, full in linear.named_parameters():
            own = torch.cat([piece.chunk(n)[rank] for piece in full.detach().split((4, 8))])
            assert torch.equal(got["state"][name], own)
            assert got["state"][name].dtype == torch.bfloat16
        assert got["same generator"]
        assert got["own memory"]
        assert got["trains"] == [True, False]
        assert got["training"] is False
        assert got["options"] == [True, 0, True, 1]
        assert got["row"] == (True, (4, 8 // n), None)


# ---- fewer key heads than ranks --------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of heads of 2 over (batch, sequence, heads * 2), each key head shared by as many query heads."""
    q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """4 query heads of size 2, `kv` key heads, then a SwiGLU."""

    def __init__(self, kv: int, comm: engine.Communicator | None) -> None:
        super().__init__()
        self.sizes: tuple[int, ...] = (8, 2 * kv, 2 * kv)
        self.gates: tuple[int, ...] = (12, 12)
        if comm is None:
            self.qkv = nn.Linear(8, 8 + 4 * kv, dtype=DOUBLE)
            self.out = nn.Linear(8, 8, dtype=DOUBLE)
            self.gate_up = nn.Linear(8, 24, dtype=DOUBLE)
            self.down = nn.Linear(12, 8, dtype=DOUBLE)
            return
        parts = [Part(8, heads=4), Part(2 * kv, heads=kv), Part(2 * kv, heads=kv)]
        self.qkv = ColumnParallelLinear(8, 8 + 4 * kv, comm, parts=parts, dtype=DOUBLE)
        self.out = RowParallelLinear(8, 8, comm, dtype=DOUBLE)
        self.gate_up = ColumnParallelLinear(8, 24, comm, parts=(12, 12), dtype=DOUBLE)
        self.down = RowParallelLinear(12, 8, comm, dtype=DOUBLE)
        self.sizes, self.gates = self.qkv.part_sizes, self.gate_up.part_sizes

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(*self.qkv(x).split(self.sizes, -1)))
        gate, up = self.gate_up(x).split(self.gates, -1)
        return x + self.down(F.silu(gate) * up)


ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def train_attention(mesh: Mesh, kv: int, stage: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Attention(kv, mesh.tensor)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, **ADAMW)
    norms, gradients = [], {}
    for number in range(3):
        model(wave(number, 2, 3, 8)).square().sum().backward()
        norms.append(optimizer.finish_gradients(max_norm=0.5).item())
        gradients = gradients or optimizer.full_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "gradients": gradients, "end": engine.full_state_dict(model, mesh)}


@pytest.mark.parametrize(
    ("n", "kv", "stage"), [(2, 2, 2), (2, 1, 0), (2, 1, 1), (2, 1, 2), (4, 2, 0), (4, 2, 1), (4, 1, 2)]
)
def test_heads_that_ranks_share_train_as_in_one_process(world: World, n: int, kv: int, stage: int) -> None:
    torch.manual_seed(5)
    model = Attention(kv, None)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    norms, gradients = [], {}
    for number in range(3):
        optimizer.zero_grad()
        model(wave(number, 2, 3, 8)).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    for got in world.run(Layout(tensor=n), train_attention, kv, stage):
        assert got["norms"] == pytest.approx(norms, rel=1e-10)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got["gradients"][name], gradients[name], **TO_1E10, msg=name)
            torch.testing.assert_close(got["end"][name], value, **TO_1E10, msg=name)


def save_attention(mesh: Mesh, kv: int) -> dict[str, Tensor]:
    torch.manual_seed(11)
    return engine.full_state_dict(Attention(kv, mesh.tensor), mesh)


def load_attention(mesh: Mesh, kv: int, state: dict[str, Tensor]) -> Any:
    model = Attention(kv, mesh.tensor)
    engine.load_full_state_dict(model, mesh, state)
    return model(wave(3, 2, 3, 8)).detach(), engine.full_state_dict(model, mesh)


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_fused_weights_saved_on_two_ranks_give_the_plain_output_on_any(world: World, kv: int) -> None:
    state = world.run(Layout(tensor=2), save_attention, kv)[0]
    torch.manual_seed(11)
    plain = Attention(kv, None)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    for n in (1, 2, 4):
        for y, again in world.run(Layout(tensor=n), load_attention, kv, state):
            torch.testing.assert_close(y, plain(wave(3, 2, 3, 8)).detach(), **TIGHT)
            assert all(torch.equal(again[name], state[name]) for name in state)


# ---- sequence parallel -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Norm, column, gelu, row. With `dim` what lies outside the matmuls is split along it."""

    def __init__(self, comm: engine.Communicator | None, dim: int | None = None, dtype: torch.dtype = DOUBLE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=dtype)
        if comm is None:
            self.up: nn.Module = nn.Linear(8, 16, dtype=dtype)
            self.down: nn.Module = nn.Linear(16, 8, dtype=dtype)
            return
        if dim is not None:
            replicated(self.norm, gradient="sum")
        self.up = ColumnParallelLinear(8, 16, comm, dtype=dtype, sequence_dim=dim)
        self.down = RowParallelLinear(16, 8, comm, dtype=dtype, sequence_dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train_blocks(mesh: Mesh, dim: int | None, stage: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(Block(mesh.tensor, dim), Block(mesh.tensor, dim))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=stage, **ADAMW)
    norms, gradients, equal = [], {}, []
    for number in range(3):
        x = wave(number, 4, 8, 8).chunk(mesh.data.size)[mesh.data.rank]
        (here(x, mesh, dim).detach() + (model(here(x, mesh, dim)))).square().sum().backward()
        norms.append(optimizer.finish_gradients(max_norm=0.5).item())
        gradients = gradients or optimizer.full_gradients()
        optimizer.step()
        optimizer.zero_grad()
        flat = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "norm" in name])
        equal.append(bool((mesh.tensor.all_gather(flat[None]) == flat).all()))
    return {"norms": norms, "gradients": gradients, "end": engine.full_state_dict(model, mesh), "equal": equal}


@pytest.mark.parametrize(
    ("layout", "dim", "stage"),
    [
        (Layout(tensor=2), 1, 2),
        (Layout(tensor=4), 0, 0),
        (Layout(tensor=4), 1, 1),
        (Layout(data=2, tensor=2), 1, 2),
        (Layout(tensor=1), 1, 2),
    ],
    ids=str,
)
def test_blocks_split_over_the_sequence_train_as_in_one_process(
    world: World, layout: Layout, dim: int, stage: int
) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Block(None), Block(None))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    norms, gradients = [], {}
    for number in range(3):
        optimizer.zero_grad()
        x = wave(number, 4, 8, 8)
        (x + model(x)).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    for got in world.run(layout, train_blocks, dim, stage):
        assert got["norms"] == pytest.approx(norms, rel=1e-10)
        assert all(got["equal"]), "replicated parameters stay bitwise equal over the tensor axis"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got["gradients"][name], gradients[name], **TO_1E10, msg=name)
            torch.testing.assert_close(got["end"][name], value, **TO_1E10, msg=name)


def saved_bytes(mesh: Mesh, dim: int | None, frozen: bool) -> int:
    """What a column-parallel layer keeps for backward beside its own weights."""
    layer = ColumnParallelLinear(8, 16, mesh.tensor, dtype=DOUBLE, sequence_dim=dim).requires_grad_(not frozen)
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        if all(x.data_ptr() != p.data_ptr() for p in layer.parameters()):
            kept.append(x.untyped_storage().nbytes())
        return x

    x = here(wave(1, 4, 8, 8), mesh, dim)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(x)
    return sum(kept)


def test_only_the_shard_is_kept_for_backward(world: World) -> None:
    whole = 4 * 8 * 8 * 8
    for n in (2, 4):
        assert world.run(Layout(tensor=n), saved_bytes, 1, False) == [whole // n] * n
        assert world.run(Layout(tensor=n), saved_bytes, None, False) == [whole] * n
        assert world.run(Layout(tensor=n), saved_bytes, 1, True) == [0] * n, "frozen weights need no input"
