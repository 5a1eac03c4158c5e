"""Hugging Face models with random weights, cut over the tensor axis, against the same models in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout
from engine.tensor_parallel import (
    Column,
    Plan,
    describe,
    huggingface_plan,
    parallelize,
    vocab_parallel_cross_entropy,
)
from tests.world import World, refusals

Mesh = engine.Mesh
VOCABULARY = 67  # divides by neither 2 nor 4
KINDS = {
    "llama": {"kv": 2},
    "llama, one key head": {"kv": 1},
    "llama, biases, tied": {"kv": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {"kv": 2, "tie_word_embeddings": True},
    "qwen3": {"kv": 4},
    "qwen3, 2 key heads": {"kv": 2},
    "qwen3, one key head": {"kv": 1},
    "mistral": {"kv": 4, "sliding_window": 3},
    "gpt2": {},
    "bert": {},
}


def config_of(kind: str, attention: str, **more: Any) -> Any:
    import transformers

    options = dict(KINDS[kind])
    name = kind.split(",")[0]
    common = {"vocab_size": VOCABULARY, "attn_implementation": attention, "bos_token_id": 1, "eos_token_id": 2}
    common |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if name == "gpt2" else {}
    common |= more
    if name == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **common)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 16}
    if name == "bert":
        return transformers.BertConfig(num_attention_heads=4, pad_token_id=0, **sizes, **common)
    made = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }[name]
    kv = options.pop("kv")
    return made(num_attention_heads=8, num_key_value_heads=kv, head_dim=4, **sizes, **common, **options)


class Double:
    """torch, of which float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@contextmanager
def float32_lifted(kind: str) -> Iterator[None]:
    """Run the block with float64 where the model's code takes float32 whatever its dtype: in norms and the eager
    softmax of Llama, Qwen and Mistral.
    """
    module: Any = sys.modules[model_class(kind).__module__]
    module.torch = Double()
    try:
        yield
    finally:
        module.torch = torch


def model_class(kind: str, head: str = "") -> Any:
    import transformers

    heads = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}
    name = kind.split(",")[0]
    return getattr(transformers, head or heads.get(name, f"{name.capitalize()}ForCausalLM"))


