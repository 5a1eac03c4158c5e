"""Opening and closing the mesh: groups, disagreement and absence of ranks, teardown, torch's own default group."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.errors import CommunicationError, EngineError, LayoutError, UsageError
from tests.world import TRANSPORT, World, WorldError, wait_until

ROOT = Path(__file__).parent.parent


def open_mesh(rank: int, size: int, store: str, layout: Layout, **options: Any) -> engine.Mesh:
    options = {"timeout": 20.0, "init_timeout": 20.0, "device": "cpu", **options}
    return engine.init(layout, store=dist.FileStore(store, size), rank=rank, world_size=size, **options)


def error_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """Kind and text of the error that a call must raise, and the seconds it took."""
    started = time.monotonic()
    try:
        function(*args, **kwargs)
    except EngineError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("no error was raised")


# ---- what a mesh is ----------------------------------------------------------------------------------------------


def describe(mesh: engine.Mesh) -> dict[str, Any]:
    names = ("data", "tensor", "pipeline", "world")
    torch_mesh = mesh.device_mesh
    total = torch.tensor(float(mesh.rank))
    dist.all_reduce(total)  # plain torch.distributed works beside the mesh
    return {
        "ranks": {name: getattr(mesh, name).ranks for name in names},
        "coordinate": (mesh.coordinate.data, mesh.coordinate.pipeline, mesh.coordinate.tensor),
        "transport": {name: getattr(mesh, name).transport for name in names},
        "torch": (torch_mesh.mesh_dim_names, torch_mesh.mesh.tolist(), tuple(torch_mesh.get_coordinate() or ())),
        "same": torch_mesh.get_group("data") is mesh.device_mesh.get_group("data"),
        "total": total.item(),
    }


def test_every_rank_has_its_place_and_torchs_device_mesh_agrees(world: World) -> None:
    results = world.run(Layout(data=3, pipeline=2), describe)
    assert [r["coordinate"] for r in results] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0)]
    assert results[4]["ranks"] == {"data": (3, 4, 5), "tensor": (4,), "pipeline": (1, 4), "world": (0, 1, 2, 3, 4, 5)}
    how = {"data": TRANSPORT, "tensor": "local", "pipeline": TRANSPORT, "world": TRANSPORT}
    assert results[4]["transport"] == how
    assert results[4]["torch"] == (("pipeline", "data"), [[0, 1, 2], [3, 4, 5]], (1, 1))
    assert all(r["total"] == 15.0 and r["same"] for r in results)


def test_one_process_needs_no_torchrun_and_has_no_group() -> None:
    with engine.init(Layout(), device="cpu") as mesh:
        x = torch.tensor([1.0, 2.0])
        assert mesh.world.all_reduce(x) is x
        assert mesh.data.transport == "local"
        assert not dist.is_initialized()
        with pytest.raises(UsageError, match="is one process"):
            _ = mesh.device_mesh


def test_a_plan_has_the_groups_of_the_real_mesh_and_sends_nothing() -> None:
    mesh = engine.plan_mesh(Layout(data=2, pipeline=2, tensor=2), 5)
    assert (mesh.data.ranks, mesh.tensor.ranks, mesh.pipeline.ranks) == ((5, 7), (4, 5), (1, 5))
    assert (mesh.data.rank, mesh.tensor.rank, mesh.pipeline.rank) == (0, 1, 1)
    with pytest.raises(UsageError, match=r"rank 5 \(data 0, pipeline 1, tensor 1\): .*'data'.* is a plan"):
        mesh.data.all_reduce(torch.ones(2))
    with pytest.raises(UsageError, match="is a plan"):
        _ = mesh.device_mesh
    with pytest.raises(LayoutError, match="rank 8 is outside"):
        engine.plan_mesh(Layout(data=2, pipeline=2, tensor=2), 8)


# ---- ranks that disagree or are not there ------------------------------------------------------------------------


def open_with_own_arguments(rank: int, size: int, store: str, arguments: list[tuple[Layout, dict[str, Any]]]) -> Any:
    layout, options = arguments[rank]
    return error_of(open_mesh, rank, size, store, layout, **options)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ((Layout(data=2), {"seed": 7}), "seed is 0 on rank 0 and 7 on rank 1"),
        ((Layout(tensor=2), {}), "layout is 'data(2) x pipeline(1) x tensor(1)' on rank 0 and"),
        ((Layout(data=2), {"timeout": 9.0}), "timeout is 20.0 on rank 0 and 9.0 on rank 1"),
    ],
)
def test_different_arguments_end_on_every_rank_in_one_sentence(world: World, second: Any, text: str) -> None:
    errors = world.run(2, open_with_own_arguments, [(Layout(data=2), {}), second], mesh=False)
    for kind, message, seconds in errors:
        assert kind == "UsageError"
        assert text in message
        assert seconds < 15, "long before the limit of 20 s"


def open_where_one_is_at_fault(rank: int, size: int, store: str, at_fault: int, options: dict[str, Any]) -> Any:
    if rank == at_fault and "damaged" in options.get("tuning", ""):
        Path(options["tuning"]).write_text("{")
    options = {"init_timeout": 60.0, **(options if rank == at_fault else {})}
    return error_of(open_mesh, rank, size, store, Layout(data=size), **options)


@pytest.mark.parametrize("at_fault", [0, 1])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tuning": "damaged.json"}, "tuning file {}/damaged.json cannot be used: JSONDecodeError("),
        ({"tuning": "absent/tuning.json"}, "tuning file {}/absent/tuning.json cannot be used: FileNotFoundError("),
        ({"algorithm": "rings"}, "algorithm 'rings' is unknown (did you mean 'ring'?)"),
        ({"transport": "shn"}, "transport='shn' (did you mean 'shm'?): choose torch, shm"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"timeout": 0.0}, "timeout=0.0, init_timeout=60.0: both are seconds above 0"),
        ({"init_timeout": -1.0}, "timeout=20.0, init_timeout=-1.0: both are seconds above 0"),
        ({"init_timeout": "300"}, "timeout=20.0, init_timeout='300': both are seconds above 0"),
        ({"timeout": "300"}, "timeout='300', init_timeout=60.0: both are seconds above 0"),
        ({"timeout": float("inf")}, "timeout=inf, init_timeout=60.0: both are seconds above 0 and below 1e+09"),
    ],
    ids=[
        "damaged",
        "unreadable",
        "algorithm",
        "transport",
        "device",
        "timeout",
        "init_timeout",
        "text",
        "text too",
        "endless",
    ],
)
def test_what_one_rank_cannot_start_with_ends_all_at_once(
    world: World, tmp_path: Path, at_fault: int, options: dict[str, Any], text: str
) -> None:
    text = text.format(tmp_path)
    if "tuning" in options:
        options = {"tuning": str(tmp_path / options["tuning"])}
    errors = world.run(2, open_where_one_is_at_fault, at_fault, options, mesh=False)
    kind, own, _ = errors[at_fault]
    assert kind == "UsageError"
    assert text in own
    assert errors[1 - at_fault][:2] == ("UsageError", f"rank {at_fault} cannot start: {own}")
    assert max(seconds for _, _, seconds in errors) < 20, "long before the limit of 60 s"


FAULTY_SCRIPT = """
import os, sys, time, engine
from engine.comm import start
at_fault, select = os.environ["RANK"] == sys.argv[1], start.select_device
if at_fault:
    os.environ["ENGINE_COMM_TUNING"] = "nowhere.json"
