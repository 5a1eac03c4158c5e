"""safetensors: what is refused, on every rank and with nothing changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

import engine
from engine import Layout
from engine.checkpoint import load_safetensors, save_safetensors
from engine.tensor_parallel import Column, Plan, huggingface_plan, parallelize
from tests.test_huggingface import build
from tests.test_safetensors import INDEX, wide
from tests.world import World, refusals

Mesh = engine.Mesh


def spoil_names(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = safetensors.torch.load_file(folder / "model.safetensors")
    change(held)
    safetensors.torch.save_file(held, folder / "model.safetensors")


def refuse(mesh: Mesh, folders: list[str], good: str) -> tuple[list[str], bool]:
    model = build("qwen2")
    parallelize(model, mesh.tensor, huggingface_plan(model))
    before = engine.full_state_dict(model, mesh)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    lost = parallelize(build("qwen2", device="meta"), mesh.tensor, huggingface_plan(model.config))
    calls = [lambda folder=folder: load_safetensors(model, mesh, folder, optimizer=optimizer) for folder in folders]
    calls += [
        lambda: load_safetensors(model, mesh, good if mesh.rank else folders[0]),
        lambda: load_safetensors(lost, mesh, good),
        lambda: load_safetensors(mesh, model, good),  # type: ignore[arg-type]
        lambda: load_safetensors(model, mesh, good, optimizer=torch.optim.SGD([nn.Parameter()])),  # type: ignore[arg-type]
        lambda: save_safetensors(model, mesh, good, max_shard_bytes=0),
        lambda: save_safetensors(lost, mesh, good),
        lambda: save_safetensors(model, mesh, good + "/model.safetensors/below"),
    ]
    texts = refusals(calls)
    after = engine.full_state_dict(model, mesh)
    return texts, all(torch.equal(after[name], value) for name, value in before.items())


def test_files_that_do_not_fit_are_refused_on_every_rank_and_change_nothing(world: World, tmp_path: Path) -> None:
    plain = build("qwen2")
    norm, table = "model.norm.weight", "model.embed_tokens.weight"

    def spoil(held: dict[str, Tensor], number: int) -> None:
        if number == 0:
            held["model.nrom.weight"] = held.pop(norm)
        elif number == 1:
            held[norm] = held[norm][:5].clone()
        elif number == 2:
            held[norm] = held[norm].long()
        elif number == 3:
            held["lm_head.weight"] = held[table] + 1

    folders = [tmp_path / str(number) for number in range(9)]
    for number, folder in enumerate(folders):
        plain.save_pretrained(folder, max_shard_size="20KB" if number in (7, 8) else "5GB")
        if number < 4:
            spoil_names(folder, lambda held, number=number: spoil(held, number))
    whole = (folders[4] / "model.safetensors").read_bytes()
    (folders[4] / "model.safetensors").write_bytes(whole[:-8])
    (folders[5] / "model.safetensors").write_bytes(b"\xff" * 64)
    (folders[6] / "model.safetensors").rename(folders[6] / "other.safetensors")
    (folders[7] / INDEX).write_text("[]")
    index = json.loads((folders[8] / INDEX).read_text())
    del index["weight_map"][norm]
    (folders[8] / INDEX).write_text(json.dumps(index))
    good = tmp_path / "good"
    plain.save_pretrained(good)
    expected = [
        "missing: model.norm.weight; unexpected: model.nrom.weight (did you mean 'model.norm.weight'?)",
        "wrong shape: model.norm.weight is (5,), the model has (32,)",
        "wrong dtype: model.norm.weight is torch.int64, the model has torch.float64",
        "torn ties: lm_head.weight differs from model.embed_tokens.weight",
        "model.safetensors is cut off: its header promises",
        "is no safetensors file: its first 8 bytes give a header of",
        "has neither model.safetensors nor model.safetensors.index.json: there is config.json",
        "is damaged",
        f"disagree about {norm}",
        "nothing was loaded: ",
        "a buffer on the meta device that is no part of the state",
        "model is a Mesh: the order is load_safetensors(model, mesh, path",
        "optimizer= is a SGD",
        "max_shard_bytes=0",
        "the model is on the meta device and has no values",
        "nothing was written: ",
    ]
    for texts, unchanged in world.run(Layout(tensor=2), refuse, [str(each) for each in folders], str(good)):
        for text, part in zip(texts, expected, strict=True):
            assert part in text
        assert unchanged
    assert sorted(path.name for path in good.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def fail_late(mesh: Mesh, folder: str) -> list[str]:
    """A directory where a part is to be opened makes the writer fail half way."""
    model = parallelize(wide(), mesh.tensor, Plan({"*": Column()}))
    texts = refusals([lambda: save_safetensors(model, mesh, folder, max_shard_bytes=300_000)])
    return [*texts, str(mesh.tensor.any(mesh.rank == 1))]


def test_old_files_stay_where_writing_fails_and_go_where_it_does_not(world: World, tmp_path: Path) -> None:
    old = b"old weights"
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes(old)
    (tmp_path / "notes.safetensors").write_bytes(old)
    in_the_way = tmp_path / "model-00002-of-00004.safetensors.partial"
    in_the_way.mkdir()
    for rank, (text, afterwards) in enumerate(world.run(Layout(tensor=2), fail_late, str(tmp_path))):
        assert "the weights were not written: " in text
        assert ("partial" if rank == 0 else "rank 0 cannot write") in text
        assert afterwards == "True"
    assert (tmp_path / "model.safetensors").read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 4, "the old, and what was in the way"
    in_the_way.rmdir()
    world.run(Layout(tensor=2), fail_late, str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)), INDEX, "notes.safetensors"]


def test_the_engine_imports_without_the_extra_and_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['safetensors'] = sys.modules['transformers'] = None\n"
        "import engine, torch, engine.tensor_parallel\n"
        "mesh = engine.init(engine.Layout())\n"
        "engine.checkpoint.load_safetensors(torch.nn.Linear(2, 2), mesh, '.')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UsageError: load_safetensors needs the safetensors package: pip install 'engine3d[hf]'" in result.stderr
