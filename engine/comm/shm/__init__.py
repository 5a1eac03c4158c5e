"""Shared memory between the ranks of one host: collectives at the speed of memory."""

from engine.comm.shm.links import Listener, missing
from engine.comm.shm.opening import open_groups, own_address
from engine.comm.shm.transport import SharedMemoryTransport

__all__ = ["Listener", "SharedMemoryTransport", "missing", "open_groups", "own_address"]
