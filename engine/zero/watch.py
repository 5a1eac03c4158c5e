"""What must not change under the optimizer, and what it keeps equal: the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.comm.mesh import Mesh
from engine.errors import UsageError
from engine.placement import Placement, Tied
from engine.zero.buckets import FlatBucket
from engine.zero.groups import Named
from engine.zero.ties import share


class WatchedParameters:
    """The trained parameters, and the places in the model that hold them."""

    def __init__(self, model: nn.Module, named: Sequence[Named], buckets: Sequence[FlatBucket]) -> None:
        self._model, self._named, self._buckets = model, named, buckets
        names = {id(parameter): name for name, parameter in named}
        self._holders = [
            (names[id(parameter)], module._parameters, key, parameter)
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in names
        ]
        self._versions = [parameter._version for _, parameter in named]

    def check(self) -> None:
        """Raise UsageError when a parameter was moved, cast, replaced or added since. One that was frozen since gets no
        gradient, and is not stepped.
        """
        self.check_places()
        known = {id(parameter) for _, parameter in self._named}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"{name!r} was added or unfrozen after ZeroOptimizer was built, which does not update it: give it "
                    f"to add_param_group before the next backward, freeze it, or do that first, then build the "
                    f"optimizer"
                )

    def check_places(self) -> None:
        """Raise UsageError when a parameter was moved, cast or replaced since."""
        own = {id(parameter) for parameter in self._model.parameters()}
        displaced = [self._named[index][0] for bucket in self._buckets for index in bucket.displaced()]
        displaced += [name for name, holder, key, parameter in self._holders if holder.get(key) is not parameter]
        displaced += [name for name, parameter in self._named if id(parameter) not in own]
        if displaced:
            raise UsageError(
                f"{displaced[0]!r} was moved, cast or replaced after ZeroOptimizer was built, which would go on "
                f"updating the old one: do that first, then build the optimizer"
            )

    def written(self) -> None:
        """Take notice that the optimizer has written the parameters."""
        torch.autograd.graph.increment_version([parameter for _, parameter in self._named])
        self._versions = [parameter._version for _, parameter in self._named]

    @property
    def changed(self) -> bool:
        """Whether anybody else has written one in place since, as far as version counters tell."""
        return [parameter._version for _, parameter in self._named] != self._versions


class EqualBuffers:
    """Buffers that forward writes, such as BatchNorm's: data rank 0's count, as in torch's DistributedDataParallel.

    Sent are those of modules of which one was written in place on some rank: torch's own batch_norm does not count its
    writes, but BatchNorm's count of batches is one. A buffer that is another tensor than at construction, or of a
    module that itself communicates over the data axis, is left alone.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._versions: list[int] = []

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Watch the buffers of these modules too, whose values all ranks have."""
        found = [
            (module, name, buffer)
            for module in modules
            if not talks_over(module, self._comm)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._buffers += found
        self._versions += [buffer._version for _, _, buffer in found]

    def written(self) -> None:
        """Take notice that all ranks have the same values."""
        self._versions = [buffer._version for _, _, buffer in self._buffers]

    def changed(self) -> list[bool]:
        """Return of each buffer whether it, or another of its module, was written in place since."""
        pairs = zip(self._buffers, self._versions, strict=True)
        written = {id(module) for (module, _, buffer), version in pairs if buffer._version != version}
        return [id(module) in written and module._buffers.get(name) is buffer for module, name, buffer in self._buffers]

    def copy_first(self, changed: Sequence[bool]) -> None:
        """Give all data ranks rank 0's values of the buffers that `changed` on some. All call it, with one list."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for (_, _, buffer), flag in zip(self._buffers, changed, strict=True):
            if flag:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = self._comm.broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]), 0)
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
        self.written()


def talks_over(module: nn.Module, comm: Communicator) -> bool:
    """Whether a module itself, not those inside it, holds a communicator of the ranks of `comm`."""
    return comm.size > 1 and any(
        isinstance(value, Communicator) and value.ranks == comm.ranks for value in vars(module).values()
    )


@torch.no_grad()
def make_equal(
    named: Sequence[Named],
    buffers: Iterable[Tensor],
    placements: Mapping[str, Placement],
    ties: Sequence[tuple[Tied, nn.Parameter]],
    mesh: Mesh,
) -> None:
    """Make all copies of these parameters and buffers equal: tensor rank 0's of replicated parameters, the first
    stage's of tied ones, then data rank 0's of all.
    """
    for name, parameter in named:
        if placements[name].dim is None:
            mesh.tensor.broadcast(parameter, 0)
    for tie, parameter in ties:
        share(tie, parameter, mesh.pipeline, "copy")
    for tensor in (*(parameter for _, parameter in named), *buffers):
        mesh.data.broadcast(tensor, 0)
