"""Linear layers whose matrix is shared by the ranks of the tensor axis.

A column-parallel layer cuts the outputs, a row-parallel one the inputs, so that a column-parallel layer, anything
elementwise and a row-parallel layer need one all-reduce forward and one backward. Shapes: T = comm.size. Method:
Megatron-LM, arXiv:1909.08053, section 3. With `sequence_dim` what lies between such pairs is split along that dim
instead of replicated (sequence parallel, arXiv:2205.05198): the column-parallel layer gathers it, the row-parallel one
scatters it, at the same cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.comm.autograd import all_gather_split, split_all_gather
from engine.comm.communicator import Communicator
from engine.errors import LayoutError, UsageError
from engine.placement import Placement, divide
from engine.tensor_parallel.checks import check_input
from engine.tensor_parallel.product import column_product, row_product
from engine.tensor_parallel.styles import Parts, cut_parts

Init = Callable[[Tensor], Any]


class Adapter(NamedTuple):
    """A low-rank addition scale * B A to a layer's matrix, of which this rank holds its shards: see `lora`."""

    a: Tensor
    """(rank, in_features), or this rank's columns of it in a row-parallel layer."""
    b: Tensor
    """(out_features, rank), or this rank's rows of it in a column-parallel layer."""
    scale: float


def _draw(
    in_features: int, out_features: int, bias: bool, init: Init | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Draw the full weight and bias from torch's generator in nn.Linear's order and with its bounds."""
    weight = torch.empty(out_features, in_features, dtype=dtype)
    with torch.no_grad():
        if init is None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        else:
            init(weight)
        if not bias:
            return weight, None
        bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
        return weight, nn.init.uniform_(torch.empty(out_features, dtype=dtype), -bound, bound)


class _ParallelLinear(nn.Module):
    """What both kinds share. `_cut` is the name of the size that is cut."""

    _cut: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, Placement]
    _shard: torch.Size

    def __init__(self, in_features: int, out_features: int, comm: Communicator, sequence_dim: int | None) -> None:
        super().__init__()
        if sequence_dim == -1:
            raise UsageError(
                f"{type(self).__name__}: sequence_dim=-1 is the dim of the features: give the dim of the sequence"
            )
        self.in_features, self.out_features, self.comm = in_features, out_features, comm
        self.sequence_dim = sequence_dim

    def _draw_shards(self, bias: bool, init: Init | None, dtype: torch.dtype | None) -> None:
        """Draw the whole weight and bias, and keep what the placements say."""
        weight, full_bias = _draw(self.in_features, self.out_features, bias, init, dtype)
        self.weight = keep_shard(weight, self.placements["weight"], self.comm)
        self._shard = self.weight.shape
        kept = None if full_bias is None else keep_shard(full_bias, self.placements["bias"], self.comm)
        self.register_parameter("bias", kept)

    def matrix(self) -> Tensor:
        """Return the (local out, local in) matrix that forward multiplies with. A subclass that stores it transposed
        overrides this.
        """
        return self.weight

    def _check(self, x: Tensor, length: int, other: int, hint: str) -> None:
        """Refuse an input whose last dim is not `length`, on every rank alike and before anything is sent. A last dim
        of `other` gets the hint. Refuse a weight that was put in the place of the shard, too.
        """
        if self.weight.shape != self._shard:
            raise LayoutError(
                f"{type(self).__name__}: the weight has shape {tuple(self.weight.shape)}, but a rank's shard over axis "
                f"{self.comm.name!r} ({self.comm.size} ranks) is {tuple(self._shard)}: give it `Placement.shard`'s"
            )
        shape = x.shape  # once: each look at a tensor is seen by what catches weight gradients
        if not shape or shape[-1] != length:
            ranks = "" if length == self.in_features else f" / {self.comm.size} ranks"
            raise LayoutError(
                f"{type(self).__name__}: an input of shape {tuple(shape)} over axis {self.comm.name!r}: its last dim "
                f"must be {length}, in_features={self.in_features}{ranks}"
                + (f": {hint}" if shape and shape[-1] == other else "")
            )
        dim = self.sequence_dim
        dims = len(shape)
        if dim is not None and (not -dims <= dim < dims or dim % dims == dims - 1):
            raise LayoutError(
                f"{type(self).__name__}: sequence_dim={dim} is none of the dims before the last of an input of shape "
                f"{tuple(shape)}: " + (f"valid are 0 to {dims - 2}" if dims > 1 else "give an input of at least 2 dims")
            )

    def extra_repr(self) -> str:
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        listed = [f"{k}={v}" + (f" / {self.comm.size}" if k == self._cut else "") for k, v in sizes.items()]
        listed.append(f"bias={self.bias is not None}")
        parts = self.placements["weight"].parts
        if parts:
            listed.append(f"parts={tuple(part.size for part in parts)}")
        for option, default in (
            ("gather_output", False),
            ("split_input", False),
            ("return_bias", False),
            ("sequence_dim", None),
        ):
            if getattr(self, option, default) != default:
                listed.append(f"{option}={getattr(self, option)}")
        return ", ".join(listed)


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with the outputs cut over the tensor axis.

    Input (..., in_features), equal on all ranks of `comm`; output (..., out_features / T), this rank's part.
    `weight`: (out_features / T, in_features); `bias`: (out_features / T,). Its backward sums the input gradient over
    `comm`, while the gradients of weight and bias are computed, so all of its ranks must run both. What is frozen
    (`requires_grad` False) has no gradient computed, and an input that needs none has none sent.
    """

    _cut = "out_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = True,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        parts: Parts = None,
        gather_output: bool = False,
        return_bias: bool = False,
        sequence_dim: int | None = None,
    ) -> None:
        """Draw the full weight as nn.Linear(in_features, out_features) would, and keep this rank's rows of it.

        All ranks of `comm` must have torch's generator in the same state. `init(weight)` fills the full
        (out_features, in_features) weight in place instead of nn.Linear's default. Initialising the shard afterwards
        is wrong: equal generators give equal shards.

        parts: what lies one after another along the outputs, each cut by itself: queries, keys and values, or gate and
        up. Of `Part(size, heads=...)` with fewer heads than ranks several ranks hold a head, and `ZeroOptimizer` sums
        its gradients. One `Part(out_features, padded=True)` takes any size: the outputs that fill it up are -inf, with
        gradient 0. gather_output: the output is whole, (..., out_features), and is used alike on every rank.
        return_bias: forward returns (y without bias, this rank's bias or None), for the caller to add. sequence_dim:
        the input is this rank's equal part along that dim, is gathered inside, in backward again (only the part is
        kept), and its gradient is reduce-scattered.

        Raises LayoutError for sizes that do not divide or sum up, UsageError for options that exclude each other.
        """
        super().__init__(in_features, out_features, comm, sequence_dim)
        placement = _placement(self, 0, out_features, parts)
        if gather_output and placement.is_copied(comm.size):
            raise UsageError(
                f"ColumnParallelLinear: gather_output=True with {placement.parts}: ranks share heads, whose gradients "
                f"would be counted several times: use at least {comm.size} heads, or leave it out"
            )
        if gather_output and return_bias:
            raise UsageError(
                "ColumnParallelLinear: gather_output=True gives the whole output, return_bias=True a shard of the bias "
                "to add to it: leave one of them out"
            )
        if any(part.padded for part in placement.parts) and len(placement.parts) > 1:
            raise UsageError(f"ColumnParallelLinear: {placement.parts}: only a single part can be padded")
        self.gather_output, self.return_bias = gather_output, return_bias
        self.placements = {"weight": placement, "bias": placement}
        self._draw_shards(bias, init, dtype)
        self._padding = placement.padding(comm.rank, comm.size)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        comm: Communicator,
        *,
        parts: Parts = None,
        gather_output: bool = False,
        sequence_dim: int | None = None,
    ) -> ColumnParallelLinear:
        """Return the layer that holds this rank's rows of `linear`, which has the same values on every rank: a copy,
        with its dtype, device, mode and `requires_grad`. Nothing is drawn or sent.
        """
        with torch.device("meta"):  # where drawing takes neither time nor numbers from the generator
            layer = cls(
                *_sizes(linear),
                comm,
                bias=linear.bias is not None,
                parts=parts,
                gather_output=gather_output,
                sequence_dim=sequence_dim,
            )
        _take_over(layer, linear)
        return layer

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Elements of this rank's output part by part, for `y.split(layer.part_sizes, -1)`."""
        placement = self.placements["bias"]
        return placement.lengths(self.comm.size) or placement.shape((self.out_features,), self.comm.size)

    def forward(self, x: Tensor, adapter: Adapter | None = None) -> Any:
        """Return the output, or (output, bias) with `return_bias`. adapter: a low-rank addition to the matrix, whose
        part of the input gradient goes with the layer's own. Raises LayoutError for an input that does not fit.
        """
        comm = self.comm
        self._check(
            x,
            self.in_features,
            self.in_features // comm.size,
            "this looks like the shard of one rank: the input is the whole, such as a row-parallel layer's output",
        )
        bias = None if self.return_bias else self.bias
        if comm.checks and comm.size > 1:
            check_input(x, comm, self.sequence_dim, type(self).__name__)
        if comm.size == 1:
            y = F.linear(x, self.matrix(), bias)
            inner = None if adapter is None else F.linear(x, adapter.a)
        else:
            a = None if adapter is None else adapter.a
            y, inner = column_product(x, self.matrix(), bias, a, comm, self.sequence_dim, self._padding)
        if adapter is not None and inner is not None:
            y = torch.add(y, F.linear(inner, adapter.b), alpha=adapter.scale)
        if self._padding and not self.gather_output:
            y = F.pad(y[..., : -self._padding], (0, self._padding), value=-math.inf)
        if self.gather_output and comm.size > 1:
            y = self._whole(y)
        return (y, self.bias) if self.return_bias else y

    def _whole(self, y: Tensor) -> Tensor:
        """Return the outputs of all ranks in the order of the plain layer."""
        whole, parts = all_gather_split(y, self.comm, y.dim() - 1), self.placements["bias"].parts
        return Placement(dim=-1, parts=parts).join(whole.chunk(self.comm.size, -1)) if parts else whole


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b with the inputs cut over the tensor axis.

    Input (..., in_features / T), this rank's part; output (..., out_features), summed over `comm` and equal on all
    its ranks. `weight`: (out_features, in_features / T); `bias`: (out_features,), whole on every rank and added once,
    after the sum. All ranks of `comm` must run it.
    """

    _cut = "in_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = True,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        parts: Parts = None,
        split_input: bool = False,
        return_bias: bool = False,
        sequence_dim: int | None = None,
    ) -> None:
        """As ColumnParallelLinear, keeping this rank's columns.

        parts: what lies one after another along the inputs, each cut by itself. split_input: the input is whole,
        (..., in_features), equal on every rank, and each takes its part. return_bias: forward returns (y without bias,
        bias or None). sequence_dim: the output is this rank's equal part along that dim, which divides by T; the bias
        is added to it, so its gradient is a part of the sum over the ranks, as its placement says.

        Raises LayoutError when in_features, or a part, does not divide by T.
        """
        super().__init__(in_features, out_features, comm, sequence_dim)
        placement = _placement(self, 1, in_features, parts)
        if placement.is_copied(comm.size) or any(part.padded for part in placement.parts):
            raise UsageError(
                f"RowParallelLinear: {placement.parts}: inputs are neither padded nor held by several ranks, which "
                f"would count them several times: use parts that divide by {comm.size}"
            )
        self.split_input, self.return_bias = split_input, return_bias
        self.placements = {
            "weight": placement,
            "bias": Placement(gradient="equal" if sequence_dim is None else "sum"),
        }
        self._draw_shards(bias, init, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        comm: Communicator,
        *,
        parts: Parts = None,
        split_input: bool = False,
        sequence_dim: int | None = None,
    ) -> RowParallelLinear:
        """As ColumnParallelLinear.from_linear, with this rank's columns."""
        with torch.device("meta"):
            layer = cls(
                *_sizes(linear),
                comm,
                bias=linear.bias is not None,
                parts=parts,
                split_input=split_input,
                sequence_dim=sequence_dim,
            )
        _take_over(layer, linear)
        return layer

    def forward(self, x: Tensor, adapter: Adapter | None = None) -> Any:
        """Return the output, or (output, bias) with `return_bias`. adapter: as in ColumnParallelLinear, added before
        the sum. Raises LayoutError for an input that does not fit.
        """
        comm, whole, shard = self.comm, self.in_features, self.in_features // self.comm.size
        if self.split_input:
            self._check(x, whole, shard, "this looks like the shard of one rank: leave split_input=True out")
        else:
            self._check(x, shard, whole, "this looks like the whole input: give this rank's part, or split_input=True")
        bias = None if self.return_bias else self.bias
        if comm.size > 1:
            if self.sequence_dim is not None:
                what = (
                    f"{type(self).__name__}: the sequence of an input of shape {tuple(x.shape)} over axis {comm.name!r}"
                )
                divide(x.shape[self.sequence_dim], comm.size, what)
            x = self._part(x) if self.split_input else x
        y = F.linear(x, self.matrix(), bias if comm.size == 1 else None)
        if adapter is not None:
            y = torch.add(y, F.linear(F.linear(x, adapter.a), adapter.b), alpha=adapter.scale)
        if comm.size > 1:
            y = row_product(y, comm, self.sequence_dim)
            if bias is not None:
                y = y.add_(bias)
        return (y, self.bias) if self.return_bias else y

    def _part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the whole input."""
        parts, size = self.placements["weight"].parts, self.comm.size
        if parts:
            placement = Placement(dim=-1, parts=parts)
            x = torch.cat([placement.shard(x, rank, size) for rank in range(size)], -1)
        return split_all_gather(x, self.comm, x.dim() - 1)


def keep_shard(full: Tensor, placement: Placement, comm: Communicator) -> nn.Parameter:
    """Return this rank's shard of a drawn weight, in memory of its own."""
    return nn.Parameter(placement.shard(full, comm.rank, comm.size).clone(memory_format=torch.contiguous_format))


