"""Weight gradients apart from autograd: of every kind of layer equal to plain PyTorch's in float64, at once and kept
for later, in `.grad` and in a bucket; what is caught, what goes autograd's way, and what is left after a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import engine
from engine.errors import UsageError
from engine.weight_gradients import Sink, WeightGradients, weight_gradient_of

DOUBLE = torch.float64


class Of(nn.Module):
    """Parts by name, and what is done with them."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class StoredTransposed(nn.Module):
    """As Hugging Face's Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(*x.shape[:-1], 6)


class OneBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(1))


def linear(*sizes: int, **options: Any) -> nn.Linear:
    return nn.Linear(*(sizes or (4, 4)), **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(4, 6), nn.LayerNorm(6), nn.GELU(), linear(6, 4, bias=False))


def table(**options: Any) -> nn.Module:
    """Rows come up several times, and the padding's."""
    return Of(lambda m, x: m.table(x[..., 0].abs().mul(9).long() % 5) + x, table=nn.Embedding(5, 4, **options))


def tied() -> nn.Module:
    model = Of(lambda m, x: m.head(m.middle(m.table(x[..., 0].abs().long() % 5))), table=nn.Embedding(5, 4))
    model.middle, model.head = linear(), linear(4, 5, bias=False)
    model.head.weight = model.table.weight
    return model


def frozen(**which: bool) -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    for name, trained in which.items():
        getattr(model[2], name).requires_grad_(trained)
    return model


def in_place(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x.clone().mul_(2.0)).relu_()).add_(1.0)


def saliency(m: Any, x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.part(z).sum(), z)
    return m.part(x) * slope


def penalty(m: Any, x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.part(z).square().sum(), z, create_graph=True)
    return m.part(x) + slope.square()


def by_rows(m: Any, x: Tensor) -> Tensor:
    weights = dict(m.part.named_parameters())
    return m.part(x) + torch.func.vmap(lambda row: torch.func.functional_call(m.part, weights, row))(x)


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.first(x)
    return m.second(y)


def deep() -> nn.Module:
    return Of(recomputed(False), part=mlp(), last=linear())


def attention(m: Any, x: Tensor) -> Tensor:
    return m.attention(x, x, m.into(x))[0]


def recomputed(reentrant: bool) -> Callable[..., Tensor]:
    return lambda m, x: m.last(checkpoint(m.part, x, use_reentrant=reentrant))


def by_hand(m: Any, x: Tensor) -> Tensor:
    return x @ m.part.weight.t() + F.linear(x, m.part.weight.t(), m.part.bias)


def hooked(m: Any, x: Tensor) -> Tensor:
    transposed = m.part.weight.t()
    transposed.register_hook(lambda gradient: 2 * gradient)
    return F.linear(x, transposed, m.part.bias)


def by_keyword(m: Any, x: Tensor) -> Tensor:
    return F.linear(bias=m.part.bias, input=x, weight=m.part.weight)


def scaled(m: Any, x: Tensor) -> Tensor:
    return torch.addmm(m.part.bias, x.view(-1, 4), m.part.weight, beta=2)


def with_one_bias(m: Any, x: Tensor) -> Tensor:
    return torch.addmm(m.part.bias, x.view(-1, 4), m.part.weight)


def with_gaps(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x.transpose(0, 1)).transpose(0, 1)).transpose(0, -1)


def shifted(m: Any, x: Tensor) -> Tensor:
    return m.part(x).view(-1, 2, 2) + m.shift.weight


def convolved(m: Any, x: Tensor) -> Tensor:
    return m.part(m.conv(x.reshape(1, 4, -1)).mT)


def twice(m: Any, x: Tensor) -> Tensor:
    return m.part(m.part(x).tanh())


def one_part(m: Any, x: Tensor) -> Tensor:
    return m.part(x)


