"""Arguments, calls of compiled functions and derivatives, which both losses share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

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
    statistics_for_backward,
)
from ..operators.results import loss_result
from ..operators.table import OPERATORS
from .arrays import as_array, as_classes, as_floating, check
from .meshes import aligned, compiled_call, compiled_in_manual_mesh, sharded_as

#: Options that are one number or an array with a number for each row.
_NUMBERS_OR_ROWS = tuple(option.name for option in OPTIONS.values() if option.kind == NUMBER_OR_PER_ROW)
#: Arrays with a number for each row or each target.
_OF_ROWS = tuple(option.name for option in OPTIONS.values() if option.kind in (PER_ROW, PER_TARGET, NUMBER_OR_PER_ROW))
#: Outputs of a loss that have a gradient.
_DIFFERENTIABLE = tuple(output.name for output in OUTPUTS.values() if output.has_gradient)
#: Arrays of a loss that have gradients.
_LAYER = ("input", "weight", "bias")


class Settings(NamedTuple):
    """Arguments of a loss that are no arrays: constants of the compiled program."""

    operator: str
    #: The dimension of the classes, counted from the end as a negative number.
    axis: int
    outputs: tuple[str, ...]
    #: Attributes of the compiled function. 0 stands for None.
    attributes: tuple[tuple[str, str | int | float], ...]

    @property
    def is_reduced(self) -> bool:
        """Return whether the loss is one number."""
        return dict(self.attributes)["reduction"] != "none"

    @property
    def saved(self) -> tuple[str, ...]:
        """Return the statistics that the gradient of the outputs of a layer's loss is computed from."""
        return () if self.operator == "cross_entropy" else statistics_for_backward(self.outputs)


def accumulator(input: jax.Array) -> np.dtype:
    """Return the dtype of losses."""
    return np.dtype(np.float64 if input.dtype == np.float64 else np.float32)


def rows_of(input: jax.Array, axis: int) -> tuple[int, ...]:
    """Return the shape of the rows of an array: its own without the dimension of the classes."""
    return input.shape[:axis] + input.shape[axis:][1:]


# ---- calls -----------------------------------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _call(
    settings: Settings, results: tuple[tuple[str, jax.ShapeDtypeStruct], ...], arrays: dict[str, jax.Array]
) -> list[jax.Array]:
    numbers = {int: np.int64, float: np.float64, str: str}
    attributes = {
        "arguments": " ".join(arrays),
        "results": " ".join(name for name, _ in results),
        **{name: numbers[type(each)](each) for name, each in settings.attributes},
    }
    target, specs = f"ascend_grad_{settings.operator}", [spec for _, spec in results]
    return compiled_call(target, specs, tuple(arrays.values()), attributes, takes_batches=False)


@_call.defjvp
def _refuse_second_order(settings: Settings, *_: object) -> NoReturn:
    raise NotImplementedError(f"{settings.operator}: the gradient cannot be differentiated once more")


def _compute(
    settings: Settings, arrays: dict[str, jax.Array], names: Sequence[str], gradients: Sequence[str]
) -> dict[str, jax.Array]:
    """Compute the results of these names, and the gradients with respect to these arrays. No result has derivatives."""
    input = arrays["input"]
    rows, integer = rows_of(input, settings.axis), jax.dtypes.canonicalize_dtype(np.int64)
    results = {}
    for name in names:
        output = OUTPUTS.get(name)
        is_one = settings.is_reduced if output is None else output.is_total
        shape = arrays["target"].shape if output is not None and output.is_of_targets else rows
        dtype = integer if output is not None and output.is_integer else accumulator(input)
        results[name] = jax.ShapeDtypeStruct(() if is_one else shape, dtype)
    for name in gradients:
        results[f"{name}_grad"] = jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
    return dict(zip(results, _call(settings, tuple(results.items()), arrays)))


# ---- the gradient ----------------------------------------------------------------------------------------------------
# Gradients of a mean or a sum are computed with the loss, so that logits are computed once, and scaled later. Gradients
# of one loss per row are computed later, as upstream gradients must be applied before the sum over the rows. So are
# gradients in float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish.
# If a requested output of a layer's loss has a gradient, all gradients are computed later, too: one call then applies
# the upstream gradients of the loss and the outputs together.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, layer: dict[str, jax.Array], others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute the loss and its outputs. `layer` has the arrays that it has gradients for."""
    return _compute(settings, {**layer, **others}, ("loss", *settings.outputs), ())