def _placement(layer: _ParallelLinear, dim: int, size: int, parts: Parts) -> Placement:
    """Return how the weight is cut along `dim`, whose whole size is `size`. Raises LayoutError."""
    what = f"{type(layer).__name__}: {layer._cut} over axis {layer.comm.name!r}"
    if parts is None:
        divide(size, layer.comm.size, what)
        return Placement(dim)
    try:
        return cut_parts(dim, parts, size, layer.comm.size)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from error


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    """Return (in_features, out_features). Raises UsageError or LayoutError for what is no whole nn.Linear."""
    if not isinstance(linear, nn.Linear):
        raise UsageError(f"from_linear takes an nn.Linear, not a {type(linear).__name__}")
    declared = (linear.out_features, linear.in_features)
    if tuple(linear.weight.shape) != declared:
        raise LayoutError(
            f"from_linear: the weight has shape {tuple(linear.weight.shape)}, but the layer declares {declared}: "
            f"give a whole nn.Linear"
        )
    return linear.in_features, linear.out_features


def _take_over(layer: _ParallelLinear, linear: nn.Linear) -> None:
    """Fill a layer that was built without values."""
    layer.train(linear.training)
    for name, parameter in linear.named_parameters(recurse=False):
        shard = keep_shard(parameter.detach(), layer.placements[name], layer.comm)
        setattr(layer, name, shard.requires_grad_(parameter.requires_grad))