def build(
    kind: str, attention: str = "sdpa", head: str = "", device: str = "cpu", config: dict[str, Any] | None = None
) -> nn.Module:
    """Return a model in float64, all of its parameters drawn, norms and biases too. config: other options of it."""
    torch.manual_seed(7)
    with torch.device(device):
        model = model_class(kind, head)(config_of(kind, attention, **config or {})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.add_(0.2 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def wave(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.7).view(shape)


IDS = torch.tensor([[3, 66, 33, 34, 17, 0], [5, 16, 50, 51, 2, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def compare(mesh: Mesh, kind: str) -> dict[str, Any]:
    errors: dict[str, Any] = {"logits": 0.0, "gradients": 0.0, "norm": 0.0, "sizes": []}
    for attention in ("eager", "sdpa"):
        compare_one(mesh, kind, attention, errors)
    return errors


def compare_one(mesh: Mesh, kind: str, attention: str, errors: dict[str, Any]) -> None:
    plain = build(kind, attention)
    expected = plain(IDS, attention_mask=MASK).logits
    (expected * wave(*expected.shape)).sum().backward()
    model = build(kind, attention)
    assert parallelize(model, mesh.tensor, huggingface_plan(model)) is model
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.0)
    logits = model(IDS, attention_mask=MASK).logits
    assert logits.shape == expected.shape
    (logits * wave(*logits.shape)).sum().backward()
    norm = optimizer.finish_gradients(1.0)
    gradients = optimizer.full_gradients()
    errors["logits"] = max(errors["logits"], (logits - expected).abs().max().item())
    named = dict(plain.named_parameters())
    assert list(gradients) == list(named), "a tied parameter is one"
    for name, parameter in named.items():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = max(1.0, float(wanted.abs().max()))
        errors["gradients"] = max(errors["gradients"], float((gradients[name] - wanted).abs().max()) / scale)
    plain_norm = torch.stack([p.grad.norm() for p in named.values() if p.grad is not None]).norm()
    errors["norm"] = max(errors["norm"], float((norm - plain_norm).abs() / norm))
    errors["sizes"].append(sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in named.values()))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_all_gradients_are_those_of_the_plain_model(world: World, kind: str, n: int) -> None:
    """Float32 in the models' own code does no harm: both models round the same numbers alike."""
    results = world.run(Layout(tensor=n), compare, kind)
    logits, gradients = (max(each[what] for each in results) for what in ("logits", "gradients"))
    sys.stdout.write(f"| {kind} | {n} | {logits:.1e} | {gradients:.1e} |\n")  # rows of a table, with pytest -s
    for each in results:
        assert each["logits"] < 1e-10
        assert each["gradients"] < 1e-10
        assert each["norm"] < 1e-10
        assert max(each["sizes"]) < {2: 0.62, 4: 0.45}[n], "each rank holds its shard only"


def states(mesh: Mesh, kind: str) -> dict[str, Any]:
    plain = build(kind)
    model = parallelize(build(kind), mesh.tensor, huggingface_plan(plain))
    state = engine.full_state_dict(model, mesh)
    wanted = plain.state_dict()
    fresh = build(kind)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(0.0)
    fresh.load_state_dict(state, strict=True)
    again = parallelize(build(kind), mesh.tensor, huggingface_plan(plain.config))
    engine.load_full_state_dict(again, mesh, {name: 2 * value for name, value in wanted.items()})
    doubled = engine.full_state_dict(again, mesh)
    return {
        "names": list(state) == list(wanted),
        "values": all(torch.equal(state[name], wanted[name]) for name in wanted),
        "logits": torch.equal(fresh(IDS).logits, plain(IDS).logits),
        "doubled": all(torch.equal(doubled[name], 2 * wanted[name]) for name in wanted),
    }


@pytest.mark.parametrize("kind", ["llama, one key head", "qwen2", "gpt2", "bert"])
def test_the_full_state_has_the_models_own_names_shapes_and_values(world: World, kind: str) -> None:
    for got in world.run(Layout(tensor=4), states, kind):
        assert got == dict.fromkeys(got, True)


def other_heads(mesh: Mesh) -> dict[str, float]:
    errors = {}
    for kind, head in (
        ("llama", "LlamaModel"),
        ("bert", "BertModel"),
        ("gpt2", "GPT2Model"),
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForPreTraining"),
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaForQuestionAnswering"),  # whose base is named transformer
        ("qwen2", "Qwen2ForQuestionAnswering"),
        ("qwen3", "Qwen3ForQuestionAnswering"),
        ("mistral", "MistralForQuestionAnswering"),
        ("gpt2", "GPT2ForQuestionAnswering"),
    ):
        plain, model = build(kind, head=head), build(kind, head=head)
        plain.config.pad_token_id = model.config.pad_token_id = 0
        parallelize(model, mesh.tensor, huggingface_plan(model))
        for name, expected in plain(IDS).items():
            got = model(IDS)[name]
            if isinstance(expected, Tensor):
                errors[f"{head} {name}"] = float((got - expected).detach().abs().max())
    return errors


def test_models_with_other_heads_and_without(world: World) -> None:
    for errors in world.run(Layout(tensor=2), other_heads):
        assert {
            "LlamaModel last_hidden_state",
            "BertModel pooler_output",
            "BertForPreTraining prediction_logits",
            "LlamaForQuestionAnswering start_logits",
            "Qwen2ForQuestionAnswering end_logits",
        } <= set(errors)
        assert max(errors.values()) < 1e-9


def generate(mesh: Mesh, kind: str) -> Tensor:
    model = build(kind)
    parallelize(model, mesh.tensor, huggingface_plan(model))
    return model.generate(IDS[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("kind", ["llama, one key head", "gpt2"])
def test_generation_with_its_cache_gives_the_same_words(world: World, kind: str) -> None:
    expected = build(kind).generate(IDS[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert expected.shape[1] > 5
    for got in world.run(Layout(tensor=4), generate, kind):
        assert torch.equal(got, expected)


def split_logits(mesh: Mesh) -> tuple[Any, ...]:
    model = build("llama")
    parallelize(model, mesh.tensor, huggingface_plan(model, logits="split"))
    logits = model(IDS).logits
    loss = vocab_parallel_cross_entropy(logits, IDS, mesh.tensor, vocabulary=VOCABULARY)
    loss.sum().backward()
    return tuple(logits.shape), loss.detach(), model.model.norm.weight.grad


@pytest.mark.parametrize("n", [2, 4])
def test_logits_can_stay_split_for_the_loss(world: World, n: int) -> None:
    plain = build("llama")
    loss = F.cross_entropy(plain(IDS).logits.flatten(0, 1), IDS.flatten(), reduction="none").view(IDS.shape)
    loss.sum().backward()
    for shape, got, gradient in world.run(Layout(tensor=n), split_logits):
        assert shape == (2, 6, -(-VOCABULARY // n))
        torch.testing.assert_close(got, loss.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient, plain.model.norm.weight.grad, rtol=1e-9, atol=1e-9)


def next_token(output: Any, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


ADAMW = {"lr": 1e-2, "eps": 1e-3}


def batch(number: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(48).view(8, 6) * 13 + 7 * number) % VOCABULARY
    return ids, ids.roll(-1, dims=1)


def train(mesh: Mesh, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    with float32_lifted(kind):
        return train_lifted(mesh, kind)


def train_lifted(mesh: Mesh, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(kind)
    parallelize(model, mesh.tensor, huggingface_plan(model))
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **ADAMW)
    step = engine.TrainStep(model, optimizer, next_token, mesh, microbatches=2, clip_grad_norm=1.0)
    norms = []
    for number in range(3):
        ids, target = (each.chunk(mesh.data.size)[mesh.data.rank] for each in batch(number))
        norms.append(step({"input_ids": ids}, target).grad_norm.item())
    return norms, engine.full_state_dict(model, mesh)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_training_follows_plain_training_beside_data_parallelism(world: World, kind: str) -> None:
    """With float32 lifted: TrainStep divides by the number of tokens after backward, plain PyTorch before it, and
    rounding to float32 in between is not the same.
    """
    plain = build(kind)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    norms = []
    with float32_lifted(kind):
        for number in range(3):
            optimizer.zero_grad()
            ids, target = batch(number)
            F.cross_entropy(plain(ids).logits.flatten(0, 1), target.flatten()).backward()
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
            optimizer.step()
    # A key's bias moves all scores of a row alike: its exact gradient is 0, and what is there is rounding.
    for got, state in world.run(Layout(data=2, tensor=2), train, kind):
        assert got == pytest.approx(norms, rel=1e-9)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_a_plan_is_made_from_a_configuration_or_a_model_and_checked_without_weights() -> None:
    for kind in KINDS:
        model = build(kind, device="meta")
        assert huggingface_plan(model) == huggingface_plan(model.config)
        for size in (1, 2, 4):
            assert describe(huggingface_plan(model), model, size)
    shared = "8 in 2 heads, each on 2 ranks, gradients summed"
    lines = describe(huggingface_plan(build("llama", device="meta")), build("llama", device="meta"), 4).splitlines()
    assert [line.split() for line in lines if "k_proj" in line or "groups" in line] == [
        ("model.layers.[0-1].self_attn.k_proj.weight 8 x 32 4 x 32 dim 0 cut: " + shared).split(),
        ["model.layers.[0-1].self_attn.num_key_value_groups", "4", "2"],
    ]


def test_what_has_no_plan_or_does_not_divide_is_refused() -> None:
    import transformers

    llama, bert = build("llama", device="meta"), build("bert", device="meta")
    texts = refusals(
        [
            lambda: huggingface_plan(transformers.T5Config()),
            lambda: huggingface_plan(nn.Linear(2, 2)),
            lambda: huggingface_plan(llama, logits="none"),  # type: ignore[arg-type]
            lambda: describe(huggingface_plan(llama), llama, 3),
            lambda: describe(huggingface_plan(bert), bert, 8),
            lambda: describe(Plan({**huggingface_plan(llama).styles, "lm_haed": Column()}), llama, 2),
        ]
    )
    for text, parts in zip(
        texts,
        [
            ("no plan for model_type='t5'", "bert, gpt2, llama, mistral, qwen2, qwen3"),
            ("a Linear has no model_type", "engine3d[hf]"),
            ("logits='none': choose 'whole' or 'split'",),
            ("'model.layers.0.self_attn.q_proj' (plan key", "8 heads do not divide over 3 ranks"),
            ("attention.output.dense' (plan key", "parts that divide by 8"),
            ("plan key 'lm_haed' matches none of the modules (did you mean 'lm_head'?)",),
        ],
        strict=True,
    ):
        for part in parts:
            assert part in text
