"""The row-wise operators as others compute them: NumPy's formula, PyTorch's CPU kernels, JAX.

A rival is a function of a case and its arrays. It returns a call without arguments, to be timed, or None if it does not
take part in the case. Views, compilation and scratch arrays are prepared before the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad._rowwise_python import MASKED_LOGIT

from .. import frameworks, stream
from ..dtypes import compute_dtype
from ..frameworks import Call, tensor
from .cases import BACKWARD, FORWARD, MASKED, MASKED_BACKWARD, SCALE, SMALL_LAYOUTS, Case, Operands

# ---- this library ----------------------------------------------------------------------------------------------------


def ascend_grad(case: Case, operands: Operands) -> Call:
    function = getattr(ag, case.operator)
    inputs, out = operands
    fresh, dim = case.mode == "fresh", case.dim
    # Arguments are written out, as users do: unpacking them would take a tenth of the time of the smallest calls.
    if case.operator in FORWARD:
        (x,) = inputs
        return (lambda: function(x, dim)) if fresh else (lambda: function(x, dim, out=out))
    if case.operator in BACKWARD:
        g, y = inputs
        return (lambda: function(g, y, dim)) if fresh else (lambda: function(g, y, dim, out=out))
    return (lambda: function(*inputs, SCALE)) if fresh else (lambda: function(*inputs, SCALE, out=out))


def direct(case: Case, operands: Operands) -> Call | None:
    """Prepare a direct call of the backend in the smallest case, as the time of dispatch is the same at any size."""
    if case.operator in MASKED or case.mode != "out" or (case.shape, case.dim) != SMALL_LAYOUTS[0]:
        return None
    return frameworks.backend_alone(case.operator, *operands.inputs, case.dim, out=operands.out)


# ---- NumPy -----------------------------------------------------------------------------------------------------------

# The formulas avoid needless temporary arrays. If `out` is None, the first operation allocates the result. `out` may be
# the first input, which is then kept until the result is written.


def _softmax_backward(g, y, dim, out):
    product = np.multiply(g, y, out=None if out is g else out)
    result = np.subtract(g, product.sum(dim, keepdims=True), out=product if out is None else out)
    return np.multiply(result, y, out=result)


def _log_softmax_backward(g, y, dim, out):
    product = np.exp(y, out=None if out is g else out)
    np.multiply(product, g.sum(dim, keepdims=True), out=product)
    return np.subtract(g, product, out=product if out is None else out)


def _scaled_masked_softmax_backward(g, y, mask, dim, out):
    result = _softmax_backward(g, y, dim, out)
    np.multiply(result, SCALE, out=result)
    np.copyto(result, 0, where=mask)
    return result


def _softmax(x, dim, out):
    result = np.subtract(x, x.max(dim, keepdims=True), out=out)
    np.exp(result, out=result)
    return np.divide(result, result.sum(dim, keepdims=True), out=result)


def _log_softmax(x, dim, out):
    result = np.subtract(x, x.max(dim, keepdims=True), out=out)
    return np.subtract(result, np.log(np.exp(result).sum(dim, keepdims=True)), out=result)


def _scaled_masked_softmax(x, mask, dim, out):
    result = np.multiply(x, SCALE, out=out)
    np.copyto(result, MASKED_LOGIT, where=mask)
    return _softmax(result, dim, result)


def _softmax_backward_by_dot(g, y, dim, out):
    """Compute the row sums as dot products, which saves a memory pass and a temporary array."""
    # BLAS would use threads for longer rows, and be slower.
    if dim == g.ndim - 1 and g.shape[dim] <= 8192 and hasattr(np, "vecdot"):
        total = np.vecdot(g, y)[..., None]
    else:
        axes = list(range(g.ndim))
        total = np.expand_dims(np.einsum(g, axes, y, axes, axes[:dim] + axes[dim + 1 :]), dim)
    result = np.subtract(g, total, out=out)
    return np.multiply(result, y, out=result)


_FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "scaled_masked_softmax": _scaled_masked_softmax,
}


def _prepared(formula: Callable, case: Case, operands: Operands) -> Call:
    """Prepare a NumPy formula on the case's arrays. Arrays of another type or byte order are converted in the call."""
    inputs, out = operands
    wide, dim = compute_dtype(case.dtype), case.dim
    if case.mode == "fresh":
        if all(a.dtype in (wide, bool) for a in inputs):
            return lambda: formula(*inputs, dim, None)
        return lambda: formula(*(a if a.dtype == bool else a.astype(wide) for a in inputs), dim, None).astype(
            out.dtype, copy=False
        )
    scratch = [a if a.dtype in (wide, bool) else np.empty_like(a, wide) for a in inputs]
    result = out if out.dtype == wide else np.empty_like(scratch[0])
    copies = [(copy, array) for copy, array in zip(scratch, inputs) if copy is not array]
    if not copies and result is out:
        return lambda: formula(*scratch, dim, out)

    def call() -> np.ndarray:
        for copy, array in copies:
            np.copyto(copy, array)
        formula(*scratch, dim, result)
        if result is not out:
            np.copyto(out, result, casting="unsafe")
        return out

    return call


