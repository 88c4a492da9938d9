"""The hardware and the versions that the measurements ran on, without anything that identifies the host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import numpy as np

import ascend_grad as ag

LIBRARIES = ("numpy", "ml_dtypes", "scipy", "scikit-learn", "torch", "jax")


def describe() -> dict[str, str]:
    """Return the properties of the machine and the software, as names and values."""
    config = ag.show_config(mode="dict")
    assert config is not None
    return {
        "CPU": config["cpu"]["model"],
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": _caches(),
        "variant": config["cpu"]["variant"],
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "huge pages": _huge_pages(),
        "compiler": config["version"]["compiler"],
        "BLAS": _blas(),
        "ascend_grad": ag.__version__,
        "Python": platform.python_version(),
    } | {name: version for name in LIBRARIES if (version := _version(name))}


def seconds_of_others() -> float:
    """Return the CPU seconds used so far by all except this process: other processes, kernel, other guests."""
    fields = _read("/proc/stat").split("\n", 1)[0].split()
    if len(fields) < 9:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, fields[1:9])
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def _caches() -> str:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def _huge_pages() -> str:
    """Return the kernel's setting for transparent huge pages, which its file shows in brackets."""
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _blas() -> str:
    """Return name, version and kernels of the BLAS libraries in this process; kernels only with threadpoolctl."""
    try:
        import threadpoolctl
    except ImportError:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    found = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    names = {f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}".rstrip() for pool in found}
    return " and ".join(sorted(names)) or "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
