"""A 3D-parallel training engine for PyTorch: data, tensor and pipeline parallelism and ZeRO-2.

Names are imported when they are first used, so that `python -m engine.comm.doctor` can still speak where
`import torch` fails.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import (
        checkpoint,
        comm,
        errors,
        huggingface,
        layout,
        pipeline,
        placement,
        precision,
        tensor_parallel,
        zero,
    )
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
    "checkpoint",
    "comm",
    "errors",
    "full_state_dict",
    "huggingface",
    "init",
    "layout",
    "load_full_state_dict",
    "pipeline",
    "placement",
    "plan_mesh",
    "precision",
    "tensor_parallel",
    "zero",
]

_HOMES = {
    "engine.checkpoint": ("full_state_dict", "load_full_state_dict"),
    "engine.comm": ("Communicator", "Mesh", "init", "plan_mesh"),
    "engine.errors": ("EngineError",),
    "engine.layout": ("Coordinate", "Layout"),
    "engine.pipeline": ("LayerSpec", "PipelineModel"),
    "engine.train_step": ("Evaluation", "StepResult", "TrainStep"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    return import_module(f"engine.{name}") if home is None else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
