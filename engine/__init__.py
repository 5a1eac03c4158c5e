"""A 3D-parallel training engine for PyTorch: data, tensor and pipeline parallelism and ZeRO-2."""

from engine import placement, tensor_parallel, zero
from engine.checkpoint import full_state_dict, load_full_state_dict
from engine.comm import Communicator, Mesh, init, plan_mesh
from engine.errors import EngineError
from engine.layout import Coordinate, Layout
from engine.pipeline import LayerSpec, PipelineModel
from engine.train_step import Evaluation, StepResult, TrainStep

__all__ = [
    "Communicator",
    "Coordinate",
    "EngineError",
    "Evaluation",
    "LayerSpec",
    "Layout",
    "Mesh",
    "PipelineModel",
    "StepResult",
    "TrainStep",
    "full_state_dict",
    "init",
    "load_full_state_dict",
    "placement",
    "plan_mesh",
    "tensor_parallel",
    "zero",
]
