"""The ledger: what it counts, by literal formulas, and one 3D training step computed by hand, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engine
from engine import Layout
from engine.comm.algorithms.compress import CHUNK
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.world import World

GPT = GPTConfig(layers=2, hidden=16, heads=2, sequence=8, vocabulary=32, tied=False)
MICROBATCHES, ROWS = 2, 4  # of each data rank


def one_step(mesh: engine.Mesh) -> dict[tuple[str, str], tuple[int, int, int]]:
    model = engine.PipelineModel(gpt_layers(GPT, mesh.tensor), mesh, balance=[3, 3])
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, stage=2, lr=1e-3)
    step = engine.TrainStep(model, optimizer, next_token_loss(mesh.tensor), mesh, microbatches=MICROBATCHES)
    ids = torch.randint(32, (ROWS, 9), generator=torch.Generator().manual_seed(mesh.data.rank))
    step(ids[:, :-1], ids[:, 1:])  # stages learn each other's shapes in the first step
    with mesh.ledger:
        step(ids[:, :-1], ids[:, 1:])
    step(ids[:, :-1], ids[:, 1:])
    table = mesh.ledger.table()
    assert all(name in table for name in ("axis", "operation", "calls", "payload bytes", "wire bytes", "seconds"))
    assert all(entry.seconds > 0 for entry in mesh.ledger.entries.values())
    return {key: (e.calls, e.payload_bytes, e.wire_bytes) for key, e in mesh.ledger.entries.items()}


def by_hand(stage: int, transport: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Layers: embedding and block on stage 0, block and head on stage 1, each block in two halves. Groups of 2: all
    that is gathered or scattered sends half of its bytes, an all-reduce all of them, 2 (n - 1) / n S.
    """
    hidden, tensor = GPT.hidden, 2
    rows = ROWS // MICROBATCHES
    activation = rows * GPT.sequence * hidden * 4  # fp32, one microbatch
    tokens = rows * GPT.sequence * 4
    # A block: out and down summed forward; the inputs of qkv and up summed backward.
    sums = [activation] * 4
    # The embedding's output; or the head's input gradient, and of every token the largest logit, then two sums.
    sums += [activation] if stage == 0 else [activation, tokens, 2 * tokens]
    block = 4 * hidden * hidden // tensor + hidden + 2 * 4 * hidden * hidden // tensor + 4 * hidden // tensor + hidden
    norms = 4 * hidden
    ends = GPT.vocabulary * hidden // tensor + (GPT.sequence * hidden if stage == 0 else 2 * hidden)
    bucket = (block + norms + ends) * 4
    assert bucket % (2 * 4) == 0, "no padding"
    # Which parameters got a gradient, 11 of them in a block, and whether the bucket has more: int32, on both axes.
    flags = 4 * (11 + (2 if stage == 0 else 3) + 1)
    # Over gloo the world doubles, log2(8) S; shared memory counts as a ring does.
    doubling = 3 * (2 * 8 + 8)
    ring = sum(2 * (8 - 1) * size // 8 for size in (2 * 8, 8))
    return {
        ("tensor", "all_reduce"): (len(sums) * MICROBATCHES + 1, *[sum(sums) * MICROBATCHES + flags] * 2),
        ("pipeline", "exchange"): (0, activation * MICROBATCHES, activation * MICROBATCHES),  # calls: the schedule's
        ("data", "reduce_scatter"): (MICROBATCHES, bucket * MICROBATCHES, bucket // 2 * MICROBATCHES),
        ("data", "all_gather"): (1, bucket, bucket // 2),
        ("data", "all_reduce"): (1, flags, flags),
        # Sum of losses and count, in float64; the squared norm.
        ("world", "all_reduce"): (2, 2 * 8 + 8, doubling if transport == "torch" else ring),
    }


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_a_3d_step_sends_what_is_computed_by_hand(world: World, transport: str) -> None:
    layout = Layout(data=2, pipeline=2, tensor=2)
    for rank, found in enumerate(world.run(layout, one_step, transport=transport)):
        wanted = by_hand(layout.coordinate(rank).pipeline, transport)
        calls = found[("pipeline", "exchange")][0]
        wanted[("pipeline", "exchange")] = (calls, *wanted[("pipeline", "exchange")][1:])
        assert found == wanted


def every_call(mesh: engine.Mesh) -> dict[str, tuple[int, int, int]]:
    comm, size, x = mesh.data, mesh.data.size, torch.ones(12)
    peer, before = (comm.rank + 1) % size, (comm.rank - 1) % size
    calls: dict[str, Any] = {
        "all_reduce": lambda: comm.all_reduce(x, algorithm="native"),
        "ring": lambda: comm.all_reduce(x, algorithm="ring"),
        "async": lambda: comm.all_reduce(x, algorithm="pairwise", async_op=True).wait(),
        "broadcast": lambda: comm.broadcast(x, 1, algorithm="native"),
        "tree": lambda: comm.broadcast(x, 0, algorithm="tree"),
        "reduce": lambda: comm.reduce(x, 0, algorithm="tree"),
        "reduce_scatter": lambda: comm.reduce_scatter(x, algorithm="pairwise"),
        "all_gather": lambda: comm.all_gather(x, algorithm="ring"),
        "all_to_all": lambda: comm.all_to_all(x),
        "gather": lambda: comm.gather(x, 0),
        "scatter": lambda: comm.scatter([x] * size if comm.rank == 0 else None, x.clone(), 0),
        "exchange": lambda: comm.exchange([(x, peer)], [(torch.empty(12), before)]),
        "bf16": lambda: comm.all_reduce(torch.ones(12), wire_dtype=torch.bfloat16),
        "fp16": lambda: comm.reduce_scatter(torch.ones(3 * (CHUNK + 1)), wire_dtype=torch.float16),
        "empty": lambda: comm.all_reduce(torch.empty(0)),
        "barrier": comm.barrier,
        "object": lambda: comm.broadcast_object("x", 0),
    }
    found = {}
    for name, call in calls.items():
        mesh.ledger.clear()
        with mesh.ledger.start():
            call()
        entries = list(mesh.ledger.entries.values())
        assert len(entries) == (0 if name == "empty" else 1)
        found[name] = (entries[0].calls, entries[0].payload_bytes, entries[0].wire_bytes) if entries else (0, 0, 0)
    mesh.data.all_reduce(x)
    assert mesh.ledger.entries[("data", "broadcast_object")].calls == 1, "off counts nothing"
    assert mesh.ledger.wire_bytes_by_axis() == {"data": 0}
    return found


def test_every_call_is_counted_by_its_formula(world: World) -> None:
    s = 48  # bytes of 12 fp32 values, over 3 ranks
    wanted = {
        "all_reduce": (s, [64] * 3), "ring": (s, [64] * 3), "async": (s, [64] * 3), "broadcast": (s, [32] * 3),
        "tree": (s, [96, 0, 0]), "reduce": (s, [0, 48, 48]), "reduce_scatter": (s, [32] * 3),
        "all_gather": (3 * s, [96] * 3), "all_to_all": (s, [32] * 3), "gather": (3 * s, [0, 48, 48]),
        "scatter": (3 * s, [96, 0, 0]), "exchange": (s, [48] * 3), "bf16": (s, [32] * 3),
        "fp16": (3 * (CHUNK + 1) * 4, [2 * (2 * (CHUNK + 1) + 2 * 4)] * 3), "empty": (0, [0] * 3),
        "barrier": (4, [2 * 2 * 4 // 3] * 3), "object": (0, [0] * 3),
    }  # fmt: skip
    for rank, found in enumerate(world.run(Layout(data=3), every_call)):
        for name, (payload, wire) in wanted.items():
            assert found[name] == (int(name != "empty"), payload, wire[rank]), name


def test_a_local_mesh_counts_nothing() -> None:
    with engine.init(Layout(), device="cpu") as mesh, mesh.ledger.start():
        mesh.data.all_reduce(torch.ones(3))
        assert mesh.ledger.entries == {}
        assert mesh.ledger.table() == "axis  operation  calls  payload bytes  wire bytes  seconds"
