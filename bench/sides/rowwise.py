"""The row-wise operators as each side computes them: this library, NumPy's formula, SciPy, PyTorch's kernels, JAX.

A side is a function of a case and its arrays. It returns a call without arguments, to be timed, or None if it does not
take part in the case. Views, compilation and scratch arrays are prepared before the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad._rowwise_python import MASKED_LOGIT

from .. import frameworks
from ..arrays import Operands, is_dense
from ..case import (
    AUTOGRAD,
    BACKWARD,
    CROSS_ENTROPY,
    FORWARD,
    FRESH,
    MASKED,
    MASKED_BACKWARD,
    OUT,
    RANDOM,
    Case,
    compute_dtype,
)
from ..cases import SMALL
from ..frameworks import Call, tensor
from ..results import ARRAYS, OWN
from .onednn import onednn

#: The factor of the masked operators.
SCALE = 0.125

# ---- this library ----------------------------------------------------------------------------------------------------


def ascend_grad(case: Case, operands: Operands) -> Call:
    return own_call(case, operands.inputs, operands.out)


def own_call(case: Case, inputs: tuple[Any, ...], out: Any) -> Call:
    """Prepare a call of this library on arrays or on tensors."""
    function = getattr(ag, case.operator)
    fresh, dim = case.mode == FRESH, case.dim
    # Arguments are written out, as users do: unpacking them would take a tenth of the time of the smallest calls.
    if case.operator in FORWARD:
        (x,) = inputs
        return (lambda: function(x, dim)) if fresh else (lambda: function(x, dim, out=out))
    if case.operator in BACKWARD:
        g, y = inputs
        return (lambda: function(g, y, dim)) if fresh else (lambda: function(g, y, dim, out=out))
    return (lambda: function(*inputs, SCALE)) if fresh else (lambda: function(*inputs, SCALE, out=out))


def estimated_ns(case: Case, operands: Operands) -> float | None:
    """Return the estimate of the call's time, by which its plan is chosen."""
    settings = {} if case.mode == FRESH else {"out": operands.out}
    if case.operator == CROSS_ENTROPY:
        return ag.explain(case.operator, *operands.inputs, axis=case.dim, **operands.loss, **settings).estimated_ns
    last = SCALE if case.operator in MASKED else case.dim
    return ag.explain(case.operator, *operands.inputs, last, **settings).estimated_ns


def direct(case: Case, operands: Operands) -> Call | None:
    """Prepare a direct call of the backend in the smallest case, as the time of dispatch is the same at any size."""
    if case.operator in MASKED or case.mode != OUT or (case.shape, case.dim) != SMALL[0] or case.suite == RANDOM:
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


def numpy_call(
    case: Case, operands: Operands, formula: Callable[..., Any], in_place: bool = False, dense: bool = False
) -> Call:
    """Prepare a NumPy formula on the case's arrays. Arrays of another type or byte order are converted in the call.

    Parameters
    ----------
    case, operands
        The case and its arrays.
    formula : callable
        A function of the inputs, the axis, and the array of the result, which may be the first input, or None for a new
        one. It returns the result, or a loss and the result.
    in_place : bool
        Whether the formula is fastest if it overwrites a converted copy of the first input.
    dense : bool
        Whether strided arrays are copied as well.
    """
    inputs, out, _ = operands
    wide, dim = compute_dtype(case.dtype), case.dim
    is_converted = [a.dtype not in (wide, bool) or (dense and not is_dense(a)) for a in inputs]
    if case.mode == FRESH:
        if not any(is_converted):
            return lambda: formula(*inputs, dim, None)

        def fresh() -> Any:
            copies = [a.astype(wide) if converted else a for a, converted in zip(inputs, is_converted)]
            *loss, result = _as_tuple(formula(*copies, dim, copies[0] if in_place else None))
            return *loss, result.astype(out.dtype, copy=False)

        return fresh
    scratch = [np.empty_like(a, wide) if converted else a for a, converted in zip(inputs, is_converted)]
    result = out
    if out.dtype != wide or (dense and not is_dense(out)):
        result = scratch[0] if in_place and is_converted[0] else np.empty_like(scratch[0])
    if not any(is_converted) and result is out:
        return lambda: formula(*scratch, dim, out)

    def call() -> Any:
        for copy, array, converted in zip(scratch, inputs, is_converted):
            if converted:
                np.copyto(copy, array)
        *loss, _ = _as_tuple(formula(*scratch, dim, result))
        if result is not out:
            np.copyto(out, result, casting="unsafe")
        return *loss, out

    return call


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def numpy_formula(case: Case, operands: Operands) -> Call:
    return numpy_call(case, operands, _FORMULAS[case.operator])


def numpy_dot(case: Case, operands: Operands) -> Call | None:
    return numpy_call(case, operands, _softmax_backward_by_dot) if case.operator == "softmax_backward" else None


