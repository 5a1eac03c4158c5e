"""Models cut into stages, schedules as data, and the executor that runs them."""

from engine.pipeline.layers import LayerSpec, PipelineModel
from engine.pipeline.schedule import Compute, Stages

__all__ = ["Compute", "LayerSpec", "PipelineModel", "Stages"]
