"""Whose failure an error is: a peer's is told with what the others do, this process's own passes as it is."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm.transport import BackendError, TorchTransport, Transport
from engine.errors import CommunicationError
from tests.world import World

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class Failing:
    """A work, or a call, that ends in an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("phase", ["start", "wait"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), BackendError),
        (dist.DistBackendError("NCCL error: remote process exited"), BackendError),
        (RuntimeError(NO_MEMORY), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (ValueError("invalid tensor"), ValueError),
    ],
    ids=["gloo", "nccl", "cpu-memory", "cuda-memory", "value"],
)
def test_what_torchs_groups_raise_is_the_backends_unless_memory_is_short(
    error: Exception, kind: type[Exception], phase: str
) -> None:
    transport = TorchTransport.__new__(TorchTransport)
    transport.group = cast(Any, SimpleNamespace(allreduce=Failing(error)))
    calls = {"start": partial(transport._start, "allreduce"), "wait": partial(transport.wait, [Failing(error)])}
    with pytest.raises(kind) as caught:
        calls[phase]()
    assert type(caught.value) is kind
    assert str(caught.value) == str(error)


class Broken(Transport):
    """A transport of two ranks whose all-reduce fails when it starts, or when it is waited for."""

    name = "broken"
    ranks = (0, 1)

    def __init__(self, error: Exception, phase: str) -> None:
        self.error, self.phase = error, phase

    def all_reduce(self, *_: Any) -> list[Any]:
        if self.phase == "start":
            raise self.error
        return [Failing(self.error)]

    def wait(self, works: list[Any]) -> None:
        for work in works:
            work.wait()


@pytest.mark.parametrize("phase", ["start", "wait", "work"])
@pytest.mark.parametrize("kind", [RuntimeError, BackendError, KeyboardInterrupt])
def test_only_a_transports_own_kind_of_error_is_told_as_a_peers(kind: Any, phase: str) -> None:
    error = kind("planted")
    transport: Any = Broken(error, phase)
    comm = engine.Communicator("data", (0, 1), 0, torch.device("cpu"), where="rank 0", transport=transport)

    def call() -> None:
        if phase == "work":
            comm.all_reduce(torch.ones(4), async_op=True, algorithm="native").wait()
        comm.all_reduce(torch.ones(4), algorithm="native")

    with pytest.raises(CommunicationError if kind is BackendError else kind) as caught:
        call()
    assert comm.failed is comm.current is not None, "whoever asks hears that it failed"
    if kind is BackendError:
        assert "Another rank has stopped" in str(caught.value)
        assert caught.value.__cause__ is error
    else:
        assert caught.value is error
        assert "planted" in comm.fault


def run_out_of_memory(rank: int, size: int, store: str) -> tuple[str, str]:
    """Rank 1 fails inside the engine's own algorithm, where it makes room for what arrives."""
    where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size}
    told = dist.FileStore(f"{store}.told", size)
    with engine.init(Layout(data=size), device="cpu", timeout=4.0, **where) as mesh:
        mesh.data.all_reduce(torch.ones(8), algorithm="ring")
        assert mesh.data._messenger is not None
        if rank == 1:
            mesh.data._messenger.take = Failing(RuntimeError(NO_MEMORY))  # type: ignore[method-assign]
        try:
            mesh.data.all_reduce(torch.ones(8), algorithm="ring")
        except RuntimeError as error:
            if rank == 1:
                told.wait(["told"], timedelta(seconds=30))
            else:
                told.set("told", "")
            return type(error).__name__, str(error)
    return "no error", ""


def test_a_rank_that_fails_by_itself_says_so_and_its_peers_name_it(world: World) -> None:
    (theirs, text), own = world.run(2, run_out_of_memory, mesh=False)
    assert own == ("RuntimeError", NO_MEMORY)
    assert theirs == "CommunicationError"
    assert "rank 1 failed by itself, RuntimeError: [enforce fail" in text
    assert "DefaultCPUAllocator" in text
