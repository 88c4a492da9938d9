"""The cross-entropy loss of logits, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax

import ascend_grad as ag

from .. import _xla_cross_entropy
from ..arguments import LAST, axis_named_dim
from ..operators.results import LossResult
from ..operators.signatures import completed, options_of, with_options
from .arrays import WORDS
from .losses import loss

if TYPE_CHECKING:
    from ..option_types import JaxLossOptions
    from ..option_types import LogitsOutputs as Outputs

    Options = JaxLossOptions[jax.Array, float]

jax.ffi.register_ffi_target("ascend_grad_cross_entropy", _xla_cross_entropy.handler(), platform="cpu")
_OPTIONS = options_of(of_logits=True)


@overload
def cross_entropy(
    input: jax.Array, target: jax.Array, axis: int = -1, *, outputs: tuple[()] = (), **options: Unpack[Options]
) -> jax.Array: ...


@overload
def cross_entropy(
    input: jax.Array, target: jax.Array, axis: int = -1, *, outputs: Outputs, **options: Unpack[Options]
) -> LossResult[jax.Array]: ...


@with_options(_OPTIONS, WORDS, like=ag.cross_entropy)
def cross_entropy(
    input: jax.Array,
    target: jax.Array,
    axis: int = LAST,
    *,
    dim: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    num_threads: int | None = None,
    **options: Any,
) -> jax.Array | LossResult[jax.Array]:
    r"""Compute the cross-entropy loss of logits and its gradient in one pass, like `ascend_grad.cross_entropy`.

    The loss of a row is ``logsumexp(row) - row[target]``. The result is the mean by default::

        loss = agj.cross_entropy(logits, target)
        grad = jax.grad(agj.cross_entropy)(logits, target)

    Returns
    -------
    jax.Array or LossResult
        The loss; float32, or float64 if `input` is float64. With `outputs` it is the first field of a named tuple,
        `loss`, and the outputs are the other fields. "lse", "log_prob", "entropy" and "prob" are also differentiable.

    Raises
    ------
    NotImplementedError
        An option is differentiated, the gradient of lse, log_prob or entropy is differentiated once more, or the
        gradient of the loss is differentiated twice.
    jax.errors.JaxRuntimeError
        The compiled program finds a target that is neither in [0, V) nor `ignore_index`, or a temperature that is not
        positive and finite. `ascend_grad.cross_entropy` has the same message in its `ParamInvalidError`.

    Notes
    -----
    The gradient of a mean or a sum is computed with the loss, except in float16. Other gradients, and the gradients of
    outputs, are computed in the backward pass. The gradient of the loss can be differentiated once more: `jax.hessian`
    and `jax.jvp` of `jax.grad` compute products as `ascend_grad.cross_entropy_hvp` does. A `temperature` that is an
    array may be traced. To divide a mean by a traced number, divide the sum by it.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> loss = lambda logits: agj.cross_entropy(logits, jnp.array([0, 3]))
    >>> jax.jit(jax.grad(loss))(jnp.zeros((2, 4)))
    Array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]], dtype=float32)
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "cross_entropy")
    values = {"input": input, "target": target, "axis": axis, "reduction": reduction, "ignore_index": ignore_index}
    values |= completed(options, _OPTIONS, "cross_entropy")
    return loss("cross_entropy", {**values, "num_threads": num_threads})
