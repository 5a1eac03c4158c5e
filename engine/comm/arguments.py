"""What a collective accepts: checks that raise before anything is sent, and the forms in which values travel. Pure.

Every function takes `label`, which says who is calling what, and raises UsageError, LayoutError or DtypeError.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch import Tensor

from engine.errors import DtypeError, LayoutError, UsageError, did_you_mean

OPS = ("sum", "mean", "max", "min", "prod")


def check_tensors(label: object, reads: Sequence[Tensor], writes: Sequence[Tensor], device: torch.device) -> None:
    """Refuse what is no tensor, lies on another kind of device, is not strided, or would lose its gradient.

    Refuse also to write where several elements share memory. In one condition each, since every call pays for it.
    """
    for xs in (reads, writes):
        for x in xs:
            if (
                not isinstance(x, Tensor)
                or (x.device != device and x.device.type != device.type)
                or x.layout is not torch.strided
                or (x.requires_grad and torch.is_grad_enabled())
            ):
                _refuse(label, x, device)
    for x in writes:
        if not x.is_contiguous() and any(t == 0 and n > 1 for t, n in zip(x.stride(), x.shape, strict=True)):
            raise UsageError(
                f"{label}: elements of the tensor {shape_of(x)} with strides {x.stride()} share memory, so it cannot "
                f"be written to: clone() it first"
            )


def _refuse(label: object, x: Tensor, device: torch.device) -> NoReturn:
    """Raise the error of `check_tensors` for `x`."""
    if not isinstance(x, Tensor):
        raise UsageError(f"{label}: expected a tensor, got {type(x).__name__}")
    if x.device.type != device.type:
        raise UsageError(
            f"{label}: the tensor {shape_of(x)} lies on {x.device}, the group on {device}: "
            f"move it with .to({str(device)!r})"
        )
    if x.layout is not torch.strided:
        raise UsageError(f"{label}: {x.layout} tensors are not carried: call to_dense() first")
    raise UsageError(
        f"{label}: the tensor {shape_of(x)} takes part in a gradient, which this call would lose: "
        f"use engine.comm.autograd, or detach() it"
    )


def check_reduction(label: object, x: Tensor, op: str, device: torch.device, dtypes: frozenset[torch.dtype]) -> None:
    """Refuse an unknown op, a dtype that is none of `dtypes`, which the backend of `device` reduces, and ops that a
    dtype has not.
    """
    if op not in OPS:
        raise UsageError(f"{label}: unknown op {op!r}{did_you_mean(op, OPS)}: choose {', '.join(OPS)}")
    if x.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise DtypeError(f"{label}: the backend of {device} does not reduce {x.dtype}: use one of {names}")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise DtypeError(f"{label}: the mean of {x.dtype} is no {x.dtype}: use sum, or a floating dtype")
    if x.is_complex() and op not in ("sum", "mean"):
        raise DtypeError(f"{label}: {op} has no meaning for {x.dtype}: use sum or mean")


def check_peer(label: object, peer: int, size: int, word: str) -> None:
    """Refuse a rank outside the group."""
    if not isinstance(peer, int) or not 0 <= peer < size:
        raise UsageError(
            f"{label}: {word}={peer} is outside the group: its ranks are 0 to {size - 1}, positions inside the group"
        )


def check_dim(label: object, x: Tensor, dim: int) -> int:
    """Return `dim` counted from the front."""
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise UsageError(f"{label}: dim {dim} is outside a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def scattered_shape(label: object, x: Tensor, dim: int, size: int) -> list[int]:
    """Return the shape of one of `size` equal parts of `x` along `dim`."""
    if x.shape[dim] % size:
        raise LayoutError(f"{label}: dim {dim} of {shape_of(x)} does not divide by the group's {size} ranks")
    shape = list(x.shape)
    shape[dim] //= size
    return shape


def result_like(label: object, x: Tensor, shape: list[int], out: Tensor | None) -> Tensor:
    """Return `out` after checking it, or a new tensor of `shape`."""
    if out is None:
        return x.new_empty(shape)
    if list(out.shape) != shape or out.dtype != x.dtype:
        raise UsageError(f"{label}: out is {shape_of(out)}, but {shape_of(x)} gives {x.dtype} {tuple(shape)}")
    return out


def on_the_wire(x: Tensor, op: str) -> tuple[Tensor, str]:
    """Return `x` in a dtype and with an op that every backend has: a mean as a sum, truth values as bytes."""
    if x.dtype is torch.bool:
        return x.view(torch.uint8), "max" if op in ("sum", "max") else "min"
    return x, "sum" if op == "mean" else op


def plain(x: Tensor) -> Tensor:
    """Return `x` itself where its memory holds its values in order, else a copy that does.

    Memory with gaps is not the only other kind: a conjugated or negated view has a pending change in it.
    """
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.resolve_conj().resolve_neg().contiguous()


def flat(x: Tensor) -> Tensor:
    """Return contiguous `x` as a vector over the same memory. The stride of a single element may be anything, and then
    keeps it from being viewed as bytes.
    """
    if x.numel() == 1:
        return x.as_strided((1,), (1,))
    return x if x.dim() == 1 else x.view(-1)


def mark_changed(x: Tensor) -> None:
    """Tell autograd that `x` is changed in place, which a backend does not."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def average(x: Tensor, op: str, size: int) -> None:
    """Divide a sum that was asked for as a mean: the one place where that happens."""
    if op == "mean":
        with outside_autograd(x):
            x.div_(size)


def write(target: Tensor, source: Tensor) -> Tensor:
    """Copy `source` into `target`, whatever the strides of both, and return it."""
    if not (target.requires_grad or source.requires_grad or target.is_inference()):
        return target.copy_(source)  # entering a mode costs more than a small copy
    with outside_autograd(target):
        return target.copy_(source)


def outside_autograd(x: Tensor) -> AbstractContextManager[None]:
    """Return the mode in which `x` may be changed in place."""
    return torch.inference_mode() if x.is_inference() else torch.no_grad()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the stretches of memory in which two tensors lie have bytes in common."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (start, stop), (first, last) = stretch(a), stretch(b)
    return start < last and first < stop


def clash(part: Tensor, whole: Tensor, index: int) -> bool:
    """Whether contiguous `part` shares memory with contiguous `whole` and is not its part `index`."""
    apart = part.data_ptr() - whole.data_ptr()
    return -part.nbytes < apart < whole.nbytes and apart != index * part.nbytes


def stretch(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor that is not empty, and of the one behind its last."""
    start = x.data_ptr()
    elements = sum((n - 1) * t for n, t in zip(x.shape, x.stride(), strict=True)) + 1
    return start, start + elements * x.element_size()


class Stretches:
    """The stretches of memory in which some tensors lie, in order, to be compared in n log n steps."""

    def __init__(self, xs: Iterable[Tensor]) -> None:
        found = sorted(stretch(x) for x in xs if x.numel())
        self._starts, self._stops = [start for start, _ in found], [stop for _, stop in found]

    def clash(self) -> bool:
        """Whether two of them overlap: then two neighbours do."""
        return any(stop > start for stop, start in zip(self._stops, self._starts[1:], strict=False))

    def overlap(self, x: Tensor) -> bool:
        """Whether `x` overlaps one of them, of which no two overlap each other."""
        if x.numel() == 0:
            return False
        start, stop = stretch(x)
        before = bisect_left(self._starts, stop)  # those that start before x ends; the last of them ends last
        return before > 0 and self._stops[before - 1] > start


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def shape_of(x: Tensor) -> str:
    """Return dtype and shape, for messages."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
