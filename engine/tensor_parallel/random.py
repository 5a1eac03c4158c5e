"""Random numbers that agree where tensor ranks hold the same and differ where they hold parts; the same on any layout
if wanted.

Nothing here keeps a generator that goes on from call to call: a mask is a function of (seed, name, step, rows), so a
recomputed forward finds the one it had, and whoever draws from torch's own generators disturbs nothing. What a run
needs to be taken up again is the seed and the number of the step (`TrainStep.steps`); there is no state to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine import philox
from engine.comm.communicator import Communicator
from engine.device import stream_seed
from engine.errors import DtypeError, UsageError, did_you_mean

Mode = Literal["plain", "reproducible"]
_MODES = ("plain", "reproducible")
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # torch's recompute and compile put them into names


@dataclass(frozen=True)
class _Moment:
    step: int
    rows: range
    used: set[str] | None  # names of the dropouts that had their turn, where each has one


class Streams:
    """Where the dropouts of a model get their masks, and its layers initial weights. Not collective: nothing is sent.

    mode `plain`: masks come from torch's own kernels, under a generator seeded by (seed, name, step, rows): equal on
    all tensor ranks for a tensor that all hold, different for parts of one, equal with recompute, but another layout
    or number of microbatches has other masks.

    mode `reproducible`: whether an element is kept is a function of (seed, name, step, the element's index in the whole
    global activation), of Philox: the same on every layout, with any microbatches and schedule, with sequence
    parallelism and on every device.

    TrainStep says which step and which rows of the global batch are under way; without one, use `at`. A copied model
    (deepcopy) has the same Streams.
    """

    def __init__(self, tensor: Communicator, *, seed: int, mode: Mode = "plain") -> None:
        """tensor: the tensor axis. seed: equal on all ranks, as mesh.seed is. Raises UsageError for another mode."""
        if mode not in _MODES:
            raise UsageError(f"mode={mode!r}{did_you_mean(str(mode), _MODES)}: choose {' or '.join(_MODES)}")
        self.comm, self.seed, self.mode = tensor, seed, mode
        self._moment: _Moment | None = None

    @contextmanager
    def at(self, step: int, rows: range, *, once: bool = False) -> Iterator[None]:
        """Run the block as step `step` over these rows of the global batch: those of the microbatch under way, counted
        through all data ranks. A backward that recomputes belongs inside too. once: refuse a dropout that is called a
        second time in the block, which would give it the same mask.

        Raises UsageError for a negative step or rows that are not consecutive.
        """
        if step < 0 or rows.step != 1 or rows.start < 0:
            raise UsageError(f"at({step}, {rows}): steps count from 0, rows are a range(first, last + 1) from 0 on")
        before = self._moment
        self._moment = _Moment(step, rows, set() if once else None)
        try:
            yield
        finally:
            self._moment = before

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Return an initialiser for `init=`: uniform in [low, high). As `normal`."""
        return self._initialiser(name, lambda key, n, device: philox.uniform(key, n, device) * (high - low) + low)

    def normal(self, name: str, std: float = 1.0, mean: float = 0.0) -> Callable[[Tensor], Tensor]:
        """Return an initialiser for `init=`: it fills a whole weight, in place, with normal numbers that are a function
        of (seed, name, row-major index in the weight), in either mode; torch's generator is not drawn from.

        name: the weight's own, such as its full name; equal names give equal weights. The numbers are computed in
        float64 and rounded once to the weight's dtype.
        """
        return self._initialiser(name, lambda key, n, device: philox.normal(key, n, device) * std + mean)

    def _initialiser(
        self, name: str, numbers: Callable[[int, int, torch.device], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        key = stream_seed("weight", self.seed, name)

        def fill(weight: Tensor) -> Tensor:
            with torch.no_grad():
                return weight.copy_(numbers(key, weight.numel(), weight.device).view(weight.shape))

        return fill

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it so
    def keep(self, x: Tensor, p: float, name: str, split_dim: int | None, row_dim: int) -> Tensor:
        """Return which elements of `x` a dropout keeps: bool, of x's shape; each is kept with probability 1 - p.

        name, split_dim, row_dim: the dropout's, as in `Dropout`. Raises UsageError outside a step, and for dims that
        `x` does not have or rows that do not fit those under way.
        """
        moment = self._moment
        if moment is None:
            raise UsageError(
                f"dropout {name!r} in training mode outside a step would have one mask for all steps: train with "
                f"TrainStep, or run forward and backward inside `with streams.at(step, rows):`"
            )
        if moment.used is not None:
            if name in moment.used:
                raise UsageError(f"dropout {name!r} is called twice in one forward: give each place a Dropout")
            moment.used.add(name)
        split, row = _dims(x, split_dim, row_dim, name)
        rows, key = moment.rows, ("dropout", self.seed, name)
        if x.shape[row] % max(1, len(rows)) or (not rows and x.shape[row]):
            raise UsageError(
                f"dropout {name!r}: dim {row} of shape {tuple(x.shape)} has {x.shape[row]} rows, which are no multiple "
                f"of the {len(rows)} rows under way ({rows}): name the dim of the rows with row_dim="
            )
        if self.mode == "plain":
            part = None if split is None else self.comm.rank
            generator = torch.Generator(x.device)
            generator.manual_seed(stream_seed(*key, moment.step, rows.start, rows.stop, part))
            mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            return mask.bernoulli_(1 - p, generator=generator)
        first, whole = [0] * x.dim(), list(x.shape)
        if split is not None:
            first[split], whole[split] = self.comm.rank * x.shape[split], self.comm.size * x.shape[split]
        first[row] = rows.start * (x.shape[row] // max(1, len(rows)))
        # Rows first, whatever dim they are in: how many there are in all is not known, nor needed there.
        shape, first, whole = (_front(sizes, row) for sizes in (x.shape, first, whole))
        if len(shape) == 1:
            shape, first, whole = [*shape, 1], [*first, 0], [*whole, 1]
        limit = round(p * 2**32)
        mask = philox.block_at_least(limit, stream_seed(*key), moment.step, shape, first, whole, x.device)
        return mask.view([x.shape[row], *_front(x.shape, row)[1:]]).movedim(0, row)

    def __deepcopy__(self, memo: dict[int, object]) -> Streams:
        """A copied model draws from the same streams."""
        return self

    def __repr__(self) -> str:
        return f"Streams(axis {self.comm.name!r}, seed={self.seed}, mode={self.mode!r})"


class Dropout(nn.Module):
    """Dropout whose mask comes from Streams: zero with probability p, else x / (1 - p); in eval mode `x` itself.

    Input and output: floating, any shape with the rows of the batch along `row_dim`. (rows * n, ...) will do where a
    row's n positions follow one another. Not collective. Its name is its full name in the model, which is the same on
    every layout: TrainStep gives it, elsewhere `name_dropouts`. One place in the model has one Dropout of its own.
    """

    def __init__(self, p: float, streams: Streams, *, split_dim: int | None = None, row_dim: int = 0) -> None:
        """split_dim: the dim of which each tensor rank holds its equal part in rank order (sequence, hidden, heads);
        None: all ranks of the tensor axis hold the same. Raises UsageError for p outside [0, 1] and for the rows' own
        dim as split_dim.
        """
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"Dropout: p={p!r}: a probability is between 0 and 1")
        if split_dim == row_dim:
            raise UsageError(
                f"Dropout: dim {row_dim} holds the rows, which the tensor axis does not split: name another split_dim "
                f"or row_dim"
            )
        self.p, self.streams, self.split_dim, self.row_dim = p, streams, split_dim, row_dim
        self.full_name: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Raises UsageError in training mode outside a step or without a name, for rows that do not fit and for a
        second call in one forward under TrainStep; DtypeError for integers.
        """
        if not x.is_floating_point():
            raise DtypeError(f"Dropout: a floating tensor is scaled by 1 / (1 - p), {x.dtype} cannot be")
        if not self.training or self.p == 0 or x.numel() == 0:
            return x
        if self.full_name is None:
            raise UsageError("this Dropout has no name yet: name_dropouts(model) gives it, as TrainStep does")
        keep: Tensor = self.streams.keep(x, self.p, self.full_name, self.split_dim, self.row_dim)
        return (x * keep).mul_(0.0 if self.p == 1 else 1 / (1 - self.p))

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run the block, outside a step, with a mask of no meaning: for a layer that is only timed."""
        name = self.full_name
        self.full_name = name or "rehearsal"
        try:
            with self.streams.at(0, range(1)):  # any number of rows is a multiple of one
                yield
        finally:
            self.full_name = name

    def extra_repr(self) -> str:
        split = "" if self.split_dim is None else f", split_dim={self.split_dim}"
        return f"p={self.p}{split}{'' if self.row_dim == 0 else f', row_dim={self.row_dim}'}"


def name_dropouts(model: nn.Module) -> dict[str, Dropout]:
    """Give every Dropout of `model` its full name there, and return them by it. Names from another model are replaced;
    what torch's wrappers for recompute and compilation add to a name is left out.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            module.full_name, found[name] = name, module
    return found


def _dims(x: Tensor, split_dim: int | None, row_dim: int, name: str) -> tuple[int | None, int]:
    """Return both dims counted from 0."""
    for dim in (split_dim, row_dim):
        if dim is not None and not -x.dim() <= dim < x.dim():
            raise UsageError(f"dropout {name!r}: shape {tuple(x.shape)} has no dim {dim}")
    split, row = None if split_dim is None else split_dim % x.dim(), row_dim % x.dim()
    if split == row:
        raise UsageError(
            f"dropout {name!r}: split_dim={split_dim} of shape {tuple(x.shape)} is dim {row}, that of the rows, which "
            f"the tensor axis does not split"
        )
    return split, row


def _front(sizes: Sequence[int], dim: int) -> list[int]:
    return [sizes[dim], *sizes[:dim], *sizes[dim + 1 :]]
