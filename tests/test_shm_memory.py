"""What memory the transport asks for, and what happens where there is too little: a sentence on every rank, no more."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.shm import memory
from tests.values import outcome
from tests.world import World

Mesh = engine.Mesh
MIB = 1 << 20


def taken(mesh: Mesh) -> Any:
    """What must be as it was after a refusal."""
    maps = Path("/proc/self/maps").read_text().count("memfd:engine")
    return mesh.memory(), maps, len(os.listdir("/proc/self/fd"))


def refused(mesh: Mesh, rank: int, limit: str) -> dict[str, Any]:
    """`rank` cannot have the memory that all ask for; then it can."""
    comm = mesh.data
    comm.all_reduce(torch.ones(3))
    before = taken(mesh)
    old, available = resource.getrlimit(resource.RLIMIT_FSIZE), memory.available
    if comm.rank == rank:
        if limit == "size of files":
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
        else:
            memory.available = lambda: (7 * MIB, limit)
    try:
        found: dict[str, Any] = {"error": outcome(lambda: comm.allocate((8 * MIB,), torch.uint8).sum().item())}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        memory.available = available
    found["same"] = taken(mesh) == before
    x = comm.allocate((8 * MIB,), torch.uint8)
    found["afterwards"] = comm.all_reduce(x.fill_(2))[-1].item()
    found["zero"] = comm.allocate((0, 5)).shape, mesh.memory()["data"]["allocated"]
    return found


@pytest.mark.parametrize("limit", ["size of files", "MemAvailable"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_refusal_is_told_on_every_rank_and_takes_nothing(world: World, rank: int, limit: str) -> None:
    for own, got in enumerate(world.run(Layout(data=3), refused, rank, limit, transport="shm")):
        kind, text = got["error"]
        assert kind == "MemoryShortageError"
        assert "allocate of 8388608 bytes" in text
        assert "on axis 'data'" in text
        if limit == "size of files":
            assert "needs 8.0 MiB of shared memory, and the kernel refused: File too large" in text
            assert "MiB are free (" in text
        else:
            assert "(3 ranks) needs 24.0 MiB of shared memory on this host, 7.0 MiB are free (MemAvailable)" in text
        assert "set ENGINE_TRANSPORT=torch" in text
        assert ("rank " + str(rank) in text) == (own != rank)
        assert got["same"], "nothing was taken"
        assert got["afterwards"] == 6
        assert got["zero"] == ((0, 5), 8 * MIB)


def open_with_little(rank: int, size: int, store: str, free: list[int]) -> Any:
    available = memory.available
    memory.available = lambda: (free[rank], "MemAvailable")
    try:
        where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size, "transport": "shm"}
        with engine.init(Layout(data=size), device="cpu", timeout=20, **where) as mesh:
            results = []
            for count in (1, 100_000, 300_007):
                results.append(mesh.data.all_reduce(torch.ones(count))[-1].item())
                results.append(mesh.data.reduce_scatter(torch.ones(size, count))[0, -1].item())
                results.append(mesh.data.all_gather(torch.ones(count)).sum().item() / count)
            return mesh.memory()["data"], results
    except engine.EngineError as error:
        return type(error).__name__, str(error)
    finally:
        memory.available = available


@pytest.mark.parametrize(
    ("free", "staging"), [([3 * MIB, 64 * MIB], MIB), ([64 * MIB, MIB], MIB // 2), ([64 * MIB, 40 << 10], 16384)]
)
def test_the_staging_shrinks_first(world: World, free: list[int], staging: int) -> None:
    """Two slots of 1 MiB on each of 2 ranks are wanted, and the slots are halved until they fit."""
    for used, results in world.run(2, open_with_little, free, mesh=False):
        assert used == {"staging": staging, "allocated": 0}
        assert results == [2.0] * 9


def test_a_mesh_that_gets_no_staging_at_all_says_so_on_every_rank(world: World) -> None:
    for kind, text in world.run(2, open_with_little, [64 * MIB, 4096], mesh=False):
        assert kind == "MemoryShortageError"
        assert "staging on axis 'data' (2 ranks) needs 0.0 MiB of shared memory on this host, 0.0 MiB are free" in text
    for kind, text in world.run(2, open_with_little, [0, 0], mesh=False):
        assert kind == "MemoryShortageError"
        assert "are free (MemAvailable)" in text


def reserve_nothing(mesh: Mesh) -> bool:
    comm, other = mesh.data, 1 - mesh.data.rank
    before = taken(mesh)
    comm.allocate((0,))
    comm.allocate((3, 0), torch.int64)
    comm.all_reduce(torch.empty(0))
    comm.all_gather(torch.empty(0, 3))
    comm.exchange([(torch.empty(0), other)], [(torch.empty(0), other)])
    return taken(mesh) == before


def test_nothing_is_reserved_for_nothing(world: World) -> None:
    assert world.run(Layout(data=2), reserve_nothing, transport="shm") == [True, True]


def ask_for_what_nobody_has(mesh: Mesh) -> Any:
    comm, before = mesh.data, taken(mesh)
    calls: list[Any] = [
        lambda: comm.allocate((1 << 62,)),
        lambda: comm.allocate((1 << 61,), shared=True),
        lambda: comm.allocate(4),  # type: ignore[arg-type]
        lambda: comm.allocate((4,), "float32"),  # type: ignore[arg-type]
    ]
    found = [outcome(call) for call in calls]
    return found, taken(mesh) == before, comm.all_reduce(comm.allocate((3,)).fill_(comm.rank + 1)).tolist()


def test_what_no_machine_has_and_what_is_no_size_is_refused(world: World) -> None:
    for found, same, sums in world.run(Layout(data=2), ask_for_what_nobody_has, transport="shm"):
        (first, large), (second, shared), (third, shape), (fourth, dtype) = found
        assert [first, second, third, fourth] == ["MemoryShortageError"] * 2 + ["UsageError"] * 2
        assert f"{1 << 64} bytes are more than any machine has" in large
        assert f"{1 << 63} bytes are more than any machine has" in shared
        assert "shape is a sequence of sizes and dtype a torch.dtype, not 4 and" in shape
        assert "not (4,) and 'float32'" in dtype
        assert same
        assert sums == [3.0] * 3


# ---- what is free ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /proc and /sys/fs/cgroup: 1000 MiB available, no cgroup."""

    def moved(path: str) -> Path:
        return tmp_path / path.lstrip("/") if path.startswith("/proc/") else Path(path)

    monkeypatch.setattr(memory, "Path", moved)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:  1024000 kB\nShmem: 5 kB\n")
    return tmp_path


