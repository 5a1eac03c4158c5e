"""The meshes of a run: one for each transport, over one default group of torch's, so that all are measured together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import engine
from benchmarks.collectives_options import Settings
from engine import Mesh
from engine.errors import UsageError


@contextmanager
def open_meshes(settings: Settings, *, checks: bool | None = None) -> Iterator[dict[str, Mesh]]:
    """Open the meshes, by transport. Every rank calls it.

    Raises UsageError where the measured group does not have one of several transports: its rows would be another's.
    """
    with ExitStack() as stack:
        found: dict[str, Mesh] = {}
        for name in settings.transports:
            mesh = engine.init(settings.layout, device=settings.device, transport=name, checks=checks)
            found[name] = stack.enter_context(mesh)
            taken = getattr(mesh, settings.axis).transport
            if taken != name and (len(settings.transports) > 1 or settings.registered):
                raise UsageError(
                    f"--transports {name}: the ranks of axis {settings.axis} are not all on one host and take {taken}: "
                    f"leave {name} out, or measure an axis inside a host"
                )
        yield found