def numpy_dense(case: Case, operands: Operands) -> Call | None:
    """Prepare the formula on dense copies of strided arrays, which can save more than the copies take."""
    if case.suite != RANDOM or all(map(is_dense, (*operands.inputs, operands.out))):
        return None
    return numpy_call(case, operands, _FORMULAS[case.operator], dense=True)


def scipy_function(case: Case, operands: Operands) -> Call | None:
    """Prepare SciPy's function, which always makes a new array, for random problems."""
    special = frameworks.module("scipy.special")
    if special is None or case.operator not in FORWARD or case.suite != RANDOM:
        return None
    function, wide, dim = getattr(special, case.operator), compute_dtype(case.dtype), case.dim
    (x,), out, _ = operands
    if case.mode == FRESH:
        return lambda: function(x.astype(wide, copy=False), dim).astype(out.dtype, copy=False)

    def call() -> np.ndarray:
        np.copyto(out, function(x.astype(wide, copy=False), dim), casting="unsafe")
        return out

    return call


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_kernels(case: Case, operands: Operands) -> Call | None:
    torch = frameworks.module("torch")
    if torch is None or not frameworks.can_be_tensors((*operands.inputs, operands.out)):
        return None
    is_plain = all(a.flags.c_contiguous for a in (*operands.inputs, operands.out))
    if case.mode != FRESH and not (is_plain and operands.out.dtype == operands.inputs[0].dtype):
        return _torch_copied(case, operands)
    first, *others = (tensor(array) for array in operands.inputs)
    dtype, dim = first.dtype, case.dim
    out = None if case.mode == FRESH else tensor(operands.out)
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
        return torch._softmax(scaled, dim, False, out=scaled if scaled.is_contiguous() else None)

    return masked_forward


def _torch_copied(case: Case, operands: Operands) -> Call:
    """Prepare PyTorch's kernels with new results, which are then copied into a strided array.

    The private functions compute wrong values if such an array is their `out`. PyTorch's public functions also make
    this copy.
    """
    compute, out = torch_kernels(replace(case, mode=FRESH), operands), tensor(operands.out)
    assert compute is not None
    return lambda: out.copy_(compute())


# ---- JAX -------------------------------------------------------------------------------------------------------------


def jax_jitted(case: Case, operands: Operands) -> Call | None:
    """Prepare the jitted formula for named cases with new results, as JAX cannot write into an existing array."""
    jax = frameworks.module("jax")
    if jax is None or case.mode != FRESH or case.suite == RANDOM:
        return None
    jnp, dim, dtype, wide = jax.numpy, case.dim, operands.out.dtype, compute_dtype(case.dtype)

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


Sides = dict[str, Callable[[Case, Operands], Call | None]]

#: The sides by their names in the results. "numpy dot" is faster than "numpy" for softmax_backward.
SIDES: Sides = {
    OWN: ascend_grad,
    "numpy": numpy_formula,
    "numpy dot": numpy_dot,
    "numpy dense": numpy_dense,
    "scipy": scipy_function,
    "torch": torch_kernels,
    "oneDNN": onednn,
    "jax": jax_jitted,
}

# ---- tensors ---------------------------------------------------------------------------------------------------------


def ascend_grad_on_tensors(case: Case, operands: Operands) -> Call:
    if case.mode != AUTOGRAD:
        return own_call(case, tuple(map(tensor, operands.inputs)), tensor(operands.out))
    import ascend_grad.torch as agt

    return _differentiated(getattr(agt, case.operator), case, operands)


def ascend_grad_on_arrays(case: Case, operands: Operands) -> Call | None:
    return None if case.mode == AUTOGRAD else ascend_grad(case, operands)


def torch_on_tensors(case: Case, operands: Operands) -> Call | None:
    import torch

    if case.mode != AUTOGRAD:
        return torch_kernels(case, operands)
    return _differentiated(getattr(torch, case.operator), case, operands)


def _differentiated(function: Callable[..., Any], case: Case, operands: Operands) -> Call:
    """Prepare a function of a tensor and its gradient, for an upstream gradient of random values."""
    import torch

    (x,) = map(tensor, operands.inputs)
    x.requires_grad_()
    grad = tensor(np.random.default_rng(1).standard_normal(case.shape, np.float32).astype(operands.out.dtype))
    dim = case.dim
    return lambda: torch.autograd.grad(function(x, dim), x, grad)


TENSOR_SIDES: Sides = {
    OWN: ascend_grad_on_tensors,
    ARRAYS: ascend_grad_on_arrays,
    "torch": torch_on_tensors,
}


def parallel_loop(num_threads: int) -> Call:
    """Prepare an elementwise operation by all of PyTorch's threads, which leaves them awake."""
    import torch

    x = torch.ones(num_threads << 18)
    return partial(torch.exp, x, out=torch.empty_like(x))
