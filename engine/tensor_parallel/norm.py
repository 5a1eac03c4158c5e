"""Batch normalisation whose statistics are those of all ranks' rows: torch's own refuses CPU tensors.

Shapes: x is (N, C, ...), its channels in dim 1; N may differ between the ranks and be 0 on some. A channel's values
are all of x[:, c]. Method: means and squared deviations of parts, combined by Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances" (1979): no large sums are subtracted.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.comm.autograd import apply
from engine.comm.communicator import Communicator
from engine.device import exact_dtype
from engine.errors import DtypeError, UsageError

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RELATED = (*_PLAIN, nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


class SyncBatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm over the joined rows of all ranks of `comm`, the data axis.

    Input (N, C, ...), floating, of 2 dims or more, C = num_features, the same C on every rank; output of its shape and
    dtype. Parameters, buffers and their names are nn.BatchNorm's; the running statistics are equal on every rank.

    In training mode all ranks of `comm` must run forward, and all or none backward, also a rank with 0 rows: forward
    gathers 2 C + 1 numbers from each rank, backward all-reduces 2 C. In eval mode nothing is sent: the running
    statistics are used or, where there are none, those of this rank's own rows. Under TrainStep the joined rows are
    those of one microbatch.

    Gradients of `weight` and `bias` are this rank's summands, as of any layer that data ranks hold alike: reducing
    them over the data axis (ZeroOptimizer) completes them. Statistics are in float32 at least, what is sent in
    `exact_dtype` of the device. A second derivative is not computed: autograd raises an error.
    """

    comm: Communicator

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """momentum: weight of the newest batch in the running statistics; None: all batches weigh alike. Raises
        UsageError for num_features below 1 or eps not above 0.
        """
        if num_features < 1 or not eps > 0:
            raise UsageError(f"SyncBatchNorm: num_features={num_features}, eps={eps}: at least 1, and above 0")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, dtype=dtype)
        self.comm = comm

    @classmethod
    def convert(cls, module: nn.Module, comm: Communicator) -> nn.Module:
        """Turn every nn.BatchNorm1d, 2d and 3d in `module`, also itself, into a SyncBatchNorm over `comm`, and return
        `module`. Nothing is sent.

        The modules stay the same objects with all they have: parameters, ties, buffers, mode, hooks. Those that are
        converted already stay as they are. Raises UsageError, before anything is changed, for a kind of batch norm that
        may do something else: a subclass, torch's SyncBatchNorm, a lazy one; or for eps not above 0.
        """
        found = []
        for name, part in module.named_modules():
            if isinstance(part, cls) or not isinstance(part, _RELATED):
                continue
            kind = type(part)
            if kind not in _PLAIN:
                raise UsageError(
                    f"SyncBatchNorm.convert: {name or 'the module'!r} is a {kind.__qualname__}, which may "
                    f"do something else than nn.BatchNorm1d, 2d and 3d: put one of these in its place first"
                )
            if not part.eps > 0:
                raise UsageError(f"SyncBatchNorm.convert: {name or 'the module'!r} has eps={part.eps}: set it above 0")
            found.append(part)
        for part in found:
            part.__class__ = cls
            cast(SyncBatchNorm, part).comm = comm
        return module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Raises UsageError for a wrong shape and DtypeError for a dtype that is not floating, both before anything is
        sent; UsageError on every rank when all ranks together have fewer than 2 values per channel.
        """
        self._check_input_dim(input)
        own = input.numel() // self.num_features
        if self.comm.size == 1 or not self.training:
            if self.training:
                _check_total(own)
            return super().forward(input)
        gathered = self.comm.all_gather(_statistics(input.detach(), own).unsqueeze(0))
        total, mean, deviations = _joined(gathered)
        if own < 2:  # else there are enough, and reading the total would wait for the device
            _check_total(int(total))
        self._track(total, mean, deviations)
        scale = torch.rsqrt(deviations / total + self.eps)
        return apply(_Normalise, input, self.weight, self.bias, total, mean, scale, self.comm)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        shape = tuple(input.shape)
        if len(shape) < 2 or shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm on axis {self.comm.name!r}: an input of shape {shape}: it must be (N, "
                f"{self.num_features}, ...), rows in dim 0, the num_features={self.num_features} channels in dim 1"
            )
        if not input.is_floating_point():
            raise DtypeError(
                f"SyncBatchNorm on axis {self.comm.name!r}: an input of {input.dtype}: it must be floating"
            )

    @torch.no_grad()
    def _track(self, total: Tensor, mean: Tensor, deviations: Tensor) -> None:
        """Take a batch into the running statistics, its variance without bias, as nn.BatchNorm does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        newest = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, deviations / (total - 1))):
            before = running.to(value.dtype)
            running.copy_(before + newest * (value - before))

    def extra_repr(self) -> str:
        plain: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, axis={self.comm.name!r}"


