"""Shared memory between the ranks of one host: collectives at the speed of memory."""

from engine.comm.shm.links import Listener, missing
from engine.comm.shm.opening import hosts_with_memory, open_groups, own_address
from engine.comm.shm.transport import SharedMemoryTransport

__all__ = ["Listener", "SharedMemoryTransport", "hosts_with_memory", "missing", "open_groups", "own_address"]
