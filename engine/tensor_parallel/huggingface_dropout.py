"""Dropout of Hugging Face models from Streams, that of attention weights too, which their code makes with a function.

Attention goes through transformers' own registry of attention functions, by the name `engine_streams`: the model's
eager attention, in which the one dropout is taken from the module's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.errors import UsageError, did_you_mean
from engine.tensor_parallel.random import Dropout, Streams

_NAME = "engine_streams"


def huggingface_dropouts(model: nn.Module, streams: Streams) -> nn.Module:
    """Let all dropout of a model that `huggingface_plan` knows come from `streams`, in place, and return it. Before or
    after `parallelize`, the same on all ranks; nothing is sent.

    Each nn.Dropout becomes a Dropout of the same probability on whole activations. Where attention weights are dropped,
    each attention module gets a Dropout `weights_dropout` over its rank's heads, and the model's attention becomes its
    eager one: fused kernels draw masks of their own. Without dropout in attention, it stays what it was.

    Raises UsageError, before anything is changed, for a type of model without a plan, and for GPT-2 with
    reorder_and_upcast_attn.
    """
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", None))
    if kind not in _ATTENTION:
        raise UsageError(
            f"huggingface_dropouts: a {type(model).__name__} of model_type={kind!r}{did_you_mean(kind, _ATTENTION)}: "
            f"known are {', '.join(sorted(_ATTENTION))}; in other models write engine.tensor_parallel.Dropout"
        )
    if getattr(config, "reorder_and_upcast_attn", False):
        raise UsageError("huggingface_dropouts: GPT-2's reorder_and_upcast_attn=True is attention of its own: unset it")
    suffix, held = _ATTENTION[kind]
    attends = False
    for name, module in list(model.named_modules()):
        attention = f".{name}".endswith(f".{suffix}")
        for own, child in list(module.named_children()):
            if type(child) is nn.Dropout and not (attention and own == held):
                setattr(module, own, Dropout(child.p, streams).train(child.training))
        if attention:
            given: Any = getattr(module, held)
            p = float(getattr(given, "p", given))
            module.weights_dropout = Dropout(p, streams, split_dim=1).train(module.training)
            attends = attends or p > 0
    if attends:
        _register()
        model.set_attn_implementation(_NAME)  # type: ignore[operator]
    return model


def _register() -> None:
    """Make the attention known to transformers, which whoever has a model has."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)


def _attend(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The eager attention of the module's own file; (batch, heads / T, queries, keys) weights are dropped."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    with _Dropped(module.get_submodule("weights_dropout")):
        return eager(module, *args, **options)


class _Dropped(TorchFunctionMode):
    """Runs a module where code calls torch's dropout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.layer(args[0]) if func is F.dropout else func(*args, **(kwargs or {}))


_LLAMA = ("self_attn", "attention_dropout")
_ATTENTION: Mapping[str, tuple[str, str]] = {
    "bert": ("attention.self", "dropout"),
    "gpt2": ("attn", "attn_dropout"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
"""From a model type to the name of its attention modules, and of what holds the probability there."""
