"""The doctor: every status of every check from literal inputs, its children with planted faults, and whole runs."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.comm import doctor
from engine.comm.doctor import Child, Finding, MemoryFacts, TorchFacts
from engine.comm.doctor_checks import STAGING_GROUPS, STAGING_MIB

MIB = 2**20
INTERFACES = ["lo", "eth0", "eth1"]
PLAIN = TorchFacts("2.13.0+cpu", ("gloo",))
CUDA = TorchFacts("2.13.0", ("gloo", "nccl"), cuda_devices=2)
NPU = TorchFacts("2.7.1+cpu", ("gloo", "hccl"), npu_devices=8, npu_installed=True, npu_version="2.7.1.post2")
NO_CANN = TorchFacts(npu_installed=True, npu_version="2.7.1.post2", error="ImportError: libhccl.so: cannot open")


def expect(finding: Finding, status: str, *words: str) -> None:
    """`finding` has this status, a fix exactly when it is not ok, and each of `words` somewhere."""
    assert finding.status == status, finding
    assert bool(finding.fix) == (status != "ok"), finding
    for word in words:
        assert word in f"{finding.text} / {finding.fix}", (word, finding)


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        (PLAIN, "ok", "2.13.0+cpu"),
        (TorchFacts("2.7.1"), "warning", "tested 2.13"),
        (TorchFacts("2.14.0a0+git1"), "warning", "tested 2.13"),
        (TorchFacts("2.6.0"), "failure", "at least 2.7"),
        (TorchFacts(error="OSError: libtorch.so"), "failure", "libtorch.so"),
    ],
    ids=str,
)
def test_torch_version(facts: TorchFacts, status: str, word: str) -> None:
    expect(doctor.check_torch(facts), status, word)


@pytest.mark.parametrize(
    ("plain", "loaded", "device", "home", "cann", "status", "words"),
    [
        (PLAIN, PLAIN, "auto", "", "", "ok", ["not installed"]),
        (PLAIN, PLAIN, "npu", "", "", "failure", ["not installed"]),
        (NPU, NPU, "auto", "/cann", "8.5.0", "ok", ["CANN 8.5.0 in /cann"]),
        (NPU, NPU, "auto", "/cann", "8.3.RC1", "warning", ["CANN 8.3.RC1", "install CANN 8.5.0"]),
        (NPU, NPU, "auto", "/cann", "", "warning", ["unknown version in /cann"]),
        (NPU, NO_CANN, "auto", "", "", "failure", ["import torch (", "libhccl.so", "ASCEND_HOME_PATH", "CANN 8.5.0"]),
        (NPU, NO_CANN, "cpu", "", "", "warning", ["TORCH_DEVICE_BACKEND_AUTOLOAD=0"]),
        (
            TorchFacts("2.13.0", npu_installed=True, npu_version="2.7.1"),
            NPU,
            "npu",
            "/cann",
            "8.3.RC1",
            "warning",
            ["torch is 2.13.0", "install torch 2.7.1"],
        ),
        (
            TorchFacts("2.13.0", npu_installed=True, npu_version="2.13.0"),
            NPU,
            "npu",
            "/cann",
            "9.2.0",
            "warning",
            ["not in the table", "COMPATIBILITY.md"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torch_npu_and_cann(
    plain: TorchFacts, loaded: TorchFacts, device: str, home: str, cann: str, status: str, words: list[str]
) -> None:
    expect(doctor.check_torch_npu(plain, loaded, device, home, cann), status, *words)


@pytest.mark.parametrize(
    ("facts", "device", "status", "word"),
    [
        (PLAIN, "auto", "ok", "device cpu needs gloo"),
        (CUDA, "auto", "ok", "device cuda needs nccl"),
        (NPU, "auto", "ok", "device npu needs hccl"),
        (CUDA, "cpu", "ok", "device cpu needs gloo"),
        (PLAIN, "cuda", "failure", "install a torch with nccl"),
        (TorchFacts("2.13.0", ("gloo", "nccl")), "cuda", "failure", "at least 1 accelerator"),
        (TorchFacts("2.13.0"), "auto", "failure", "gloo no"),
    ],
)
def test_backends(facts: TorchFacts, device: str, status: str, word: str) -> None:
    expect(doctor.check_backends(facts, device), status, word)


@pytest.mark.parametrize(
    ("address", "environment", "hosts", "status", "word"),
    [
        ("127.0.1.1", {}, 1, "ok", "127.0.1.1"),
        ("", {}, 1, "ok", "nothing"),
        ("10.0.0.3", {"MASTER_ADDR": "10.0.0.3"}, 2, "ok", "10.0.0.3"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, 2, "ok", "127.0.1.1"),
        ("127.0.1.1", {}, 2, "warning", "set GLOO_SOCKET_IFNAME"),
        ("::1", {}, 2, "warning", "set GLOO_SOCKET_IFNAME"),
        ("", {}, 2, "warning", "set GLOO_SOCKET_IFNAME"),
        ("10.0.0.3", {"MASTER_ADDR": "localhost"}, 2, "warning", "set MASTER_ADDR"),
    ],
)
def test_address(address: str, environment: dict[str, str], hosts: int, status: str, word: str) -> None:
    expect(doctor.check_address("node7", address, environment, hosts), status, word)


@pytest.mark.parametrize(
    ("environment", "hosts", "status", "word"),
    [
        ({}, 2, "ok", "lo, eth0, eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, 2, "ok", "GLOO_SOCKET_IFNAME=eth0,eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, 1, "failure", "for eth;"),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, 1, "failure", "for ib0;"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 1, "ok", "lo"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 2, "warning", "loopback"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, 2, "ok", "eth"),
        ({"NCCL_SOCKET_IFNAME": "ib,eth1:5000"}, 2, "ok", "eth1"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, 2, "ok", "docker"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, 2, "failure", "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth"}, 2, "failure", "fits no interface;"),
        ({"HCCL_SOCKET_IFNAME": "=endvnic"}, 1, "failure", "HCCL_SOCKET_IFNAME"),
        ({"HCCL_SOCKET_IFNAME": "^=eth0,eth1"}, 2, "warning", "loopback"),
        ({"GLOO_SOCKET_IFNAME": "lo", "HCCL_SOCKET_IFNAME": "ib"}, 2, "failure", "HCCL_SOCKET_IFNAME"),
    ],
    ids=str,
)
def test_interfaces(environment: dict[str, str], hosts: int, status: str, word: str) -> None:
    expect(doctor.check_interfaces(environment, INTERFACES, hosts), status, word)


@pytest.mark.parametrize(
    ("environment", "status", "word"),
    [
        ({}, "ok", "not set"),
        ({"MASTER_PORT": "29500"}, "ok", "29500 is free"),
        ({"MASTER_PORT": "29501"}, "failure", "already in use"),
        ({"MASTER_PORT": "29501", "MASTER_ADDR": "node7"}, "failure", "already in use"),
        ({"MASTER_PORT": "29501", "MASTER_ADDR": "127.0.0.1"}, "failure", "already in use"),
        ({"MASTER_PORT": "29501", "MASTER_ADDR": "node8"}, "ok", "is node8's"),
        ({"MASTER_PORT": "29501", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "ok", "torchrun"),
        ({"MASTER_PORT": "70000"}, "failure", "1 to 65535"),
        ({"MASTER_PORT": "http"}, "failure", "1 to 65535"),
    ],
    ids=str,
)
def test_ports(environment: dict[str, str], status: str, word: str) -> None:
    def listen(port: int) -> str:
        return "already in use" if port == 29501 else ""

    expect(doctor.check_ports(environment, {"node7", "10.0.0.3"}, listen), status, word)
    expect(doctor.check_ports(environment, {"node7"}, lambda _: "not permitted"), "failure", "not permitted")


def test_a_port_that_is_listened_on_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        expect(
            doctor.check_ports({"MASTER_PORT": str(taken.getsockname()[1])}, {}, doctor._listen), "failure", "in use"
        )


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(8192, 4096, "ok"), (64, 64, "warning"), (8192, 63, "warning"), (65, 65, "ok"), (0, 0, "warning")],
)
def test_dev_shm(total: int, free: int, status: str) -> None:
    expect(doctor.check_dev_shm(total * MIB, free * MIB), status, f"{free} of {total} MiB")


@pytest.mark.parametrize(
    ("facts", "asked", "status", "words"),
    [
        (MemoryFacts("shm"), "", "ok", ["take shm (ENGINE_TRANSPORT is not set)", "memfd_create"]),
        (MemoryFacts("torch"), "torch", "ok", ["take torch (ENGINE_TRANSPORT=torch)"]),
        (
            MemoryFacts("torch", missing="memfd_create"),
            "",
            "warning",
            ["take torch", "this system has no memfd_create"],
        ),
        (MemoryFacts(error="UsageError: choose"), "shn", "failure", ["none: ENGINE_TRANSPORT=shn: UsageError: choose"]),
        (MemoryFacts(error="torch cannot be imported"), "", "failure", ["imported", "mend what torch says"]),
    ],
)
def test_transport(facts: MemoryFacts, asked: str, status: str, words: list[str]) -> None:
    expect(doctor.check_transport(facts, asked), status, *words)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (MemoryFacts("shm", "", 9000 * MIB, "MemAvailable"), "ok", ["9,000 MiB may be taken (MemAvailable)"]),
        (MemoryFacts("shm", "", 256 * MIB, "MemAvailable"), "ok", ["256 MiB"]),
        (
            MemoryFacts("shm", "", 256 * MIB - 1, "memory cgroup /job: limit 512.0 MiB, in use 256.1 MiB"),
            "warning",
            ["255 MiB may be taken (memory cgroup /job: limit 512.0 MiB", "up to 256 MiB", "staging_mib"],
        ),
        (MemoryFacts("shm", "", 9000 * MIB, "", "PermissionError: memfd"), "failure", ["PermissionError", "seccomp"]),
        (MemoryFacts("torch", "", 9000 * MIB, "", "PermissionError: memfd"), "warning", ["PermissionError"]),
        (MemoryFacts("torch", "memfd_create"), "ok", ["not looked at"]),
        (MemoryFacts(error="torch cannot be imported"), "ok", ["not looked at"]),
    ],
)
def test_shared_memory(facts: MemoryFacts, status: str, words: list[str]) -> None:
    expect(doctor.check_shared_memory(facts), status, *words)


def test_memory_is_looked_at_as_the_engine_does() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "ENGINE_TRANSPORT"}
    facts = doctor.look_at_memory(plain)
    assert (facts.transport, facts.missing, facts.error) == ("shm", "", "")
    assert facts.available > 0
    assert facts.bound == "MemAvailable" or facts.bound.startswith("memory cgroup ")
    wrong = doctor.look_at_memory({**plain, "ENGINE_TRANSPORT": "shn"})
    assert wrong.transport == ""
    assert wrong.error.startswith("UsageError: the environment's ENGINE_TRANSPORT='shn'")


def test_the_staging_that_is_asked_for_is_the_engines_default() -> None:
    assert inspect.signature(engine.init).parameters["staging_mib"].default == STAGING_MIB
    assert len(engine.layout.AXES) + 1 == STAGING_GROUPS


@pytest.mark.parametrize(
    ("soft", "hard", "status", "word"),
    [
        (1024, 4096, "ok", "1024"),
        (-1, -1, "ok", "soft limit none"),
        (256, -1, "warning", "ulimit -n 65536"),
        (1023, 4096, "warning", "ulimit -n 4096"),
        (256, 512, "warning", "raise the hard limit"),
    ],
)
def test_open_files(soft: int, hard: int, status: str, word: str) -> None:
    expect(doctor.check_open_files(soft, hard), status, word)


@pytest.mark.parametrize(
    ("children", "status", "word"),
    [
        ([Child(0, "\nnoise\ndoctor:0.0025\nmore\n", ""), Child(0, "", "")], "ok", "2.50 ms"),
        ([Child(None, "", ""), Child(1, "", "Traceback\nRuntimeError: no route\n\n")], "failure", "rank 1 of 2 died"),
        ([Child(0, "", ""), Child(None, "", "")], "failure", "ranks [1] of 2 were not done within 20 s"),
    ],
)
def test_all_reduce(children: list[Child], status: str, word: str) -> None:
    expect(doctor.check_all_reduce(children, 20.0), status, word)


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 1),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "4"}, 3),
        ({"WORLD_SIZE": "8"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"}, 1),
    ],
    ids=str,
)
def test_hosts_meant(environment: dict[str, str], hosts: int) -> None:
    assert doctor.hosts_meant(environment) == hosts


def test_cann_version_is_read_from_the_installers_note(tmp_path: Path) -> None:
    note = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    note.parent.mkdir()
    note.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100\n")
    assert doctor._cann_version(str(tmp_path)) == "8.5.0"
    assert doctor._cann_version(str(tmp_path / "gone")) == doctor._cann_version("") == ""


def hang(folder: str, rank: str) -> None:
    """Never end."""
    import signal

    signal.pause()


def die_as_rank_1(folder: str, rank: str) -> None:
    """Rank 1 is killed as the kernel would; rank 0 waits for ever."""
    import os
    import signal

    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files, which a test may find empty afterwards."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_hanging_ranks_are_ended_at_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def noted(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*given, **options))
        return started[-1]

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", noted)
    began = time.monotonic()
    finding = doctor.time_all_reduce(dict(os.environ), worker=hang, limit=1.0)
    assert time.monotonic() - began < 20
    expect(finding, "failure", "ranks [0, 1] of 2", "1 s")
    assert len(started) == 2
    for each in started:
        with pytest.raises(ProcessLookupError):
            os.kill(each.pid, 0)
    assert not list(folder.iterdir())


def test_a_dead_rank_ends_the_other_at_once(folder: Path) -> None:
    start = time.monotonic()
    finding = doctor.time_all_reduce(dict(os.environ), worker=die_as_rank_1, limit=60.0)
    assert time.monotonic() - start < 30
    expect(finding, "failure", f"rank 1 of 2 died with status {-signal.SIGKILL}")
    assert not list(folder.iterdir())


def plant_torch_npu(folder: Path) -> dict[str, str]:
    """Install a torch_npu that finds no CANN, entry point for autoload included; return an environment with it."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu/__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    info = folder / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    paths = [str(folder), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        environment.pop(name, None)
    return environment


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_torch_npu_without_cann_is_a_finding(tmp_path: Path) -> None:
    """Started by its path the doctor reports what `-m` cannot get to: there `import engine` is already over."""
    environment = plant_torch_npu(tmp_path)
    result = run([str(doctor.__file__), "--no-all-reduce"], environment)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("failure"))
    assert "import torch (which loads torch_npu by itself) fails: ImportError: libhccl.so" in line
    assert "torch_npu 2.13.0, no CANN: ASCEND_HOME_PATH is not set" in line

    by_module = run(["-m", "engine.comm.doctor", "--no-all-reduce"], environment)
    assert "fails: ImportError: libhccl.so" in by_module.stdout