def numpy_formula(case: Case, operands: Operands) -> Call:
    return _prepared(_FORMULAS[case.operator], case, operands)


def numpy_dot(case: Case, operands: Operands) -> Call | None:
    return _prepared(_softmax_backward_by_dot, case, operands) if case.operator == "softmax_backward" else None


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_kernels(case: Case, operands: Operands) -> Call | None:
    torch = frameworks.module("torch")
    if torch is None:
        return None
    first, *others = (tensor(array) for array in operands.inputs)
    dtype, dim = first.dtype, case.dim
    out = None if case.mode == "fresh" else tensor(operands.out)
    # The private functions are what `backward()` of the public ones calls. Calling them directly is fastest.
    if case.operator in BACKWARD:
        y = others[0]
        backward = getattr(torch, f"_{case.operator}_data")
        if out is None:
            return lambda: backward(first, y, dim, dtype)
        if case.operator == "softmax_backward":
            return lambda: backward(first, y, dim, dtype, grad_input=out)
        return lambda: backward(first, y, dim, dtype, out=out)
    if case.operator in FORWARD:
        forward = getattr(torch, f"_{case.operator}")
        return (lambda: forward(first, dim, False)) if out is None else (lambda: forward(first, dim, False, out=out))
    if case.operator == MASKED_BACKWARD:
        y, mask = others
        settings = {} if out is None else {"grad_input": out}

        def masked_backward() -> Any:
            result = torch._softmax_backward_data(first, y, dim, dtype, **settings)
            return result.mul_(SCALE).masked_fill_(mask, 0)

        return masked_backward
    (mask,) = others

    def masked_forward() -> Any:
        scaled = torch.mul(first, SCALE, out=out).masked_fill_(mask, MASKED_LOGIT)
        return torch._softmax(scaled, dim, False, out=scaled)

    return masked_forward


# ---- JAX -------------------------------------------------------------------------------------------------------------


def jax_jitted(case: Case, operands: Operands) -> Call | None:
    """Prepare the jitted formula for cases with new results, as JAX cannot write into an existing array."""
    jax = frameworks.module("jax")
    if jax is None or case.mode != "fresh":
        return None
    jnp, dim = jax.numpy, case.dim
    dtype = operands.out.dtype
    wide = np.float64 if case.dtype == "float64" else np.float32

    @jax.jit
    def softmax_backward(g, y):
        g, y = g.astype(wide), y.astype(wide)
        return ((g - jnp.sum(g * y, axis=dim, keepdims=True)) * y).astype(dtype)

    @jax.jit
    def log_softmax_backward(g, y):
        g, y = g.astype(wide), y.astype(wide)
        return (g - jnp.sum(g, axis=dim, keepdims=True) * jnp.exp(y)).astype(dtype)

    formula = {"softmax_backward": softmax_backward, "log_softmax_backward": log_softmax_backward}[case.operator]
    g, y = (jax.device_put(array) for array in operands.inputs)
    return lambda: formula(g, y).block_until_ready()


#: Rivals by their names in the results. "numpy dot" is faster than "numpy" for softmax_backward.
RIVALS: dict[str, Callable[[Case, Operands], Call | None]] = {
    "numpy": numpy_formula,
    "numpy dot": numpy_dot,
    "torch": torch_kernels,
    "jax": jax_jitted,
}


# ---- the limit that memory sets --------------------------------------------------------------------------------------


def streams(case: Case, operands: Operands, num_threads: int) -> dict[str, Call]:
    """Return the additions that set a case's memory limit. A new result has none, as its pages are allocated, too."""
    if case.mode != "out" or case.nbytes < stream.SMALLEST:
        return {}
    floats = [a for a in operands.inputs if a.dtype == operands.out.dtype]
    a, b, out = (_as_float32(array) for array in (floats[0], floats[-1], operands.out))
    return stream.both(a, b, lambda: out, num_threads)


def _as_float32(array: np.ndarray) -> np.ndarray:
    """Return the array itself, or ones of the same size for other types, as their bits could be slow subnormals."""
    if array.dtype == np.float32:
        return array.reshape(-1)
    return np.ones(array.nbytes // 4, np.float32)
