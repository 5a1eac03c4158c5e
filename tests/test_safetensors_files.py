"""safetensors: a save that is killed leaves all old values or all new ones, and damaged files are found out."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

import engine
from engine import Layout
from engine.checkpoint import load_safetensors, save_safetensors
from tests.test_huggingface import build
from tests.test_safetensors import INDEX, reference
from tests.world import World, refusals

Mesh = engine.Mesh
FILE = "model.safetensors"


def filled(value: float, layers: int = 3) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# ---- killed ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing catches it, so nothing is tidied up."""


@contextmanager
def killed_before(step: int, error: Callable[[], BaseException] = Killed) -> Iterator[list[int]]:
    """End the run before so many steps that change the folder."""
    done: list[int] = []

    def counted(call: Any) -> Any:
        def step_or_end(*args: Any, **options: Any) -> Any:
            if len(done) == step:
                raise error()
            done.append(1)
            return call(*args, **options)

        return step_or_end

    with (
        mock.patch.object(Path, "replace", counted(Path.replace)),
        mock.patch.object(Path, "unlink", counted(Path.unlink)),
        mock.patch.object(os, "fsync", counted(os.fsync)),
    ):
        yield done


def values_theirs(folder: Path) -> set[float]:
    """What Hugging Face reads: the one file where it is, else the index's."""
    if (folder / FILE).is_file():
        held = [FILE]
    else:
        held = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    tensors = [each for name in held for each in safetensors.torch.load_file(folder / name).values()]
    return {value for each in tensors for value in each.flatten().tolist()}


def values_ours(mesh: Mesh, folder: Path) -> set[float]:
    model = filled(0.0)
    load_safetensors(model, mesh, folder)
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


def kill_everywhere(mesh: Mesh, folder: Path, before: list[int], limit: int) -> list[tuple[set[float], set[float]]]:
    """Save at the limits `before`, then at `limit`, killed at every step; then again, not killed. Return what is read
    after each kill.
    """
    read = []
    for step in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        for each in before:
            save_safetensors(filled(1.0), mesh, folder, max_shard_bytes=each)
        try:
            with killed_before(step):
                save_safetensors(filled(2.0), mesh, folder, max_shard_bytes=limit)
        except Killed:
            read.append((values_ours(mesh, folder), values_theirs(folder)))
        else:
            return read
        half = names(folder)
        save_safetensors(filled(3.0), mesh, folder, max_shard_bytes=limit)
        assert values_ours(mesh, folder) == {3.0}
        assert values_theirs(folder) == {3.0}
        held = {FILE} if limit == 999 else {INDEX, *json.loads((folder / INDEX).read_text())["weight_map"].values()}
        assert set(names(folder)) == held, f"nothing is left of {half}"
    raise AssertionError("the save never ends")


@pytest.mark.parametrize("before", [[64], [128], [999], [64, 64], [999, 64], [64, 999]], ids=str)
@pytest.mark.parametrize("limit", [64, 128, 999])
def test_a_killed_save_leaves_all_old_or_all_new(world: World, tmp_path: Path, before: list[int], limit: int) -> None:
    read = world.run(Layout(), kill_everywhere, tmp_path / "w", before, limit)[0]
    assert all(ours == theirs and ours in ({1.0}, {2.0}) for ours, theirs in read)
    assert read[0][0] == {1.0}
    assert len(read) >= 2


def kill_two(mesh: Mesh, folder: Path) -> int:
    """The folder has both forms after some first kills; a second save is killed too."""
    tried = 0
    for limits in ((64, 999, 64), (999, 64, 999), (999, 64, 64)):
        for one, two in itertools.islice(itertools.product(range(16), range(16)), 0, None, 3):  # 3: every one and two
            shutil.rmtree(folder, ignore_errors=True)
            save_safetensors(filled(1.0), mesh, folder, max_shard_bytes=limits[0])
            kills = 0
            for value, limit, step in ((2.0, limits[1], one), (3.0, limits[2], two)):
                try:
                    with killed_before(step):
                        save_safetensors(filled(value), mesh, folder, max_shard_bytes=limit)
                except Killed:
                    kills += 1
            read = values_theirs(folder)
            assert len(read) == 1, (limits, one, two)
            assert values_ours(mesh, folder) == read
            tried += kills == 2
    return tried


def test_a_save_killed_after_a_killed_save_mixes_nothing(world: World, tmp_path: Path) -> None:
    assert world.run(Layout(), kill_two, tmp_path / "w")[0] > 70