else:
    start.select_device = lambda *arguments: time.sleep(1) or select(*arguments)
try:
    engine.init(engine.Layout(data=2), device="cpu", init_timeout=60)
except engine.EngineError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(1)
"""


@pytest.mark.parametrize("at_fault", [0, 1])
def test_the_rank_that_holds_the_store_stays_until_the_others_have_heard(at_fault: int) -> None:
    with dist_port() as port:
        environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAULTY_SCRIPT, str(at_fault)],
            env={**environment, "RANK": str(rank)}, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [each.communicate(timeout=150)[0] for each in ranks]
    assert texts[at_fault].startswith("UsageError: tuning file nowhere.json cannot be used")
    told = texts[at_fault].replace("UsageError: ", f"UsageError: rank {at_fault} cannot start: ", 1)
    assert texts[1 - at_fault] == told


def test_sizes_that_do_not_give_the_world_end_on_every_rank(world: World) -> None:
    arguments: Any = [(Layout(data=2, tensor=2), {})] * 3
    for kind, message, _ in world.run(3, open_with_own_arguments, arguments, mesh=False):
        assert kind == "LayoutError"
        assert message == (
            "data(2) x pipeline(1) x tensor(2) = 4 ranks, but 3 were started: "
            "start 4, or choose sizes whose product is 3"
        )


def join_late(rank: int, size: int, store: str, absent: int) -> Any:
    """The two that join begin together, so that the limit is over the absent one alone."""
    if rank == absent:
        return None
    Path(f"{store}.here-{rank}").touch()
    wait_until(lambda: all(Path(f"{store}.here-{r}").exists() for r in range(size) if r != absent))
    return error_of(open_mesh, rank, size, store, Layout(data=size), init_timeout=2.0)


@pytest.mark.parametrize(
    ("absent", "text"), [(1, "missing ranks [1]: 2 of 3 joined within 2 s"), (0, "waited 2 s for rank 0")]
)
def test_a_rank_that_never_joins_is_named_within_the_time_limit(world: World, absent: int, text: str) -> None:
    for rank, error in enumerate(world.run(3, join_late, absent, mesh=False)):
        if rank != absent:
            assert error[0] == "CommunicationError"
            assert text in error[1]
            assert error[2] < 20


def run_alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=150,
    )


def test_started_without_torchrun_names_the_command() -> None:
    done = run_alone("import engine; engine.init(engine.Layout(data=2, pipeline=2, tensor=2))")
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert "torchrun --standalone --nproc-per-node 8" in done.stderr


def test_half_an_environment_is_refused() -> None:
    done = run_alone("import engine; engine.init(engine.Layout(data=4))", RANK="3", WORLD_SIZE="4")
    assert done.returncode == 1
    assert "MASTER_ADDR, MASTER_PORT missing" in done.stderr


def test_a_lone_process_of_four_ends_in_time() -> None:
    with dist_port() as port:
        environment = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = run_alone("import engine; engine.init(engine.Layout(data=4), init_timeout=1.5)", **environment)
    assert done.returncode == 1
    assert "rank 0 of 4 did not meet the others at 127.0.0.1" in done.stderr
    assert "1/4 clients joined" in done.stderr


class dist_port:  # noqa: N801 (used like a function)
    """A port that was free a moment ago, and that the system gives to nobody who asks for any."""

    def __enter__(self) -> int:
        for port in random.Random().sample(range(20_000, 30_000), 100):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
        raise AssertionError("none of 100 ports is free")

    def __exit__(self, *_: object) -> None:
        pass


# ---- teardown ----------------------------------------------------------------------------------------------------


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def open_and_close(rank: int, size: int, store: str) -> list[tuple[int, int]]:
    shared = dist.FileStore(store, size)
    counts = []
    for _ in range(20):
        with engine.init(
            Layout(data=2, tensor=2), device="cpu", timeout=20, store=shared, rank=rank, world_size=size
        ) as mesh:
            for comm in (mesh.data, mesh.tensor, mesh.world):
                assert comm.all_reduce(torch.tensor(float(rank))).item() == sum(comm.ranks)
            _ = mesh.device_mesh
        del mesh
        gc.collect()
        # gloo's threads end a moment after their group: wait for the count, not for a time.
        with contextlib.suppress(AssertionError):  # told below, with all counts
            wait_until(
                lambda: (
                    not counts or all(now <= first for now, first in zip(threads_and_files(), counts[0], strict=True))
                )
            )
        counts.append(threads_and_files())
    return counts


def test_twenty_openings_in_one_process_leak_no_thread_and_no_file(world: World) -> None:
    for counts in world.run(4, open_and_close, mesh=False):
        assert counts[-1][0] <= counts[0][0], counts
        assert counts[-1][1] <= counts[0][1], counts


EXIT_SCRIPT = """
import sys, torch, engine, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
where = {"store": dist.FileStore(path, 2), "rank": rank, "world_size": 2}
mesh = engine.init(engine.Layout(tensor=2), device="cpu", timeout=30, **where)
model = torch.nn.Linear(3, 3)
optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
work = mesh.world.all_reduce(torch.ones(1000), async_op=True)
assert work.wait()[0] == 2
mesh.device_mesh
if len(sys.argv) > 3:
    mesh.close()
