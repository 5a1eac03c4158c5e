"""Weight gradients of linear layers, computed apart from autograd: straight into the memory where gradients are summed,
at once or when a pipeline schedule says so.

While `WeightGradients.catching()` is active, products with a parameter (`F.linear`, so every nn.Linear, `torch.addmm`
and, through `weight_gradient_of`, products of the engine's own) become functions whose backward returns the gradients
of input and bias, and hands both factors of the weight's gradient over instead of multiplying them. All else, and what
cannot be told to be safe (a parameter with hooks, under autocast, traced by torch.compile, a subclass), goes autograd's
way, within the input gradient. Method: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from engine.errors import UsageError

Product = Callable[[Tensor, Tensor], Tensor | None]
"""(left (n, rows), right (n, columns)) -> left^T right, a weight's gradient; None where it was handed over."""


class Sink(NamedTuple):
    """Where the gradient of one parameter (rows, columns) is summed."""

    add: Callable[[Tensor, Tensor], None]
    """(left (n, rows), right (n, columns)): add left^T right, of the parameter's dtype, to the gradient."""
    hook: int | None = None
    """Id of the parameter's post-accumulate hook whose work `add` does as well. A parameter with others has its
    gradient made by autograd, so that they run.
    """


def weight_gradient_of(weight: Tensor) -> Product:
    """Return what a function that multiplies by `weight` computes its gradient with. To be called in its forward; a
    WeightGradients that is active there, and takes the weight, gives one that hands the factors over.
    """
    if has_torch_function_unary(weight):
        return handle_torch_function(weight_gradient_of, (weight,), weight)
    return _product


def add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add left^T right to the parameter's `.grad`, where it is: (n, rows), (n, columns) to (rows, columns)."""
    grad = parameter.grad
    if grad is not None and grad.dtype == left.dtype and grad.layout is torch.strided:
        grad.addmm_(left.t(), right)
    else:
        product = left.t() @ right
        parameter.grad = product if grad is None else product.add_(grad)


@dataclass(frozen=True)
class _Waiting:
    """A weight gradient that is not computed yet."""

    weight: nn.Parameter
    left: Tensor
    right: Tensor
    versions: tuple[int, int]


