"""Row-wise operators with gradients of any order, which JAX can trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .. import _xla_rowwise
from ..arguments import real_number
from .arrays import as_array, check
from .meshes import aligned, compiled_call, sharded_as

_TARGET = "ascend_grad_rowwise"
jax.ffi.register_ffi_target(_TARGET, _xla_rowwise.handler(), platform="cpu")


def _compute(operator: str, *arrays: jax.Array, dim: int = -1, scale: float = 1.0) -> jax.Array:
    """Call the compiled kernels. `dim` is negative, so that vmap can add batch dimensions in front."""
    result = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    settings = {"operator": operator, "dim": np.int64(dim), "scale": np.float64(scale)}
    return compiled_call(_TARGET, [result], arrays, settings, takes_batches=True)[0]


# ---- gradients of any order ------------------------------------------------------------------------------------------
# The gradient of a gradient is composed of the same operators and of JAX's own.


def _softmax_backward_wrt_output(grad: jax.Array, grad_output: jax.Array, output: jax.Array, dim: int) -> jax.Array:
    """Compute the gradient of (g - sum(g*y)) * y with respect to y."""
    row_sum = jnp.sum(grad_output * output, dim, keepdims=True)
    return grad * (grad_output - row_sum) - grad_output * jnp.sum(grad * output, dim, keepdims=True)


def _with_gradients(operator: str, backward_of_backward: Callable) -> tuple[Callable, Callable]:
    """Return an operator along a dimension and its backward function; JAX can differentiate both."""

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def backward(grad_output, output, dim):
        return _compute(f"{operator}_backward", grad_output, output, dim=dim)

    backward.defvjp(
        lambda grad_output, output, dim: (backward(grad_output, output, dim), (grad_output, output)),
        lambda dim, saved, grad: backward_of_backward(grad, *saved, dim),
    )

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def forward(input, dim):
        return _compute(operator, input, dim=dim)

    def forward_with_output(input, dim):
        output = forward(input, dim)
        return output, output

    forward.defvjp(forward_with_output, lambda dim, output, grad_output: (backward(grad_output, output, dim),))
    return forward, backward


def _softmax_backward_backward(grad, grad_output, output, dim):
    return _softmax_backward(grad, output, dim), _softmax_backward_wrt_output(grad, grad_output, output, dim)


def _log_softmax_backward_backward(grad, grad_output, output, dim):
    scaled = grad * jnp.exp(output)  # factor in both gradients of g - sum(g) * exp(y)
    return grad - jnp.sum(scaled, dim, keepdims=True), -jnp.sum(grad_output, dim, keepdims=True) * scaled


_softmax, _softmax_backward = _with_gradients("softmax", _softmax_backward_backward)
_log_softmax, _ = _with_gradients("log_softmax", _log_softmax_backward_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scaled_masked_softmax_backward(grad_output, y, mask, scale):
    return _compute("scaled_masked_softmax_backward", grad_output, y, mask, scale=scale)


def _scaled_masked_softmax_backward_backward(scale, saved, grad):
    grad_output, y, mask = saved
    wide = jnp.promote_types(grad.dtype, jnp.float32)  # the dtype in which the kernels scale
    grad = jnp.where(mask, 0, (grad.astype(wide) * scale).astype(grad.dtype))
    return _softmax_backward(grad, y, -1), _softmax_backward_wrt_output(grad, grad_output, y, -1), None


_scaled_masked_softmax_backward.defvjp(
    lambda grad_output, y, mask, scale: (
        _scaled_masked_softmax_backward(grad_output, y, mask, scale),
        (grad_output, y, mask),
    ),
    _scaled_masked_softmax_backward_backward,
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scaled_masked_softmax(x, mask, scale):
    return _compute("scaled_masked_softmax", x, mask, scale=scale)


def _scaled_masked_softmax_forward(x, mask, scale):
    y = _scaled_masked_softmax(x, mask, scale)
    return y, (y, mask)


_scaled_masked_softmax.defvjp(
    _scaled_masked_softmax_forward,
    lambda scale, saved, grad_output: (_scaled_masked_softmax_backward(grad_output, *saved, scale), None),
)


# ---- public functions ------------------------------------------------------------------------------------------------


def _along(function, input: jax.Array, dim: int) -> jax.Array:
    """Call a softmax function with the dimension counted from the end, as a negative number."""
    if input.ndim == 0:
        return function(input.reshape(1), -1).reshape(())
    (array,) = aligned({"input": input}).values()
    return sharded_as(function(array, int(dim) % input.ndim - input.ndim), input)


def softmax(input: jax.Array, dim: int = -1) -> jax.Array:
    """Compute the softmax along one dimension, like `jax.nn.softmax`.

    Parameters
    ----------
    input : jax.Array, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The dimension that sums to one. Not traced.

    Returns
    -------
    jax.Array
        An array of the dtype of `input`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, `dim` or the rank is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> agj.softmax(jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)
    """
    array = as_array(input, "input", "softmax")
    check("softmax", {"input": array}, dim=dim)
    return _along(_softmax, array, dim)


def log_softmax(input: jax.Array, dim: int = -1) -> jax.Array:
    """Compute the natural logarithm of the softmax along one dimension, like `jax.nn.log_softmax`.

    Parameters
    ----------
    input : jax.Array, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The dimension whose exponentials sum to one. Not traced.

    Returns
    -------
    jax.Array
        An array of the dtype of `input`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, `dim` or the rank is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> jnp.exp(agj.log_softmax(jnp.zeros(2)))
    Array([0.5, 0.5], dtype=float32)
    """
    array = as_array(input, "input", "log_softmax")
    check("log_softmax", {"input": array}, dim=dim)
    return _along(_log_softmax, array, dim)


def scaled_masked_softmax(x: jax.Array, mask: jax.Array, scale: float = 1.0) -> jax.Array:
    r"""Compute the softmax over the last dimension of (-10000 where `mask` is True, else :math:`x\cdot` scale).

    Parameters
    ----------
    x : jax.Array, shape (B, N, S1, S2)
        The input; float32, float16, bfloat16 or float64.
    mask : jax.Array of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out.
    scale : float, default 1.0
        Rounded to float32 first, except for float64 arrays. Not traced.

    Returns
    -------
    jax.Array
        An array of the dtype of `x`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype or a shape is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> mask = jnp.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> agj.scaled_masked_softmax(jnp.zeros((1, 1, 1, 4)), mask)
    Array([[[[0.5, 0.5, 0. , 0. ]]]], dtype=float32)
    """
    operator = "scaled_masked_softmax"
    arrays = {"x": as_array(x, "x", operator), "mask": as_array(mask, "mask", operator)}
    check(operator, arrays, scale=scale)
    result = _scaled_masked_softmax(*aligned(arrays).values(), real_number(scale, "scale", operator))
    return sharded_as(result, arrays["x"])
