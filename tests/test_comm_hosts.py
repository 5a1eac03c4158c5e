"""Groups over several hosts: shared memory inside each, the backend between them; the answers of one process.

Hosts are names that a test gives to ranks of one machine, or network namespaces of their own, which only a cable joins.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import engine
from engine import Layout
from engine.comm.shm import words
from engine.errors import CommunicationError
from tests.world import World, WorldError, wait_until

MAPS = ["aabb", "aab", "abaab", "abbbac", "abca"]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]


def open_on(rank: int, size: int, store: str, hosts: str, transport: str | None = None, **sizes: int) -> engine.Mesh:
    return engine.init(
        Layout(**(sizes or {"data": size})), device="cpu", timeout=20, store=dist.FileStore(store, size), rank=rank,
        world_size=size, host=hosts[rank], transport=transport,
    )  # fmt: skip


def held(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, exact in every dtype also as sums of seven."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def plain(parts: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(parts)
    if op == "max":
        return stacked.amax(0)
    return stacked.any(0) if stacked.dtype is torch.bool else stacked.sum(0).to(stacked.dtype)


def everything(mesh: engine.Mesh, count: int, dtype: torch.dtype) -> list[str]:
    """Return the operations of the data axis that did not give the plain answer."""
    comm = mesh.data
    n, rank = comm.size, comm.rank
    parts, whole = [held(r, count, dtype) for r in range(n)], [held(r, count * n, dtype) for r in range(n)]
    mine = slice(rank * count, (rank + 1) * count)
    wrong = []

    def check(name: str, got: Tensor, want: Tensor) -> None:
        if got.dtype is not want.dtype or not torch.equal(got, want):
            wrong.append(f"{name} of {count} {dtype} on rank {rank}")

    for op in ("sum", "max"):
        check(f"all_reduce {op}", comm.all_reduce(parts[rank].clone(), op), plain(parts, op))
        check(f"reduce_scatter {op}", comm.reduce_scatter(whole[rank], op=op), plain(whole, op)[mine])
    check("async", comm.all_reduce(parts[rank].clone(), async_op=True).wait(), plain(parts, "sum"))
    check("all_gather", comm.all_gather(parts[rank]), torch.cat(parts))
    check("all_to_all", comm.all_to_all(whole[rank]), torch.cat([each[mine] for each in whole]))
    for root in range(n):
        check(f"broadcast from {root}", comm.broadcast(parts[rank].clone(), root), parts[root])
        want = plain(parts, "sum") if rank == root else parts[rank]
        check(f"reduce to {root}", comm.reduce(parts[rank].clone(), root), want)
    got = comm.exchange([(parts[rank], (rank + 1) % n)], [(torch.empty_like(parts[rank]), (rank - 1) % n)])[0]
    check("exchange", got, parts[rank - 1])
    registered = comm.allocate((count,), dtype)
    registered.copy_(parts[rank])
    check("registered", comm.all_reduce(registered), plain(parts, "sum"))
    return wrong


def compare(rank: int, size: int, store: str, hosts: str) -> tuple[str, Any, list[str]]:
    with open_on(rank, size, store, hosts, "shm") as mesh:
        cases = [(count, dtype) for count in (1, 5, 1000) for dtype in DTYPES] + [(300_001, torch.float32)]
        return mesh.data.transport, mesh.data.hosts, [each for case in cases for each in everything(mesh, *case)]


@pytest.mark.parametrize("hosts", MAPS)
def test_every_operation_gives_the_plain_answer(world: World, hosts: str) -> None:
    groups = tuple(tuple(i for i, h in enumerate(hosts) if h == host) for host in dict.fromkeys(hosts))
    for found in world.run(len(hosts), compare, hosts, mesh=False):
        assert found == ("hosts", groups, [])


def rounded(rank: int, size: int, store: str, hosts: str) -> bytes:
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(rank))
    with open_on(rank, size, store, hosts, "shm") as mesh:
        return mesh.data.all_reduce(x).numpy().tobytes()


def test_all_ranks_end_with_the_same_bits(world: World) -> None:
    results = world.run(5, rounded, "abaab", mesh=False)
    assert all(result == results[0] for result in results)
    want = sum(torch.randn(10_001, generator=torch.Generator().manual_seed(r)).double() for r in range(5))
    torch.testing.assert_close(
        torch.frombuffer(bytearray(results[0]), dtype=torch.float32), want.float(), rtol=1e-5, atol=1e-5
    )


def sent_across(rank: int, size: int, store: str, hosts: str) -> dict[str, int]:
    """Return the bytes that each operation makes this rank send by the backend."""
    found: dict[str, int] = {}
    with open_on(rank, size, store, hosts, "shm") as mesh:
        comm, across = mesh.data, mesh.data._transport._across  # type: ignore[union-attr]
        exchange, total = across.exchange, 0

        def count(sends: Any, *more: Any) -> Any:
            nonlocal total
            # All but the heads, which say what comes.
            total += sum(x.nbytes for x, _ in sends if (x.dtype, x.numel()) != (torch.uint8, words.HEAD))
            return exchange(sends, *more)

        across.exchange = count
        calls = {
            "all_reduce": lambda: comm.all_reduce(torch.ones(12)),
            "bf16": lambda: comm.all_reduce(torch.ones(12, dtype=torch.bfloat16)),
            "reduce_scatter": lambda: comm.reduce_scatter(torch.ones(12)),
            "all_gather": lambda: comm.all_gather(torch.ones(2)),
            "broadcast": lambda: comm.broadcast(torch.ones(12), 3),
            "reduce": lambda: comm.reduce(torch.ones(12), 4),
            "all_to_all": lambda: comm.all_to_all(torch.ones(12)),
            "barrier": comm.barrier,
        }
        for name, call in calls.items():
            total = 0
            call()
            found[name] = total
    return found


def test_ranks_send_between_hosts_what_the_docs_say(world: World) -> None:
    s, n = 48, 6  # bytes of 12 fp32 values; leaders are 0, 1 and 5, of hosts of 2, 3 and 1 ranks
    wanted = {
        "all_reduce": {0: 2 * s, 1: 2 * s, 5: 2 * s},
        "bf16": {0: 2 * s, 1: 2 * s, 5: 2 * s},  # in fp32
        "reduce_scatter": {0: 4 * s // n, 1: 3 * s // n, 5: 5 * s // n},
        "all_gather": {0: 2 * 2 * s // n, 1: 2 * 3 * s // n, 5: 2 * 1 * s // n},
        "broadcast": {1: 2 * s},
        "reduce": {1: s, 5: s},
        "all_to_all": dict.fromkeys(range(n), (n - 1) * s // n),
        "barrier": {0: 8, 1: 8, 5: 8},
    }
    for rank, found in enumerate(world.run(n, sent_across, "abbbac", mesh=False)):
        assert found == {name: sent.get(rank, 0) for name, sent in wanted.items()}


def transports(rank: int, size: int, store: str, hosts: str) -> dict[str, str]:
    with open_on(rank, size, store, hosts, "shm", data=2, tensor=2) as mesh:
        mesh.world.barrier()
        return {name: getattr(mesh, name).transport for name in ("world", "data", "tensor")}


def test_each_group_takes_what_its_ranks_have(world: World) -> None:
    for found in world.run(4, transports, "aabb", mesh=False):
        assert found == {"world": "hosts", "data": "torch", "tensor": "shm"}
    found = world.run(4, transports, "aaab", mesh=False)  # what a group takes is the group's, not the mesh's
    assert [each["tensor"] for each in found] == ["shm", "shm", "torch", "torch"]
    assert [each["data"] for each in found] == ["shm", "torch", "shm", "torch"]


def low_precision(rank: int, size: int, store: str, hosts: str) -> list[Tensor]:
    x = quarters(rank)
    with open_on(rank, size, store, hosts, "shm") as mesh:
        reduced = mesh.data.reduce(x.clone(), 1)
        return [mesh.data.all_reduce(x.clone()), reduced, mesh.data.reduce_scatter(x)]


def quarters(rank: int) -> Tensor:
    """Of which float32 holds any sum of four, and bfloat16 hardly one of two."""
    whole = torch.randint(-120, 120, (4000,), generator=torch.Generator().manual_seed(rank))
    return (whole / 4).to(torch.bfloat16) * (1 + 30 * (rank % 2))


def test_low_precision_is_summed_in_float32_over_all_hosts(world: World) -> None:
    inputs = [quarters(rank) for rank in range(4)]
    want = sum(x.float() for x in inputs).to(torch.bfloat16)  # type: ignore[union-attr]
    for rank, (whole, reduced, part) in enumerate(world.run(4, low_precision, "abab", mesh=False)):
        assert torch.equal(whole, want)
        assert torch.equal(reduced, want if rank == 1 else inputs[rank])
        assert torch.equal(part, want[rank * 1000 : (rank + 1) * 1000])


def pass_together(mesh: engine.Mesh, store: str) -> None:
    """A barrier whose last rank, which leaves next, is through when all others are."""
    mesh.data.barrier()
    Path(f"{store}.past-{mesh.rank}").touch()
    if mesh.rank == mesh.data.size - 1:
        wait_until(lambda: all(Path(f"{store}.past-{rank}").exists() for rank in range(mesh.rank)))


def lost(rank: int, size: int, store: str, hosts: str) -> str:
    with open_on(rank, size, store, hosts, "shm") as mesh:
        pass_together(mesh, store)
        if rank == size - 1:
            return "left"
        try:
            mesh.data.all_reduce(torch.ones(10))
        except CommunicationError as error:
            return str(error)
        return "no error"


def test_a_rank_that_has_left_is_named_on_every_host(world: World) -> None:
    *texts, last = world.run(4, lost, "abab", mesh=False)
    assert last == "left"
    assert all("rank 3" in text and "all_reduce(sum)" in text for text in texts), texts


def killed(rank: int, size: int, store: str, hosts: str) -> str:
    mesh = open_on(rank, size, store, hosts, "shm")
    pass_together(mesh, store)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mesh.data.all_reduce(torch.ones(10))
    except CommunicationError as error:
        return str(error)  # with its mesh open: no other may hear of it by its end
    return "no error"


def test_a_killed_rank_is_named_at_once_on_every_host(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(4, killed, "abab", mesh=False)
    assert set(caught.value.reports) == {3}, "the others returned their errors well before the limit of a call"


# ---- several calls at once -------------------------------------------------------------------------------------------


def to_all_in_two_groups(rank: int, size: int, store: str, hosts: str) -> int:
    """Two groups over the same ranks: what one of them sends is nothing for the other. Returns how many were wrong."""
    with open_on(rank, size, store, hosts, "shm") as mesh:
        wrong = 0
        for turn in range(10):
            given = {
                comm: [torch.arange(3000) + 10_000 * r + 100_000 * turn + salt for r in range(size)]
                for comm, salt in ((mesh.data, 0), (mesh.world, 5_000))
            }
            works = [(comm, comm.all_to_all(parts[rank], async_op=True)) for comm, parts in given.items()]
            for comm, work in works:
                want = torch.cat([each.view(size, -1)[rank] for each in given[comm]])
                wrong += not torch.equal(work.wait(), want)
        return wrong


def test_groups_over_the_same_ranks_keep_their_messages(world: World) -> None:
    assert world.run(3, to_all_in_two_groups, "aab", mesh=False) == [0, 0, 0]


def allocate_behind_queued(rank: int, size: int, store: str, hosts: str) -> list[bool]:
    with open_on(rank, size, store, hosts, "shm") as mesh:
        comm, parts = mesh.data, [torch.arange(200_000.0) + r for r in range(size)]
        works = [comm.all_reduce(parts[rank] * turn, async_op=True) for turn in range(1, 5)]
        memory = comm.allocate((1000,))
        sums = [torch.equal(work.wait(), sum(parts) * turn) for turn, work in enumerate(works, start=1)]  # type: ignore[operator]
        return [*sums, not memory.any(), bool((comm.all_reduce(memory.fill_(rank + 1)) == 6).all())]


def test_memory_is_allocated_after_the_calls_that_are_queued(world: World) -> None:
    assert world.run(3, allocate_behind_queued, "aab", mesh=False) == [[True] * 6] * 3


def with_another_default(rank: int, size: int, store: str, hosts: str) -> tuple[list[str], list[str], Any]:
    with open_on(rank, size, store, hosts, "shm") as mesh, torch.device("meta"):
        memory, x = mesh.data.allocate((4,)), torch.full((4,), rank + 1.0, device="cpu")
        mesh.data.barrier()
        results = [mesh.data.all_reduce(x.clone()), mesh.data.all_gather(x[:1]), mesh.data.all_to_all(x[:3])]
        results += [mesh.data.all_reduce(memory.copy_(x)), mesh.data.reduce_scatter(x[:3])]
        return [str(each.device) for each in (memory, *results)], [str(torch.empty(1).device)], [
            each.tolist() for each in results
        ]  # fmt: skip


def test_the_callers_default_device_is_nothing_to_the_engine(world: World) -> None:
    for devices, default, values in world.run(3, with_another_default, "aab", mesh=False):
        assert set(devices) == {"cpu"}
        assert default == ["meta"]
        assert values == [[6.0] * 4, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [6.0] * 4, [6.0]]


# ---- hosts that share nothing but a cable ------------------------------------------------------------------------

JOB = """
import os, sys
import engine
from engine import Layout
from tests.test_comm_hosts import everything
import torch
with engine.init(Layout(data=4), device="cpu", timeout=30) as mesh:
    wrong = [each for dtype in (torch.float32, torch.int8) for each in everything(mesh, 1000, dtype)]
    print(mesh.data.transport, mesh.data.hosts, wrong)
"""


@pytest.fixture
def cable() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    mark = secrets.token_hex(3)
    names, ends = [f"engine-{mark}-{i}" for i in range(2)], [f"e{mark}{i}" for i in range(2)]
    made = []
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
            made.append(name)
        subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            subprocess.run(["ip", "link", "set", end, "netns", name], check=True)
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"10.77.0.{number}/24", "dev", end], check=True)
            for device in (end, "lo"):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)
        yield [*names, *ends]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces needs Linux, root and the ip command",
)
def test_two_network_namespaces_are_two_hosts(cable: list[str]) -> None:
    names, ends = cable[:2], cable[2:]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(JOB)
        jobs = []
        for rank in range(4):
            host = rank // 2
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2),
                "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": ends[host],
                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent), "ENGINE_TRANSPORT": "shm",
            }  # fmt: skip
            command = ["ip", "netns", "exec", names[host], sys.executable, str(script)]
            jobs.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        try:
            told = [job.communicate(timeout=150) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    for job, (out, error) in zip(jobs, told, strict=True):
        assert job.returncode == 0, error
        assert out.strip() == "hosts ((0, 1), (2, 3)) []"
