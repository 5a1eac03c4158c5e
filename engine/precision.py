"""Which dtypes train, what their sums are in, what stays in fp32, and the scaling of losses for fp16 gradients.

Masters in fp32 and loss scaling: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.errors import DtypeError, UsageError, did_you_mean
from engine.placement import StageModule
from engine.tree import map_tensors

LOW = (torch.float16, torch.bfloat16)
TRAINED = (*LOW, torch.float32, torch.float64)
"""Dtypes that a trained parameter may have."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of gradients, and of masters, of parameters of `dtype`: fp32 for fp16 and bf16."""
    return torch.float32 if dtype in LOW else dtype


# ---- parameters ----------------------------------------------------------------------------------------------------


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, keep_fp32: Sequence[str] = ()) -> nn.Module:
    """Cast the floating parameters and buffers of `model` to `dtype`, in place, but for the modules that a pattern of
    `keep_fp32` matches, and return it. Call it before ZeroOptimizer is built, on every rank.

    keep_fp32: patterns of modules' full names, as `model.named_modules()` gives them, such as `*norm*`; all inside a
    matched module stays in fp32. Such a module computes in fp32: its floating inputs are cast to fp32, what it returns
    to `dtype`, in autograd's sight. The model's own floating inputs are the caller's to cast.

    Raises DtypeError for a dtype other than fp16 and bf16, UsageError for a pattern that matches no module with
    parameters, on any stage of a pipeline, and for a parameter that is in a module that stays and in one that does not.
    """
    if dtype not in LOW:
        raise DtypeError(f"cast_parameters to {dtype}: choose torch.bfloat16 or torch.float16")
    if isinstance(keep_fp32, str):
        raise UsageError(f"keep_fp32={keep_fp32!r} is one string: give a list of patterns, [{keep_fp32!r}]")
    modules = dict(model.named_modules())
    kept = [name for name, part in modules.items() if any(fnmatchcase(name, p) for p in keep_fp32) and _has_own(part)]
    for pattern in keep_fp32:
        found = any(fnmatchcase(name, pattern) for name in kept)
        if not (model.on_any_stage(found) if isinstance(model, StageModule) else found):
            names = [name for name, part in modules.items() if _has_own(part)]
            raise UsageError(
                f"keep_fp32: {pattern!r} matches no module with parameters{did_you_mean(pattern, names)}: patterns are "
                f"of full names, such as {names[-1] if names else 'norm'!r} or '*norm*'"
            )
    outermost = [name for name in kept if not any(name.startswith(f"{other}.") or other == "" for other in kept)]
    staying = {id(part) for name in kept for part in modules[name].modules()}
    _check_apart(modules, staying)
    for part in modules.values():
        _cast_own(part, torch.float32 if id(part) in staying else dtype)
    for name in outermost or kept[:1]:
        modules[name].register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
        modules[name].register_forward_hook(partial(_cast_output, dtype))
    return model


def _has_own(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _check_apart(modules: dict[str, nn.Module], staying: set[int]) -> None:
    holders: dict[int, tuple[str, bool]] = {}
    for name, part in modules.items():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            first, stays = holders.setdefault(id(parameter), (f"{name}.{key}", id(part) in staying))
            if stays != (id(part) in staying):
                raise UsageError(
                    f"keep_fp32: {first!r} and '{name}.{key}' are one parameter, and only one stays in "
                    f"fp32: match both, or neither"
                )


def _cast_own(part: nn.Module, dtype: torch.dtype) -> None:
    for tensors in (part._parameters, part._buffers):
        for tensor in tensors.values():
            if tensor is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
                tensor.data = tensor.data.to(dtype)
                tensor.grad = None


def _cast_inputs(dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast = partial(_cast, dtype)
    return map_tensors(args, cast), map_tensors(kwargs, cast)


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: Any, output: Any) -> Any:
    return map_tensors(output, partial(_cast, dtype))


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


# ---- losses --------------------------------------------------------------------------------------------------------


class LossScaler:
    """Keeps small fp16 gradients above zero: losses are multiplied by `value`, gradients divided by it.

    With `dynamic` the value starts at 65536, halves at a step whose gradients are not finite, which is to be left out,
    and doubles after 2000 good ones in a row: the defaults of torch.amp.GradScaler. A number stays as it is; steps
    that are not finite are left out as well.
    """

    def __init__(
        self,
        scale: float | Literal["dynamic"] = "dynamic",
        *,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        """The keywords are for `dynamic`. Raises UsageError for a scale or factor that cannot work."""
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not (scale == "dynamic" or (number and 0 < float(scale) < float("inf"))):
            raise UsageError(f"loss_scale={scale!r}: give a finite number above 0, or 'dynamic'")
        if not (initial > 0 and growth > 1 and 0 < backoff < 1 and interval > 0):
            raise UsageError(
                f"loss scaling with initial={initial}, growth={growth}, backoff={backoff}, interval={interval}: the "
                f"first is above 0, the next above 1, the third between 0 and 1, the last at least 1"
            )
        self.dynamic = scale == "dynamic"
        self.value = initial if self.dynamic else float(scale)
        self.good_steps = 0
        """Since the value changed."""
        self._growth, self._backoff, self._interval = growth, backoff, interval

    def __repr__(self) -> str:
        kind = f"dynamic, x{self._growth} after {self._interval}, x{self._backoff}" if self.dynamic else "fixed"
        return f"LossScaler({self.value}, {kind}, good_steps={self.good_steps})"

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss that backward starts from."""
        return loss * self.value

    def accept(self, norm: Tensor) -> bool:
        """Return whether the step is to be made: whether the global gradient norm is finite; and adjust the value.

        Ranks that get the same norm, as `finish_gradients` returns it, answer alike. Waits for the device.
        """
        good = bool(torch.isfinite(norm))
        if self.dynamic:
            self.good_steps = self.good_steps + 1 if good else 0
            if not good:
                self.value *= self._backoff
            elif self.good_steps >= self._interval:
                self.value, self.good_steps = self.value * self._growth, 0
        return good

    def state_dict(self) -> dict[str, float]:
        """Return what a later run needs to go on."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up what `state_dict` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
