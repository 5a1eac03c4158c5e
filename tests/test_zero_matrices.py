"""Parameters that one rank updates whole: optimizers of matrices beside elementwise ones equal plain PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import engine
from engine import LayerSpec, Layout
from engine.placement import Part, Placement
from engine.zero import ZeroOptimizer
from engine.zero.matrices import matrix_work
from engine.zero.plan import ParameterInfo, plan_buckets
from tests.world import TRANSPORT, World, refusals

# Every way a parameter can lie: cut along either dim, several parts with heads of which two ranks share one, padded.
SHAPES: dict[str, tuple[tuple[int, ...], Placement]] = {
    "column": ((12, 8), Placement(dim=0)),
    "row": ((6, 10), Placement(dim=1)),
    "heads": ((16, 7), Placement(dim=0, parts=(Part(8, heads=4), Part(4, heads=1), Part(4, heads=2)))),
    "padded": ((7, 5), Placement(dim=0, parts=(Part(7, padded=True),))),
    "whole": ((6, 9), Placement()),
    "bias": ((12,), Placement(dim=0)),
    "scale": ((5,), Placement()),
}


class Layer(nn.Module):
    """Parameters whose gradients are what the test says."""

    def __init__(self, comm: Any = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        self.placements = {name: placement for name, (_, placement) in SHAPES.items()}
        for name, (shape, placement) in SHAPES.items():
            full = torch.randn(shape, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(placement.shard(full, rank, size).clone()))


class Polar(torch.optim.Optimizer):
    """Steps along U V^T of the momentum's exact decomposition: wrong for any part of a matrix."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(left @ right, alpha=group["lr"])


UNUSED = {("0.row", 1), ("1.padded", 1), ("0.scale", 1), ("1.bias", 2)}
"""Which parameter gets no gradient in which step, and is then not stepped."""


def gradient(name: str, step: int, data_rank: int) -> Tensor:
    """Of one data rank, multiples of 1/64 so that sums over two ranks are exact in float32."""
    shape = SHAPES[name.split(".")[1]][0]
    generator = torch.Generator().manual_seed(hash((step, data_rank, *map(ord, name))) % 2**31)
    return torch.randint(-256, 257, shape, generator=generator, dtype=torch.float64) / 64


def grouped(model: nn.Module, kind: type[torch.optim.Optimizer], pick: Callable[[str, Tensor], Any]) -> Any:
    """Two groups of matrices, the first two apart, and the rest for the class that ZeroOptimizer is given."""
    named = list(model.named_parameters())
    matrices = {"optimizer": kind, "shard": "tensor", "lr": 0.1, "weight_decay": 0.05}
    return [
        {"params": [pick(n, p) for n, p in named if p.dim() < 2]},
        {**matrices, "params": [pick(n, p) for n, p in named if p.dim() == 2 and n.startswith("0.")]},
        {**matrices, "params": [pick(n, p) for n, p in named if p.dim() == 2 and not n.startswith("0.")], "lr": 0.3},
    ]


def train(
    mesh: engine.Mesh, kind: type[torch.optim.Optimizer], dtype: torch.dtype, clip: float | None, options: Any
) -> Any:
    model = engine.PipelineModel([LayerSpec(Layer, mesh.tensor, dtype) for _ in range(2)], mesh, balance="uniform")
    start = engine.full_state_dict(model, mesh)
    groups = grouped(model, kind, lambda n, p: (n, p))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh, groups=groups, lr=0.01, **options)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if (name, step) in UNUSED:
                continue
            placement = SHAPES[name.split(".")[1]][1]
            own = placement.shard(gradient(name, step, mesh.data.rank), mesh.tensor.rank, mesh.tensor.size).clone()
            for piece, _, count in placement.partial(own, mesh.tensor.rank, mesh.tensor.size):
                piece.mul_(count / mesh.tensor.size)  # a summand
            parameter.grad = own.to(dtype)
        norms.append(optimizer.finish_gradients(mesh.data.size, clip).item())
        optimizer.step()
    held = [piece.tensor.numel() for pieces in optimizer._inner.pieces for piece in pieces if piece.tensor.dim() == 2]
    return start, norms, engine.full_state_dict(model, mesh), held


