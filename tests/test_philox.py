"""Philox against its published answers, and the initial weights that are made of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import engine
from engine import Layout, philox
from engine.device import stream_seed
from engine.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.random import Streams
from tests.plain_philox import words_of

DOUBLE = torch.float64
CPU = torch.device("cpu")
SEED = 7


# Random123's kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.expand(2, 3, 5), lambda x: x.expand(7, 4).t()])
def test_philox_gives_the_published_answers(form: Any) -> None:
    for counter, key, result in KNOWN:
        low, high = hexadecimal(key)
        given = [form(torch.tensor([word])) for word in hexadecimal(counter)]
        found = philox.philox(low + (high << 32), given)
        assert [set(word.flatten().tolist()) for word in found] == [{word} for word in hexadecimal(result)]
        assert all(word.shape == given[0].shape and word.dtype == torch.int64 for word in found)
        assert [word.flatten()[0].item() for word in given] == hexadecimal(counter), "the counter is not changed"


def test_philox_equals_pythons_integers_for_any_key_index_and_step() -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        key, step = (int(torch.randint(2**62, (), generator=draw)) * 2 + i for i in range(2))
        indices = torch.randint(2**62, (3, 7), generator=draw)
        found = torch.stack(philox.words(key, step, indices), -1)
        assert [tuple(four) for four in found.flatten(0, 1).tolist()] == [
            words_of(key, index, step) for index in indices.flatten().tolist()
        ]


def test_the_numbers_of_a_block_are_those_of_the_whole_array() -> None:
    whole = (6, 5, 11)
    limit = 2**31
    full = philox.block_at_least(limit, 99, 3, whole, (0, 0, 0), whole, CPU)
    assert 0.4 < full.double().mean() < 0.6
    spans = [(0, 1), (2, 3), (4, 2)], [(0, 5), (3, 1), (1, 2)], [(0, 11), (3, 6), (9, 2), (10, 1), (4, 4), (2, 0)]
    for block in itertools.product(*spans):
        first, shape = [start for start, _ in block], [size for _, size in block]
        found = philox.block_at_least(limit, 99, 3, shape, first, whole, CPU)
        assert torch.equal(found, full[tuple(slice(start, start + size) for start, size in block)]), block


def test_a_block_of_many_counters_is_cut_without_a_seam() -> None:
    shape = (3, 100_000)  # 75 000 counters: more than are computed at once
    found = philox.block_at_least(2**31, 5, 0, shape, (0, 0), shape, CPU)
    for line, i in ((0, 0), (0, 99_999), (1, 31_073), (1, 31_072), (2, 65_536), (2, 99_999)):
        assert found[line, i] == (words_of(5, line * 25_000 + i // 4, 0)[i % 4] >= 2**31)


def test_uniform_and_normal_numbers_have_their_distribution() -> None:
    uniform, normal = (draw(11, 100_001, CPU) for draw in (philox.uniform, philox.normal))
    assert uniform.dtype == normal.dtype == DOUBLE
    assert uniform.shape == normal.shape == (100_001,)
    assert 0 <= uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.004
    assert abs(uniform.var() - 1 / 12) < 0.001
    assert abs(normal.mean()) < 0.015
    assert abs(normal.var() - 1) < 0.02
    assert abs((normal**3).mean()) < 0.05
    assert abs((normal**4).mean() - 3) < 0.15
    assert abs((normal[:-1] * normal[1:]).mean()) < 0.015, "neighbours are independent"
    assert torch.equal(philox.normal(11, 500, CPU), normal[:500]), "an element depends on its place alone"
    assert len(philox.uniform(11, 0, CPU)) == len(philox.normal(11, 0, CPU)) == 0


# ---- initial weights -------------------------------------------------------------------------------------------------


def plan(tensor: int = 1, rank: int = 0) -> engine.Communicator:
    return engine.plan_mesh(Layout(tensor=tensor), rank).tensor


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
def test_initial_weights_are_a_function_of_seed_name_and_index(dtype: torch.dtype) -> None:
    whole = torch.empty(8, 6, dtype=dtype)
    before = torch.get_rng_state()
    Streams(plan(), seed=SEED).normal("0.up.weight", std=0.5, mean=2.0)(whole)
    words = [words_of(stream_seed("weight", SEED, "0.up.weight"), i, 0) for i in range(24)]
    pairs = [((a >> 5 << 26 | b >> 6) / 2**53, (c >> 5 << 26 | d >> 6) / 2**53) for a, b, c, d in words]
    wanted = [
        2 + 0.5 * math.sqrt(-2 * math.log(1 - u)) * turn(2 * math.pi * v)
        for u, v in pairs
        for turn in (math.cos, math.sin)
    ]
    assert torch.allclose(whole, torch.tensor(wanted, dtype=DOUBLE).view(8, 6).to(dtype), rtol=1e-12, atol=1e-12)
    for mode, rank in itertools.product(("plain", "reproducible"), range(4)):
        init = Streams(plan(4, rank), seed=SEED, mode=mode).normal("0.up.weight", std=0.5, mean=2.0)
        column = ColumnParallelLinear(6, 8, plan(4, rank), bias=False, init=init, dtype=dtype)
        row = RowParallelLinear(8, 6, plan(4, rank), bias=False, init=init, dtype=dtype)
        assert torch.equal(column.weight, whole.chunk(4, 0)[rank])
        assert torch.equal(row.weight, whole.view(6, 8).chunk(4, 1)[rank])
    low = Streams(plan(), seed=SEED).uniform("0.up.weight", -1.0, 3.0)(torch.empty(8, 6, dtype=DOUBLE))
    assert torch.equal(low.flatten(), torch.tensor([4 * u - 1 for pair in pairs for u in pair], dtype=DOUBLE))
    assert torch.equal(torch.get_rng_state(), before)
    others = [Streams(plan(), seed=s).normal(n)(torch.empty(8, 6, dtype=dtype)) for s, n in ((SEED, "b"), (8, "b"))]
    assert not torch.equal(*others)


def test_an_initialiser_works_where_layers_are_counted() -> None:
    init = Streams(plan(), seed=SEED).normal("w", std=0.02)
    with torch.device("meta"):
        assert ColumnParallelLinear(6, 8, plan(), init=init).weight.is_meta
    assert init(torch.empty(0, 3)).shape == (0, 3)
