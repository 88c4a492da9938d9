"""Test the functions that describe calls and the library: `explain`, `workspace_size`, `backends`, `show_config`."""

from __future__ import annotations

import os

import numpy as np
import pytest

import ascend_grad as ag
from ascend_grad import _cpu, _openmp

X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def test_questions_take_arguments_as_calls_do():
    assert ag.explain("softmax", input=X, axis=0).backend == "cpu"
    for question in (ag.explain, ag.workspace_size):
        with pytest.raises(TypeError, match=r"^softmax: missing a required argument"):
            question("softmax")
        with pytest.raises(TypeError, match=r"^softmax: got an unexpected keyword argument"):
            question("softmax", X, axes=0)
        for name in ("softmin", None, ["softmax"]):
            message = f"^{question.__name__}: op_name: expected one of softmax_backward, "
            with pytest.raises(ag.ParamInvalidError, match=message):
                question(name, X)


def test_workspace_size():
    x = np.zeros((256, 256), np.float32)
    size = ag.workspace_size("softmax", x)
    assert isinstance(size, int)
    assert size >= 0
    assert ag.workspace_size("softmax", x, num_threads=4) >= ag.workspace_size("softmax", x, num_threads=1)
    # A result that partly overlaps an input is computed in a temporary buffer.
    aside = ag.workspace_size("softmax", x, out=x.T) - size
    assert aside == x.nbytes
    assert ag.workspace_size("softmax", x, out=x) == size
    # The values do not matter, and the memory need not be available.
    assert ag.workspace_size("softmax", np.broadcast_to(np.float32(0), (2**40, 2))) > 0
    assert ag.workspace_size("softmax", x[:0]) == 0


def broadcast(*shape: int, dtype: str = "f2"):
    return np.broadcast_to(np.zeros((), dtype), shape)


VAST = {
    "a row": ("softmax", (broadcast(2**62 - 1),), {}),
    "rows": ("softmax_backward", (broadcast(2**31, 2**30),) * 2, {}),
    "a mask": ("scaled_masked_softmax", (broadcast(1, 1, 1, 2**62 - 1), broadcast(1, 1, 1, 2**62 - 1, dtype="?")), {}),
    "tokens": (
        "fused_linear_online_max_sum",
        (broadcast(2**60, 1), broadcast(1, 1), broadcast(2**60, dtype="i4"), 0, 1),
        {},
    ),
    "features": (
        "linear_cross_entropy",
        (broadcast(1, 2**61), broadcast(1, 2**61), broadcast(1, dtype="i4")),
        {},
    ),
    "logits": (
        "fused_linear_online_max_sum",
        (broadcast(2**40, 1), broadcast(2**40, 1), broadcast(2**40, dtype="i4"), 0, 1),
        {"return_logits": True},
    ),
}


@pytest.mark.parametrize(("operator", "arrays", "settings"), VAST.values(), ids=VAST)
def test_workspace_size_of_what_fits_no_memory(operator, arrays, settings):
    """`workspace_size` raises MemoryError if the result fits no memory, instead of a size that has wrapped around."""
    with pytest.raises(MemoryError, match=f"{operator}: a result of [0-9]+ bytes exceeds the address space"):
        ag.workspace_size(operator, *arrays, **settings)


@pytest.mark.parametrize("name", ["a row", "rows", "a mask"])
def test_calls_whose_results_fit_no_memory(name):
    operator, arrays, _ = VAST[name]
    with pytest.raises(MemoryError):
        getattr(ag, operator)(*arrays, backend="cpu")


def test_workspace_size_raises_what_the_call_would():
    with pytest.raises(ag.BackendUnavailableError):
        ag.workspace_size("softmax", [1.0], backend="npu")


def test_backends():
    status = ag.backends()
    assert list(status) == ["npu", "cpu", "reference"]
    assert all(entry._fields == ("usable", "reason", "details") for entry in status.values())
    assert status["cpu"].usable
    assert status["reference"].usable
    assert _cpu.variant() in status["cpu"].reason


def test_show_config(capsys):
    config = ag.show_config(mode="dict")
    assert capsys.readouterr().out == ""
    assert config["version"]["ascend_grad"] == ag.__version__
    assert config["cpu"] == {
        "variant": _cpu.variant(),
        "supported": list(_cpu.supported_variants()),
        "remarks": _cpu.remarks(),
        "model": config["cpu"]["model"],
        "cores": os.cpu_count(),
    }
    assert config["cpu"]["model"]
    assert config["system"].startswith(f"Linux {os.uname().release} {os.uname().machine}")
    assert config["threads"] == ag.get_num_threads()
    assert ("no OpenMP" in config["openmp"]) == (not _openmp.VERSION)
    assert config["backends"]["npu"] == ag.backends()["npu"]._asdict()
    assert ag.show_config() is None
    printed = capsys.readouterr().out
    assert all(text in printed for text in (ag.__version__, _cpu.variant(), config["openmp"], "npu"))
    with pytest.raises(ag.ParamInvalidError, match=r"^show_config: mode: expected 'stdout' or 'dict', got str 'yaml'"):
        ag.show_config(mode="yaml")


def test_forced_variants(forced):
    for name in _cpu.supported_variants():
        forced(name)
        assert _cpu.variant() == name
        assert ag.show_config(mode="dict")["cpu"]["variant"] == name
    with pytest.raises(ValueError, match="expected one of"):
        forced("mmx")
    unsupported = set(_cpu.VARIANTS) - set(_cpu.supported_variants())
    for name in unsupported:
        with pytest.raises(ValueError, match="expected one of"):
            forced(name)
