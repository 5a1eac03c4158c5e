"""Plans of Hugging Face models: Llama, Qwen2, Qwen3, Mistral, GPT-2 and BERT, from what their configuration says.

transformers itself is not imported: whoever has such a model has it. Names are those of the models' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from engine.errors import UsageError, did_you_mean
from engine.placement import Part
from engine.tensor_parallel.resolve import matches
from engine.tensor_parallel.styles import Column, Divided, Plan, Replicated, Row, Sharded, Style, Vocab

Attributes = dict[str, Mapping[str, Divided]]


def huggingface_plan(model_or_config: Any, *, logits: Literal["whole", "split"] = "whole") -> Plan:
    """Return the plan of a Hugging Face model, chosen by its `config.model_type`.

    model_or_config: the model, with any head, also on the meta device; or a configuration, for the plan of the language
    model (`LlamaForCausalLM`, `BertForMaskedLM`). logits: `whole`, each rank gets all of them, as before; `split`, each
    its part of the vocabulary, (..., ceil(vocab_size / T)), for `vocab_parallel_cross_entropy`.

    The vocabulary is filled up where it does not divide; key and value heads that are fewer than ranks are shared. The
    number of attention heads and the inner size of the MLP must divide by the tensor size. Dropout in the model's
    own code takes torch's generator, which must be equal on all ranks, as TrainStep makes it: whole activations then
    lose the same elements everywhere, and so do attention weights, head by head of each rank. For masks that differ by
    head and do not depend on the layout, see `huggingface_dropouts`.

    Raises UsageError for a type without a plan.
    """
    config = getattr(model_or_config, "config", model_or_config)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise UsageError(
            f"huggingface_plan: a {type(model_or_config).__name__} has no model_type: give a Hugging Face model or its "
            f"configuration (pip install 'engine3d[hf]')"
        )
    if kind not in _PLANS:
        raise UsageError(
            f"huggingface_plan: no plan for model_type={kind!r}{did_you_mean(str(kind), _PLANS)}: there are plans for "
            f"{', '.join(sorted(_PLANS))}; write one as Plan({{'layers.*.up': Column(), ...}})"
        )
    if logits not in ("whole", "split"):
        raise UsageError(f"huggingface_plan: logits={logits!r}: choose 'whole' or 'split'")
    base, make = _PLANS[kind]
    model = model_or_config if isinstance(model_or_config, nn.Module) else None
    prefix = f"{base}." if model is None else _prefix(model, base)
    vocabulary = (Part(config.vocab_size, padded=True),)
    styles, attributes = make(config, prefix, Column(parts=vocabulary, gather_output=logits == "whole"))
    if model is None:  # the language models have no pooler
        return Plan({key: style for key, style in styles.items() if "pooler" not in key}, attributes)
    # Heads, poolers and biases are there or not; a key of the blocks that is missing is a model that is not known.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return Plan({k: s for k, s in styles.items() if "*" in k or any(matches(k, n) for n in names)}, attributes)


def _prefix(model: nn.Module, base: str) -> str:
    """Return what stands before the names of the base model in one with a head, which may call it its own way."""
    names = (getattr(model, "base_model_prefix", base), base)
    return next((f"{name}." for name in names if name and isinstance(getattr(model, name, None), nn.Module)), "")


def _llama(config: Any, prefix: str, head: Column) -> tuple[dict[str, Style], Attributes]:
    """Llama, Mistral and Qwen2: rotary attention with fewer key heads, gated MLP."""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries, shared = Part(heads * width, heads=heads), Part(keys * width, heads=keys)
    layer = f"{prefix}layers.*"
    styles: dict[str, Style] = {
        f"{prefix}embed_tokens": Vocab(),
        f"{layer}.self_attn.q_proj": Column(parts=(queries,)),
        f"{layer}.self_attn.k_proj": Column(parts=(shared,)),
        f"{layer}.self_attn.v_proj": Column(parts=(shared,)),
        f"{layer}.self_attn.o_proj": Row(parts=(queries,)),
        f"{layer}.mlp.gate_proj": Column(),
        f"{layer}.mlp.up_proj": Column(),
        f"{layer}.mlp.down_proj": Row(),
        "lm_head": head,
    }
    return styles, {f"{layer}.self_attn": {"num_key_value_groups": Divided(heads=keys)}}


def _qwen3(config: Any, prefix: str, head: Column) -> tuple[dict[str, Style], Attributes]:
    """As Llama, with a norm that every head goes through, in float32."""
    styles, attributes = _llama(config, prefix, head)
    attention, keys = f"{prefix}layers.*.self_attn", config.num_key_value_heads
    styles[f"{attention}.q_norm"] = Replicated(gradient="sum")
    styles[f"{attention}.k_norm"] = Replicated(gradient="sum", heads=keys)
    return styles, attributes


def _gpt2(config: Any, prefix: str, head: Column) -> tuple[dict[str, Style], Attributes]:
    if getattr(config, "add_cross_attention", False):
        raise UsageError("huggingface_plan: GPT-2 with cross-attention has no plan: set add_cross_attention=False")
    layer, part = f"{prefix}h.*", Part(config.n_embd, heads=config.n_head)
    styles: dict[str, Style] = {
        f"{prefix}wte": Vocab(),
        f"{layer}.attn.c_attn": Column(parts=(part, part, part)),
        f"{layer}.attn.c_proj": Row(parts=(part,)),
        f"{layer}.mlp.c_fc": Column(),
        f"{layer}.mlp.c_proj": Row(),
        "lm_head": head,
    }
    return styles, {f"{layer}.attn": {name: Divided() for name in ("split_size", "num_heads")}}


def _bert(config: Any, prefix: str, head: Column) -> tuple[dict[str, Style], Attributes]:
    layer, part = f"{prefix}encoder.layer.*", Part(config.hidden_size, heads=config.num_attention_heads)
    styles: dict[str, Style] = {
        f"{prefix}embeddings.word_embeddings": Vocab(),
        f"{layer}.attention.self.query": Column(parts=(part,)),
        f"{layer}.attention.self.key": Column(parts=(part,)),
        f"{layer}.attention.self.value": Column(parts=(part,)),
        f"{layer}.attention.output.dense": Row(parts=(part,)),
        f"{layer}.intermediate.dense": Column(),
        f"{layer}.output.dense": Row(),
        f"{prefix}pooler.dense": Column(gather_output=True),
        "cls.predictions.transform.dense": Column(gather_output=True),
        "cls.predictions.decoder": head,
        "cls.predictions.bias": Sharded(parts=head.parts),
    }
    return styles, {f"{layer}.attention.self": {n: Divided() for n in ("num_attention_heads", "all_head_size")}}


_Make = Callable[[Any, str, Column], tuple[dict[str, Style], Attributes]]

_PLANS: Mapping[str, tuple[str, _Make]] = {
    "bert": ("bert", _bert),
    "gpt2": ("transformer", _gpt2),
    "llama": ("model", _llama),
    "mistral": ("model", _llama),
    "qwen2": ("model", _llama),
    "qwen3": ("model", _qwen3),
}
"""From a model type to the name of the base model inside one with a head, and the maker of its plan."""