# By what a model is made, and how many weight gradients one pass of it keeps for later.
KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one": (linear, 1),
    "mlp": (mlp, 2),
    "frozen weight": (lambda: frozen(weight=False), 1),
    "frozen bias": (lambda: frozen(bias=False), 2),
    "all frozen": (lambda: linear().requires_grad_(False), 0),
    "used twice": (lambda: Of(twice, part=linear()), 2),
    "unused": (lambda: Of(one_part, part=linear(), unused=linear()), 1),
    "tied": (tied, 3),
    "table with padding": (lambda: table(padding_idx=-3), 1),
    "table by frequency": (lambda: table(scale_grad_by_freq=True), 0),
    "stored transposed": (lambda: nn.Sequential(StoredTransposed(), linear(6, 4)), 2),
    "transposed by hand": (lambda: Of(by_hand, part=linear()), 1),
    "hook on the transpose": (lambda: Of(hooked, part=linear()), 0),
    "by keyword": (lambda: Of(by_keyword, part=linear()), 1),
    "scaled addmm": (lambda: Of(scaled, part=linear()), 0),
    "one bias": (lambda: Of(with_one_bias, part=OneBias()), 0),
    "in place": (lambda: Of(in_place, first=linear(), second=linear()), 2),
    "gaps": (lambda: Of(with_gaps, first=linear(), second=linear()), 2),
    "added parameter": (lambda: Of(shifted, part=linear(), shift=linear(2, 2)), 1),
    "convolution": (lambda: Of(convolved, part=linear(), conv=nn.Conv1d(4, 4, 1)), 1),
    "attention": (lambda: Of(attention, into=linear(), attention=nn.MultiheadAttention(4, 2)), 1),
    "parametrized": (lambda: parametrizations.weight_norm(linear()), 0),
    "autocast": (lambda: Of(autocast, first=linear(), second=linear()), 1),
    "recomputed": (lambda: Of(recomputed(False), part=mlp(), last=linear()), 3),
    "recomputed, reentrant": (lambda: Of(recomputed(True), part=mlp(), last=linear()), 3),
    "recomputed twice": (lambda: Of(recomputed(True), part=deep(), last=linear()), 4),
    "gradient inside": (lambda: Of(saliency, part=mlp()), 2),
    "penalty": (lambda: Of(penalty, part=mlp()), 4),
    "mapped": (lambda: Of(by_rows, part=mlp()), 2),
}  # fmt: skip


def inputs(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 2, 4)), generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def passes(model: nn.Module, x: Tensor, apart: WeightGradients | None, key: Any = None) -> tuple[Tensor, Tensor | None]:
    """One microbatch; return the output and the input's gradient."""
    x = x.clone().requires_grad_()
    if apart is None:
        y = model(x)
        if y.requires_grad:
            torch.autograd.backward([y], [torch.cos(y.detach())])
        return y, x.grad
    with apart.catching():
        y = model(x)
    if y.requires_grad:
        apart.backward([get_gradient_edge(y)], [torch.cos(y.detach())], key)
    return y, x.grad