class WeightGradients:
    """Takes the weight gradients of one model's training steps. Nothing is sent."""

    def __init__(self, sinks: Mapping[int, Sink]) -> None:
        """sinks: by `id(parameter)`, for the life of the parameters. Of one without, `.grad` is added to."""
        self._sinks = sinks
        self._waiting: dict[Hashable, list[_Waiting]] = defaultdict(list)
        self._takes = False  # whether a backward that runs now hands over
        self._key: Hashable = None

    def catching(self) -> TorchFunctionMode:
        """Return the context in which products with parameters are caught: for each forward and each backward, which
        may run a part of the forward again.
        """
        return _Catching(self)

    @contextmanager
    def taking(self, key: Hashable = None) -> Iterator[None]:
        """For a backward, through what was caught in the forward: sum weight gradients where they belong as they come
        up, or with a `key` keep them until `compute(key)`. Elsewhere they are autograd's.
        """
        before = self._takes, self._key
        self._takes, self._key = True, key
        try:
            yield
        finally:
            self._takes, self._key = before

    @torch.no_grad()
    def compute(self, key: Hashable) -> None:
        """Compute what was kept under `key`. Raises UsageError where a factor was changed in place meanwhile."""
        for each in self._waiting.pop(key, ()):
            if (each.left._version, each.right._version) != each.versions:
                raise UsageError(
                    f"an input or output gradient of a layer with a weight {tuple(each.weight.shape)} was changed in "
                    f"place before the weight gradient that needs it: change a copy, or choose a schedule without "
                    f"weight gradients apart"
                )
            self._add(each.weight, each.left, each.right)

    def clear(self) -> None:
        """Forget what is kept: the step ended, or failed."""
        self._waiting.clear()

    @property
    def waiting(self) -> int:
        """How many weight gradients are kept."""
        return sum(map(len, self._waiting.values()))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def catches(self, weight: Tensor) -> bool:
        """Whether the gradient of `weight` can be handed over."""
        if type(weight) is not nn.Parameter or not (weight.requires_grad and torch.is_grad_enabled()):
            return False
        if weight.dim() != 2 or not weight.is_floating_point() or weight.layout is not torch.strided:
            return False
        sink = self._sinks.get(id(weight))
        own = None if sink is None else sink.hook
        if weight._backward_hooks or any(hook != own for hook in weight._post_accumulate_grad_hooks or ()):
            return False
        # What functions of torch.func transform is a function's own rule, which the caught product lacks.
        return not (torch.is_autocast_enabled(weight.device.type) or torch._C._are_functorch_transforms_active())

    def hand_over(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> Tensor | None:
        """Take left^T right, or return it where nothing takes."""
        if not self._takes:
            return _product(left, right)
        if self._key is None:
            self._add(weight, left, right)
        else:
            self._waiting[self._key].append(_Waiting(weight, left, right, (left._version, right._version)))
        return None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For a backward inside a forward, whose gradients are no part of the step's."""
        before, self._takes = self._takes, False
        try:
            yield
        finally:
            self._takes = before

    def _add(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
        sink = self._sinks.get(id(weight))
        if sink is None:
            add_product(weight, _rows(left), _rows(right))
        else:
            sink.add(_rows(left), _rows(right))


class _Catching(TorchFunctionMode):
    """Sees every call of torch's functions."""

    def __init__(self, owner: WeightGradients) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **options)
        if func is F.linear:
            x, weight, bias = _of_linear(*args, **options)
            if self._fits(x, weight, bias, 0):
                return _linear(self.owner, False, x, weight, bias)
        elif func is torch.addmm:
            if len(args) == 3 and not options and self._fits(args[1], args[2], args[0], 1):
                return _linear(self.owner, True, args[1], args[2], args[0])
        elif func is weight_gradient_of:
            return partial(self.owner.hand_over, *args) if self.owner.catches(*args) else _product
        elif func is torch.autograd.backward and options.get("inputs") is None:
            # torch leaves a mode while it handles such a call, but recomputed forwards inside must see it as the first
            # ones did. An edge of the graph is no tensor, so this is not handled again.
            edges = [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in args[0]]
            with self:
                return func(edges, **options)
        elif func is torch.autograd.grad:
            with self.owner.aside():
                return func(*args, **options)
        return func(*args, **options)

    def _fits(self, x: Any, weight: Any, bias: Any, out: int) -> bool:
        """Whether the weight gradient of this product can be handed over. out: the weight's dim of the outputs."""
        if not self.owner.catches(weight) or type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            return False
        return bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[out : out + 1])


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:  # noqa: A002 (torch's name)
    return input, weight, bias


class _Linear(torch.autograd.Function):
    """x W^T + b, or with a weight that is stored as (in, out) x W + b."""

    @staticmethod
    def forward(
        ctx: Any, owner: WeightGradients, transposed: bool, x: Tensor, weight: nn.Parameter, bias: Tensor | None
    ) -> Tensor:
        ctx.owner, ctx.transposed, ctx.weight = owner, transposed, weight
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[2] else None)
        matrix = weight if transposed else weight.t()
        # Into memory of its own: a view of the product could not be changed in place outside of this function.
        y = x.new_empty(*x.shape[:-1], matrix.shape[1])
        if bias is None:
            torch.mm(_rows(x), matrix, out=_rows(y))
        else:
            torch.addmm(bias, _rows(x), matrix, out=_rows(y))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        _, _, needs_x, _, needs_bias = ctx.needs_input_grad
        of_x = (_rows(grad) @ (weight.t() if ctx.transposed else weight)).view(x.shape) if needs_x else None
        of_bias = _rows(grad).sum(0) if needs_bias else None
        of_weight = ctx.owner.hand_over(ctx.weight, *((x, grad) if ctx.transposed else (grad, x)))
        return None, None, of_x, of_weight, of_bias


_linear: Callable[..., Tensor] = _Linear.apply  # which torch leaves untyped


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _rows(left).t() @ _rows(right)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
