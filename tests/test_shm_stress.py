"""A thousand random calls over shared memory, the same every time; `make stress` runs ten thousand others."""

from __future__ import annotations

import pytest

from engine import Layout
from tests.stress import RANKS, stress
from tests.world import World


@pytest.mark.parametrize("seed", [20261130, 7])
def test_a_thousand_random_calls_are_right(world: World, seed: int) -> None:
    assert world.run(Layout(data=RANKS), stress, seed, 500, transport="shm") == [[]] * RANKS, f"seed {seed}"
