"""Who may share memory at all: processes of one user, on a system that has what it takes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine import Layout
from engine.comm import start
from engine.comm.shm import links
from engine.comm.transport import BackendError
from engine.errors import UsageError
from tests.world import World

CPU = torch.device("cpu")
OTHER = 65534  # nobody
LIMIT = 20.0  # seconds for a connection

# ---- one user --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_user(really: bool) -> Iterator[None]:
    """Run as another user. Only root can; else this process takes itself for another, which the kernel does not."""
    effective = os.geteuid
    if really:
        os.seteuid(OTHER)
    else:
        os.geteuid = lambda: OTHER
    try:
        yield
    finally:
        if really:
            os.seteuid(0)
        os.geteuid = effective


def meet(rank: int, size: int, store: str, refuser: int) -> str:
    """Rank 1, of another user, connects to rank 0. Rank 1 looks at the listener's user, or, if it does not look,
    rank 0 at the caller's. Returns what the refuser raises.
    """
    rendezvous, root = dist.FileStore(store, size), os.geteuid() == 0
    listener = links.Listener()
    check = links._check_owner
    try:
        if rank == 0:
            rendezvous.set("address", listener.address)
            if refuser == 1:
                rendezvous.get("refused")  # until then there is a listener
                return ""
            with contextlib.nullcontext() if root else another_user(False):
                try:
                    listener.connect([(0, 0, {1: ""})], LIMIT)
                finally:
                    rendezvous.get("called")  # both of the caller's sockets find a listener
            return "no error"
        address = rendezvous.get("address").decode()
        if refuser == 0:
            links._check_owner = lambda *_: None  # a program that does not look
        with another_user(root) if root or refuser == 1 else contextlib.nullcontext():
            listener.connect([(0, 1, {0: address})], LIMIT)
        return "no error"
    except UsageError as error:
        return str(error)
    finally:
        links._check_owner = check
        rendezvous.set("refused" if refuser == 1 else "called", "")
        listener.close()


@pytest.mark.parametrize("refuser", [0, 1], ids=["listener", "caller"])
def test_a_process_of_another_user_is_refused_with_both_users(world: World, refuser: int) -> None:
    text = world.run(2, meet, refuser, mesh=False)[refuser]
    ours = os.geteuid()
    own, other = (ours, OTHER) if refuser == 0 and ours == 0 else (OTHER, ours)
    assert f"run as different users ({own} and {other}) and cannot share memory" in text
    assert "ENGINE_TRANSPORT=torch" in text


def test_a_rank_that_calls_too_late_still_hears_why_it_is_refused() -> None:
    gone, late = links.Listener(), links.Listener()
    try:
        links._refuse(late.address, "another user")
        gone.close()
        with pytest.raises(UsageError, match="another user"):
            late.connect([(0, 1, {0: gone.address})], LIMIT)
        with pytest.raises(BackendError, match="has left while the mesh opened"):
            late.connect([(0, 1, {0: gone.address})], LIMIT)  # nobody has said why
    finally:
        late.close()


# ---- what the system has ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "memfd_create"), (os, "posix_fallocate"), (socket, "SO_PEERCRED")],
    ids=["memfd_create", "posix_fallocate", "SO_PEERCRED"],
)
def test_a_system_without_what_it_takes_has_torch(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    monkeypatch.delenv("ENGINE_TRANSPORT", raising=False)
    assert start.choose_transport(None, CPU) == start.choose_transport("shm", CPU) == "shm"
    monkeypatch.delattr(where, name)
    assert start.choose_transport(None, CPU) == start.choose_transport("torch", CPU) == "torch"
    wanted = f"='shm' needs {name}, which this system does not have: take 'torch'"
    with pytest.raises(UsageError, match=f"transport{wanted}"):
        start.choose_transport("shm", CPU)
    monkeypatch.setenv("ENGINE_TRANSPORT", "shm")
    with pytest.raises(UsageError, match=f"ENGINE_TRANSPORT{wanted}"):
        start.choose_transport(None, CPU)


def open_without(rank: int, size: int, store: str, transport: str | None) -> Any:
    missing, asked = start.missing, os.environ.pop("ENGINE_TRANSPORT", None)
    start.missing = lambda: "memfd_create, /proc/self/fd"
    try:
        where: Any = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size, "transport": transport}
        with engine.init(Layout(data=size), device="cpu", timeout=LIMIT, **where) as mesh:
            total = mesh.data.all_reduce(torch.full((3,), rank + 1.0)).tolist()
            return mesh.data.transport, total, mesh.memory()
    except UsageError as error:
        return str(error)
    finally:
        start.missing = missing
        if asked is not None:
            os.environ["ENGINE_TRANSPORT"] = asked


def test_ranks_of_such_a_system_take_torch_or_say_what_is_missing(world: World) -> None:
    assert world.run(2, open_without, None, mesh=False) == [("torch", [3.0] * 3, {})] * 2
    for text in world.run(2, open_without, "shm", mesh=False):
        assert "transport='shm' needs memfd_create, /proc/self/fd, which this system does not have" in text
