"""What a result must say about where it was measured: versions and hardware, and nothing of the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from engine import device as devices

_PACKAGES = ("engine3d", "torch", "torch-npu", "deepspeed")


def describe(device: str) -> dict[str, Any]:
    """Return versions of what is installed, and the hardware that `device` (cpu, cuda, npu) means here."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "hardware": devices.describe(devices.select(device, 0)),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "code": _code(),
    }


def _code() -> str:
    """Return the commit that is measured, with + where files differ from it; unknown outside a repository."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--", "../engine", "."], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    if commit.returncode != 0:
        return "unknown"
    changed = [line for line in changes.stdout.splitlines() if "/results/" not in line]
    return commit.stdout.strip() + ("+" if changed else "")


def summary(device: str) -> str:
    """Return the same in one line."""
    found = describe(device)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    hardware = f"{found['hardware']}, {found['cores']} cores, {found['memory_gib']} GiB, {found['system']}"
    return f"{hardware}; {versions}; code {found['code']}"
