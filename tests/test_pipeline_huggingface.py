"""Hugging Face's Llama cut into layers: training on pipeline and tensor axes equals transformers' own model in one
process, in float64 to 1e-10 relative, and its names and initial weights are those of that model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import Layout, PipelineModel, plan_mesh
from engine.huggingface import from_huggingface, llama_specs, to_huggingface
from engine.tensor_parallel import vocab_parallel_cross_entropy
from tests.test_huggingface import MASK, VOCABULARY, config_of, float32_lifted
from tests.test_parity import TOLERANCE, worst_error
from tests.world import World, refusals

DOUBLE = torch.float64
ADAMW = {"lr": 1e-2, "eps": 1e-3}
STEPS = 2


def config(tied: bool, attention: str = "sdpa", **changes: Any) -> Any:
    found = config_of("llama", attention)
    found.num_hidden_layers, found.tie_word_embeddings = 3, tied
    found.num_key_value_heads = 1 if attention == "eager" else 2  # of 8; one is held by both tensor ranks
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def plain_model(tied: bool, attention: str = "sdpa") -> Any:
    """Return transformers' model in float64, all of its parameters drawn, norms too."""
    import transformers

    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config(tied, attention)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=DOUBLE))
    return model


def batch(number: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(36).view(6, 6) ** 2 * 13 + 7 * number) % VOCABULARY
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = -100
    targets[0, :3] = -100
    return ids, targets


def padding(ids: Tensor) -> Tensor:
    """Return a mask that leaves one position of every other row out."""
    mask = torch.ones_like(ids)
    mask[::2, 1] = 0
    return mask


def next_token(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


@float32_lifted("llama")
def train(mesh: engine.Mesh, cases: list[Any]) -> list[dict[str, Any]]:
    results = []
    for tied, attention, logits, options in cases:
        plain = plain_model(tied, attention)
        model = PipelineModel(llama_specs(plain.config, mesh.tensor, logits=logits, dtype=DOUBLE), mesh, **options)
        optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, **ADAMW)
        state = from_huggingface(plain.state_dict(), plain.config)
        engine.load_full_state_dict(model, mesh, state, optimizer=optimizer)

        def split(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            losses = vocab_parallel_cross_entropy(output, target, mesh.tensor, vocabulary=VOCABULARY)
            return losses.sum(), (target != -100).sum()

        loss = split if logits == "split" else next_token
        step = engine.TrainStep(model, optimizer, loss, mesh, microbatches=3, schedule="1f1b", clip_grad_norm=1.0)
        result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
        finish = optimizer.finish_gradients

        def finish_and_look(*args: Any, finish: Any = finish, result: Any = result, optimizer: Any = optimizer) -> Any:
            norm = finish(*args)
            result["gradients"].append(to_huggingface(optimizer.full_gradients()))
            return norm

        optimizer.finish_gradients = finish_and_look
        for number in range(STEPS):
            ids, targets = batch(number)
            done = step({"input_ids": ids, "attention_mask": padding(ids)} if attention == "eager" else ids, targets)
            result["losses"].append(done.loss.item())
            result["norms"].append(done.grad_norm.item())
        result["weights"] = to_huggingface(engine.full_state_dict(model, mesh))
        result["held"] = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
        results.append(result)
    return results


def train_plainly(plain: Any, masked: bool) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for number in range(STEPS):
        optimizer.zero_grad()
        ids, targets = batch(number)
        logits = plain(ids, attention_mask=padding(ids) if masked else None).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        result["gradients"].append({name: p.grad.clone() for name, p in plain.named_parameters()})
        optimizer.step()
    result["weights"] = plain.state_dict()
    return result


CASES = [
    (False, "eager", "whole", {"balance": "uniform"}),
    (True, "sdpa", "whole", {"balance": [2, 3], "recompute": ["*.self_attn", "*.mlp"]}),
    (True, "sdpa", "split", {"balance": "compute", "recompute": "full"}),
]


@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(pipeline=2, tensor=2)], ids=str)
@float32_lifted("llama")
def test_training_equals_the_plain_model(world: World, layout: Layout) -> None:
    results = world.run(layout, train, CASES)
    for number, (tied, attention, _, _) in enumerate(CASES):
        wanted = train_plainly(plain_model(tied, attention), attention == "eager")
        for rank in results:
            got = rank[number]
            assert list(got["weights"]) == list(wanted["weights"])
            for part in ("losses", "norms", "gradients", "weights"):
                assert worst_error(got[part], wanted[part]) < TOLERANCE, part
            assert got["held"] < {1: 0.85, 2: 0.45}[layout.tensor], "each rank holds its layers' shards only"


