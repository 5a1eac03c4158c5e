"""`python -m engine.comm.doctor`: is this machine fit for the engine, and if not, what to change.

Not a benchmark, and it looks at one host only. This file, and the packages above it, import the standard library alone:
torch is looked at in child processes with a time limit, so whatever it does is a finding, also where `import torch`
itself fails (torch_npu without CANN: torch loads installed backends by itself). Facts about torch_npu and CANN are from
COMPATIBILITY.md of Ascend/pytorch and from torch_npu's sources; they were not run on an NPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import ipaddress
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "failure"]
MINIMUM_TORCH, TESTED_TORCH = (2, 7), (2, 13)
PROBE_LIMIT, ALL_REDUCE_LIMIT = 60.0, 20.0  # seconds
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_MIB = 2**20
_CANN_FOR = {
    **dict.fromkeys(("2.7.1", "2.8.0"), "8.3.RC1"),
    **dict.fromkeys(("2.7.1.post2", "2.8.0.post2", "2.9.0"), "8.5.0"),
    **dict.fromkeys(("2.7.1.post4", "2.8.0.post4", "2.9.0.post2"), "9.0.0"),
    **dict.fromkeys(("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"), "9.1.0"),
}


@dataclass(frozen=True)
class Finding:
    """What one check saw; `fix` says what to change and is empty when the status is ok."""

    name: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What a child process saw of torch. Empty `version`: torch could not be imported; `error` says why."""

    version: str = ""
    backends: Sequence[str] = ()
    cuda_devices: int = 0
    npu_devices: int = 0
    npu_installed: bool = False
    npu_version: str = ""
    error: str = ""


@dataclass(frozen=True)
class Child:
    """How a child process ended: its exit status (None: ended by us) and what it wrote."""

    code: int | None
    output: str
    errors: str


def check_torch(facts: TorchFacts) -> Finding:
    """Compare torch's version with the minimum and the tested one."""
    tested, minimum = (".".join(map(str, version)) for version in (TESTED_TORCH, MINIMUM_TORCH))
    if not facts.version:
        return Finding("torch", "failure", f"import torch fails: {facts.error}", f"install torch {tested}")
    version = tuple(int(part) for part in re.findall(r"\d+", facts.version)[:2])
    text = f"torch {facts.version}, tested {tested}, minimum {minimum}"
    if version < MINIMUM_TORCH:
        return Finding("torch", "failure", text, f"install torch {tested}, at least {minimum}")
    if version != TESTED_TORCH:
        return Finding("torch", "warning", text, f"install torch {tested}, or run the engine's tests with this one")
    return Finding("torch", "ok", text)


def check_torch_npu(plain: TorchFacts, loaded: TorchFacts, device: str, home: str, cann: str) -> Finding:
    """Say whether torch_npu, where installed, loads and fits torch and CANN.

    `plain` is torch without its backend extensions, `loaded` torch as a program gets it, `device` what the user asked
    for, `home` ASCEND_HOME_PATH, `cann` the version installed there ("": unknown).
    """
    name, version, base = "torch_npu, CANN", plain.npu_version or "of unknown version", _base(plain.npu_version)
    if not plain.npu_installed:
        if device == "npu":
            fix = "install the torch_npu of this torch's version, and CANN"
            return Finding(name, "failure", "--device npu needs torch_npu, which is not installed", fix)
        return Finding(name, "ok", "not installed, not needed without Ascend NPUs")
    wanted = _CANN_FOR.get(plain.npu_version.split("+")[0], "")
    install = f"install CANN {wanted or 'of the release that COMPATIBILITY.md of Ascend/pytorch names'}"
    state = f"CANN {cann or 'of unknown version'} in {home}" if home else "no CANN: ASCEND_HOME_PATH is not set"
    if loaded.error:
        what = "import torch_npu" if loaded.version else "import torch (which loads torch_npu by itself)"
        text = f"{what} fails: {loaded.error}; torch_npu {version}, {state}"
        fix = f"{install} and source its set_env.sh; without NPUs uninstall torch_npu or set {_AUTOLOAD}=0"
        return Finding(name, "warning" if device in ("cpu", "cuda") else "failure", text, fix)
    if base != _base(plain.version):
        fix = f"install torch {base or 'of the same version'}, or the torch_npu of torch {_base(plain.version)}"
        text = f"torch_npu {version} needs torch of the same version, but torch is {plain.version}"
        return Finding(name, "warning", text, fix)
    text = f"torch_npu {version} loads; it wants CANN {wanted or '(not in the table of versions)'}; {state}"
    if not wanted or not cann.upper().startswith(wanted):
        return Finding(name, "warning", text, f"{install} and source its set_env.sh")
    return Finding(name, "ok", text)


