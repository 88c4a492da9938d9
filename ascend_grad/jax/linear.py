"""The cross-entropy loss of a linear layer, with its gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from .. import _xla_linear
from ..operators.results import LossResult
from .losses import (
    DIFFERENTIABLE,
    Settings,
    accumulator,
    call,
    given,
    prepared,
    refuse_gradients,
    scaled,
    sharded_results,
    specs,
    upstream,
    with_temperatures,
)
from .meshes import aligned, compiled_in_manual_mesh

if TYPE_CHECKING:
    from ..option_types import LinearLossOptions, Outputs

_NAME = "linear_cross_entropy"
_TARGET = "ascend_grad_linear_cross_entropy"
jax.ffi.register_ffi_target(_TARGET, _xla_linear.handler(), platform="cpu")

#: Settings of this loss alone.
_OTHERS = ("logit_scale", "softcap", "filter_eps")


def _compute(
    settings: Settings, arrays: dict[str, jax.Array], names: tuple[str, ...], gradients: Sequence[str]
) -> dict[str, jax.Array]:
    """Compute the results of these names, and the gradients with respect to these arrays."""
    results = specs(arrays["input"].shape[:1], arrays["input"], settings, names)
    for name in gradients:
        results[f"{name}_grad"] = jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
    return call(_TARGET, settings, arrays, results)


# ---- the gradient ----------------------------------------------------------------------------------------------------
# Gradients of a mean or a sum are computed with the loss, so that logits are computed once, and scaled later. Gradients
# of one loss per row are computed later, as upstream gradients must be applied before the sum over the rows. So are
# gradients in float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish.
# If a requested output has a gradient, all gradients are computed later, too: one call then applies the upstream
# gradients of the loss and the outputs together.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, layer: dict[str, jax.Array], others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute the loss and its outputs. `layer` has the arrays that it has gradients for: input, weight and bias."""
    return _compute(settings, {**layer, **others}, ("loss", *settings.outputs), ())


def _loss_forward(settings: Settings, layer: dict[str, Any], others: dict[str, Any]) -> tuple[dict, tuple]:
    refuse_gradients(_NAME, others)
    wanted = [name for name, each in layer.items() if each.perturbed]
    layer, others = ({name: each.value for name, each in arrays.items()} for arrays in (layer, others))
    # Gradients of outputs are computed from these two.
    saved = ["lse"] * any(name in settings.outputs for name in DIFFERENTIABLE)
    saved += ["entropy"] * ("entropy" in settings.outputs)
    names = tuple(dict.fromkeys(("loss", *settings.outputs, *saved)))
    is_with_loss = settings.reduction != "none" and layer["input"].dtype != jnp.float16 and not saved
    found = _compute(settings, {**layer, **others}, names, wanted if is_with_loss else ())
    gradients = {name: found.get(f"{name}_grad") for name in wanted}
    results = {name: found[name] for name in ("loss", *settings.outputs)}
    return results, (layer, others, gradients, {name: found[name] for name in saved})


def _loss_backward(settings: Settings, residuals: tuple, cotangents: dict[str, Any]) -> tuple[dict, None]:
    layer, others, gradients, saved = residuals
    above = upstream(cotangents)
    if not above:
        return dict.fromkeys(layer), None
    if list(above) != ["loss"]:
        given_statistics = {**saved, "grad_loss": jnp.zeros((), accumulator(layer["input"]))}
        given_statistics |= {f"grad_{name}": each for name, each in above.items()}
        found = _compute(settings, {**layer, **others, **given_statistics}, (), tuple(gradients))
    elif None in gradients.values():
        found = _compute(settings, {**layer, **others, "grad_loss": above["loss"]}, ("loss",), tuple(gradients))
    else:
        found = {f"{name}_grad": scaled(each, above["loss"]) for name, each in gradients.items()}
    return {name: found.get(f"{name}_grad") for name in layer}, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
_loss_on_any_mesh = compiled_in_manual_mesh(_loss)


@overload
def linear_cross_entropy(
    input: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    *,
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    outputs: tuple[()] = (),
    **options: Unpack[LinearLossOptions[jax.Array, float]],
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    input: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    *,
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    outputs: Outputs,
    **options: Unpack[LinearLossOptions[jax.Array, float]],
) -> LossResult[jax.Array]: ...


