"""Hugging Face's Llama as a list of layers for PipelineModel, cut over the tensor axis by the built-in plan.

    model = engine.PipelineModel(llama_specs(config, mesh.tensor), mesh)
    state = to_huggingface(engine.full_state_dict(model, mesh))  # what LlamaForCausalLM(config) loads

The layers run transformers' own code. It is imported when a layer is built, and only then. Shapes: B rows, S positions,
H hidden, V vocabulary, T tensor ranks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from engine.comm.communicator import Communicator
from engine.errors import UsageError
from engine.pipeline import LayerSpec
from engine.tensor_parallel import Plan, huggingface_plan, parallelize

Value = TypeVar("Value")
Logits = Literal["whole", "split"]


def llama_specs(
    config: Any, tensor: Communicator, *, logits: Logits = "whole", dtype: torch.dtype | None = None
) -> list[LayerSpec]:
    """Return the layers of a `LlamaForCausalLM` of this configuration: the embedding, each decoder layer, and the last
    norm with the head, num_hidden_layers + 2 in all.

    The first takes ids (B, S), and an attention_mask (B, S) if wanted, which then goes from layer to layer beside the
    hidden states (B, S, H). The last gives logits (B, S, V), or with logits="split" this rank's part of them,
    (B, S, ceil(V / T)), for `vocab_parallel_cross_entropy`. Positions count from 0 in each row. Weights are drawn as
    transformers does, whole, and then cut over `tensor`; with `config.tie_word_embeddings` embedding and head are one
    parameter. To start from weights, `load_full_state_dict(model, mesh, from_huggingface(state, config))`. dtype: of
    the parameters; None: torch's default.

    Nothing is sent here. Building a layer is collective over `tensor`, as `parallelize` is, and raises what that does,
    for heads that do not divide for instance. Raises UsageError for a configuration of another model, for another
    `logits`, and without transformers (`pip install 'engine3d[hf]'`).
    """
    if not isinstance(tensor, Communicator):
        raise UsageError(f"llama_specs(config, tensor): tensor is a {type(tensor).__name__}: give mesh.tensor")
    kind = getattr(config, "model_type", None)
    if kind != "llama":
        told = f"model_type={kind!r}" if kind is not None else f"a {type(config).__name__}"
        raise UsageError(f"llama_specs cuts a model of a LlamaConfig into layers, and was given {told}")
    _transformers()
    plan = huggingface_plan(config, logits=logits)
    first, last = {}, {}
    if config.tie_word_embeddings:
        first, last = {"words": "model.embed_tokens.weight"}, {"words": "lm_head.weight"}
    config = copy.deepcopy(config)  # what the caller does to it later would reach layers that are built then
    return [
        LayerSpec(_build, LlamaEmbedding, config, tensor, plan, dtype, tied=first),
        *(LayerSpec(_build, LlamaLayer, config, tensor, plan, dtype) for _ in range(config.num_hidden_layers)),
        LayerSpec(_build, LlamaHead, config, tensor, plan, dtype, tied=last),
    ]


def to_huggingface(state: Mapping[str, Value]) -> dict[str, Value]:
    """Return what a model of `llama_specs` names its own way, as `full_state_dict` or `full_gradients` give it, under
    the names of `LlamaForCausalLM`. Raises UsageError for a name that is not of such a model.
    """
    renamed = {}
    for name, value in state.items():
        found = re.fullmatch(r"(\d+)\.((?:model|lm_head)\..+)", name)
        if found is None:
            raise UsageError(f"{name!r} is no name of a model of llama_specs, as '1.model.layers.0.mlp.up_proj.weight'")
        number, own = int(found[1]), found[2]
        renamed[re.sub(r"^model\.layers\.0\.", f"model.layers.{number - 1}.", own)] = value
    return renamed


def from_huggingface(state: Mapping[str, Value], config: Any) -> dict[str, Value]:
    """Return a state of `LlamaForCausalLM(config)` under the names of a model of `llama_specs(config, ...)`, for
    `load_full_state_dict`. A name of neither stays, so that loading refuses it.
    """
    renamed = {}
    for name, value in state.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is not None:
            renamed[f"{int(found[1]) + 1}.model.layers.0.{found[2]}"] = value
        elif name.startswith("model.embed_tokens."):
            renamed[f"0.{name}"] = value
        elif name.startswith(("model.norm.", "lm_head.")):
            renamed[f"{config.num_hidden_layers + 1}.{name}"] = value
        else:
            renamed[name] = value
    return renamed


class LlamaEmbedding(nn.Module):
    """Ids (B, S), and an attention_mask (B, S) or none, to hidden states (B, S, H), and the mask where there is one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = _transformers().LlamaModel(_smaller(config, layers=0)).embed_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.model.get_submodule("embed_tokens")(input_ids)
        return hidden if attention_mask is None else (hidden, attention_mask)


class LlamaLayer(nn.Module):
    """One decoder layer: hidden states, or they and the mask, to the same. A whole LlamaModel of one layer, without
    its table and last norm: it computes rotary positions and the causal mask from what it is given.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = _transformers().LlamaModel(_smaller(config, layers=1, vocabulary=1))
        del self.model.embed_tokens
        self.model.norm = nn.Identity()

    def forward(self, given: Any) -> Any:
        hidden, mask = given if isinstance(given, tuple) else (given, None)
        hidden = self.model(inputs_embeds=hidden, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden if mask is None else (hidden, mask)


class LlamaHead(nn.Module):
    """Hidden states, or they and the mask, through the last norm to logits (B, S, V) or a part of them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        whole = _transformers().LlamaForCausalLM(_smaller(config, layers=0, tied=True))  # one matrix is drawn, not two
        self.model = nn.Module()
        self.model.norm = whole.model.norm
        self.lm_head = whole.lm_head

    def forward(self, given: Any) -> Tensor:
        hidden = given[0] if isinstance(given, tuple) else given
        logits: Tensor = self.lm_head(self.model.get_submodule("norm")(hidden))
        return logits


def _build(
    kind: type[nn.Module], config: Any, tensor: Communicator, plan: Plan, dtype: torch.dtype | None
) -> nn.Module:
    """Draw one layer whole, and keep this rank's part."""
    layer = kind(config)
    if dtype is not None:
        for parameter in layer.parameters():  # buffers stay: rotary frequencies lose too much in half precision
            parameter.data = parameter.data.to(dtype)
    start = {LlamaEmbedding: "model.embed_tokens", LlamaLayer: "model.layers.", LlamaHead: "lm_head"}[kind]
    return parallelize(
        layer,
        tensor,
        Plan(
            {key: style for key, style in plan.styles.items() if key.startswith(start)},
            {key: changes for key, changes in plan.attributes.items() if key.startswith(start)},
        ),
    )


def _smaller(config: Any, *, layers: int, vocabulary: int | None = None, tied: bool = False) -> Any:
    """Return a copy for a model of a few layers, of which some parts are taken."""
    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers, smaller.tie_word_embeddings = layers, tied
    if vocabulary is not None:
        smaller.vocab_size, smaller.pad_token_id = vocabulary, None
    return smaller


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"Llama's layers are those of transformers, which cannot be imported ({error}): pip install 'engine3d[hf]'"
        ) from error
    return transformers