def check_backends(facts: TorchFacts, device: str) -> Finding:
    """Say which backends and accelerators torch shows, and whether those that `device` needs are among them."""
    if device == "auto":
        device = "npu" if facts.npu_devices else "cuda" if facts.cuda_devices else "cpu"
    needed = _BACKENDS[device]
    shown = ", ".join(f"{name} {'yes' if name in facts.backends else 'no'}" for name in _BACKENDS.values())
    text = f"{shown}; {facts.cuda_devices} CUDA devices, {facts.npu_devices} NPUs; device {device} needs {needed}"
    if needed not in facts.backends:
        return Finding("backends", "failure", text, f"install a torch with {needed}, or choose another --device")
    if {"cuda": facts.cuda_devices, "npu": facts.npu_devices}.get(device, 1) == 0:
        fix = f"show at least 1 {device} device to this process (driver, *_VISIBLE_DEVICES), or choose another --device"
        return Finding("backends", "failure", f"{text} and at least 1 accelerator", fix)
    return Finding("backends", "ok", text)


def check_address(host: str, address: str, environment: Mapping[str, str], hosts: int) -> Finding:
    """Say which address other hosts would be told: gloo takes the one that the host's name resolves to ("": none)."""
    text = f"{host} resolves to {address or 'nothing, so gloo takes loopback'}; {hosts} host{'s' * (hosts > 1)} meant"
    if hosts > 1:
        master = environment.get("MASTER_ADDR", "")
        if master and _is_loopback(master):
            text = f"MASTER_ADDR={master} is loopback, which no other of {hosts} hosts can reach"
            return Finding("address", "warning", text, "set MASTER_ADDR to an address of rank 0's host on every host")
        if (not address or _is_loopback(address)) and not environment.get("GLOO_SOCKET_IFNAME"):
            fix = "set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts, or correct /etc/hosts"
            return Finding("address", "warning", f"{text}, which cannot reach loopback", fix)
    return Finding("address", "ok", text)


def check_interfaces(environment: Mapping[str, str], interfaces: Sequence[str], hosts: int) -> Finding:
    """Hold the *_SOCKET_IFNAME variables against the interfaces that exist; a failure goes before a warning."""
    there = ", ".join(interfaces)
    asked = {variable: environment[variable] for variable in _INTERFACE_VARIABLES if environment.get(variable)}
    shown = ", ".join(f"{variable}={value}" for variable, value in asked.items())
    finding = Finding("interfaces", "ok", f"{there}; {shown or 'no *_SOCKET_IFNAME set'}")
    for variable, value in asked.items():
        gloo = variable.startswith("GLOO")
        chosen, missing = _choose_interfaces(value, interfaces, exact=gloo)
        if not chosen or (gloo and missing):
            text = (
                f"{variable}={value} fits no interface{' for ' * bool(missing)}{', '.join(missing)}; there are {there}"
            )
            return Finding("interfaces", "failure", text, f"let {variable} name one of those, or unset it")
        if hosts > 1 and all(name.startswith("lo") for name in chosen):
            text = f"{variable}={value} chooses loopback, but {hosts} hosts are meant; there are {there}"
            fix = f"set {variable} to the interface that reaches the other hosts"
            finding = Finding("interfaces", "warning", text, fix)
    return finding


