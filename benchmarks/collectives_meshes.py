"""The meshes of a run: one for each transport, over one default group of torch's, so that all are measured together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import engine
from benchmarks.collectives_case import REGISTERING
from benchmarks.collectives_options import Settings
from engine import Mesh
from engine.errors import UsageError


@contextmanager
def open_meshes(settings: Settings, *, checks: bool | None = None) -> Iterator[dict[str, Mesh]]:
    """Open the meshes, by transport. Every rank calls it.

    Raises UsageError where the measured group has one transport under two names, or none that registers memory.
    """
    with ExitStack() as stack:
        found: dict[str, Mesh] = {}
        for name in settings.transports:
            mesh = engine.init(settings.layout, device=settings.device, transport=name, checks=checks)
            found[name] = stack.enter_context(mesh)
            comm = getattr(mesh, settings.axis)
            again = comm.transport != name and comm.transport in settings.transports
            if again or (name == REGISTERING and settings.registered and not comm.reads_in_place):
                raise UsageError(
                    f"--transports {name}: axis {settings.axis} lies on {len(comm.hosts)} hosts and takes "
                    f"{comm.transport}: leave {name} out, and --memory, or measure an axis inside a host"
                )
        yield found