class _Normalise(torch.autograd.Function):
    """y = xhat w + b with xhat = (x - mean) scale and scale = 1 / sqrt(var + eps), mean and var those of all ranks' n
    values, which depend on x. With g = dL/dy and sums over all of these:

        dL/dx = w scale (g - sum(g) / n - xhat sum(g xhat) / n)        dL/dw = sum(g xhat)        dL/db = sum(g)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        total: Tensor,
        mean: Tensor,
        scale: Tensor,
        comm: Communicator,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, total, mean, scale)
        ctx.comm, ctx.bias_dtype = comm, None if bias is None else bias.dtype
        y = _centred(x, mean)
        y.mul_(_along(scale if weight is None else scale * weight, y))
        if bias is not None:
            y.add_(_along(bias, y))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, total, mean, scale = ctx.saved_tensors
        normed = _centred(x, mean)
        normed.mul_(_along(scale, normed))
        grad = grads[0].to(normed.dtype)
        dims = _all_but_channels(x)
        own = torch.stack([grad.sum(dims), (grad * normed).sum(dims)])
        # Sent whether or not x needs a gradient here: it may on another rank, which would wait.
        means = ctx.comm.all_reduce(own.to(mean.dtype, copy=True)) / total
        grad_x = None
        if ctx.needs_input_grad[0]:
            inner = normed.mul_(_along(means[1], normed)).add_(_along(means[0], normed))
            grad_x = (grad - inner).mul_(_along(scale if weight is None else scale * weight, normed)).to(x.dtype)
        grad_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = own[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _statistics(x: Tensor, count: int) -> Tensor:
    """Return (2 C + 1,) in the exact dtype: each channel's mean, its sum of squared deviations, and the count."""
    exact, channels = exact_dtype(x.device), x.shape[1]
    if count == 0:
        return torch.zeros(2 * channels + 1, dtype=exact, device=x.device)
    values, dims = _computed(x), _all_but_channels(x)
    rough = values.mean(dims)  # of a large mean as near as its dtype can say: the rest is in the deviations
    values = values - _along(rough, values)
    rest = values.mean(dims)
    squares = values.square().sum(dims).to(exact) - count * rest.to(exact).square()
    parts = (rough.to(exact) + rest.to(exact), squares.clamp_min_(0.0), squares.new_full((1,), count))
    return torch.cat(parts)


def _joined(gathered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, the mean and the sum of squared deviations of all ranks, from (ranks, 2 C + 1)."""
    channels = gathered.shape[1] // 2
    means, deviations, counts = gathered.split([channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return total, mean, (deviations + counts * (means - mean).square()).sum(0)


def _check_total(count: int) -> None:
    if count < 2:
        raise UsageError(
            f"SyncBatchNorm: Expected more than 1 value per channel when training, got {count} on all ranks together: "
            f"give more rows, or call eval()"
        )


def _computed(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean, computed in float32 at least, in new memory. A mean that is more exact than x is taken off in
    two parts: x - the first is exact where x is near it.
    """
    values = _computed(x)
    first = mean.to(values.dtype)
    return (values - _along(first, values)).sub_(_along(mean - first, values))


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """Return (C,) in the dtype of `x`, to be broadcast along its channels."""
    return channels.to(x.dtype).view(-1, *(1 for _ in range(x.dim() - 2)))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