def _loss_forward(settings: Settings, layer: dict[str, Any], others: dict[str, Any]) -> tuple[dict, tuple]:
    for name, each in others.items():
        if each.perturbed and jnp.issubdtype(each.value.dtype, jnp.floating):
            message = "the loss has no gradient for it, got an array that is differentiated"
            message = f"{settings.operator}: {name}: {message} (jax.lax.stop_gradient(array) is not)"
            raise NotImplementedError(message)
    wanted = [name for name, each in layer.items() if each.perturbed]
    arrays = {name: each.value for name, each in (layer | others).items()}
    names = ("loss", *settings.outputs)
    is_with_loss = settings.is_reduced and arrays["input"].dtype != jnp.float16 and not settings.saved
    found = _compute(settings, arrays, tuple(dict.fromkeys((*names, *settings.saved))), wanted if is_with_loss else ())
    # JAX may keep one structure of residuals for all differentiations of a compiled program. So the structure must not
    # depend on which arrays are differentiated: for each array of the layer there is one residual, whose rank tells.
    gradients = {
        name: found.get(f"{name}_grad", jnp.zeros((0,) * (arrays[name].ndim + 1 if name in wanted else 0)))
        for name in layer
    }
    saved = {name: found[name] for name in settings.saved}
    return {name: found[name] for name in names}, (arrays, gradients, saved)


def _loss_backward(settings: Settings, residuals: tuple, cotangents: dict[str, Any]) -> tuple[dict, None]:
    arrays, by_name, saved = residuals
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
        found = _compute(settings, {**arrays, **upstream}, names, tuple(gradients))
    return {name: found.get(f"{name}_grad") for name in arrays if name in _LAYER}, None


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


def loss(operator: str, values: dict[str, Any]) -> Any:
    """Compute what the function of a loss returns. `values` has its arguments by name."""
    contract = OPERATORS[operator]
    found, others = {}, {}
    if is_zero(values["target_prob"]):
        values = {**values, "target_prob": jnp.zeros(jnp.shape(values["target"]), jnp.float32)}
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
    found = {**as_floating(found, ("input", "weight")), "target": as_classes(found["target"])}
    arguments, num_threads = check(operator, found, **others)
    constants: dict[str, Any] = dict.fromkeys(_NUMBERS_OR_ROWS, 1.0)  # for the options that are arrays
    constants |= {name: 0.0 if arguments[name] is None else arguments[name] for name in others if name in arguments}
    outputs = constants.pop("outputs")

    arrays = {name: each for name, each in found.items() if each is not None}
    if not arrays["input"].ndim:
        for name in ("input", *(["target"] if jnp.issubdtype(arrays["target"].dtype, jnp.floating) else [])):
            arrays[name] = arrays[name].reshape(1)
    input = arrays["input"]
    axis = int(others.get("axis", -1)) % input.ndim - input.ndim
    if "axis" in others:
        constants["axis"] = axis
    rows = rows_of(input, axis)
    leading = rows if "weight" in arrays and len(rows) != 1 else None
    shape_of_targets = arrays["target"].shape
    if leading is not None:  # the compiled function has one dimension of rows
        rows = (math.prod(leading),)
        for name in ("input", "target", *_OF_ROWS):
            if name in arrays and arrays[name].ndim >= len(leading):
                arrays[name] = arrays[name].reshape(*rows, *arrays[name].shape[len(leading) :])
        input = arrays["input"]
    for name in _NUMBERS_OR_ROWS:
        if name in arrays and not arrays[name].ndim:  # one number holds for all rows
            arrays[name] = jnp.broadcast_to(arrays[name], rows).astype(accumulator(input))
    arrays = aligned(arrays)
    layer = {name: arrays.pop(name) for name in _LAYER if name in arrays}
    settings = Settings(operator, axis, outputs, tuple({**constants, "num_threads": num_threads}.items()))
    results = _loss_on_any_mesh(settings, layer, arrays)
    # The rows' numbers have the sharding of the rows of `input`.
    results = {name: sharded_as(each, input, axis) if each.ndim else each for name, each in results.items()}
    if leading is not None:
        for name, each in results.items():
            if each.ndim:
                is_of_targets = name in OUTPUTS and OUTPUTS[name].is_of_targets
                results[name] = each.reshape(shape_of_targets if is_of_targets else leading)
    names = ("loss", *outputs)
    return loss_result(names, map(results.__getitem__, names)) if outputs else results["loss"]