def group(folder: Path, limit: str, used: str, *, version: int = 2, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, used), strict=True):
        (folder / name).write_text(text + "\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nfile 8\n")


def member(machine: Path, *lines: str) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("".join(line + "\n" for line in lines))


def test_without_a_cgroup_the_machine_says_what_is_free(machine: Path) -> None:
    assert memory.available() == (1000 * MIB, "MemAvailable")
    assert memory.shortage(1000 * MIB, "it") == ""
    assert memory.shortage(1000 * MIB + 1, "it").startswith(
        "it needs 1,000.0 MiB of shared memory on this host, 1,000.0 MiB are free (MemAvailable): "
    )


def test_the_narrowest_of_nested_cgroups_counts(machine: Path) -> None:
    root = machine / "cgroup"
    member(machine, "0::/outer/inner")
    group(root / "outer" / "inner", "max", str(50 * MIB))
    group(root / "outer", str(300 * MIB), str(100 * MIB), inactive=30 * MIB)
    assert memory.available() == (230 * MIB, "memory cgroup /outer: limit 300.0 MiB, in use 70.0 MiB")
    group(root / "outer" / "inner", str(80 * MIB), str(70 * MIB))
    assert memory.available() == (10 * MIB, "memory cgroup /outer/inner: limit 80.0 MiB, in use 70.0 MiB")
    group(root / "outer" / "inner", str(80 * MIB), str(90 * MIB))
    assert memory.available()[0] == 0, "over its limit, not below nothing"


def test_a_cgroup_of_the_first_version_counts_too(machine: Path) -> None:
    member(machine, "12:cpu,cpuacct:/elsewhere", "7:memory:/job", "1:name=systemd:/job", "0::/")
    group(machine / "cgroup" / "memory" / "job", str(64 * MIB), str(60 * MIB), version=1, inactive=MIB)
    assert memory.available() == (5 * MIB, "memory cgroup /job: limit 64.0 MiB, in use 59.0 MiB")
    group(machine / "cgroup" / "memory" / "job", str((1 << 63) - 4096), str(60 * MIB), version=1)
    assert memory.available() == (1000 * MIB, "MemAvailable"), "the first version's word for no limit"


def test_a_cgroup_that_cannot_be_read_is_passed_over(machine: Path) -> None:
    member(machine, "0::/not/there")
    assert memory.available() == (1000 * MIB, "MemAvailable")
    group(machine / "cgroup" / "not" / "there", "junk", "3")
    assert memory.available() == (1000 * MIB, "MemAvailable")
