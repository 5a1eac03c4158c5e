"""The checks of the doctor: from what was seen of a machine to findings, in one process and with no machine at hand.

Like the doctor it imports the standard library alone. Facts about torch_npu and CANN are from COMPATIBILITY.md of
Ascend/pytorch and from torch_npu's sources; they were not run on an NPU.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
MINIMUM_TORCH, TESTED_TORCH = (2, 7), (2, 13)
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_MIB = 2**20
STAGING_GROUPS, STAGING_MIB = 4, 64  # data, tensor, pipeline and world; the default of engine.init
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
class MemoryFacts:
    """What a child process saw of shared memory between CPU ranks. `error`: why it saw nothing, or not all."""

    transport: str = ""
    """What `engine.init` takes; empty: it refuses, `error` says why."""
    missing: str = ""
    """What the system lacks."""
    available: int = 0
    """Bytes that a process may still take."""
    bound: str = ""
    """What says so: the machine, or a memory cgroup with its limit."""
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
        fix = f"{install} and source its set_env.sh; without NPUs uninstall torch_npu or set {AUTOLOAD}=0"
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
    needed = BACKENDS[device]
    shown = ", ".join(f"{name} {'yes' if name in facts.backends else 'no'}" for name in BACKENDS.values())
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
        if master and is_loopback(master):
            text = f"MASTER_ADDR={master} is loopback, which no other of {hosts} hosts can reach"
            return Finding("address", "warning", text, "set MASTER_ADDR to an address of rank 0's host on every host")
        if (not address or is_loopback(address)) and not environment.get("GLOO_SOCKET_IFNAME"):
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
    if master and master not in own_names and not is_loopback(master):
        return Finding("ports", "ok", f"{text}; MASTER_PORT={port} is {master}'s: only the doctor there can try it")
    if error := listen(int(port)):
        return Finding("ports", "failure", f"MASTER_PORT={port} is not free: {error}", fix)
    return Finding("ports", "ok", f"{text}; MASTER_PORT={port} is free")


def check_transport(facts: MemoryFacts, asked: str) -> Finding:
    """Say how bytes will move between CPU ranks of one host. asked: ENGINE_TRANSPORT."""
    why = f"ENGINE_TRANSPORT={asked}" if asked else "ENGINE_TRANSPORT is not set"
    if not facts.transport:
        fix = "set ENGINE_TRANSPORT to torch, or unset it" if asked else "first mend what torch says"
        return Finding("transport", "failure", f"none: {why}: {facts.error}", fix)
    text = f"CPU ranks of one host take {facts.transport} ({why})"
    if facts.missing:
        fix = "nothing has to be done; shm, which is faster, needs Linux with /proc mounted"
        return Finding("transport", "warning", f"{text}: this system has no {facts.missing}", fix)
    return Finding("transport", "ok", f"{text}; memfd_create, posix_fallocate, SO_PEERCRED and /proc/self/fd are there")


def check_shared_memory(facts: MemoryFacts) -> Finding:
    """Judge what ranks of this host may still take, against the staging of a mesh's four groups at its default."""
    name, wanted = "shared memory", STAGING_GROUPS * STAGING_MIB
    instead = "or set ENGINE_TRANSPORT=torch"
    if facts.missing or not facts.transport:
        return Finding(name, "ok", "not looked at, since no rank can take it")
    if facts.error:
        fix = f"let this process use memfd_create and map it (seccomp, /proc, ulimit -f), {instead}"
        return Finding(name, "failure" if facts.transport == "shm" else "warning", facts.error, fix)
    text = f"{facts.available // _MIB:,} MiB may be taken ({facts.bound}), 1 MiB was reserved and mapped"
    if facts.available < wanted * _MIB:
        fix = f"free memory, raise the limit (docker --memory), give engine.init a smaller staging_mib, {instead}"
        text = f"{text}; {STAGING_GROUPS} groups x staging_mib={STAGING_MIB} are up to {wanted} MiB"
        return Finding(name, "warning", text, fix)
    return Finding(name, "ok", text)


def check_dev_shm(total: int, free: int) -> Finding:
    """Judge the size of /dev/shm, in bytes (total 0: there is none). Docker's default of 64 MiB is too small."""
    text = f"{free // _MIB} of {total // _MIB} MiB free, for workers of data loaders and NCCL; the engine takes none"
    if free <= 64 * _MIB:
        fix = "if you use those: free some, or start the container with --shm-size=8g or --ipc=host"
        return Finding("/dev/shm", "warning", f"{text}; more than 64 MiB are wanted", fix)
    return Finding("/dev/shm", "ok", text)


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
            text = f"rank {rank} of {size} died with status {child.code}: {last_line(child.errors)}"
            return Finding("all-reduce", "failure", text, fix)
    if hanging := [rank for rank, child in enumerate(children) if child.code is None]:
        text = f"ranks {hanging} of {size} were not done within {limit:g} s and were ended"
        return Finding("all-reduce", "failure", text, fix)
    seconds = float(answer_of(children[0]) or "nan")
    return Finding("all-reduce", "ok", f"{seconds * 1e3:.2f} ms for 1 MiB over gloo between {size} ranks of this host")


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


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _base(version: str) -> str:
    """Return the numbers at the start of `version`: 2.7.1 of 2.7.1.post2 and of 2.7.1+cpu."""
    return re.split(r"[^\d.]|\.(?!\d)", version)[0]


def answer_of(child: Child) -> str:
    """Return what the child wrote for us; libraries may write to the same stream."""
    return next((line[7:] for line in child.output.splitlines() if line.startswith("doctor:")), "")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "(nothing written)")
