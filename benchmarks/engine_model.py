"""This engine's model of the benchmarks' GPT, cut as the engine cuts it."""

from __future__ import annotations

import engine
from benchmarks.work import Work
from examples.gpt.model import GPTConfig, gpt_layers


def engine_model(work: Work, mesh: engine.Mesh) -> engine.PipelineModel:
    """Build this rank's stages, with the chunks that the work's schedule is made for."""
    shape = {name: getattr(work.model, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    layers = gpt_layers(GPTConfig(**shape, tied=False), mesh.tensor)
    return engine.PipelineModel(layers, mesh, chunks=work.stages.chunks, placement=work.stages.placement)
