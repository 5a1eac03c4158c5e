"""One copy of the trained parameters for all data ranks: where that can be, and that nothing but the optimizer writes
it.
"""

from __future__ import annotations

import weakref
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
        _ALIVE.add(self)

    def holds(self, model: nn.Module) -> bool:
        """Whether a parameter of the model lies in the common copy."""
        own = {
            id(parameter) for bucket in self._buckets if not bucket.displaced() for parameter, _ in bucket.parameters
        }
        return any(id(parameter) in own for parameter in model.parameters())

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


# A model does not know its optimizers, and nothing is hung on tensors. Weak: it keeps no optimizer's memory.
_ALIVE: weakref.WeakSet[SharedParameters] = weakref.WeakSet()


def unshared_load(model: nn.Module) -> str:
    """Return why the model cannot be loaded without its optimizer, or an empty string. Nothing is sent."""
    if not any(each.holds(model) for each in _ALIVE):
        return ""
    return (
        f"all data ranks share one copy of the model's parameters (share_parameters=True), which is written with its "
        f"optimizer's knowledge only: call {_LOAD}"
    )


def check_sharing(mesh: Mesh, stage: int) -> None:
    """Refuse, on every rank, one copy of the parameters where the data ranks of any have no memory in common."""
    if stage != 2:
        raise UsageError(
            f"share_parameters=True is for stage 2, not stage={stage}: at stage 0 and 1 leave it out, or take stage=2"
        )
    if mesh.planned:
        return
    apart = mesh.data.size > 1 and not mesh.data.reads_in_place
    if mesh.world.any(apart):
        here = f"those of this rank talk over {mesh.data.transport!r} on {mesh.device.type}"
        raise UsageError(
            f"share_parameters=True needs data ranks that share memory (CPU ranks of one host, transport='shm'), and "
            f"{here if apart else 'those of another rank do not'}: leave it out"
        )