def check_ports(environment: Mapping[str, str], own_names: Collection[str], listen: Callable[[int], str]) -> Finding:
    """Say whether a listening socket can be opened, and MASTER_PORT where this host is the master.

    `listen(port)` returns why it could not listen, or ""; port 0 is any free one.
    """
    port, master = environment.get("MASTER_PORT", ""), environment.get("MASTER_ADDR", "")
    text, fix = "a listening socket can be opened", "set MASTER_PORT to a free port"
    if error := listen(0):
        return Finding("ports", "failure", f"no port to listen on: {error}", "allow this process to open TCP sockets")
    if not port:
        return Finding("ports", "ok", f"{text}; MASTER_PORT is not set")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        return Finding("ports", "failure", f"MASTER_PORT={port}, but ports go from 1 to 65535", fix)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Finding("ports", "ok", f"{text}; MASTER_PORT={port} is held by the torchrun that started this")
    if master and master not in own_names and not _is_loopback(master):
        return Finding("ports", "ok", f"{text}; MASTER_PORT={port} is {master}'s: only the doctor there can try it")
    if error := listen(int(port)):
        return Finding("ports", "failure", f"MASTER_PORT={port} is not free: {error}", fix)
    return Finding("ports", "ok", f"{text}; MASTER_PORT={port} is free")


def check_shared_memory(total: int, free: int) -> Finding:
    """Judge the size of /dev/shm, in bytes (total 0: there is none). Docker's default of 64 MiB is too small."""
    text = f"/dev/shm: {free // _MIB} of {total // _MIB} MiB free"
    if free <= 64 * _MIB:
        fix = "free some, or start the container with --shm-size=8g or --ipc=host"
        return Finding("shared memory", "warning", f"{text}, more than 64 MiB are wanted", fix)
    return Finding("shared memory", "ok", text)


def check_open_files(soft: int, hard: int) -> Finding:
    """Judge the limit of open files, counting sockets (a negative number: no limit)."""
    text = "soft limit {}, hard limit {}".format(*("none" if limit < 0 else limit for limit in (soft, hard)))
    if not 0 <= soft < 1024:
        return Finding("open files", "ok", text)
    most = 65536 if hard < 0 else min(hard, 65536)
    fix = f"ulimit -n {most}" if most >= 1024 else "raise the hard limit: limits.conf, or docker --ulimit nofile=65536"
    return Finding("open files", "warning", f"{text}, at least 1024 are wanted", fix)


def check_all_reduce(children: Sequence[Child], limit: float) -> Finding:
    """Judge how the children of the small all-reduce ended; the first one's answer is its median seconds."""
    size, fix = (
        len(children),
        "look at the findings on address, interfaces and ports; GLOO_SOCKET_IFNAME=lo tries loopback",
    )
    for rank, child in enumerate(children):
        if child.code not in (None, 0):
            text = f"rank {rank} of {size} died with status {child.code}: {_last_line(child.errors)}"
            return Finding("all-reduce", "failure", text, fix)
    if hanging := [rank for rank, child in enumerate(children) if child.code is None]:
        text = f"ranks {hanging} of {size} were not done within {limit:g} s and were ended"
        return Finding("all-reduce", "failure", text, fix)
    seconds = float(_answer(children[0]) or "nan")
    return Finding("all-reduce", "ok", f"{seconds * 1e3:.2f} ms for 1 MiB over gloo between {size} ranks of this host")


