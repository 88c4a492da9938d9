"""Functions for all comparisons: the frameworks, their settings, their arrays, and the comparison of results."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu_backend
from ascend_grad.inspection import bound_call

from .case import compute_dtype, numpy_dtype

Call = Callable[[], Any]

#: The largest relative difference of two results: several roundings, as their sums have different orders.
TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "float16": 2**-8, "bfloat16": 2**-6}


@functools.cache
def module(name: str) -> Any | None:
    """Return a rival's package, or None if it is not installed."""
    try:
        package = importlib.import_module(name)
    except ImportError:
        return None
    if name == "jax":
        package.config.update("jax_platforms", "cpu")
        package.config.update("jax_enable_x64", True)
    return package


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let this library, PyTorch and (with threadpoolctl) NumPy's BLAS use `count` threads. JAX uses all cores.

    NumPy's other functions use one thread.
    """
    torch, pools = module("torch"), module("threadpoolctl")
    before = torch.get_num_threads() if torch else None
    ag.set_num_threads(count)
    if torch:
        torch.set_num_threads(count)
    try:
        with pools.threadpool_limits(count, "blas") if pools else contextlib.nullcontext():
            yield
    finally:
        ag.set_num_threads(None)
        if torch:
            torch.set_num_threads(before)


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Run PyTorch in inference mode, in which it is fastest as it records nothing for a backward pass."""
    torch = module("torch")
    with torch.inference_mode() if torch else contextlib.nullcontext():
        yield


def as_array(result: Any) -> np.ndarray:
    """Return a rival's result as a NumPy array."""
    torch = module("torch")
    if torch and isinstance(result, torch.Tensor):
        if result.dtype == torch.bfloat16:
            return result.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return result.numpy()
    return np.asarray(result)


def as_arrays(results: Any) -> tuple[np.ndarray, ...]:
    """Return the results of a call, one or several, as arrays."""
    return tuple(map(as_array, results if isinstance(results, tuple) else (results,)))


def agree(got: np.ndarray, expected: np.ndarray, dtype: str, terms: float = 0.0) -> bool:
    """Return whether two results are equal up to rounding, or up to the smallest subnormal number.

    ``terms`` is the magnitude of the terms whose difference a result is. Their rounding is all that a result near zero
    consists of.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    tolerance = TOLERANCES[dtype]
    wide = compute_dtype(dtype)
    got, expected = got.reshape(-1), expected.reshape(-1)
    smallest = float(ml_dtypes.finfo(expected.dtype).smallest_subnormal)
    block = 2**20
    for start in range(0, expected.size, block):
        a, b = got[start : start + block].astype(wide), expected[start : start + block].astype(wide)
        size = np.abs(b)
        if not np.all(np.abs(a - b) <= tolerance * (size + size.max() + terms) + smallest):
            return False
    return True


def tensor(array: np.ndarray) -> Any:
    """Return a tensor over the array's memory."""
    torch = module("torch")
    assert torch is not None
    if array.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def can_be_tensors(arrays: Sequence[np.ndarray]) -> bool:
    """Return whether tensors can be views of the arrays."""
    return all(a.dtype.isnative and all(stride >= 0 for stride in a.strides) for a in arrays)


def backend_alone(operator: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call of the CPU backend on arguments that are validated once, beforehand."""
    call, threads, _ = bound_call(operator, args, kwargs)
    return lambda: _cpu_backend.run(call, threads)
