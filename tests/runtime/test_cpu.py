"""Test which variant computes: by default, if a variant is forced, and if the operating system refuses one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from processes import cpu_flags

from ascend_grad import _cpu


@pytest.fixture
def refused() -> Iterator[None]:
    """Let the operating system refuse AMX."""
    _cpu.force_amx_permission(False)
    yield
    _cpu.force_amx_permission(None)


def test_a_forced_variant_computes(forced):
    for name in _cpu.supported_variants():
        forced(name)
        assert _cpu.variant() == name


def test_the_default_is_the_last_variant_without_a_remark(forced):
    forced(None)
    remarks = _cpu.remarks()
    slow = [name for name in _cpu.supported_variants() if f"{name} is slower on this CPU" in remarks]
    refused = [name for name in _cpu.supported_variants() if f"{name} is refused by the operating system" in remarks]
    assert len(slow) + len(refused) == len(remarks)
    assert _cpu.variant() == [name for name in _cpu.supported_variants() if name not in slow + refused][-1]


def test_without_permission_the_next_best_variant_computes(forced, refused):
    supported = _cpu.supported_variants()
    for name in supported:
        forced(name)
        if name == "amx_bf16":
            assert _cpu.variant() in ("avx512", "avx512_bf16")
            assert "amx_bf16 is refused by the operating system" in _cpu.remarks()
        else:
            assert _cpu.variant() == name
            is_better = "amx_bf16" in supported[supported.index(name) :]
            assert ("amx_bf16 is refused by the operating system" in _cpu.remarks()) == is_better


def test_the_reason_names_what_the_cpu_lacks():
    for name in _cpu.VARIANTS:
        reason = _cpu.unsupported_reason(name)
        is_refused = f"{name} is refused by the operating system" in _cpu.remarks()
        assert (reason is None) == (name in _cpu.supported_variants() and not is_refused)
        if reason and (named := re.fullmatch("the CPU does not report (.*)", reason)):
            features = re.split(", | and ", named[1].lower())
            assert not set(features) <= cpu_flags()


def test_a_refused_unit_is_a_reason(refused):
    reason = _cpu.unsupported_reason("amx_bf16")
    if "amx_bf16" in _cpu.supported_variants():
        assert reason == "the operating system refuses the use of its tiles"
    else:
        assert reason