def linear_cross_entropy(
    input: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    filter_eps: float = 0.0,
    token_weight: jax.Array | None = None,
    class_weight: jax.Array | None = None,
    target_prob: jax.Array | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: float | jax.Array = 1.0,
    denominator: float | None = None,
    bias: jax.Array | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Outputs = (),
    num_threads: int | None = None,
) -> jax.Array | LossResult[jax.Array]:
    r"""Compute the cross-entropy loss of a linear layer, without storing all logits.

    It is `ascend_grad.linear_cross_entropy` for JAX, with the same formula and the same options. `jax.grad` computes
    the gradients with respect to `input`, `weight` and `bias` that are needed.

    Parameters
    ----------
    input : jax.Array, shape (BT, H)
        The layer's input; float32, float16, bfloat16 or float64.
    weight : jax.Array, shape (V, H)
        The layer's weight, of the dtype of `input`.
    target : jax.Array of int32 or int64, shape (BT,), or (BT, K) with `target_prob`
        Rows of `weight`, or `ignore_index`. Another value is an error of the compiled program.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    filter_eps : float, default 0.0
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`.
    token_weight : jax.Array, shape (BT,), optional
        Factors of the losses of the rows, of any of the four dtypes.
    class_weight : jax.Array, shape (V,), optional
        Factors of the vocabulary entries, of any of the four dtypes.
    target_prob : jax.Array, shape (BT, K), optional
        Probabilities of K targets in each row, of any of the four dtypes.
    label_smoothing : float, default 0.0
        The share of the loss that goes to all vocabulary entries, from 0 to 1.
    lse_square_scale : float, default 0.0
        The factor of the squared logarithm of the sum of the exponentials (z-loss).
    temperature : float or jax.Array, shape () or (BT,), default 1.0
        The divisor of the logits, above 0: one number, or one for each row. An array may be traced; a value that is not
        positive and finite is then an error of the compiled program.
    denominator : float, optional
        The divisor of a mean, above 0. To divide by a traced number, divide the sum by it.
    bias : jax.Array, shape (V,), optional
        The layer's bias, of any of the four dtypes.
    logit_scale : float, default 1.0
        The factor of the products.
    softcap : float, optional
        The bound of the logits before `temperature` divides them, above 0. None: the logits are not bounded.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        Further results. The first three are differentiable, too.
    num_threads : int, optional
        As in `ascend_grad.softmax_backward`.

    Returns
    -------
    jax.Array or LossResult
        The loss; float32, or float64 if `input` is float64. With `outputs` it is the first field of a named tuple,
        `loss`, and the outputs are others.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight` or `target` is None.
    ParamInvalidError
        161002: a dtype, a shape or a number is not as described, or an option that is no array is traced (a dtype or a
        kind: its subclass `ParamTypeError`).
    NotImplementedError
        `token_weight`, `class_weight`, `target_prob` or `temperature` is differentiated, which the loss has no gradient
        for; or the gradient is differentiated once more.
    jax.errors.JaxRuntimeError
        The compiled program finds a target that is neither in [0, V) nor `ignore_index`, or a temperature that is not
        positive and finite. `ascend_grad.linear_cross_entropy` has the same message in its `ParamInvalidError`.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradients are computed with the loss. They are computed in the backward pass,
    which computes the logits again, in float16 and if `outputs` has "lse", "log_prob" or "entropy". A layer that is not
    differentiated costs one product less.

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
    arrays, settings = prepared(
        _NAME,
        {
            "input": input,
            "weight": weight,
            "target": target,
            "bias": bias,
            "token_weight": token_weight,
            "class_weight": class_weight,
            "target_prob": target_prob,
        },
        temperature,
        _OTHERS,
        reduction=reduction,
        ignore_index=ignore_index,
        filter_eps=filter_eps,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        denominator=denominator,
        logit_scale=logit_scale,
        softcap=softcap,
        outputs=outputs,
        num_threads=num_threads,
    )
    rows = arrays["input"]
    arrays = aligned(with_temperatures(arrays, rows.shape[:1]))
    layer = given({name: arrays.pop(name, None) for name in ("input", "weight", "bias")})
    return sharded_results(_loss_on_any_mesh(settings, layer, arrays), settings, rows, -1)
