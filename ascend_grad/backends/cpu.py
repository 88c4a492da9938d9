"""The CPU backend, with compiled kernels."""

from __future__ import annotations

from .. import _cpu, _openmp, config
from .._cpu_backend import run, workspace_size

__all__ = ["NAME", "run", "status", "workspace_size"]

NAME = "cpu"

_cpu.force_variant(config.choice("ASCEND_GRAD_CPU", _cpu.VARIANTS, _cpu.unsupported_reason))


def status() -> tuple[bool, str]:
    return True, f"{_cpu.variant()} kernels, {_openmp.DESCRIPTION}"