def equal(got: Tensor | None, wanted: Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    return got.dtype == wanted.dtype and bool(torch.allclose(got, wanted, rtol=1e-12, atol=1e-13))


@pytest.mark.parametrize("sinks", ["grad", "bucket"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_autograds_at_once_and_kept(kind: str, sinks: str) -> None:
    torch.manual_seed(1)
    make, kept = KINDS[kind]
    plain = make().double()
    with engine.init(engine.Layout(), device="cpu") as mesh:
        for later in (False, True):
            model, reference = deepcopy(plain), deepcopy(plain)
            optimizer = None
            if sinks == "bucket" and kind != "all frozen":
                optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
            apart = WeightGradients({} if optimizer is None else optimizer.gradient_sinks())
            for i in range(3):
                x = inputs(i, *((2, 4) if kind == "mapped" and i else ()))
                for got, wanted in zip(
                    passes(model, x, apart, i if later else None), passes(reference, x, None), strict=True
                ):
                    assert equal(got, wanted)
                if later:
                    assert apart.waiting == kept * (i + 1)
            for i in (1, 2, 0) if later else ():
                apart.compute(i)
            assert apart.waiting == 0
            for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert equal(parameter.grad, wanted.grad), name
            if optimizer is not None:
                optimizer.finish_gradients()
                for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                    missing = torch.zeros_like(wanted) if wanted.requires_grad else None
                    assert equal(parameter.grad, missing if wanted.grad is None else wanted.grad)


def test_float32_and_half_gradients_are_the_products_of_autograd() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(2)
        plain = mlp().to(dtype)
        model, x = deepcopy(plain), inputs(0).to(dtype)
        apart = WeightGradients({})
        passes(plain, x, None)
        passes(model, x, apart, "later")
        apart.compute("later")
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.grad.dtype == dtype
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-2)


def test_odd_shapes() -> None:
    layer = nn.Linear(4, 3, dtype=DOUBLE)
    for x in (inputs(0, 4), inputs(1, 0, 4), inputs(2, 2, 3, 2, 4)):
        copy = deepcopy(layer)
        got, wanted = passes(copy, x, WeightGradients({})), passes(layer, x, None)
        assert all(equal(*each) for each in zip(got, wanted, strict=True))
        assert equal(copy.weight.grad, layer.weight.grad)
        layer.zero_grad()
    hollow = nn.Linear(1, 3, dtype=DOUBLE)
    hollow.weight = nn.Parameter(torch.empty(3, 0, dtype=DOUBLE))
    passes(hollow, inputs(0, 2, 0), WeightGradients({}))
    assert hollow.weight.grad is not None
    assert hollow.weight.grad.shape == (3, 0)


# ---- sinks and hooks -------------------------------------------------------------------------------------------------


def test_a_sink_is_given_the_rows_of_both_factors_and_autograd_nothing() -> None:
    layer, x, seen = linear().double(), inputs(0), []
    apart = WeightGradients({id(layer.weight): Sink(lambda *factors: seen.append(factors))})
    y, _ = passes(layer, x, apart)
    ((left, right),) = seen
    assert torch.equal(left, torch.cos(y.detach()).flatten(0, 1))
    assert torch.equal(right, x.flatten(0, 1))
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_a_buckets_gradient_is_computed_in_the_buckets_memory() -> None:
    model = mlp().double()
    with engine.init(engine.Layout(), device="cpu") as mesh:
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
        apart = WeightGradients(optimizer.gradient_sinks())
        places = set()
        for i in range(3):
            passes(model, inputs(i), apart)
            places.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
        assert len(places) == 1
        memory = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(memory) == 1


def test_a_parameter_with_hooks_keeps_them() -> None:
    with engine.init(engine.Layout(), device="cpu") as mesh:
        for add in ("register_hook", "register_post_accumulate_grad_hook"):
            for early in (False, True):
                layer, seen = linear().double(), []

                def hook(x: Tensor, seen: list[Any] = seen) -> None:
                    seen.append(x)

                if early:
                    handle = getattr(layer.weight, add)(hook)
                optimizer = engine.zero.ZeroOptimizer(layer, torch.optim.SGD, mesh, lr=0.0)
                apart = WeightGradients(optimizer.gradient_sinks())
                if not early:
                    handle = getattr(layer.weight, add)(hook)
                passes(layer, inputs(0), apart, "later")
                assert len(seen) == 1
                assert apart.waiting == 0
                handle.remove()
                passes(layer, inputs(0), apart, "later")
                assert (len(seen), apart.waiting) == (1, 1)


# ---- what waits ------------------------------------------------------------------------------------------------------


def test_what_waits_is_computed_once_by_its_key_or_forgotten() -> None:
    layer, apart = linear().double(), WeightGradients({})
    for key in ("a", "b"):
        passes(layer, inputs(ord(key)), apart, key)
    assert layer.weight.grad is None
    for _ in range(2):
        apart.compute("b")
    copy = deepcopy(layer)
    copy.zero_grad()
    passes(copy, inputs(ord("b")), None)
    assert equal(layer.weight.grad, copy.weight.grad)
    assert apart.waiting == 1
    apart.clear()
    apart.compute("a")
    assert equal(layer.weight.grad, copy.weight.grad)


def test_what_changes_while_it_waits_is_refused() -> None:
    layer, x, gradient = nn.Linear(4, 3, dtype=DOUBLE), inputs(0), inputs(1, 3, 2, 3)
    apart = WeightGradients({})
    for changed in (x, gradient):
        with apart.catching():
            y = layer(x)
        apart.backward([get_gradient_edge(y)], [gradient], "later")
        changed.mul_(2)
        with pytest.raises(UsageError, match=r"a layer with a weight \(3, 4\) was changed in place before"):
            apart.compute("later")


def test_a_backward_outside_of_a_step_is_autograds() -> None:
    layer, apart = linear().double(), WeightGradients({})
    with apart.catching():
        y = layer(inputs(0))
        torch.autograd.backward([y.sum()], retain_graph=True)
    assert layer.weight.grad is not None
    assert torch.equal(torch.autograd.grad(y.sum(), layer.weight)[0], layer.weight.grad)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        apart.backward([get_gradient_edge(y)], [torch.ones(())], "later")
    with apart.catching():
        y = layer(inputs(0))
    torch.autograd.backward([y.sum()])
    assert apart.waiting == 0
    weight = layer.weight
    product = weight_gradient_of(weight)
    assert equal(product(inputs(1), inputs(2)), inputs(1).flatten(0, 1).t() @ inputs(2).flatten(0, 1))
