"""Groups of ranks and what they can say to each other."""

from engine.comm.communicator import Communicator
from engine.comm.mesh import Mesh, init, plan_mesh
from engine.comm.work import Work

__all__ = ["Communicator", "Mesh", "Work", "init", "plan_mesh"]
