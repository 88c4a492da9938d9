"""Arguments and derivatives of losses, which `linear_top_k` partly shares."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..operators.options import (
    NUMBER_OR_PER_ROW,
    OPTIONS,
    OUTPUTS,
    PER_ROW,
    PER_TARGET,
    is_zero,
)
from ..operators.results import loss_result
from ..operators.table import OPERATORS
from .arrays import as_array, as_classes, as_floating, check
from .calls import LAYER, Settings, accumulator, compute, refuse_derivatives, rows_of, slope_of_logits
from .meshes import aligned, compiled_in_manual_mesh, sharded_as

#: Options that are one number or an array with a number for each row.
_NUMBERS_OR_ROWS = tuple(option.name for option in OPTIONS.values() if option.kind == NUMBER_OR_PER_ROW)
#: Arrays with a number for each row or each target.
_OF_ROWS = tuple(option.name for option in OPTIONS.values() if option.kind in (PER_ROW, PER_TARGET, NUMBER_OR_PER_ROW))
#: Outputs of a loss that have a gradient.
_DIFFERENTIABLE = tuple(output.name for output in OUTPUTS.values() if output.has_gradient)


# ---- the gradient ----------------------------------------------------------------------------------------------------
# Gradients of a mean or a sum are computed with the loss, so that logits are computed once, and scaled later. Gradients
# of one loss per row are computed later, as upstream gradients must be applied before the sum over the rows. So are
# gradients in float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish.
# If a requested output of a layer's loss has a gradient, all gradients are also computed later: one call then applies
# the upstream gradients of the loss and the outputs together.


def refuse_perturbed(operator: str, others: dict[str, Any], results_have: str) -> None:
    """Refuse arrays that are differentiated, among those that there are no gradients for."""
    perturbed = [
        name for name, each in others.items() if each.perturbed and jnp.issubdtype(each.value.dtype, jnp.floating)
    ]
    refuse_derivatives(operator, perturbed, results_have)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, layer: dict[str, jax.Array], others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute the loss and its outputs. `layer` has the arrays that it has gradients for."""
    return compute(settings, {**layer, **others}, ("loss", *settings.outputs), ())


def _loss_forward(settings: Settings, layer: dict[str, Any], others: dict[str, Any]) -> tuple[dict, tuple]:
    refuse_perturbed(settings.operator, others, "the loss has")
    wanted = [name for name, each in layer.items() if each.perturbed]
    arrays = {name: each.value for name, each in (layer | others).items()}
    names = ("loss", *settings.outputs)
    is_with_loss = settings.is_reduced and arrays["input"].dtype != jnp.float16 and not settings.saved
    found = compute(settings, arrays, tuple(dict.fromkeys((*names, *settings.saved))), wanted if is_with_loss else ())
    # JAX may keep one structure of residuals for all differentiations of a compiled program. So the structure must not
    # depend on which arrays are differentiated: for each array of the layer there is one residual, whose rank tells.
    gradients = {
        name: found.get(f"{name}_grad", jnp.zeros((0,) * (arrays[name].ndim + 1 if name in wanted else 0)))
        for name in layer
    }
    saved = {name: found[name] for name in (*settings.saved, *settings.prob)}
    return {name: found[name] for name in names}, (arrays, gradients, saved)


def _loss_backward(settings: Settings, residuals: tuple, cotangents: dict[str, Any]) -> tuple[dict, None]:
    arrays, by_name, saved = residuals
    prob, saved = saved.get("prob"), {name: each for name, each in saved.items() if name != "prob"}
    gradients = {name: each for name, each in by_name.items() if each.ndim}  # of the arrays that are differentiated
    is_with_loss = all(each.ndim == arrays[name].ndim for name, each in gradients.items())
    upstream = {
        f"grad_{name}": each
        for name, each in cotangents.items()
        if name in ("loss", *_DIFFERENTIABLE) and not isinstance(each, jax.custom_derivatives.SymbolicZero)
    }
    found: dict[str, jax.Array] = {}
    if list(upstream) == ["grad_loss"] and is_with_loss:
        found = {f"{name}_grad": _scaled(each, upstream["grad_loss"]) for name, each in gradients.items()}
    elif upstream:
        if list(upstream) != ["grad_loss"]:
            upstream = {"grad_loss": jnp.zeros((), accumulator(arrays["input"])), **saved, **upstream}
        names = () if "lse" in upstream else ("loss",)
        found = compute(settings, {**arrays, **upstream}, names, tuple(gradients))
    grad_prob = cotangents.get("prob")
    if grad_prob is not None and not isinstance(grad_prob, jax.custom_derivatives.SymbolicZero) and gradients:
        of_prob = _gradient_of_prob(settings, arrays, prob, grad_prob)
        found["input_grad"] = found["input_grad"] + of_prob if "input_grad" in found else of_prob
    return {name: found.get(f"{name}_grad") for name in arrays if name in LAYER}, None


