"""Devices with mocks: what is activated when, what the backends get, and seeds. No accelerator is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine import device as devices
from engine.comm.communicator import Communicator
from engine.comm.transport import Transport
from engine.errors import DtypeError, UsageError
from engine.tensor_parallel import SyncBatchNorm
from tests.world import World

CPU = torch.device("cpu")


class StopHereError(Exception):
    """Raised by a mock once everything of interest has happened."""


def show_accelerators(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, npu: int | None = None) -> list[Any]:
    """Let this process see `cuda` GPUs and `npu` NPUs (None: torch_npu is not installed); return the list of calls."""
    calls: list[Any] = []

    def fake(count: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, set_device=lambda device: calls.append(device)
        )

    for name, value in vars(fake(cuda)).items():
        monkeypatch.setattr(torch.cuda, name, value)
    if npu is not None:
        package = types.ModuleType("torch_npu")
        package.__spec__ = ModuleSpec("torch_npu", None)
        monkeypatch.setitem(sys.modules, "torch_npu", package)
        monkeypatch.setattr(torch, "npu", fake(npu), raising=False)
    return calls


@pytest.mark.parametrize(
    ("accelerators", "kind"),
    [({}, "cpu"), ({"npu": 0}, "cpu"), ({"cuda": 2}, "cuda"), ({"cuda": 2, "npu": 0}, "cuda")],
    ids=str,
)
def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch, accelerators: dict[str, int], kind: str) -> None:
    show_accelerators(monkeypatch, **accelerators)
    assert devices.select("auto", 1).type == kind
    assert devices.select("cpu", 1) == CPU


def test_each_local_rank_gets_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    show_accelerators(monkeypatch, cuda=3)
    assert [devices.select("cuda", rank) for rank in range(3)] == [torch.device("cuda", rank) for rank in range(3)]


@pytest.mark.parametrize(("device", "count"), [("cuda", 2), ("cuda", 0), ("auto", 2), ("npu", 0), ("npu", 1)])
def test_more_ranks_than_accelerators_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    show_accelerators(monkeypatch, **{"npu" if device == "npu" else "cuda": count})
    with pytest.raises(UsageError) as caught:
        devices.select(device, 2)
    kind = "cuda" if device == "auto" else device
    assert str(caught.value) == (
        f"device={kind!r}: local rank 2 needs its own accelerator, but this host shows {count}: "
        f"start at most {count} ranks here, or use device='cpu'"
    )


def test_a_misspelt_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"^device='cdua' \(did you mean 'cuda'\?\): choose auto, cpu, cuda, npu$"):
        devices.select("cdua", 0)


def test_backends() -> None:
    assert [devices.backend(types.SimpleNamespace(type=kind)) for kind in ("cpu", "cuda", "npu")] == [  # type: ignore[arg-type]
        "gloo",
        "nccl",
        "hccl",
    ]


# ---- the device comes before the groups --------------------------------------------------------------------


def record_opening(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Open a mesh of two ranks, in two threads, on mocked accelerators; return each rank's calls in order."""
    calls: list[list[Any]] = [[], []]
    names = ["rank 0", "rank 1"]

    def mine() -> list[Any]:
        return calls[names.index(threading.current_thread().name)]

    def init_process_group(backend: str, *, device_id: Any = None, **rest: Any) -> None:
        mine().append(["init_process_group", backend, None if device_id is None else str(device_id), rest["rank"]])
        raise StopHereError

    show_accelerators(monkeypatch, **{kind: 2})
    monkeypatch.setattr(getattr(torch, kind), "set_device", lambda d: mine().append(["set_device", str(d)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: mine().append(["new_group"]))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("ENGINE_TRANSPORT", raising=False)  # which may name what a CPU alone has
    store = dist.HashStore()

    def open_mesh(rank: int) -> None:
        try:
            engine.init(engine.Layout(data=2), device="auto", init_timeout=20, store=store, rank=rank, world_size=2)
        except StopHereError:
            mine().append("stopped")

    threads = [threading.Thread(target=open_mesh, args=(rank,), name=names[rank], daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return calls


def test_cuda_is_activated_before_any_group_and_nccl_gets_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, calls in enumerate(record_opening("cuda", monkeypatch)):
        device = f"cuda:{rank}"
        assert calls == [["set_device", device], ["init_process_group", "nccl", device, rank], "stopped"]


def npu_opening() -> None:
    """Run in a process of its own, because naming a device type npu cannot be taken back."""
    torch.utils.rename_privateuse1_backend("npu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        show_accelerators(monkeypatch, cuda=2, npu=2)
        selected = str(devices.select("auto", 1))
        sys.stdout.write(json.dumps({"selected": selected, "calls": record_opening("npu", monkeypatch)}))


def test_npu_goes_first_is_activated_before_any_group_and_hccl_gets_no_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.test_device import npu_opening; npu_opening()"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["selected"] == "npu:1"
    for rank, calls in enumerate(seen["calls"]):
        assert calls == [["set_device", f"npu:{rank}"], ["init_process_group", "hccl", None, rank], "stopped"]


# ---- a CPU run touches no accelerator ----------------------------------------------------------------------


class WatchImports:
    """Notes every attempt to import torch_npu."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "torch_npu":
            self.tried.append(name)


def watch_cuda(touched: list[tuple[str, str]]) -> Callable[[], None]:
    """Note (function, caller's file) of every call of a function of torch.cuda; return what puts them back."""
    originals = {name: value for name, value in vars(torch.cuda).items() if isinstance(value, types.FunctionType)}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            touched.append((name, sys._getframe(1).f_code.co_filename))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(torch.cuda, name, watched(name))

    def restore() -> None:
        for name, value in originals.items():
            setattr(torch.cuda, name, value)

    return restore


def train_on_cpu(rank: int, size: int, store: str) -> tuple[list[tuple[str, str]], list[str]]:
    touched: list[tuple[str, str]] = []
    imports = WatchImports()
    sys.meta_path.insert(0, imports)  # type: ignore[arg-type]
    restore = watch_cuda(touched)
    try:
        file = dist.FileStore(store, size)
        with engine.init(
            engine.Layout(data=size), device="cpu", timeout=30, store=file, rank=rank, world_size=size
        ) as mesh:
            model = nn.Linear(3, 2)
            optimizer = engine.zero.ZeroOptimizer(model, torch.optim.AdamW, mesh, lr=0.1)
            step = engine.TrainStep(model, optimizer, lambda y, t: ((y - t).square().sum(), t.numel()), mesh)
            step(torch.arange(12.0).view(4, 3) + rank, torch.arange(8.0).view(4, 2))
            step.evaluate(torch.arange(3.0).view(1, 3), torch.zeros(1, 2))
            devices.synchronize(mesh.device)
            devices.peak_memory_mib(mesh.device)
        torch.cuda.is_available()  # the watch itself must see something
    finally:
        restore()
        sys.meta_path.remove(imports)  # type: ignore[arg-type]
    return touched, imports.tried


def test_a_cpu_run_touches_no_accelerator_module(world: World) -> None:
    waking = {"init", "_lazy_init", "set_device", "synchronize", "current_device", "device_count"}
    for touched, tried in world.run(2, train_on_cpu, mesh=False):
        assert ("is_available", __file__) in touched
        assert [(name, file) for name, file in touched if "/engine/" in file] == []
        assert [(name, file) for name, file in touched if name in waking] == []
        assert tried == []


def test_the_package_imports_without_torch_npu_and_wakes_no_accelerator() -> None:
    script = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "import torch, engine\n"
        "with engine.init(engine.Layout(), device='cpu') as mesh: print(mesh.device, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu False\n", done.stderr


# ---- what HCCL cannot carry --------------------------------------------------------------------------------


class Recorder(Transport):
    """A transport for one of `size` ranks that all hold the same tensors; notes what would be sent."""

    name = "recorder"

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[tuple[str, torch.dtype, str]] = []

    def _reduced(self, x: Tensor, op: str) -> Tensor:
        if op == "sum":
            return torch.stack([x] * self.size).sum(0, dtype=x.dtype)
        return x**self.size if op == "prod" else x

    def all_reduce(self, x: Tensor, op: str) -> list[Any]:
        self.sent.append(("all_reduce", x.dtype, op))
        x.copy_(self._reduced(x, op))
        return []

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> list[Any]:
        self.sent.append(("reduce_scatter", x.dtype, op))
        out.copy_(self._reduced(x, op)[: len(out)])
        return []

    def all_gather(self, out: Tensor, x: Tensor) -> list[Any]:
        self.sent.append(("all_gather", x.dtype, ""))
        out.copy_(torch.cat([x] * self.size))
        return []

    def wait(self, works: list[Any]) -> None:
        assert works == []


@pytest.fixture
def hccl(monkeypatch: pytest.MonkeyPatch) -> tuple[Communicator, Recorder]:
    """Rank 0 of two on a CPU whose backend passes for HCCL."""
    monkeypatch.setitem(devices._BACKENDS, "cpu", "hccl")
    transport = Recorder(2)
    return Communicator("data", (0, 1), 0, CPU, where="rank 0", transport=transport), transport  # type: ignore[arg-type]


def test_hccl_reduces_three_floats_and_int32(hccl: Any) -> None:
    assert devices.reducible(CPU) == {torch.float32, torch.float16, torch.bfloat16, torch.int32}
    assert devices.exact_dtype(CPU) == torch.float32


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bool, torch.int64, torch.int8, torch.uint8, torch.complex64], ids=str
)
def test_what_hccl_cannot_reduce_is_refused_before_anything_is_sent(hccl: Any, dtype: torch.dtype) -> None:
    comm, transport = hccl
    for call in (comm.all_reduce, comm.reduce_scatter, lambda x: comm.reduce(x, 1)):
        with pytest.raises(DtypeError, match=f"{dtype}: use one of bfloat16, float16, float32, int32$"):
            call(torch.tensor([1, 0]).to(dtype))
    assert transport.sent == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_goes_to_hccl_as_a_sum(hccl: Any, dtype: torch.dtype) -> None:
    comm, transport = hccl
    mean = comm.all_reduce(torch.tensor([1.0, 3.0], dtype=dtype), "mean")
    part = comm.reduce_scatter(torch.tensor([5.0, 7.0], dtype=dtype), op="mean")
    assert mean.tolist() == [1.0, 3.0], "two equal summands have the mean that they have themselves"
    assert part.tolist() == [5.0]
    assert transport.sent == [("all_reduce", dtype, "sum"), ("reduce_scatter", dtype, "sum")]


def test_flags_and_comparisons_go_to_hccl_as_int32(hccl: Any) -> None:
    comm, transport = hccl
    assert [comm.any(True), comm.any(False)] == [True, False]
    comm.barrier()
    comm.check_equal("a value", (1, "x"))
    assert {dtype for _, dtype, _ in transport.sent} == {torch.int32}
    assert [op for call, _, op in transport.sent if call == "all_reduce"] == ["max"] * 3


def test_batch_norm_over_hccl_sends_float32_alone(hccl: Any) -> None:
    comm, transport = hccl
    rows = torch.arange(12.0).view(4, 3).sin()
    ours, plain = SyncBatchNorm(3, comm), nn.BatchNorm1d(3)
    x, both = rows.clone().requires_grad_(), torch.cat([rows, rows]).requires_grad_()
    y, wanted = ours(x), plain(both)
    y.square().square().sum().backward()
    wanted.square().square().sum().backward()
    torch.testing.assert_close(y, wanted[:4])
    torch.testing.assert_close(x.grad, both.grad[:4])
    torch.testing.assert_close(ours.running_var, plain.running_var)
    assert transport.sent == [("all_gather", torch.float32, ""), ("all_reduce", torch.float32, "sum")]


def test_a_flag_does_not_overflow_over_256_ranks() -> None:
    """256 summed bytes would be 0 again."""
    comm = Communicator("world", range(256), 0, CPU, where="rank 0", transport=Recorder(256))
    assert comm.any(True) is True
    assert comm.any(False) is False


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_equal_parts_give_equal_seeds_on_every_machine() -> None:
    assert devices.stream_seed("layer", 0, 0) == devices.stream_seed("layer", 0, 0)
    script = "from engine.device import stream_seed; print(stream_seed('step', 7, 1, 0, 42))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert devices.stream_seed("step", 7, 1, 0, 42) == int(other)


def test_different_parts_give_different_seeds() -> None:
    parts = [(name, seed, i, j) for name in ("layer", "step") for seed in range(3) for i in range(8) for j in range(8)]
    parts += [(12, 3), (1, 23), (123,), ("1", 2), (1, "2")]  # type: ignore[list-item]
    seeds = [devices.stream_seed(*each) for each in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_random_stream_depends_on_its_seed_alone() -> None:
    drawn = []
    for before, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(before)
        with devices.random_stream(seed, CPU):
            drawn.append(torch.rand(4))
    torch.manual_seed(7)
    assert torch.equal(drawn[0], torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("fails", [False, True])
def test_a_random_stream_puts_the_generator_back(fails: bool) -> None:
    torch.manual_seed(3)
    expected = torch.rand(6)
    torch.manual_seed(3)
    first = torch.rand(2)
    try:
        with devices.random_stream(99, CPU):
            torch.rand(5)
            with devices.random_stream(100, CPU):
                torch.rand(1)
            if fails:
                raise StopHereError
    except StopHereError:
        pass
    assert torch.equal(torch.cat([first, torch.rand(4)]), expected)
