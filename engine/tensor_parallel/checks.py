"""With `ENGINE_CHECKS=1`: do the tensor ranks hold parts where parts belong, and the same where the same belongs?
Shapes cannot tell a part from a whole of another size, values can.

Both send three or four numbers for each tensor, and all ranks of the axis must call them alike. Callers ask
`comm.checks` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.comm.communicator import Communicator
from engine.device import exact_dtype
from engine.errors import LayoutError


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it so
def check_part(x: Tensor, comm: Communicator, dim: int, what: str, fix: str) -> None:
    """Raise LayoutError, on every rank, where all ranks hold equal values and not each its part along `dim`. What does
    not vary along it says nothing.
    """
    found = _sketches(x, comm, dim)
    if bool((found == found[0]).all() & (found[0, -1] > 0)):
        raise LayoutError(
            f"{what}: {tuple(x.shape)} is equal on all {comm.size} ranks of axis {comm.name!r}, where each holds its "
            f"part along dim {dim % x.dim()}: {fix}"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_whole(x: Tensor, comm: Communicator, what: str, fix: str) -> None:
    """Raise LayoutError, on every rank, where not all ranks hold the same, to a hundredth: less than parts are off by,
    more than rounding.
    """
    found = _sketches(x, comm, None)
    if bool(((found - found[0]).abs() > 1e-2 * found[:, 0].amax()).any()):
        norms = ", ".join(f"{norm:.4g}" for norm in found[:, 0].tolist())
        raise LayoutError(
            f"{what}: {tuple(x.shape)} differs between the ranks of axis {comm.name!r} (norms {norms}), which all take "
            f"the whole: {fix}"
        )


def check_input(x: Tensor, comm: Communicator, sequence_dim: int | None, who: str) -> None:
    """Raise LayoutError where the whole sequence is given instead of parts along `sequence_dim`, or the reverse."""
    if sequence_dim is None:
        fix = "give it a row-parallel layer's output; where each rank has a part of the positions, set sequence_dim"
        check_whole(x, comm, f"{who}: its input", fix)
    else:
        fix = "cut the sequence first, as VocabParallelEmbedding(sequence_dim=...) does, or leave sequence_dim out"
        check_part(x, comm, sequence_dim, f"{who}(sequence_dim={sequence_dim}): its input", fix)


@torch.no_grad()
def _sketches(x: Tensor, comm: Communicator, dim: int | None) -> Tensor:
    """Return (ranks, 3 or 4): of each rank's values the norm, two weighted sums, and whether they vary along `dim`."""
    values = x.detach().to(exact_dtype(x.device)).nan_to_num(0.0, 0.0, 0.0)
    flat = values.flatten()
    angle = torch.arange(flat.numel(), device=x.device).to(flat.dtype) * 0.7
    numbers = [flat.norm(), flat @ angle.cos(), flat @ angle.sin()]
    if dim is not None:
        varies = x.numel() > 0 and bool((values != values.narrow(dim, 0, 1)).any())
        numbers.append(flat.new_full((), float(varies)))
    return comm.compared(torch.stack(numbers))
