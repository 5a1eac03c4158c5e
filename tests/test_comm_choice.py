"""The table that chooses algorithms: rules, files, and what a mesh does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.choice import OPERATIONS, Choice, algorithms_of, read_choice, write_choice
from engine.errors import UsageError
from tests.world import World

ANY = float("inf")
TABLE: Any = {("all_reduce", 2, 1): ((1024, "native"), (65536, "halving_doubling"), (ANY, "ring"))}


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    write_choice(tmp_path / "tuning.json", TABLE, {"host": "here"})
    read = read_choice(tmp_path / "tuning.json")
    assert read == Choice(TABLE)
    assert read.thresholds("all_reduce", 2, 1, "gloo", asynchronous=False) == TABLE["all_reduce", 2, 1]
    built_in = Choice().thresholds("all_reduce", 3, 1, "gloo", asynchronous=False)
    assert read.thresholds("all_reduce", 3, 1, "gloo", asynchronous=False) == built_in, "no row for 3 ranks"


def test_accelerators_keep_to_their_own_calls_unless_forced() -> None:
    for backend in ("nccl", "hccl"):
        assert Choice(TABLE).thresholds("all_reduce", 2, 1, backend, asynchronous=False) == ((ANY, "native"),)
    assert Choice(TABLE, "ring").thresholds("all_reduce", 2, 1, "nccl", asynchronous=False) == ((ANY, "ring"),)


def test_asynchronous_calls_take_what_flies_by_itself() -> None:
    measured = Choice(TABLE).thresholds("all_reduce", 2, 1, "gloo", asynchronous=True)
    assert measured == ((1024, "native"), (65536, "native"), (ANY, "native"))
    assert Choice().thresholds("all_gather", 2, 1, "gloo", asynchronous=True) == ((ANY, "pairwise"),)
    assert Choice(forced="ring").thresholds("all_reduce", 2, 1, "gloo", asynchronous=True) == ((ANY, "ring"),)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("hosts", [1, 2])
def test_built_in_rules_name_algorithms_that_exist_for_any_size(size: int, hosts: int) -> None:
    for operation in OPERATIONS:
        found = Choice().thresholds(operation, size, hosts, "gloo", asynchronous=False)
        assert found[-1][0] == ANY
        assert list(found) == sorted(found)
        assert all(name in algorithms_of(operation) for _, name in found)


def test_a_forced_algorithm_holds_where_an_operation_has_it() -> None:
    forced = Choice(forced="ring")
    assert forced.thresholds("all_gather", 4, 1, "gloo", asynchronous=False) == ((ANY, "ring"),)
    assert forced.thresholds("broadcast", 4, 1, "gloo", asynchronous=False) == Choice().thresholds(
        "broadcast", 4, 1, "gloo", asynchronous=False
    )
    with pytest.raises(UsageError, match=r"algorithm 'rings' is unknown \(did you mean 'ring'\?\): choose .*halving"):
        Choice(forced="rings")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be used: JSONDecodeError"),
        ("[]", "cannot be used: TypeError"),
        ('{"version": true, "rows": []}', "version is a number, rows a list"),
        ('{"version": 1, "rows": {}}', "version is a number, rows a list"),
        (
            '{"version": 1, "rows": [{"op": "reduce", "size": 2, "hosts": 1, "up_to": 1e999, "algorithm": "tree"}]}',
            "cannot be used: OverflowError",
        ),
        ('{"version": 9, "rows": []}', "is of version 9, this engine reads 1"),
        ('{"version": 1, "rows": [{"op": "all_reduce"}]}', "cannot be used: KeyError"),
        (
            '{"version": 1, "rows": [{"op": "all_reduce", "size": 2, "hosts": 1, "up_to": 9, "algorithm": "tree"}]}',
            "no algorithm 'tree' for 'all_reduce'",
        ),
        (
            '{"version": 1, "rows": [{"op": "all_reduce", "size": 2, "hosts": 1, "up_to": 9, "algorithm": "ring"}]}',
            "no row of ('all_reduce', 2, 1) holds for any size",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        engine.init(Layout(), device="cpu", tuning=path)
    assert part in str(error.value)
    assert str(path) in str(error.value)
    assert "leave it out to take the built-in rules" in str(error.value)


def test_a_missing_file_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_COMM_TUNING", "/no/such/file")
    with pytest.raises(UsageError, match="tuning file /no/such/file cannot be used: FileNotFoundError"):
        engine.init(Layout(), device="cpu")


def chosen(rank: int, size: int, store: str, path: str, transport: str) -> list[str | None]:
    with engine.init(
        Layout(data=size), device="cpu", store=dist.FileStore(store, size), rank=rank, world_size=size, tuning=path,
        transport=transport,
    ) as mesh:  # fmt: skip
        names = []
        for count in (256, 257, 16384, 16385):
            mesh.data.all_reduce(torch.ones(count))
            call = mesh.data.current
            names.append(call.algorithm if call else None)
        return names


def test_a_mesh_takes_what_its_file_says(world: World, tmp_path: Path) -> None:
    write_choice(tmp_path / "tuning.json", TABLE, {})
    for names in world.run(2, chosen, str(tmp_path / "tuning.json"), "torch", mesh=False):
        assert names == ["native", "halving_doubling", "halving_doubling", "ring"]


def test_a_file_measured_over_gloo_says_nothing_about_shared_memory(world: World, tmp_path: Path) -> None:
    write_choice(tmp_path / "tuning.json", TABLE, {})
    for names in world.run(2, chosen, str(tmp_path / "tuning.json"), "shm", mesh=False):
        assert names == ["native"] * 4


def other_file(rank: int, size: int, store: str, paths: list[str | None]) -> str:
    try:
        engine.init(
            Layout(data=size), device="cpu", store=dist.FileStore(store, size), rank=rank, world_size=size,
            tuning=paths[rank],
        ).close()  # fmt: skip
    except UsageError as error:
        return str(error)
    return "opened"


def test_ranks_with_other_files_are_told(world: World, tmp_path: Path) -> None:
    write_choice(tmp_path / "tuning.json", TABLE, {})
    for text in world.run(2, other_file, [str(tmp_path / "tuning.json"), None], mesh=False):
        assert "the ranks were started differently: algorithms is" in text


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    write_choice(tmp_path / "tuning.json", TABLE, {"torch": "2.13"})
    document = json.loads((tmp_path / "tuning.json").read_text())
    assert document["version"] == 1
    assert document["meta"] == {"torch": "2.13"}
    assert document["rows"][2] == {"op": "all_reduce", "size": 2, "hosts": 1, "up_to": None, "algorithm": "ring"}


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"transport='torhc' \(did you mean 'torch'\?\): choose torch"):
        engine.init(Layout(), device="cpu", transport="torhc")
    monkeypatch.setenv("ENGINE_TRANSPORT", "udp")
    with pytest.raises(UsageError, match=r"^the environment's ENGINE_TRANSPORT='udp': choose torch, shm"):
        engine.init(Layout(), device="cpu")


@pytest.mark.parametrize("wrong", ["64", 0, 1.5, True, None, 1 << 21])
def test_staging_is_a_whole_number_of_mib(wrong: object) -> None:
    with pytest.raises(UsageError, match=f"staging_mib={wrong!r}: MiB of shared memory for each group, a whole number"):
        engine.init(Layout(), device="cpu", staging_mib=wrong)  # type: ignore[arg-type]
