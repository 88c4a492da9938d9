"""The cross-entropy loss of a linear layer, with its gradients, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax

import ascend_grad as ag

from .. import _xla_linear, _xla_python
from ..operators.results import LossResult
from ..operators.signatures import completed, options_of, with_options
from .arrays import WORDS
from .calls import hessian_product
from .losses import loss

if TYPE_CHECKING:
    from ..option_types import JaxLinearLossOptions, Outputs

    Options = JaxLinearLossOptions[jax.Array, float]

jax.ffi.register_ffi_target("ascend_grad_linear_cross_entropy", _xla_linear.handler(), platform="cpu")
jax.ffi.register_ffi_target(
    "ascend_grad_linear_cross_entropy_hvp", _xla_python.handler(hessian_product), platform="cpu"
)
_OPTIONS = options_of()


@overload
def linear_cross_entropy(
    input: jax.Array, weight: jax.Array, target: jax.Array, *, outputs: tuple[()] = (), **options: Unpack[Options]
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    input: jax.Array, weight: jax.Array, target: jax.Array, *, outputs: Outputs, **options: Unpack[Options]
) -> LossResult[jax.Array]: ...


@with_options(_OPTIONS, WORDS, like=ag.linear_cross_entropy)
def linear_cross_entropy(
    input: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    filter_eps: float = 0.0,
    num_threads: int | None = None,
    **options: Any,
) -> jax.Array | LossResult[jax.Array]:
    r"""Compute the cross-entropy loss of a linear layer in bounded memory, like `ascend_grad.linear_cross_entropy`.

    The logits are ``input @ weight.T``. The loss of a row is ``logsumexp(row) - row[target]``. The result is the
    mean by default::

        loss = agj.linear_cross_entropy(input, weight, target)
        input_grad, weight_grad = jax.grad(agj.linear_cross_entropy, argnums=(0, 1))(input, weight, target)

    Returns
    -------
    jax.Array or LossResult
        As `cross_entropy` returns.

    Raises
    ------
    NotImplementedError
        `token_weight`, `class_weight`, `target_prob` or `temperature` is differentiated, which the loss has no gradient
        for; the gradient of lse, log_prob or entropy is differentiated once more, or the gradient of the loss is
        differentiated twice.
    jax.errors.JaxRuntimeError
        The compiled program finds a bad target or temperature, as in `cross_entropy`.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradients are computed with the loss. They are computed in the backward pass,
    which computes the logits again, in float16 and if `outputs` has "lse", "log_prob" or "entropy". A layer that is not
    differentiated costs one product less. The gradient of the loss can be differentiated once more: `jax.hessian` and
    `jax.jvp` of `jax.grad` compute products as `ascend_grad.linear_cross_entropy_hvp` does.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> hidden, weight, target = jnp.eye(2), jnp.zeros((4, 2)), jnp.array([0, 3])
    >>> loss = jax.jit(lambda weight: agj.linear_cross_entropy(hidden, weight, target))
    >>> jax.grad(loss)(weight).T
    Array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]], dtype=float32)
    """
    values = {"input": input, "weight": weight, "target": target, "reduction": reduction, "ignore_index": ignore_index}
    values |= {"filter_eps": filter_eps, **completed(options, _OPTIONS, "linear_cross_entropy")}
    return loss("linear_cross_entropy", {**values, "num_threads": num_threads})