def test_dead_probe_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos._exit(7)\n")
    facts = doctor.look_at_torch({**os.environ, "PYTHONPATH": str(tmp_path)}, autoload=False)
    expect(doctor.check_torch(facts), "failure", "died with status 7")
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    facts = doctor.look_at_torch({**os.environ, "PYTHONPATH": str(tmp_path)}, autoload=False, limit=0.5)
    expect(doctor.check_torch(facts), "failure", "not done within 0.5 s")


def test_whole_run() -> None:
    result = run(["-m", "engine.comm.doctor", "--device", "cpu"], dict(os.environ))
    assert result.returncode == 0, result.stdout + result.stderr
    names = ("torch", "torch_npu, CANN", "backends", "address", "interfaces", "ports", "transport", "shared memory")
    for name in (*names, "/dev/shm", "open files", "all-reduce"):
        assert any(line[9:].startswith(f"{name} ") for line in result.stdout.splitlines()), (name, result.stdout)
    assert "ms for 1 MiB" in result.stdout


def test_lines_are_aligned_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("ports", "ok", "free"), Finding("open files", "failure", "too few", "ulimit")]
    monkeypatch.setattr(doctor, "gather", lambda *_, **__: findings)
    assert doctor.main(["--hosts", "2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       ports       free",
        "failure  open files  too few",
        "                     fix: ulimit",
        "not fit for the engine; failures: 1, warnings: 0",
    ]
    monkeypatch.setattr(doctor, "gather", lambda *_, **__: findings[:1])
    assert doctor.main([]) == 0
    with pytest.raises(SystemExit):
        doctor.main(["--hosts", "0"])