def refuse_everywhere(mesh: Mesh, folder: Path, before: int, limit: int) -> list[tuple[str, set[float]]]:
    """As a kill, but the disk refuses the step: the save says so, or it is done."""
    found = []
    for step in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        save_safetensors(filled(1.0), mesh, folder, max_shard_bytes=before)
        with killed_before(step, lambda: OSError(28, "no space")) as done:
            text = refusals([lambda: save_safetensors(filled(2.0), mesh, folder, max_shard_bytes=limit)])[0]
        found.append((text, values_ours(mesh, folder)))
        assert values_theirs(folder) == found[-1][1]
        if len(done) < step:
            return found
    raise AssertionError("the save never ends")


@pytest.mark.parametrize(("before", "limit"), [(64, 64), (64, 999), (999, 64), (999, 999)])
def test_a_refused_save_leaves_the_old_and_says_so(world: World, tmp_path: Path, before: int, limit: int) -> None:
    for text, values in world.run(Layout(), refuse_everywhere, tmp_path / "w", before, limit)[0]:
        assert (values == {1.0}) == ("the weights were not written: " in text)
        assert (values == {2.0}) == (text == "no error")


# ---- what is in the way ----------------------------------------------------------------------------------------------


def save_filled(mesh: Mesh, folder: Path, limit: int) -> list[str]:
    return refusals([lambda: save_safetensors(filled(2.0), mesh, folder, max_shard_bytes=limit)])


