"""The cross-entropy loss of logits, with its gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from .. import _xla_cross_entropy
from ..operators.results import LossResult
from .losses import (
    DIFFERENTIABLE,
    Settings,
    call,
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
    from ..option_types import LossOptions, Outputs

_NAME = "cross_entropy"
_TARGET = "ascend_grad_cross_entropy"
jax.ffi.register_ffi_target(_TARGET, _xla_cross_entropy.handler(), platform="cpu")


def _axis(settings: Settings) -> int:
    """Return the dimension of the classes, counted from the end as a negative number."""
    return int(dict(settings.others)["dim"])


def _rows(input: jax.Array, axis: int) -> tuple[int, ...]:
    """Return the shape of the rows of an array: its own without the dimension of the classes."""
    return input.shape[:axis] + input.shape[axis:][1:]


def _compute(
    settings: Settings, arrays: dict[str, jax.Array], names: tuple[str, ...], with_gradient: bool
) -> dict[str, jax.Array]:
    """Compute the results of these names, and the gradient."""
    input = arrays["input"]
    results = specs(_rows(input, _axis(settings)), input, settings, names)
    if with_gradient:
        results["input_grad"] = jax.ShapeDtypeStruct(input.shape, input.dtype)
    return call(_TARGET, settings, arrays, results)


def _gradient_of_outputs(
    settings: Settings, arrays: dict[str, jax.Array], saved: dict[str, jax.Array], above: dict[str, jax.Array]
) -> jax.Array:
    """Compute the gradient of the requested outputs with JAX's own operations."""
    # All operands have the same rank and dtype, as jax_numpy_rank_promotion and jax_numpy_dtype_promotion may demand.
    axis, target, dtype = _axis(settings), arrays["target"], saved["lse"].dtype
    limits = jnp.iinfo(target.dtype)
    is_possible = limits.min <= settings.ignore_index <= limits.max
    ignored = target == settings.ignore_index if is_possible else jnp.zeros(target.shape, bool)
    if "target_prob" in arrays:
        ignored = ignored.all(-1)

    def of_rows(values: jax.Array) -> jax.Array:
        return jnp.expand_dims(values.astype(dtype), axis)

    temperature = jnp.asarray(settings.temperature, dtype)
    if "temperature" in arrays:
        temperature = of_rows(arrays["temperature"])
    # The saved numbers of ignored rows are 0, and their logits may be anything.
    z = jnp.where(jnp.expand_dims(ignored, axis), 0, arrays["input"].astype(dtype)) / temperature
    log_p = z - of_rows(saved["lse"])
    p = jnp.exp(log_p)
    grad = of_rows(above["lse"]) * p if "lse" in above else jnp.zeros_like(p)
    if "log_prob" in above:
        classes = jax.lax.broadcasted_iota(target.dtype, z.shape, z.ndim + axis)
        is_target = jnp.expand_dims(target, axis) == classes
        grad += of_rows(above["log_prob"]) * (is_target.astype(dtype) - p)
    if "entropy" in above:
        surplus = p * (jnp.where(p == 0, 0, log_p) + of_rows(saved["entropy"]))
        grad -= of_rows(above["entropy"]) * surplus
    return jnp.where(jnp.expand_dims(ignored, axis), 0, grad / temperature)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, input: jax.Array, others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute the loss and its outputs."""
    return _compute(settings, {"input": input, **others}, ("loss", *settings.outputs), False)


def _loss_forward(settings: Settings, input: Any, others: dict[str, Any]) -> tuple[dict, tuple]:
    refuse_gradients(_NAME, others)
    arrays = {"input": input.value, **{name: each.value for name, each in others.items()}}
    saved = ["lse"] * any(name in settings.outputs for name in DIFFERENTIABLE)
    saved += ["entropy"] * ("entropy" in settings.outputs)
    names = tuple(dict.fromkeys(("loss", *settings.outputs, *saved)))
    # A loss scale must be applied to gradients of float16 before they are rounded. Rows have upstream gradients each.
    is_with_loss = input.perturbed and settings.reduction != "none" and input.value.dtype != jnp.float16
    found = _compute(settings, arrays, names, is_with_loss)
    results = {name: found[name] for name in ("loss", *settings.outputs)}
    return results, (arrays, found.get("input_grad"), {name: found[name] for name in saved})


def _loss_backward(settings: Settings, residuals: tuple, cotangents: dict[str, Any]) -> tuple[Any, None]:
    arrays, gradient, saved = residuals
    above = upstream(cotangents)
    loss = above.pop("loss", None)
    grad = None
    if loss is not None and gradient is not None:
        grad = scaled(gradient, loss)
    elif loss is not None:
        grad = _compute(settings, {**arrays, "grad_loss": loss}, ("loss",), True)["input_grad"]
    if above:
        of_outputs = _gradient_of_outputs(settings, arrays, saved, above)
        total = of_outputs if grad is None else of_outputs + grad.astype(of_outputs.dtype)
        grad = total.astype(arrays["input"].dtype)
    return grad, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
_loss_on_any_mesh = compiled_in_manual_mesh(_loss)


@overload
def cross_entropy(
    input: jax.Array,
    target: jax.Array,
    dim: int = -1,
    *,
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    outputs: tuple[()] = (),
    **options: Unpack[LossOptions[jax.Array, float]],
) -> jax.Array: ...


@overload
def cross_entropy(
    input: jax.Array,
    target: jax.Array,
    dim: int = -1,
    *,
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    outputs: Outputs,
    **options: Unpack[LossOptions[jax.Array, float]],
) -> LossResult[jax.Array]: ...


def cross_entropy(
    input: jax.Array,
    target: jax.Array,
    dim: int = -1,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    token_weight: jax.Array | None = None,
    target_prob: jax.Array | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: float | jax.Array = 1.0,
    denominator: float | None = None,
    outputs: Outputs = (),
    num_threads: int | None = None,
) -> jax.Array | LossResult[jax.Array]:
    r"""Compute the cross-entropy loss of logits, in one pass over the rows with its gradient.

    It is `ascend_grad.cross_entropy` for JAX, with the same formula and the same options.

    Parameters
    ----------
    input : jax.Array, shape (...)
        The logits. Rank 0 to 8; float32, float16, bfloat16 or float64.
    target : jax.Array of int32 or int64
        The index of each row's target, or `ignore_index`: the shape of `input` without `dim`. With `target_prob` there
        is one more axis, the last one, of K targets. Another value is an error of the compiled program.
    dim : int, default -1
        The axis of the classes. Not traced.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    class_weight : jax.Array, shape (V,), optional
        Factors of the classes, of any of the four dtypes.
    token_weight : jax.Array, optional
        The factor of each row, of any of the four dtypes.
    target_prob : jax.Array, optional
        Probabilities of K targets in each row, of the shape of `target`, of any of the four dtypes.
    label_smoothing : float, default 0.0
        The share of the loss that goes to all classes, from 0 to 1.
    lse_square_scale : float, default 0.0
        The factor of the squared logarithm of the sum of the exponentials (z-loss).
    temperature : float or jax.Array, default 1.0
        The divisor of the logits, above 0: one number, or one for each row. An array may be traced.
    denominator : float, optional
        The divisor of a mean, above 0. To divide by a traced number, divide the sum by it.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        Further results. The first three are differentiable, too, by JAX's own operations.
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
        161001: `input` or `target` is None.
    ParamInvalidError
        161002: a dtype, a shape or a number is not as described, or an option that is no array is traced (a dtype or a
        kind: its subclass `ParamTypeError`).
    NotImplementedError
        An option is differentiated, or the gradient is differentiated once more.
    jax.errors.JaxRuntimeError
        The compiled program finds a target that is neither in [0, V) nor `ignore_index`, or a temperature that is not
        positive and finite. `ascend_grad.cross_entropy` has the same message in its `ParamInvalidError`.

    Notes
    -----
    The gradient of a mean or a sum is computed with the loss, except in float16. Other gradients are computed in the
    backward pass.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import ascend_grad.jax as agj
    >>> loss = lambda logits: agj.cross_entropy(logits, jnp.array([0, 3]))
    >>> jax.jit(jax.grad(loss))(jnp.zeros((2, 4)))
    Array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]], dtype=float32)
    """
    arrays, settings = prepared(
        _NAME,
        {
            "input": input,
            "target": target,
            "class_weight": class_weight,
            "token_weight": token_weight,
            "target_prob": target_prob,
        },
        temperature,
        dim=dim,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        denominator=denominator,
        outputs=outputs,
        num_threads=num_threads,
    )
    logits = arrays["input"].reshape(arrays["input"].shape or (1,))
    axis = int(dim) % logits.ndim - logits.ndim
    arrays = aligned(with_temperatures({**arrays, "input": logits}, _rows(logits, axis)))
    found = _loss_on_any_mesh(settings._replace(others=(("dim", axis),)), arrays.pop("input"), arrays)
    return sharded_results(found, settings, logits, axis)