def _gradient_of_prob(
    settings: Settings, arrays: dict[str, jax.Array], prob: jax.Array, grad_prob: jax.Array
) -> jax.Array:
    """Return the gradient with respect to the input from the probabilities and their upstream gradient.

    It is composed of JAX's functions, so that it may be differentiated.
    """
    p, g = (each.astype(accumulator(each)) for each in (prob, grad_prob))
    gradient = jnp.moveaxis((g - jnp.sum(g * p, -1, keepdims=True)) * p, -1, settings.axis)
    return (gradient * slope_of_logits(settings, arrays)).astype(prob.dtype)


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
_loss_on_any_mesh = compiled_in_manual_mesh(_loss)


def _scaled(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply a gradient by one number, rounded once."""
    if (
        not isinstance(factor, jax.core.Tracer) and factor == 1
    ):  # the pass over the gradient is saved outside of jax.jit
        return gradient
    return (gradient.astype(factor.dtype) * factor).astype(gradient.dtype)


# ---- arguments -------------------------------------------------------------------------------------------------------


def arguments_of(operator: str, values: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Check and convert arguments by name. Return those that are arrays, and the others, in which 0 stands for None."""
    contract = OPERATORS[operator]
    found, others = {}, {}
    for name, value in values.items():
        if name in _NUMBERS_OR_ROWS:
            # Other arrays of rows are refused, as for every other argument.
            is_array = isinstance(value, (list, tuple, jax.Array, np.ndarray)) or getattr(value, "ndim", 0) != 0
        else:
            is_array = name in contract.array_names or name in contract.optional_names
        if is_array:
            found[name] = as_array(value, name, operator)
        else:
            others[name] = value
    found = as_floating(found, ("input", "weight"))
    if "target" in found:
        found["target"] = as_classes(found["target"])
    arguments, num_threads = check(operator, found, **others)
    constants: dict[str, Any] = dict.fromkeys(_NUMBERS_OR_ROWS, 1.0)  # for the options that are arrays
    constants |= {name: 0.0 if arguments[name] is None else arguments[name] for name in others if name in arguments}
    return {name: each for name, each in found.items() if each is not None}, {**constants, "num_threads": num_threads}


def in_rows(arrays: dict[str, jax.Array], axis: int = -1) -> dict[str, jax.Array]:
    """Return the arrays of a layer with one dimension of rows, and every temperature with a number for each row."""
    arrays, rows = dict(arrays), rows_of(arrays["input"], axis)
    if "weight" in arrays and len(rows) != 1:  # the compiled function has one dimension of rows
        for name in ("input", "target", *_OF_ROWS):
            if name in arrays and arrays[name].ndim >= len(rows):
                arrays[name] = arrays[name].reshape(math.prod(rows), *arrays[name].shape[len(rows) :])
        rows = (math.prod(rows),)
    for name in _NUMBERS_OR_ROWS:
        if name in arrays and not arrays[name].ndim:  # one number holds for all rows
            arrays[name] = jnp.broadcast_to(arrays[name], rows).astype(accumulator(arrays["input"]))
    return arrays


def loss(operator: str, values: dict[str, Any]) -> Any:
    """Compute what the function of a loss returns. `values` has its arguments by name."""
    if is_zero(values["target_prob"]):
        values = {**values, "target_prob": jnp.zeros(jnp.shape(values["target"]), jnp.float32)}
    arrays, constants = arguments_of(operator, values)
    outputs = constants.pop("outputs")
    is_one_element = not arrays["input"].ndim
    if is_one_element:
        for name in ("input", *(["target"] if jnp.issubdtype(arrays["target"].dtype, jnp.floating) else [])):
            arrays[name] = arrays[name].reshape(1)
    axis = int(values.get("axis", -1)) % arrays["input"].ndim - arrays["input"].ndim
    if "axis" in values:
        constants["axis"] = axis
    input, shape_of_targets = arrays["input"], arrays["target"].shape
    arrays = in_rows(aligned(arrays), axis)
    layer = {name: arrays.pop(name) for name in LAYER if name in arrays}
    settings = Settings(operator, axis, outputs, tuple(constants.items()))
    results = _loss_on_any_mesh(settings, layer, arrays)
    if "weight" in layer:
        for name, each in results.items():
            if each.ndim:
                is_of_targets = name in OUTPUTS and OUTPUTS[name].is_of_targets
                results[name] = each.reshape(shape_of_targets if is_of_targets else input.shape[:-1])
    # The rows' numbers have the sharding of the rows of `input`.
    for name, each in results.items():
        if name in OUTPUTS and OUTPUTS[name].is_of_logits:
            results[name] = each.reshape(()) if is_one_element else sharded_as(jnp.moveaxis(each, -1, axis), input)
        elif each.ndim:
            results[name] = sharded_as(each, input, axis)
    names = ("loss", *outputs)
    return loss_result(names, map(results.__getitem__, names)) if outputs else results["loss"]
