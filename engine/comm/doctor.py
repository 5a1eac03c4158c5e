"""`python -m engine.comm.doctor`: is this machine fit for the engine, and if not, what to change.

Not a benchmark, and it looks at one host only. This file looks and prints, `doctor_checks.py` judges. Both, and the
packages above them, import the standard library alone: torch is looked at in child processes with a time limit, so
whatever it does is a finding, also where `import torch` itself fails (torch_npu without CANN: torch loads installed
backends by itself).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

if not __package__:  # started by its path, where the engine need not be installed
    sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.comm.doctor_checks import (
    AUTOLOAD,
    BACKENDS,
    Child,
    Finding,
    MemoryFacts,
    TorchFacts,
    answer_of,
    check_address,
    check_all_reduce,
    check_backends,
    check_dev_shm,
    check_interfaces,
    check_open_files,
    check_ports,
    check_shared_memory,
    check_torch,
    check_torch_npu,
    check_transport,
    last_line,
)

PROBE_LIMIT = ALL_REDUCE_LIMIT = 60.0  # seconds


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
    environment = {**environment, AUTOLOAD: str(int(autoload))}
    (child,) = run_children(_describe_torch, [["yes" if autoload else "no"]], environment, limit)
    if child.code == 0 and (answer := answer_of(child)):
        return TorchFacts(**json.loads(answer))
    ended = f"not done within {limit:g} s" if child.code is None else f"died with status {child.code}"
    installed = importlib.util.find_spec("torch_npu") is not None
    return TorchFacts(npu_installed=installed, error=f"{ended}: {last_line(child.errors)}")


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


def look_at_memory(environment: Mapping[str, str], *, limit: float = PROBE_LIMIT) -> MemoryFacts:
    """Ask the engine in a child which transport CPU ranks take, and try the memory that they would share."""
    root = str(Path(__file__).parents[2])
    (child,) = run_children(_describe_memory, [[root]], {**environment, AUTOLOAD: "0"}, limit)
    if child.code == 0 and (answer := answer_of(child)):
        return MemoryFacts(**json.loads(answer))
    ended = f"not done within {limit:g} s" if child.code is None else f"died with status {child.code}"
    return MemoryFacts(error=f"{ended}: {last_line(child.errors)}")


def _describe_memory(folder: str, root: str) -> None:  # noqa: ARG001
    """Print MemoryFacts as JSON. Runs in a child."""
    import json
    import os
    import sys

    sys.path.insert(0, root)
    found: dict[str, object] = {}
    try:
        import torch

        from engine.comm.shm import missing
        from engine.comm.shm.memory import available, map_segment, reserve
        from engine.comm.start import choose_transport

        found["missing"] = missing()
        found["transport"] = choose_transport(None, torch.device("cpu"))
        if not found["missing"]:
            found["available"], found["bound"] = available()
            descriptor = reserve(1 << 20, "the doctor")
            map_segment(descriptor, 1 << 20).fill_(1)
            os.close(descriptor)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
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
    return check_all_reduce(run_children(worker, [["0"], ["1"]], {**environment, AUTOLOAD: "0"}, limit), limit)


def gather(device: str, hosts: int, *, all_reduce: bool) -> list[Finding]:
    """Look at this machine and return every finding, in the order in which they are printed."""
    environment = dict(os.environ)
    plain = look_at_torch(environment, autoload=False)
    loaded = look_at_torch(environment, autoload=True) if plain.npu_installed else plain
    host, home = socket.gethostname(), environment.get("ASCEND_HOME_PATH", "")
    address = _resolve(host)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    sizes = (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize) if shm else (0, 0)
    memory = look_at_memory(environment) if plain.version else MemoryFacts(error="torch cannot be imported")
    findings = [
        check_torch(plain),
        check_torch_npu(plain, loaded, device, home, _cann_version(home)),
        check_backends(plain if loaded.error else loaded, device),
        check_address(host, address, environment, hosts),
        check_interfaces(environment, [name for _, name in socket.if_nameindex()], hosts),
        check_ports(environment, {host, address}, _listen),
        check_transport(memory, environment.get("ENGINE_TRANSPORT", "")),
        check_shared_memory(memory),
        check_dev_shm(*sizes),
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
    parser.add_argument("--device", choices=["auto", *BACKENDS], default="auto", help="what the job shall run on")
    parser.add_argument("--no-all-reduce", action="store_true", help="leave out the all-reduce of two processes")
    options = parser.parse_args(arguments)
    hosts = hosts_meant(os.environ) if options.hosts is None else options.hosts
    if hosts < 1:
        parser.error(f"--hosts {hosts}: a job has at least 1 host")
    findings = gather(options.device, hosts, all_reduce=not options.no_all_reduce)
    sys.stdout.write("\n".join(lines(findings)) + "\n")
    return int(any(finding.status == "failure" for finding in findings))


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


if __name__ == "__main__":
    sys.exit(main())
