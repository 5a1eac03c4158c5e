"""One copy of the trained parameters for all data ranks: where that can be, and that nothing but the optimizer writes
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named

_LOAD = "engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)"


class SharedParameters:
    """The parameters of one optimizer that all data ranks hold one copy of."""

    def __init__(self, mesh: Mesh, named: Sequence[Named], buckets: Sequence[FlatBucket]) -> None:
        """named: the parameters that the buckets hold. Every rank of the mesh must call it."""
        self._mesh, self._named, self._buckets = mesh, named, buckets
        self._versions: list[int] = []
        self.written()

    def written(self) -> None:
        """Take notice of new values, once all ranks have written theirs. Every rank of the mesh must call it."""
        self._mesh.data.barrier()
        self._versions = [parameter._version for _, parameter in self._named]

    def meet_unchanged(self) -> None:
        """Return once every rank is here, so that nobody reads the parameters any more. Every rank of the mesh must
        call it. Raises UsageError on every rank when one was changed, or its memory moved, on any since `written`.
        """
        pairs = zip(self._named, self._versions, strict=True)
        changed = [name for (name, parameter), version in pairs if parameter._version != version]
        moved = [self._named[each.plan.slices[0].index][0] for each in self._buckets if each.moved()]
        somewhere = self._mesh.world.any(bool(changed or moved))
        if moved:
            raise UsageError(
                f"the memory of {moved[0]!r} was moved after ZeroOptimizer was built (model.share_memory() does that "
                f"with torch.multiprocessing's sharing strategy 'file_system'), so this rank no longer has the copy "
                f"that all data ranks share (share_parameters=True): hand out copy.deepcopy(model) instead; to go on, "
                f"build the optimizer anew, which takes data rank 0's values, or leave share_parameters out"
            )
        if changed:
            raise UsageError(
                f"{changed[0]!r} was changed in place between steps, but all data ranks share one copy of it "
                f"(share_parameters=True), which others may be reading: call optimizer.zero_grad() to drop this step, "
                f"then load values with {_LOAD}, or leave share_parameters out"
            )
        if somewhere:
            raise UsageError("a shared parameter was changed in place or moved on another rank: see its error")


def unshared_load(model: nn.Module, mesh: Mesh) -> str:
    """Return why the model cannot be loaded without its optimizer, or an empty string. Nothing is sent."""
    if not any(mesh.data.shares(parameter) for parameter in model.parameters()):
        return ""
    return (
        f"all data ranks share one copy of the model's parameters (share_parameters=True), which is written with its "
        f"optimizer's knowledge only: call {_LOAD}, or load into copy.deepcopy(model)"
    )
