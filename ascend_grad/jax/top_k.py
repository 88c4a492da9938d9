"""The largest log-probabilities of a linear layer, with their gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import ascend_grad as ag

from .. import _xla_linear
from ..operators.options import NUMBER, OPTIONS
from ..operators.results import LinearTopK
from ..operators.signatures import documented
from ..operators.table import LINEAR_TOP_K
from .arrays import WORDS
from .calls import Settings, accumulator, call_operator, compute, integers
from .losses import LAYER, arguments_of, in_rows, refuse_perturbed
from .meshes import aligned, compiled_in_manual_mesh, sharded_as

_NAME = LINEAR_TOP_K.name
jax.ffi.register_ffi_target(f"ascend_grad_{_NAME}", _xla_linear.handler(), platform="cpu")
#: Settings of the loss whose gradient is computed: of the sum, without options.
_OF_LOSS = {
    **{option.name: option.default or 0.0 for option in OPTIONS.values() if option.kind == NUMBER},
    "reduction": "sum",
    "ignore_index": -100,
    "filter_eps": 0.0,
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _top_k(settings: Settings, layer: dict[str, jax.Array], others: dict[str, jax.Array]) -> list[jax.Array]:
    arrays = {**layer, **others}
    input = arrays["input"]
    shape = input.shape[0], dict(settings.attributes)["k"]
    results = {"log_prob": accumulator(input), "index": integers()}
    specs = tuple((name, jax.ShapeDtypeStruct(shape, dtype)) for name, dtype in results.items())
    return call_operator(settings, specs, arrays)


def _forward(settings: Settings, layer: dict[str, Any], others: dict[str, Any]) -> tuple[list, tuple]:
    refuse_perturbed(settings.operator, others, "the log-probabilities have")
    # As in the losses, the structure of residuals does not depend on which arrays are differentiated: the rank tells.
    wanted = {name: jnp.zeros((0,) * bool(each.perturbed)) for name, each in layer.items()}
    of_layer, of_rows = ({name: each.value for name, each in arrays.items()} for arrays in (layer, others))
    results = _top_k(settings, of_layer, of_rows)
    return results, (of_layer, of_rows, results[1], wanted)


def _backward(settings: Settings, residuals: tuple, cotangents: list) -> tuple[dict, None]:
    """Compute the gradient of a loss whose targets are the indices, each with the probability 0."""
    layer, others, index, wanted = residuals
    found: dict[str, jax.Array] = {}
    if not isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        targets = {"target": index, "target_prob": jnp.zeros(index.shape, jnp.float32)}
        upstream = {"grad_loss": jnp.zeros((), cotangents[0].dtype), "grad_log_prob": cotangents[0]}
        names = tuple(name for name, each in wanted.items() if each.ndim)
        found = compute(settings, {**layer, **others, **targets, **upstream}, ("loss",), names)
    return {name: found.get(f"{name}_grad") for name in layer}, None


_top_k.defvjp(_forward, _backward, symbolic_zeros=True)
_top_k_on_any_mesh = compiled_in_manual_mesh(_top_k)


@documented(WORDS, like=ag.linear_top_k)
def linear_top_k(
    input: jax.Array,
    weight: jax.Array,
    k: int,
    *,
    temperature: float | jax.Array = 1.0,
    bias: jax.Array | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_threads: int | None = None,
) -> LinearTopK[jax.Array]:
    """Compute the k largest log-probabilities of a linear layer for each row, without storing all logits.

    It is `ascend_grad.linear_top_k` for JAX. The result is a named tuple::

        log_prob, index = agj.linear_top_k(input, weight, k)

    The log-probabilities have gradients with respect to `input`, `weight` and `bias`. They are computed in the backward
    pass, which computes the logits again.

    Returns
    -------
    log_prob : jax.Array, shape (..., k)
        The k largest log-probabilities of each row, from the largest down; float32, or float64 if `input` is float64.
    index : jax.Array, shape (..., k)
        Their rows of `weight`; int32, or int64 while 64 bits are enabled in JAX. Of equal logits the one with the lower
        index comes first.

    Raises
    ------
    NotImplementedError
        `temperature` is differentiated, or the gradient is differentiated once more.
    jax.errors.JaxRuntimeError
        The compiled program finds a temperature that is not positive and finite.

    Notes
    -----
    `k` is a constant of the compiled program. A `temperature` that is an array may be traced.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> logits = jnp.log(jnp.array([[0.5, 0.125, 0.25, 0.125]]))
    >>> log_prob, index = agj.linear_top_k(jnp.eye(1), logits.T, 3)
    >>> index
    Array([[0, 2, 1]], dtype=int32)
    >>> jnp.exp(log_prob).round(3)
    Array([[0.5  , 0.25 , 0.125]], dtype=float32)
    """
    values = {"input": input, "weight": weight, "k": k, "temperature": temperature, "bias": bias}
    values |= {"logit_scale": logit_scale, "softcap": softcap, "num_threads": num_threads}
    given, constants = arguments_of(_NAME, values)
    others = in_rows(aligned(given))
    layer = {name: others.pop(name) for name in LAYER if name in given}
    settings = Settings(_NAME, -1, (), tuple({**_OF_LOSS, **constants}.items()))
    results = _top_k_on_any_mesh(settings, layer, others)
    input = given["input"]
    shape = *input.shape[:-1], constants["k"]
    return LinearTopK(*(sharded_as(each.reshape(shape), input, -1) for each in results))
