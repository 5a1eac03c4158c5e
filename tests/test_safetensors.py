"""safetensors: what is read and written is what Hugging Face's own code reads and writes, and never the whole model."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import engine
from engine import Layout
from engine.checkpoint import load_safetensors, save_safetensors
from engine.checkpoint.safetensors_format import divide_into_files
from engine.checkpoint.safetensors_load import slices_of
from engine.placement import Part, Placement, cut
from engine.tensor_parallel import Column, Plan, Sharded, huggingface_plan, parallelize
from examples.gpt.model import GPTConfig, gpt_layers
from tests.plain_gpt import plain_gpt
from tests.test_huggingface import IDS, build
from tests.world import World

Mesh = engine.Mesh
INDEX = "model.safetensors.index.json"
SLACK = 8192
"""Bytes, a quarter of the smallest shard measured, for flags and what checks compare."""


def reference(kind: str) -> nn.Module:
    """A model whose weights are not those that `build` draws."""
    model = build(kind)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.sin(torch.arange(parameter.numel()).double() + number).view(parameter.shape))
    return model


# ---- Hugging Face's files --------------------------------------------------------------------------------------------


def load_theirs(mesh: Mesh, kind: str, folder: str) -> dict[str, Any]:
    model = build(kind)
    parallelize(model, mesh.tensor, huggingface_plan(model))
    load_safetensors(model, mesh, folder)
    with torch.device("meta"):
        empty = build(kind, device="meta")
    for name, module in list(empty.named_modules()):
        if "rotary" in name or name.endswith("embeddings"):  # what no file holds is made anew
            for own, _ in list(module.named_buffers(recurse=False)):
                module._buffers[own] = build(kind).get_submodule(name)._buffers[own]
    parallelize(empty, mesh.tensor, huggingface_plan(empty))
    load_safetensors(empty, mesh, folder)
    return {
        "state": engine.full_state_dict(model, mesh),
        "logits": model(IDS).logits.detach(),
        "from meta": empty(IDS).logits.detach(),
        "one": len(list(model.parameters())) == len(list(empty.parameters())),
    }


@pytest.mark.parametrize(("kind", "n"), [("llama, one key head", 4), ("qwen2", 2), ("gpt2", 4), ("bert", 2)])
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_what_hugging_face_wrote_is_read(world: World, tmp_path: Path, kind: str, n: int, size: str) -> None:
    plain = reference(kind)
    plain.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).exists() == (size == "20KB")
    expected = plain(IDS).logits
    for got in world.run(Layout(tensor=n), load_theirs, kind, str(tmp_path)):
        assert all(torch.equal(got["state"][name], value) for name, value in plain.state_dict().items())
        torch.testing.assert_close(got["logits"], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got["from meta"], expected, rtol=1e-9, atol=1e-9)
        assert got["one"]


def save_ours(mesh: Mesh, kind: str, folder: str, limit: int) -> None:
    model = reference(kind)
    parallelize(model, mesh.tensor, huggingface_plan(model))
    save_safetensors(model, mesh, folder, max_shard_bytes=limit)


@pytest.mark.parametrize(("kind", "n"), [("llama, one key head", 4), ("qwen2", 2), ("gpt2", 4), ("bert", 2)])
@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_hugging_face_reads_what_was_written(world: World, tmp_path: Path, kind: str, n: int, limit: int) -> None:
    plain = reference(kind)
    plain.config.save_pretrained(tmp_path)
    world.run(Layout(tensor=n), save_ours, kind, str(tmp_path), limit)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa").eval()
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    torch.testing.assert_close(loaded(IDS).logits, plain(IDS).logits, rtol=1e-12, atol=1e-12)
    files = sorted(path.name for path in tmp_path.iterdir())
    if limit == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        assert files == ["config.json", *sorted(set(places.values())), INDEX]
        assert len(files) > 4
        assert list(places) == [name for name, _ in plain.named_parameters()]
        for name in set(places.values()):
            held = safetensors.torch.load_file(tmp_path / name)
            assert sum(each.nbytes for each in held.values()) <= limit or len(held) == 1


# ---- stages, dtypes, buffers -----------------------------------------------------------------------------------------


SIZES = {"layers": 3, "hidden": 8, "heads": 4, "sequence": 5, "vocabulary": 16}


def through_stages(mesh: Mesh, folder: str, more: str) -> dict[str, Tensor]:
    def make() -> engine.PipelineModel:
        return engine.PipelineModel(gpt_layers(GPTConfig(**SIZES, tied=True), mesh.tensor), mesh)

    model = make()
    load_safetensors(model, mesh, folder)
    save_safetensors(model, mesh, more, max_shard_bytes=600)
    again = make()
    optimizer = engine.zero.ZeroOptimizer(again, torch.optim.SGD, mesh, lr=0.1)
    load_safetensors(again, mesh, more, optimizer=optimizer)
    return engine.full_state_dict(again, mesh)


@pytest.mark.parametrize("layout", [Layout(pipeline=2, tensor=2), Layout(data=2, pipeline=2), Layout()], ids=str)
def test_stages_and_replicas_read_and_write_one_model(world: World, tmp_path: Path, layout: Layout) -> None:
    torch.manual_seed(9)
    state = plain_gpt(**SIZES, tied=True).state_dict()
    del state["7.project.weight"]
    safetensors.torch.save_file(state, tmp_path / "any name.safetensors")
    for got in world.run(layout, through_stages, str(tmp_path / "any name.safetensors"), str(tmp_path / "a" / "b")):
        assert all(torch.equal(got[name], value) for name, value in state.items())
        assert torch.equal(got["7.project.weight"], got["0.token.weight"])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("count", torch.tensor([7, 8]))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.b = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.cut = nn.Linear(3, 8)


def mixed(mesh: Mesh, folder: str) -> dict[str, Tensor]:
    model = parallelize(Mixed(), mesh.tensor, Plan({"cut": Column(parts=(2, Part(4, heads=1), 2))}))
    save_safetensors(model, mesh, folder)
    again, padded = Mixed().to(torch.float16), (Part(3, padded=True),)
    again.count.zero_()
    parallelize(
        again,
        mesh.tensor,
        Plan({"cut": Column(parts=(Part(8, padded=True),), gather_output=True), "a": Sharded(dim=1, parts=padded)}),
    )
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(9.0)
    load_safetensors(again, mesh, folder)
    return engine.full_state_dict(again, mesh)


def test_every_dtype_and_shape_and_floating_values_are_converted(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)  # as the ranks
    model = Mixed()
    for got in world.run(Layout(tensor=2), mixed, str(tmp_path)):
        assert list(got) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(got[name], value.to(got[name].dtype)), name
        assert got["a"].dtype == torch.float16
        assert got["count"].dtype == torch.int64
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())


def test_files_are_filled_in_order_and_the_widest_come_first() -> None:
    entries = [("a", (3,), torch.int8), ("b", (2,), torch.float64), ("c", (100,), torch.int8), ("d", (), torch.int8)]
    names = [[name for name, _, _ in file] for file in divide_into_files(entries, 20)]
    assert names == [["b", "a"], ["c"], ["d"]]
    assert divide_into_files([], 20) == [[]]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_slices_and_their_padding_make_up_the_shard(dim: int, size: int) -> None:
    parts = (Part(16), Part(7, padded=True), Part(4, heads=2), Part(3, padded=True), Part(8, heads=8))
    whole = (torch.arange(38) + 1).view(38, 1).movedim(0, dim)
    for placement in (cut(dim, parts, size), cut(dim, [Part(38, padded=True)], size)):
        for rank in range(size):
            pieces = []
            for start, stop, padding in slices_of(placement, tuple(whole.shape), rank, size):
                pieces += [whole.narrow(dim, start, stop - start), torch.zeros_like(whole.narrow(dim, 0, padding))]
            assert torch.equal(torch.cat(pieces, dim), placement.shard(whole, rank, size))
    assert slices_of(Placement(0), (8, 1), 1, 2) == [(4, 8, 0)]


# ---- never the whole model -------------------------------------------------------------------------------------------


def in_a_file(x: Tensor) -> bool:
    """Whether a tensor lies in a mapped safetensors file, of which only what is read takes memory."""
    here = x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= here < last:
            return line.endswith(".safetensors")
    return False


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations gave or took and that are still alive, at their largest; and the bytes that
    were copied out of files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[Tensor]] = {}
        self.peak = self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten((result, args))[0]:
            if not isinstance(each, Tensor) or each.is_meta:
                continue
            if not in_a_file(each):
                self.alive[id(each)] = weakref.ref(each)
                continue
            self.alive.pop(id(each), None)  # an empty tensor that was put there
            if func in (torch.ops.aten.copy_.default, torch.ops.aten.cat.default):
                self.read += each.nbytes
        storages = {}
        for key, reference in list(self.alive.items()):
            tensor = reference()
            if tensor is None:
                del self.alive[key]
            else:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(storages.values()))
        return result


def wide() -> nn.Module:
    """8 matrices of 128 KiB, 1 MiB in all."""
    return nn.Sequential(*(nn.Linear(128, 128, bias=False, dtype=torch.float64) for _ in range(8)))


def measured(mesh: Mesh, folder: str) -> dict[str, Any]:
    model = parallelize(wide(), mesh.tensor, Plan({"*": Column()}))
    with Live() as saving:
        save_safetensors(model, mesh, folder, max_shard_bytes=300_000)
    before = engine.full_state_dict(model, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with Live() as loading:
        load_safetensors(model, mesh, folder)
    after = engine.full_state_dict(model, mesh)
    own = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "own": own,
        "saving": saving.peak,
        "loading": loading.peak,
        "read": loading.read,
        "equal": all(torch.equal(after[name], value) for name, value in before.items()),
    }


def test_no_rank_holds_more_than_its_shards_and_one_tensor(world: World, tmp_path: Path) -> None:
    largest = 128 * 128 * 8
    # Without the other transport's memory for what is under way, which would count too.
    for rank, got in enumerate(world.run(Layout(tensor=4), measured, str(tmp_path), transport="torch")):
        assert got["equal"]
        assert got["own"] == 2 * largest, "a quarter of 8"
        # The writer joins one tensor out of the shards of all ranks.
        assert got["saving"] - got["own"] <= (2 * largest + SLACK if rank == 0 else SLACK)
        assert got["loading"] - got["own"] <= largest // 4 + SLACK
        assert got["loading"] >= got["own"], "what is measured is there"
        assert got["read"] == got["own"], "of the files, each rank's slices"
