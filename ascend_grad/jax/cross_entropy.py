"""The cross-entropy loss of logits, with its gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from .. import _xla_cross_entropy
from ..operators.results import LossResult
from .losses import (
    Settings,
    accumulator,
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, input: jax.Array, others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute the loss and its outputs."""
    return _compute(settings, {"input": input, **others}, ("loss", *settings.outputs), False)


def _loss_forward(settings: Settings, input: Any, others: dict[str, Any]) -> tuple[dict, tuple]:
    refuse_gradients(_NAME, others)
    arrays = {"input": input.value, **{name: each.value for name, each in others.items()}}
    # A loss scale must be applied to gradients of float16 before they are rounded. Rows have upstream gradients each.
    is_with_loss = input.perturbed and settings.reduction != "none" and input.value.dtype != jnp.float16
    results = _compute(settings, arrays, ("loss", *settings.outputs), is_with_loss)
    return results, (arrays, results.pop("input_grad", None))


def _loss_backward(settings: Settings, residuals: tuple, cotangents: dict[str, Any]) -> tuple[Any, None]:
    arrays, gradient = residuals
    above = upstream(cotangents)
    if not above:
        return None, None
    if list(above) == ["loss"] and gradient is not None:
        return scaled(gradient, above["loss"]), None
    given = {
        "grad_loss": jnp.zeros((), accumulator(arrays["input"])),
        **{f"grad_{name}": each for name, each in above.items()},
    }
    return _compute(settings, {**arrays, **given}, ("loss",), True)["input_grad"], None


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
    The gradient of a mean or a sum is computed with the loss, except in float16. Other gradients, and those of outputs,
    are computed in the backward pass.

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
