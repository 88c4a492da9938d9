"""Row-wise operators that JAX can trace, in ``jax.jit``, ``jax.grad`` and ``jax.vmap``, on the CPU.

>>> import jax, jax.numpy as jnp
>>> import ascend_grad.jax as agj
>>> gradient = jax.jit(jax.grad(lambda x: agj.softmax(x)[0]))
>>> gradient(jnp.zeros(4))
Array([ 0.1875, -0.0625, -0.0625, -0.0625], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

if not hasattr(jax, "enable_x64"):  # older JAX would round results of float64
    raise ImportError(f"ascend_grad.jax needs JAX 0.8 or newer, found {jax.__version__}")

from . import _xla
from .arguments import check_class, real_number, shown
from .arrays import native
from .errors import ParamTypeError
from .inspection import explain

__all__ = ["log_softmax", "scaled_masked_softmax", "softmax"]

_TARGET = "ascend_grad_rowwise"
jax.ffi.register_ffi_target(_TARGET, _xla.handler(), platform="cpu")


def _compute(operator: str, *arrays: jax.Array, dim: int = -1, scale: float = 1.0) -> jax.Array:
    """Call the compiled kernels. `dim` is negative, so that vmap can add batch dimensions in front."""
    result = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    call = jax.ffi.ffi_call(_TARGET, result, vmap_method="expand_dims")
    return call(*arrays, operator=operator, dim=np.int64(dim), scale=np.float64(scale))


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


def _array(value: object, name: str, operator: str) -> jax.Array | None:
    """Return an argument as a JAX array, traced or not."""
    if value is None:  # the checks refuse None
        return None
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise ParamTypeError(f"{name}: expected an array of jax or a number, got {shown(value)}", operator=operator)
    if isinstance(value, np.ndarray):
        check_class(type(value), name, operator)
        value = value.astype(native(value.dtype), copy=False)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:  # a dtype that JAX does not have
        message = f"{name}: expected an array that JAX takes, got {shown(value)}: {error}"
        raise ParamTypeError(message, operator=operator) from error


def _check(operator: str, *arrays: jax.Array | None, **settings: object) -> None:
    """Refuse arguments that the contract refuses. Its checks see only shapes and dtypes, as tracing does."""
    for name, value in settings.items():
        if isinstance(value, jax.core.Tracer):
            expected = "a value that is known when JAX traces (static_argnames of jax.jit)"
            raise ParamTypeError(f"{name}: expected {expected}, got a tracer", operator=operator)
    stand_ins = []
    for each in arrays:
        if each is not None:
            # Random keys have a dtype that NumPy lacks.
            dtype = each.dtype if isinstance(each.dtype, np.dtype) else np.dtype(object)
            each = np.broadcast_to(np.empty((), dtype), each.shape)
        stand_ins.append(each)
    explain(operator, *stand_ins, **settings, backend="cpu")


def _along(function, input: jax.Array, dim: int) -> jax.Array:
    """Call a softmax function with the dimension counted from the end, as a negative number."""
    if input.ndim == 0:
        return function(input.reshape(1), -1).reshape(())
    return function(input, int(dim) % input.ndim - input.ndim)


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
    array = _array(input, "input", "softmax")
    _check("softmax", array, dim=dim)
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
    array = _array(input, "input", "log_softmax")
    _check("log_softmax", array, dim=dim)
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
    array, hidden = _array(x, "x", operator), _array(mask, "mask", operator)
    _check(operator, array, hidden, scale=scale)
    return _scaled_masked_softmax(array, hidden, real_number(scale, "scale", operator))
