"""The example of docs/tensor_parallel.md: what it prints, and what comes out of it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine
from engine import Layout
from tests.world import World

BLOCKS = re.findall(
    r"^```(?:python)?\n(.*?)^```", (Path(__file__).parent.parent / "docs/tensor_parallel.md").read_text(), re.S | re.M
)


def example(mesh: engine.Mesh | None) -> tuple[str, Any, Tensor]:
    """Return what the example prints, its model and its logits; without a mesh, of the plain model."""
    prepare, run = (BLOCKS[0] + BLOCKS[1]).split("with engine.init(engine.Layout(tensor=2)) as mesh:\n")
    names: dict[str, Any] = {"mesh": mesh}
    if mesh is None:
        run = run.replace("parallelize(model, mesh.tensor, plan)", "pass")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(prepare + re.sub("^    ", "", run, flags=re.M), names)
    return printed.getvalue(), names["model"], names["logits"].detach()


def sharded(mesh: engine.Mesh) -> tuple[str, dict[str, Tensor], Tensor]:
    printed, model, logits = example(mesh)
    return printed, engine.full_state_dict(model, mesh), logits


def test_the_example_prints_what_the_page_says_and_computes_what_the_plain_model_does(world: World) -> None:
    _, model, expected = example(None)
    for printed, state, logits in world.run(Layout(tensor=2), sharded):
        assert printed == BLOCKS[2]
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
