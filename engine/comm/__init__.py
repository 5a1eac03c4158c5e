"""Groups of ranks and what they can say to each other. Imported when first used, see `engine`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.comm.communicator import Communicator
    from engine.comm.mesh import Mesh, init, plan_mesh
    from engine.comm.work import Work

__all__ = ["Communicator", "Mesh", "Work", "init", "plan_mesh"]

_HOMES = {"Communicator": "communicator", "Work": "work", "Mesh": "mesh", "init": "mesh", "plan_mesh": "mesh"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"engine.comm.{_HOMES[name]}"), name)
