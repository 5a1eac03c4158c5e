"""The parallel layer that takes a plain one's place."""

from __future__ import annotations

import copy
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.comm import plan_mesh
from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.layout import Layout
from engine.placement import Placement, placements_of
from engine.tensor_parallel.embedding import VocabParallelEmbedding
from engine.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from engine.tensor_parallel.styles import Column, Row, Vocab
from engine.tensor_parallel.transposed import ColumnParallelConv1D, RowParallelConv1D


def parallel_layer(plain: nn.Module, style: Column | Row | Vocab, comm: Communicator) -> nn.Module:
    """Return the layer that holds this rank's part of `plain`, with its dtype, device, mode and requires_grad. Nothing
    is drawn, sent or changed.

    Raises UsageError for a module that the style does not fit, or that does more than its class; and what the layer
    itself refuses.
    """
    _check_plain(plain, style)
    if isinstance(style, Vocab):
        table = cast(nn.Embedding, plain)
        return VocabParallelEmbedding.from_embedding(table, comm, sequence_dim=style.sequence_dim)
    options: dict[str, Any] = {"parts": style.parts, "sequence_dim": style.sequence_dim}
    layer: nn.Module
    if isinstance(style, Column):
        options["gather_output"] = style.gather_output
        if is_conv1d(plain):
            layer = ColumnParallelConv1D.from_conv1d(plain, comm, **options)
        else:
            layer = ColumnParallelLinear.from_linear(cast(nn.Linear, plain), comm, **options)
    else:
        options["split_input"] = style.split_input
        if is_conv1d(plain):
            layer = RowParallelConv1D.from_conv1d(plain, comm, **options)
        else:
            layer = RowParallelLinear.from_linear(cast(nn.Linear, plain), comm, **options)
    return layer.train(plain.training)


def placements_after(plain: nn.Module, style: Column | Row | Vocab, size: int) -> dict[str, Placement]:
    """Return the placements of the parameters of the layer that would take a module's place over `size` ranks. Raises
    what `parallel_layer` would; no memory is taken.
    """
    _check_plain(plain, style)
    twin = copy.copy(plain)
    twin._parameters = {
        name: None if value is None else nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)
        for name, value in plain._parameters.items()
    }
    return placements_of(parallel_layer(twin, style, plan_mesh(Layout(tensor=size), 0).tensor))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is a Hugging Face Conv1D: a linear layer whose weight is stored as (in, out)."""
    home = sys.modules.get("transformers.pytorch_utils")  # where there is none, no module is of its class
    return home is not None and isinstance(module, home.Conv1D)


def _check_plain(module: nn.Module, style: Column | Row | Vocab) -> None:
    """Refuse a module of another kind, or one that does more than its class: that would be lost."""
    kind, given = type(style).__name__, type(module).__name__
    plain = nn.Embedding if isinstance(style, Vocab) else nn.Linear
    if not isinstance(module, plain) and not (plain is nn.Linear and is_conv1d(module)):
        wanted = "nn.Embedding" if isinstance(style, Vocab) else "nn.Linear or Hugging Face's Conv1D"
        raise UsageError(f"{kind} is for {wanted}, and this is a {given}")
    if isinstance(module, plain) and type(module).forward is not plain.forward:
        raise UsageError(f"this {given} has a forward of its own, which {kind} would not run")
    hooked = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    if any(hooked) or "forward" in vars(module) or hasattr(module, "parametrizations"):
        raise UsageError(f"this {given} has hooks or parametrizations, which {kind} would drop: remove them first")
    more = _more(module)
    if more:
        raise UsageError(f"this {given} has {'; '.join(more)}, which {kind} would drop: remove them first")


def hooks_of(parameter: Tensor) -> bool:
    """Whether a parameter has hooks, on its gradient or on what is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _more(module: nn.Module) -> list[str]:
    """Return what a module has besides weight and bias, in words."""
    named = {
        "buffers": list(module._buffers),
        "modules of its own": list(module._modules),
        "parameters": [name for name in module._parameters if name not in ("weight", "bias")],
        "hooks on": [name for name, p in module._parameters.items() if p is not None and hooks_of(p)],
    }
    listed = [f"{what} {', '.join(map(repr, names))}" for what, names in named.items() if names]
    hooked = (
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )
    return [*listed, "hooks on its state dict"] if any(hooked) else listed