def train_all(mesh: engine.Mesh, *arguments: Any) -> Any:
    *arguments, cases = arguments
    return [train(mesh, *arguments, options) for options in cases]


def plainly(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, clip: float | None, start: dict[str, Tensor], data: int
) -> tuple[list[float], dict[str, Tensor]]:
    model = nn.Sequential(*(Layer(dtype=dtype) for _ in range(2)))
    model.load_state_dict(start)
    rest, *matrices = grouped(model, kind, lambda _, p: p)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([rest], lr=0.01)]
    for group in matrices:
        options = {key: value for key, value in group.items() if key not in ("params", "optimizer", "shard")}
        optimizers.append(kind(group["params"], **options))
    norms = []
    for step in range(3):
        for name, p in model.named_parameters():
            mean = torch.stack([gradient(name, step, rank) for rank in range(data)]).mean(0).to(dtype)
            p.grad = None if (name, step) in UNUSED else mean
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item())
        for optimizer in optimizers:
            optimizer.step()
    return norms, dict(model.state_dict())


CASES = [
    {"stage": stage, "bucket_mib": mib}
    for stage, mib in ((0, 25), (1, 25), (2, 25), (2, 1e-6), (1, 200 * 8 / 2**20), (0, 1e-6))
]
LAYOUTS = [
    Layout(data=2),
    Layout(data=3),
    Layout(tensor=2),
    Layout(data=2, tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, tensor=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_exact_orthogonalised_steps_beside_adamw_equal_one_process(world: World, layout: Layout) -> None:
    shares = [{"share_parameters": True}] if TRANSPORT == "shm" else []
    results = world.run(layout, train_all, Polar, torch.float64, 3.0, [*CASES, *shares])
    norms, weights = plainly(Polar, torch.float64, 3.0, results[0][0][0], layout.data)
    for of_rank in results:
        for case, (_, own_norms, own, _) in zip([*CASES, *shares], of_rank, strict=True):
            assert own_norms == pytest.approx(norms, rel=1e-12)
            for name, value in weights.items():
                torch.testing.assert_close(own[name], value, rtol=1e-10, atol=1e-11, msg=f"{case}: {name}")


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, tensor=2)], ids=str)
def test_muon_beside_adamw_is_bitwise_muon_on_the_whole_matrices(world: World, layout: Layout) -> None:
    results = world.run(layout, train_all, torch.optim.Muon, torch.float32, None, CASES[1:4])
    _, weights = plainly(torch.optim.Muon, torch.float32, None, results[0][0][0], layout.data)
    for of_rank in results:
        for _, _, own, _ in of_rank:
            for name, value in weights.items():
                if value.dim() == 2:
                    assert torch.equal(own[name], value), name
                torch.testing.assert_close(own[name], value, rtol=1e-6, atol=1e-7)


def test_each_matrix_is_stepped_by_one_rank_of_data_and_tensor_or_by_all_data_ranks_at_stage_0(world: World) -> None:
    results = world.run(Layout(data=2, tensor=2), train_all, Polar, torch.float64, None, CASES[:3])
    every = sorted(2 * [math.prod(shape) for shape, _ in SHAPES.values() if len(shape) == 2])
    for number, copies in ((0, 2), (1, 1), (2, 1)):
        held = [of_rank[number][3] for of_rank in results]
        assert sorted(itertools.chain(*held)) == sorted(every * copies)
        assert all(held), "work for every rank"


# ---- the plan ------------------------------------------------------------------------------------------------------


matrices = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=14)


