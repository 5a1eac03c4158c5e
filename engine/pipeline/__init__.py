"""Models cut into stages, schedules as data, and the executor that runs them."""

from engine.pipeline.layers import LayerSpec, PipelineModel

__all__ = ["LayerSpec", "PipelineModel"]