def run_children(
    worker: Callable[..., None], arguments: Sequence[Sequence[str]], environment: Mapping[str, str], limit: float
) -> list[Child]:
    """Run `worker(folder, *arguments[i])` in one child each; `folder` is a new one, removed at the end.

    All are ended, by their id, once one has failed or `limit` seconds have passed. `worker` is a function at the top of
    its module, with its imports in its body and annotations of built-in types only.
    """
    # The child gets the function's source: importing it by name would import engine, and so torch, before its time.
    source = f"{inspect.getsource(worker)}\n{worker.__name__}(*__import__('sys').argv[1:])"
    with tempfile.TemporaryDirectory(prefix="engine-doctor-", ignore_cleanup_errors=True) as folder:
        # Files, not pipes: nobody has to read them while the children run.
        files = [(Path(folder, f"out{index}"), Path(folder, f"err{index}")) for index in range(len(arguments))]
        processes: list[subprocess.Popen[bytes]] = []
        killed: set[int] = set()
        try:
            deadline = time.monotonic() + limit
            for given, (output, errors) in zip(arguments, files, strict=True):
                command = [sys.executable, "-c", source, folder, *given]
                with output.open("wb") as out, errors.open("wb") as err:
                    processes.append(
                        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                    )
            while alive := [process for process in processes if process.poll() is None]:
                if time.monotonic() > deadline or any(process.returncode for process in processes):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    alive[0].wait(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    killed.add(process.pid)
                    process.kill()
                    process.wait()
        codes = [None if process.pid in killed else process.returncode for process in processes]
        texts = [[file.read_text(errors="replace") for file in pair] for pair in files]
    return [Child(code, *pair) for code, pair in zip(codes, texts, strict=True)]


def look_at_torch(environment: Mapping[str, str], *, autoload: bool, limit: float = PROBE_LIMIT) -> TorchFacts:
    """Import torch in a child, with the installed backend extensions (`autoload`) or without any."""
    environment = {**environment, _AUTOLOAD: str(int(autoload))}
    (child,) = run_children(_describe_torch, [["yes" if autoload else "no"]], environment, limit)
    if child.code == 0 and (answer := _answer(child)):
        return TorchFacts(**json.loads(answer))
    ended = f"not done within {limit:g} s" if child.code is None else f"died with status {child.code}"
    installed = importlib.util.find_spec("torch_npu") is not None
    return TorchFacts(npu_installed=installed, error=f"{ended}: {_last_line(child.errors)}")


def _describe_torch(folder: str, load_npu: str) -> None:  # noqa: ARG001
    """Print TorchFacts as JSON. Runs in a child."""
    import contextlib
    import importlib.metadata
    import importlib.util
    import json
    import sys

    found: dict[str, object] = {"npu_installed": importlib.util.find_spec("torch_npu") is not None, "backends": []}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["npu_version"] = importlib.metadata.version("torch_npu")
    try:
        import torch

        found["version"] = torch.__version__
        if load_npu == "yes" and found["npu_installed"]:
            found["npu_devices"] = importlib.import_module("torch_npu").npu.device_count()
        import torch.distributed as dist

        if dist.is_available():
            found["backends"] = [name for name in ("gloo", "nccl", "hccl") if dist.is_backend_available(name)]
        found["cuda_devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except BaseException as error:
        # torch wraps what an extension raised; the first cause names the missing library.
        cause = error
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__ or cause
        found["error"] = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    sys.stdout.write(f"\ndoctor:{json.dumps(found)}\n")


def _all_reduce_one_mib(folder: str, rank: str) -> None:
    """All-reduce 1 MiB a hundred times as one of two ranks and print the median seconds. Runs in a child."""
    import statistics
    import sys
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=15)
    # file:// makes a FileStore: no port is needed to meet.
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=limit, rank=int(rank), world_size=2)
    tensor = torch.full((2**18,), 1.0 + int(rank))
    dist.all_reduce(tensor)
    if not bool((tensor == 3).all()):
        raise RuntimeError(f"1 + 2 over two ranks gave {tensor.unique().tolist()[:5]}")
    seconds = []
    for _ in range(100):
        tensor.zero_()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    sys.stdout.write(f"\ndoctor:{statistics.median(seconds)}\n")


def time_all_reduce(
    environment: Mapping[str, str],
    *,
    worker: Callable[[str, str], None] = _all_reduce_one_mib,
    limit: float = ALL_REDUCE_LIMIT,
) -> Finding:
    """Let two child processes meet through a file and all-reduce 1 MiB over gloo. `worker` replaces what they run."""
    return check_all_reduce(run_children(worker, [["0"], ["1"]], {**environment, _AUTOLOAD: "0"}, limit), limit)