@given(matrices, st.floats(1, 4000), st.integers(1, 5))
def test_whole_parameters_lie_inside_one_shard_and_work_differs_by_at_most_one_parameter(
    sizes: list[tuple[int, int, bool]], limit: float, shards: int
) -> None:
    infos = [
        ParameterInfo(str(i), m * n, torch.float32, i % 2, ((0, m * n),), work=matrix_work((m, n)) if whole else None)
        for i, (m, n, whole) in enumerate(sizes)
    ]
    loads, seen = [0.0] * shards, []
    for bucket in plan_buckets(infos, limit, shards):
        whole = {infos[each.index].work is not None for each in bucket.slices}
        assert len(whole) == 1, "cut and whole parameters are apart"
        covered = sorted([*((each.start, each.stop) for each in bucket.slices), *bucket.padding])
        assert covered[0][0] == 0
        assert covered[-1][1] == bucket.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered)), "no gap, no overlap"
        seen += [each.index for each in bucket.slices]
        if whole == {True}:
            size = sum(each.stop - each.start for each in bucket.slices)
            assert size * 4 <= limit or len(bucket.slices) <= shards
            for each in bucket.slices:
                rank = each.start // bucket.shard
                assert each.stop <= (rank + 1) * bucket.shard, "whole in one shard"
                loads[rank] += infos[each.index].work or 0.0
    assert sorted(seen) == list(range(len(sizes)))
    works = [info.work for info in infos if info.work is not None]
    assert max(loads) - min(loads) <= max(works, default=0.0)


def test_the_longest_work_is_placed_first_and_segments_are_padded_to_the_largest() -> None:
    # 2 x 2 costs 8, 4 x 4 costs 64, 8 x 2 costs 32, 3 x 3 costs 27: rank 0 gets 64 (16), rank 1 gets 32 + 27 (25 + 4).
    shapes = [(2, 2), (4, 4), (8, 2), (3, 3)]
    infos = [ParameterInfo(str(s), math.prod(s), torch.float32, 0, (), work=matrix_work(s)) for s in shapes]
    (bucket,) = plan_buckets(infos, 1e9, 2)
    assert [info.work for info in infos] == [8, 64, 32, 27]
    assert [(each.index, each.start, each.stop) for each in bucket.slices] == [
        (1, 0, 16),
        (0, 29, 33),
        (2, 33, 49),
        (3, 49, 58),
    ]
    assert (bucket.shard, bucket.padding) == (29, ((16, 29),))


# ---- refused -------------------------------------------------------------------------------------------------------


def refused(mesh: engine.Mesh) -> list[str]:
    model = engine.PipelineModel([LayerSpec(Layer, mesh.tensor) for _ in range(2)], mesh, balance="uniform")
    named = list(model.named_parameters())

    def make(group: dict[str, Any], kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        ZeroOptimizer(model, kind, mesh, groups=[{"params": named, **group}], lr=0.1)

    muon = torch.optim.Muon
    pair = {"shard": "tensor", "optimizer": Polar, "lr": 0.1, "weight_decay": 0.1 * mesh.rank}
    return refusals(
        [
            lambda: ZeroOptimizer(model, muon, mesh),
            lambda: make({"optimizer": muon}),
            lambda: make({"optimizer": muon, "shard": "tensor"}),
            lambda: make({"shard": "tensors"}),
            lambda: make({"optimizer": "Muon"}),
            lambda: make({"optimizer": torch.optim.LBFGS, "shard": "tensor"}),
            lambda: make({"optimizer": Polar, "shard": "tensor", "lr": 0.1, "momentun": 0.5}),
            lambda: make({"optimizer": Polar, "shard": "tensor" if mesh.rank else "flat", "lr": 0.1}),
            lambda: make(pair),
        ]
    )


def test_what_cannot_work_is_refused_on_every_rank_with_the_fix(world: World) -> None:
    expected = [
        "Muon updates whole matrices, so it cannot work on a shard that is cut anywhere: give it a group in groups= "
        "with 'optimizer': Muon and 'shard': 'tensor'",
        "with 'optimizer': Muon and 'shard': 'tensor'",
        "Muon updates matrices, but '0.bias' of group 0 has shape (12,): put it into a group of another class, such as "
        "'optimizer': torch.optim.AdamW",
        "group 0: shard='tensors' (did you mean 'tensor'?): 'flat' cuts parameters anywhere, 'tensor' gives whole ones",
        "group 0: optimizer='Muon': give a torch optimizer's class",
        "LBFGS does not update each element by itself",
        "group 0 has no option 'momentun' (did you mean 'momentum'?): Polar's are lr, momentum, weight_decay",
        "the model's parameters and their groups differs over axis 'data'",
        "the model's parameters and their groups differs over axis 'data'",
    ]
    for texts in world.run(Layout(data=2), refused):
        for text, part in zip(texts, expected, strict=True):
            assert part in text
