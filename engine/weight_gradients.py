"""Weight gradients of linear layers, computed apart from autograd: straight into the memory where gradients are summed,
at once or when a pipeline schedule says so.

While `WeightGradients.catching()` is active, products with a parameter (`F.linear`, so every nn.Linear, `torch.addmm`
and, through `weight_gradient_of`, products of the engine's own) and, on CPUs, look-ups (`F.embedding`) become functions
whose backward returns the gradients of input and bias, and hands both factors of the weight's gradient over instead of
multiplying them. All else, and what cannot be told to be safe (a parameter with hooks, under autocast, traced by
torch.compile, a subclass), goes autograd's way, within the input gradient. Method: Zero Bubble Pipeline Parallelism,
arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from engine.errors import UsageError

Product = Callable[[Tensor, Tensor], Tensor | None]
"""(left (n, rows), right (n, columns)) -> left^T right, a weight's gradient; None where it was handed over."""


class Sink(NamedTuple):
    """Where the gradient of one parameter (rows, columns) is summed."""

    add: Callable[[Tensor, Tensor], None]
    """(left (n, rows), right (n, columns)): add left^T right, of the parameter's dtype, to the gradient. A left of
    integers (n,) is which rows were looked up: add each row of right to that row.
    """
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
    """Add a gradient to the parameter's `.grad`, where it is; left and right as a Sink takes them."""
    grad = parameter.grad
    if grad is not None and grad.dtype == right.dtype and grad.layout is torch.strided:
        write_product(grad, left, right, add=True)
    else:
        product = torch.empty_like(parameter, dtype=right.dtype)
        write_product(product, left, right, add=False)
        parameter.grad = product if grad is None else product.add_(grad)


def write_product(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Add a gradient to `out` (rows, columns), or put it there; left and right as a Sink takes them."""
    if not left.is_floating_point():
        (out if add else out.zero_()).index_add_(0, left, right.to(out.dtype))
    elif out.dtype is not right.dtype:  # rounded to the parameter's dtype, as autograd's gradients are
        product = left.t() @ right
        out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(left.t(), right)
    else:
        torch.mm(left.t(), right, out=out)


@dataclass(frozen=True)
class _Waiting:
    """A weight gradient that is not computed yet."""

    weight: nn.Parameter
    left: Tensor
    right: Tensor
    versions: tuple[int, int]


class WeightGradients:
    """Takes the weight gradients of one model's training steps. Nothing is sent."""

    def __init__(self, sinks: Mapping[int, Sink], least: int = 0) -> None:
        """sinks: by `id(parameter)`, for the life of the parameters. Of one without, `.grad` is added to. least: leave
        the gradients of weights with fewer elements to autograd.
        """
        self._sinks, self._least = sinks, least
        self._waiting: dict[Hashable, list[_Waiting]] = defaultdict(list)
        self._takes = False  # whether a backward that runs now hands over
        self._key: Hashable = None

    def catching(self) -> TorchFunctionMode:
        """Return the context in which products with parameters are caught: for a forward whose backward is run here."""
        return _Catching(self)

    def backward(self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor] | None, key: Hashable = None) -> None:
        """Run the backward from `roots`, whose forward was caught, as torch.autograd.backward does: sum the weight
        gradients where they belong as they come up, or with a `key` keep them until `compute(key)`.
        """
        # Roots are no tensors: torch leaves the mode while it handles a backward of tensors, but forwards that are run
        # again inside must be caught as the first ones were.
        before = self._takes, self._key
        self._takes, self._key = True, key
        try:
            with self.catching():
                torch.autograd.backward(roots, gradients)
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

    def parameter_of(self, weight: Tensor) -> tuple[nn.Parameter, bool] | None:
        """Return the parameter whose gradient is handed over for this factor of a product, and whether the factor is
        its transpose; None where the gradient is autograd's.
        """
        if not (isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled()):
            return None
        base = weight._base
        transposed = base is not None and weight.dim() == base.dim() == 2 and _geometry(weight) == _geometry(base.t())
        if transposed and (weight._backward_hooks or weight.retains_grad):
            return None
        parameter = base if transposed else weight
        if type(parameter) is not nn.Parameter or not self._is_plain(parameter):
            return None
        # What functions of torch.func transform is a function's own rule, which the caught product lacks.
        if torch.is_autocast_enabled(weight.device.type) or torch._C._are_functorch_transforms_active():
            return None
        return parameter, transposed

    def _is_plain(self, parameter: nn.Parameter) -> bool:
        """Whether a sink can do all that autograd would."""
        if parameter.dim() != 2 or not parameter.is_floating_point() or parameter.layout is not torch.strided:
            return False
        if parameter.numel() < self._least:
            return False
        sink = self._sinks.get(id(parameter))
        own = None if sink is None else sink.hook
        return not parameter._backward_hooks and all(h == own for h in parameter._post_accumulate_grad_hooks or ())

    def hand_over(self, weight: nn.Parameter, transposed: bool, left: Tensor, right: Tensor) -> Tensor | None:
        """Take left^T right, the gradient of the weight or of its transpose, or looked-up rows; or return the gradient
        where nothing takes it.
        """
        if not self._takes:
            if left.is_floating_point():
                return _product(left, right)
            gradient = torch.empty_like(weight)
            write_product(gradient, left, right, add=False)
            return gradient
        if transposed:
            left, right = right, left
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
        left = _rows(left) if left.is_floating_point() else left
        if sink is None:
            add_product(weight, left, _rows(right))
        else:
            sink.add(left, _rows(right))