def test_names_shapes_and_first_weights_are_those_of_transformers() -> None:
    import transformers

    for tied in (False, True):
        llama = config(tied, hidden_size=64, pad_token_id=0)
        plain = transformers.LlamaForCausalLM(llama)
        model = PipelineModel(llama_specs(llama, plan_mesh(Layout(), 0).tensor), plan_mesh(Layout(), 0, seed=3))
        state = to_huggingface(model.state_dict())
        wanted = plain.state_dict()
        assert {name: (v.shape, v.dtype) for name, v in state.items()} == {
            name: (v.shape, v.dtype) for name, v in wanted.items()
        }
        assert from_huggingface(state, llama).keys() == model.state_dict().keys()
        assert (state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()) == tied
        for name, value in state.items():
            if "norm" in name:
                assert torch.equal(value, torch.ones_like(value))
            else:
                assert value.std().item() == pytest.approx(llama.initializer_range, rel=0.1), name
        assert not state["model.embed_tokens.weight"][0].any()
        up = [state[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(3)]
        assert not torch.equal(up[0], up[1])
        plain.load_state_dict(state)
        ids = batch(0)[0]
        torch.testing.assert_close(model(ids), plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_weights_do_not_depend_on_the_layout() -> None:
    llama = config(True)
    whole = PipelineModel(llama_specs(llama, plan_mesh(Layout(), 0).tensor), plan_mesh(Layout(), 0, seed=3))
    layout = Layout(pipeline=2, tensor=2)
    for rank in range(4):
        mesh = plan_mesh(layout, rank, seed=3)
        model = PipelineModel(llama_specs(llama, mesh.tensor), mesh)
        placements = engine.placement.placements_of(model)
        for name, shard in model.named_parameters():
            full = whole.get_parameter(name).detach()
            assert torch.equal(shard, placements[name].shard(full, mesh.tensor.rank, 2)), name


@float32_lifted("llama")
def test_a_mask_goes_from_layer_to_layer() -> None:
    for attention in ("eager", "sdpa"):
        plain = plain_model(False, attention)
        mesh = plan_mesh(Layout(), 0)
        model = PipelineModel(llama_specs(plain.config, mesh.tensor, dtype=DOUBLE), mesh)
        model.load_state_dict(from_huggingface(plain.state_dict(), plain.config))
        ids = batch(0)[0][:2]
        assert MASK.shape == ids.shape
        torch.testing.assert_close(
            model(ids, attention_mask=MASK), plain(ids, attention_mask=MASK).logits, rtol=1e-12, atol=1e-12
        )
        assert not torch.equal(model(ids), model(ids, attention_mask=MASK))


def test_half_precision_keeps_the_rotary_frequencies() -> None:
    mesh = plan_mesh(Layout(), 0)
    model = PipelineModel(llama_specs(config(False), mesh.tensor, dtype=torch.bfloat16), mesh)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert model(batch(0)[0]).dtype == torch.bfloat16


def test_what_is_no_llama_is_refused() -> None:
    import transformers

    mesh = plan_mesh(Layout(tensor=3), 0)
    texts = refusals(
        [
            lambda: llama_specs(transformers.GPT2Config(), mesh.tensor),
            lambda: llama_specs(3, mesh.tensor),
            lambda: llama_specs(config(False), mesh),  # type: ignore[arg-type]
            lambda: llama_specs(config(False), mesh.tensor, logits="none"),  # type: ignore[arg-type]
            lambda: PipelineModel(llama_specs(config(False), mesh.tensor), mesh),
            lambda: to_huggingface({"0.weight": 1}),
        ]
    )
    expected = [
        "llama_specs cuts a model of a LlamaConfig into layers, and was given model_type='gpt2'",
        "and was given a int",
        "tensor is a Mesh: give mesh.tensor",
        "logits='none': choose 'whole' or 'split'",
        "8 heads do not divide over 3 ranks",
        "'0.weight' is no name of a model of llama_specs",
    ]
    for text, part in zip(texts, expected, strict=True):
        assert part in text
    assert from_huggingface({"model.layers.2.x": 1, "strange": 2}, config(False)) == {
        "3.model.layers.0.x": 1,
        "strange": 2,
    }


def test_transformers_is_not_imported_with_the_module() -> None:
    assert "transformers" not in vars(engine.huggingface)