"""


def start_and_exit(path: Path, times: int, close: list[str]) -> list[int]:
    """Start two ranks `times` times; return the exit codes that were not 0."""
    wrong = []
    for number in range(times):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", EXIT_SCRIPT, str(rank), str(path / f"store{number}"), *close], cwd=ROOT
            )
            for rank in range(2)
        ]
        wrong += [code for rank in ranks if (code := rank.wait(timeout=150)) != 0]
    return wrong


@pytest.mark.parametrize("close", [["close"], []], ids=["closed", "left open"])
def test_ranks_exit_cleanly_five_times(tmp_path: Path, close: list[str]) -> None:
    assert start_and_exit(tmp_path, 5, close) == []


def fail_on_one(mesh: engine.Mesh, raiser: int) -> None:
    for _ in range(3):
        mesh.world.all_reduce(torch.ones(10))
    if mesh.rank == raiser:
        raise ValueError("planted on one rank")
    mesh.tensor.all_reduce(torch.ones(10))
    mesh.data.all_reduce(torch.ones(10))
    mesh.world.all_reduce(torch.ones(10))


def test_one_rank_that_raises_ends_all_and_is_the_first_cause(world: World) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(Layout(data=2, pipeline=2), fail_on_one, 2)
    assert time.monotonic() - started < 25, "before the limit of a call"
    assert caught.value.cause == 2
    assert "planted on one rank" in caught.value.reports[2]
    others = [text for rank, text in caught.value.reports.items() if rank != 2]
    assert len(others) == 3
    assert all("CommunicationError: rank" in text and "on axis" in text and "float32 (10,)" in text for text in others)


def skip_one(mesh: engine.Mesh, heard: Path) -> Any:
    """Rank 1 stays away, its mesh open, until rank 0 has heard."""
    if mesh.rank == 1:
        wait_until(heard.exists)
        return None
    try:
        return error_of(mesh.world.all_reduce, torch.ones(4))
    finally:
        heard.touch()


def skip_with_short_limit(rank: int, size: int, store: str) -> Any:
    with open_mesh(rank, size, store, Layout(data=2), timeout=1.0) as mesh:
        return skip_one(mesh, Path(f"{store}.heard"))


def test_a_collective_that_a_peer_leaves_out_ends_at_the_time_limit(world: World) -> None:
    kind, message, seconds = world.run(2, skip_with_short_limit, mesh=False)[0]
    assert kind == CommunicationError.__name__
    assert "rank 0 (data 0, pipeline 0, tensor 0): all_reduce(sum) of float32 (4,) on axis 'world' failed" in message
    assert 0.9 < seconds < 15


# ---- a default group that exists already -------------------------------------------------------------------------


def inside_existing_group(rank: int, size: int, store: str) -> Any:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    try:
        wrong = error_of(engine.init, Layout(data=3), device="cpu")
        apart = error_of(engine.init, Layout(data=4) if rank else Layout(tensor=4), device="cpu")
        algorithm = error_of(engine.init, Layout(data=4), device="cpu", algorithm="rings" if rank == 2 else None)
        assert algorithm[0] == "UsageError"
        assert algorithm[1].startswith("algorithm 'rings'" if rank == 2 else "rank 2 cannot start: algorithm 'rings'")
        assert apart[0] == "UsageError"
        assert "rank 1 (global 1) has" in apart[1]
        beside = error_of(open_mesh, rank, size, f"{store}.beside", Layout(data=4))
        assert beside[0] == "UsageError"
        assert "but there is one already" in beside[1]
        with engine.init(Layout(data=2, tensor=2), device="cpu", timeout=20) as mesh:
            total = mesh.world.all_reduce(torch.tensor(float(rank))).item()
            in_axis = mesh.data.all_reduce(torch.tensor(float(rank))).item()
        still = torch.tensor(1.0)
        dist.all_reduce(still)
        return wrong[:2], total, in_axis, still.item()
    finally:
        dist.destroy_process_group()


def test_an_existing_default_group_is_used_and_left_open(world: World) -> None:
    for rank, (wrong, total, in_axis, still) in enumerate(world.run(4, inside_existing_group, mesh=False)):
        assert wrong == (
            "LayoutError",
            "data(3) x pipeline(1) x tensor(1) = 3 ranks, but 4 were started: raise data to 4 or start 3",
        )
        assert (total, in_axis, still) == (6.0, 2.0 if rank % 2 == 0 else 4.0, 4.0)


def test_every_argument_of_init_is_described() -> None:
    told = str(engine.init.__doc__)
    missing = [name for name in inspect.signature(engine.init).parameters if not re.search(rf"\b{name}\b[,:]", told)]
    assert not missing