_SEEN = frozenset(
    {F.linear, F.embedding, torch.addmm, weight_gradient_of, torch.autograd.backward, torch.autograd.grad}
)


class _Catching(TorchFunctionMode):
    """Sees every call of torch's functions."""

    def __init__(self, owner: WeightGradients) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():  # every look at a tensor's shape comes here too
            return func(*args, **options)
        if func is F.linear:
            caught = self._product(*_of_linear(*args, **options), 0)
            if caught is not None:
                return caught
        elif func is torch.addmm:
            caught = self._product(args[1], args[2], args[0], 1) if len(args) == 3 and not options else None
            if caught is not None:
                return caught
        elif func is F.embedding:
            caught = self._lookup(*_of_embedding(*args, **options))
            if caught is not None:
                return caught
        elif func is weight_gradient_of:
            found = self.owner.parameter_of(args[0])
            return partial(self.owner.hand_over, *found) if found else _product
        elif func is torch.autograd.backward and options.get("inputs") is None:
            # Within another backward: see `WeightGradients.backward`.
            edges = [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in args[0]]
            with self:
                return func(edges, **options)
        elif func is torch.autograd.grad:
            with self.owner.aside():
                return func(*args, **options)
        return func(*args, **options)

    def _product(self, x: Any, weight: Any, bias: Any, out: int) -> Tensor | None:
        """Return the product, if its weight gradient can be handed over. out: the weight's dim of the outputs."""
        found = self.owner.parameter_of(weight)
        if found is None or type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            return None
        if not (bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[out : out + 1])):
            return None
        parameter, transposed = found
        return _linear(self.owner, parameter, transposed != bool(out), x, bias)

    def _lookup(self, ids: Any, weight: Any, padding_idx: Any, plain: bool) -> Tensor | None:
        """Return the looked-up rows, if their gradient can be handed over: on a CPU, where rows are added in order."""
        if not plain or type(ids) is not Tensor or not isinstance(weight, Tensor) or weight.device.type != "cpu":
            return None
        found = self.owner.parameter_of(weight)
        return None if found is None or found[1] else _look_up(self.owner, weight, ids, padding_idx)


def _of_embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None,  # noqa: A002 (torch's name)
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,  # noqa: ARG001
) -> tuple[Any, Any, Any, bool]:  # fmt: skip
    return input, weight, padding_idx, max_norm is None and not scale_grad_by_freq and not sparse


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:  # noqa: A002 (torch's name)
    return input, weight, bias


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


class _Linear(torch.autograd.Function):
    """x W^T + b, or with a weight that is stored as (in, out) x W + b."""

    @staticmethod
    def forward(
        ctx: Any, owner: WeightGradients, weight: nn.Parameter, transposed: bool, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.hand_over, ctx.transposed = partial(owner.hand_over, weight, transposed), transposed
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[3] else None)
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
        *_, needs_x, needs_bias = ctx.needs_input_grad
        with torch._C.DisableTorchFunction():  # nothing to catch: saves the time of looking
            of_x = (_rows(grad) @ (weight.t() if ctx.transposed else weight)).view(x.shape) if needs_x else None
            of_bias = _rows(grad).sum(0) if needs_bias else None
            return None, ctx.hand_over(grad, x), None, of_x, of_bias


class _LookUp(torch.autograd.Function):
    """Rows of a table. Their gradient takes no memory of the table's size, nor time for its other rows."""

    @staticmethod
    def forward(ctx: Any, owner: WeightGradients, weight: nn.Parameter, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.hand_over = partial(owner.hand_over, weight, False)
        ctx.padding = None if padding_idx is None else padding_idx % weight.shape[0]
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), grad = ctx.saved_tensors, grads[0]
        if ctx.padding is not None:
            grad = grad.masked_fill((ids == ctx.padding).unsqueeze(-1), 0.0)
        return None, ctx.hand_over(ids.reshape(-1), grad.reshape(-1, grad.shape[-1])), None, None


_linear: Callable[..., Tensor] = _Linear.apply  # which torch leaves untyped
_look_up: Callable[..., Tensor] = _LookUp.apply


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _rows(left).t() @ _rows(right)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
