"""Row-wise operators with gradients of any order, which JAX can trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ascend_grad as ag

from .. import _xla_rowwise
from ..arguments import LAST, axis_named_dim
from ..operators.signatures import documented
from .arrays import WORDS, as_array, as_floating, check
from .meshes import aligned, compiled_call, sharded_as

__all__ = ["log_softmax", "scaled_masked_softmax", "softmax"]

_TARGET = "ascend_grad_rowwise"
jax.ffi.register_ffi_target(_TARGET, _xla_rowwise.handler(), platform="cpu")


def _compute(operator: str, *arrays: jax.Array, axis: int = -1, scale: float = 1.0) -> jax.Array:
    """Call the compiled kernels. `axis` is negative, so that vmap can add batch dimensions in front."""
    result = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    settings = {"operator": operator, "axis": np.int64(axis), "scale": np.float64(scale)}
    return compiled_call(_TARGET, [result], arrays, settings, takes_batches=True)[0]


# ---- gradients of any order ------------------------------------------------------------------------------------------
# The gradient of a gradient is composed of the same operators and of JAX's own.


def _softmax_backward_wrt_output(grad: jax.Array, grad_output: jax.Array, output: jax.Array, axis: int) -> jax.Array:
    """Compute the gradient of (g - sum(g*y)) * y with respect to y."""
    row_sum = jnp.sum(grad_output * output, axis, keepdims=True)
    return grad * (grad_output - row_sum) - grad_output * jnp.sum(grad * output, axis, keepdims=True)


def _with_gradients(operator: str, backward_of_backward: Callable) -> tuple[Callable, Callable]:
    """Return an operator and its backward function; JAX can differentiate both.

    Both take a setting, with its name, and arrays, the last of which may be a mask.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def backward(setting, *arrays):
        return _compute(f"{operator}_backward", *arrays, **dict([setting]))

    backward.defvjp(
        lambda setting, *arrays: (backward(setting, *arrays), arrays),
        lambda setting, saved, grad: backward_of_backward(grad, *saved, setting[1]),
    )

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def forward(setting, *arrays):
        return _compute(operator, *arrays, **dict([setting]))

    def forward_with_output(setting, input, *mask):
        output = forward(setting, input, *mask)
        return output, (output, *mask)

    def gradient(setting, saved, grad_output):
        return backward(setting, grad_output, *saved), *[None] * (len(saved) - 1)

    forward.defvjp(forward_with_output, gradient)
    return forward, backward


def _softmax_backward_backward(grad, grad_output, output, axis):
    return _softmax_backward(("axis", axis), grad, output), _softmax_backward_wrt_output(
        grad, grad_output, output, axis
    )


def _log_softmax_backward_backward(grad, grad_output, output, axis):
    scaled = grad * jnp.exp(output)  # factor in both gradients of g - sum(g) * exp(y)
    return grad - jnp.sum(scaled, axis, keepdims=True), -jnp.sum(grad_output, axis, keepdims=True) * scaled


def _scaled_masked_softmax_backward_backward(grad, grad_output, y, mask, scale):
    wide = np.promote_types(grad.dtype, np.float32)  # the dtype in which the kernels scale
    grad = jnp.where(mask, 0, (grad.astype(wide) * scale).astype(grad.dtype))
    return *_softmax_backward_backward(grad, grad_output, y, -1), None


_softmax, _softmax_backward = _with_gradients("softmax", _softmax_backward_backward)
_FORWARD = {
    "softmax": _softmax,
    "log_softmax": _with_gradients("log_softmax", _log_softmax_backward_backward)[0],
    "scaled_masked_softmax": _with_gradients("scaled_masked_softmax", _scaled_masked_softmax_backward_backward)[0],
}


# ---- public functions ------------------------------------------------------------------------------------------------


def _call(operator: str, arrays: dict[str, Any], **settings: Any) -> jax.Array:
    """Check and compute an operator. An axis is counted from the end, as a negative number."""
    given = {name: as_array(each, name, operator) for name, each in arrays.items()}
    found = as_floating(given, [next(iter(given))])
    arguments, _ = check(operator, found, **settings)
    ((name, _),) = settings.items()
    first, *mask = aligned(found).values()
    if not first.ndim:
        return _FORWARD[operator]((name, -1), first.reshape(1)).reshape(())
    value = arguments[name] if name == "scale" else int(settings[name]) % first.ndim - first.ndim
    result = _FORWARD[operator]((name, value), first, *mask)
    return sharded_as(result, next(iter(found.values())))  # `aligned` may have dropped the sharding


@documented(WORDS, like=ag.softmax)
def softmax(input: jax.Array, axis: int = LAST, *, dim: int | None = None) -> jax.Array:
    """Compute the softmax along one dimension, like `ascend_grad.softmax` and `jax.nn.softmax`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> agj.softmax(jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "softmax")
    return _call("softmax", {"input": input}, axis=axis)


@documented(WORDS, like=ag.log_softmax)
def log_softmax(input: jax.Array, axis: int = LAST, *, dim: int | None = None) -> jax.Array:
    """Compute the natural logarithm of the softmax, like `ascend_grad.log_softmax` and `jax.nn.log_softmax`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> jnp.exp(agj.log_softmax(jnp.zeros(2)))
    Array([0.5, 0.5], dtype=float32)
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "log_softmax")
    return _call("log_softmax", {"input": input}, axis=axis)


@documented(WORDS, like=ag.scaled_masked_softmax)
def scaled_masked_softmax(x: jax.Array, mask: jax.Array, scale: float = 1.0) -> jax.Array:
    r"""Compute the scaled and masked softmax over the last dimension, like `ascend_grad.scaled_masked_softmax`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> mask = jnp.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> agj.scaled_masked_softmax(jnp.zeros((1, 1, 1, 4)), mask)
    Array([[[[0.5, 0.5, 0. , 0. ]]]], dtype=float32)
    """
    return _call("scaled_masked_softmax", {"x": x, "mask": mask}, scale=scale)