def test_a_folder_in_place_of_a_part_is_left_and_in_place_of_the_index_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00003.safetensors").mkdir()
    assert world.run(Layout(data=2), save_filled, tmp_path, 64) == [["no error"]] * 2
    parts = [f"model-2-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(names(tmp_path)) == {"model-00002-of-00003.safetensors", INDEX, *parts}
    for name in (INDEX, FILE):
        folder = tmp_path / f"with {name}"
        (folder / name).mkdir(parents=True)
        for limit in (64, 999):
            texts = world.run(Layout(data=2), save_filled, folder, limit)
            assert "is a folder, where a file has to go: remove it" in texts[0][0]
            assert "nothing was written: rank 0 cannot write" in texts[1][0]
        assert names(folder) == [name]


def test_left_over_partial_files_go_and_others_stay(world: World, tmp_path: Path) -> None:
    for name in ("model-00009-of-00009.safetensors", "model-2-00001-of-00002.safetensors", FILE, INDEX, "mine"):
        (tmp_path / f"{name}.partial").write_bytes(b"half")
    world.run(Layout(), save_filled, tmp_path, 999)
    assert names(tmp_path) == ["mine.partial", FILE]


def test_parts_of_other_names_go_with_their_index_and_nothing_outside(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    for path in (folder / "weights-a.safetensors", tmp_path / "b.safetensors", folder / "config.json"):
        path.write_bytes(b"x")
    places = {"0.weight": "weights-a.safetensors", "1.weight": "../b.safetensors", "2.weight": "config.json"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    world.run(Layout(), save_filled, folder, 999)
    assert names(folder) == ["config.json", FILE]
    assert names(tmp_path) == ["b.safetensors", "w"]


def save_twice(mesh: Mesh, folder: str) -> None:
    save_safetensors(build("gpt2"), mesh, folder, max_shard_bytes=20_000)
    save_safetensors(reference("gpt2"), mesh, folder, max_shard_bytes=20_000)


def test_hugging_face_reads_a_second_save_and_replaces_it(world: World, tmp_path: Path) -> None:
    plain = reference("gpt2")
    plain.config.save_pretrained(tmp_path)
    world.run(Layout(), save_twice, str(tmp_path))
    assert any(name.startswith("model-2-00001-of-") for name in names(tmp_path))
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in plain.state_dict().items())
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not any(name.startswith("model-2-") for name in names(tmp_path))


# ---- damaged ---------------------------------------------------------------------------------------------------------


def in_bytes(header: Any, values: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(values)


def entry(start: int, stop: int, shape: Any = (4, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TWO = ("0.weight", "1.weight")
DAMAGED = {
    "span": (in_bytes({"0.weight": entry(0, 32)}, 32), "takes 64 bytes, its data_offsets [0, 32] span 32"),
    "backwards": (in_bytes({"0.weight": entry(64, 0)}, 64), "[64, 0] span -64"),
    "overlap": (
        in_bytes(dict(zip(TWO, (entry(0, 64), entry(32, 96)), strict=True)), 96),
        "1.weight starts at byte 32 of the values, where those before it end at 64: they overlap",
    ),
    "gap": (in_bytes(dict(zip(TWO, (entry(0, 64), entry(72, 136)), strict=True)), 136), "end at 64: there is a gap"),
    "cut off": (in_bytes({"0.weight": entry(0, 64)}, 60), "is cut off: its header promises 64 bytes of values, there"),
    "trailing": (in_bytes({"0.weight": entry(0, 64)}, 65), "has bytes after its end: its header promises 64 bytes"),
    "negative": (in_bytes({"0.weight": entry(0, 64, (-4, -4))}, 64), "-4 is no size"),
    "truth": (in_bytes({"0.weight": entry(0, 4, (True,))}, 4), "True is no size"),
    "huge": (in_bytes({"0.weight": entry(0, 0, (2**40, 2**40, 0))}, 0), "is damaged"),
    "three": (in_bytes({"0.weight": {**entry(0, 64), "data_offsets": [0, 64, 64]}}, 64), "its header is damaged"),
    "dtype": (in_bytes({"0.weight": entry(0, 64, dtype=["F32"])}, 64), "its header is damaged"),
    "notes": (in_bytes({"__metadata__": {"a": 1}, "0.weight": entry(0, 64)}, 64), "its header is damaged"),
    "deep": (in_bytes(DEEP, 0), "its header is damaged (RecursionError"),
    "no object": (in_bytes([1], 0), "its header is damaged"),
    "theirs": (in_bytes({"1.weight": {**entry(0, 64), "more": float("nan")}}, 64), "invalid JSON in header"),
    "coding": (in_bytes('{"a": {}}'.encode("utf-16"), 0), "its header is damaged"),
}


def load_damaged(mesh: Mesh, folder: Path, kinds: list[str]) -> list[tuple[str, bool]]:
    """Rank 0 alone sees the damage."""
    model, found = filled(1.0), []
    for kind in kinds:
        where = folder / (kind if mesh.rank == 0 else "whole")
        text = refusals([lambda where=where: load_safetensors(model, mesh, where)])[0]
        found.append((text, all(bool((parameter == 1).all()) for parameter in model.parameters())))
    return found


def test_damaged_files_are_named_on_every_rank_before_anything_changes(world: World, tmp_path: Path) -> None:
    world.run(Layout(), save_filled, tmp_path / "whole", 64)
    for kind, (damaged, _) in DAMAGED.items():
        shutil.copytree(tmp_path / "whole", tmp_path / kind)
        (tmp_path / kind / "model-00002-of-00003.safetensors").write_bytes(damaged)
    shutil.copytree(tmp_path / "whole", tmp_path / "index")
    (tmp_path / "index" / INDEX).write_bytes(DEEP)
    expected = [part for _, part in DAMAGED.values()] + ["is damaged (RecursionError", "null byte"]
    got = world.run(Layout(data=2), load_damaged, tmp_path, [*DAMAGED, "index", "nul\0"])
    for (text, unchanged), (other, unchanged_too), part in zip(*got, expected, strict=True):
        assert part in text
        assert "model-00002-of-00003.safetensors" in text or part in expected[-2:]
        assert "nothing was loaded: another rank cannot load these files" in other
        assert unchanged
        assert unchanged_too


def odd_saves(mesh: Mesh, folder: Path) -> list[str]:
    noted = nn.Module()
    noted.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    texts = refusals(
        [
            lambda: save_safetensors(filled(2.0), mesh, f"{folder}/a\0b" if mesh.rank == 0 else folder),
            lambda: save_safetensors(noted, mesh, folder),
        ]
    )
    (folder / INDEX).write_bytes(DEEP)
    mesh.world.any(False)
    return [*texts, *refusals([lambda: save_safetensors(filled(2.0), mesh, folder)])]


def test_odd_paths_names_and_old_indices_end_on_every_rank(world: World, tmp_path: Path) -> None:
    texts = world.run(Layout(data=2), odd_saves, tmp_path)
    assert "null byte" in texts[0][0]
    for path, noted, deep in texts:
        assert "nothing was written: " in path
        assert "__metadata__ names a parameter or buffer, and safetensors files keep it" in noted
        assert deep == "no error"
    assert names(tmp_path) == [FILE]