def gather(device: str, hosts: int, *, all_reduce: bool) -> list[Finding]:
    """Look at this machine and return every finding, in the order in which they are printed."""
    environment = dict(os.environ)
    plain = look_at_torch(environment, autoload=False)
    loaded = look_at_torch(environment, autoload=True) if plain.npu_installed else plain
    host, home = socket.gethostname(), environment.get("ASCEND_HOME_PATH", "")
    address = _resolve(host)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    sizes = (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize) if shm else (0, 0)
    findings = [
        check_torch(plain),
        check_torch_npu(plain, loaded, device, home, _cann_version(home)),
        check_backends(plain if loaded.error else loaded, device),
        check_address(host, address, environment, hosts),
        check_interfaces(environment, [name for _, name in socket.if_nameindex()], hosts),
        check_ports(environment, {host, address}, _listen),
        check_shared_memory(*sizes),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]
    if not all_reduce:
        return [*findings, Finding("all-reduce", "ok", "not tried (--no-all-reduce)")]
    if "gloo" not in plain.backends:
        fix = "first mend what torch and backends say"
        return [*findings, Finding("all-reduce", "warning", "not tried: it needs a torch with gloo", fix)]
    return [*findings, time_all_reduce(environment)]


def hosts_meant(environment: Mapping[str, str]) -> int:
    """Return how many hosts torchrun's environment speaks of: WORLD_SIZE / LOCAL_WORLD_SIZE, rounded up, else 1."""
    world, local = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return max(1, -(-int(world) // int(local))) if world.isdecimal() and local.isdecimal() and int(local) else 1


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the report: a line for each finding, its fix below it, and the verdict."""
    width = max(len(finding.name) for finding in findings)
    report = []
    for finding in findings:
        report.append(f"{finding.status:<7}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            report.append(f"{'':<7}  {'':<{width}}  fix: {finding.fix}")
    failures, warnings = (sum(finding.status == status for finding in findings) for status in ("failure", "warning"))
    return [*report, f"{'not fit' if failures else 'fit'} for the engine; failures: {failures}, warnings: {warnings}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if anything failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m engine.comm.doctor", description="Is this machine fit?")
    parser.add_argument("--hosts", type=int, help="hosts of the job (default: from torchrun's environment)")
    parser.add_argument("--device", choices=["auto", *_BACKENDS], default="auto", help="what the job shall run on")
    parser.add_argument("--no-all-reduce", action="store_true", help="leave out the all-reduce of two processes")
    options = parser.parse_args(arguments)
    hosts = hosts_meant(os.environ) if options.hosts is None else options.hosts
    if hosts < 1:
        parser.error(f"--hosts {hosts}: a job has at least 1 host")
    findings = gather(options.device, hosts, all_reduce=not options.no_all_reduce)
    sys.stdout.write("\n".join(lines(findings)) + "\n")
    return int(any(finding.status == "failure" for finding in findings))


def _choose_interfaces(value: str, interfaces: Sequence[str], *, exact: bool) -> tuple[list[str], list[str]]:
    """Return the interfaces that `value` chooses, and its names that fit none; gloo's are exact, NCCL's and HCCL's are
    prefixes, after `=` exact, after `^` excluded."""
    excluded, exact = value.startswith("^"), exact or value.lstrip("^").startswith("=")
    names = [name if exact else name.split(":")[0] for name in value.lstrip("^=").split(",") if name]

    def fits(interface: str, name: str) -> bool:
        return interface == name if exact else interface.startswith(name)

    chosen = [interface for interface in interfaces if any(fits(interface, name) for name in names) != excluded]
    missing = [name for name in names if not any(fits(interface, name) for interface in interfaces)]
    return chosen, [] if excluded else missing


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _listen(port: int) -> str:
    with socket.socket() as listener:
        # As torch's store does: a port in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            return str(error)
    return ""


def _cann_version(home: str) -> str:
    """Return what the installer noted in `home`/<arch>-linux/ascend_*_install.info, else ""."""
    with contextlib.suppress(OSError):
        for note in Path(home).glob("*/ascend_*_install.info") if home else ():
            if match := re.search(r"^version=(\S+)", note.read_text(errors="replace"), re.MULTILINE):
                return match[1]
    return ""


def _base(version: str) -> str:
    """Return the numbers at the start of `version`: 2.7.1 of 2.7.1.post2 and of 2.7.1+cpu."""
    return re.split(r"[^\d.]|\.(?!\d)", version)[0]


def _answer(child: Child) -> str:
    """Return what the child wrote for us; libraries may write to the same stream."""
    return next((line[7:] for line in child.output.splitlines() if line.startswith("doctor:")), "")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "(nothing written)")


if __name__ == "__main__":
    sys.exit(main())
