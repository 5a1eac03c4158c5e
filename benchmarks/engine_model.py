"""This engine's model of the benchmarks' GPT, cut as the engine cuts it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import engine
from benchmarks.work import Work
from examples.gpt.model import GPTConfig, gpt_layers


def engine_model(work: Work, mesh: engine.Mesh) -> engine.PipelineModel:
    """Build this rank's stages, with the chunks that the work's schedule is made for."""
    shape = {name: getattr(work.model, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    layers = gpt_layers(GPTConfig(**shape, tied=False), mesh.tensor)
    return engine.PipelineModel(layers, mesh, chunks=work.stages.chunks, placement=work.stages.placement)


def engine_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of `peers.gpt` by this engine's names: a block there is two layers here, its halves."""
    renamed = {}
    for name, value in state.items():
        layer, _, rest = name.partition(".")
        half, _, inside = rest.partition(".")
        number = max(0, 2 * int(layer) - 1) + (half == "mlp")
        renamed[f"{number}.{inside if half in ('attention', 'mlp') else rest}"] = value
    return renamed
