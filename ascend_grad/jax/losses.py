"""Results, calls of compiled functions and derivatives that both losses use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..operators.results import loss_result
from .arrays import as_array, check
from .meshes import compiled_call, sharded_as

#: Outputs of a loss that have a gradient.
DIFFERENTIABLE = ("lse", "log_prob", "entropy")


class Settings(NamedTuple):
    """Options of a loss that are no arrays: constants of the compiled program. 0: no denominator, no softcap."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    temperature: float
    denominator: float
    outputs: tuple[str, ...]
    num_threads: int
    #: Further attributes of the compiled function.
    others: tuple[tuple[str, int | float], ...] = ()


def accumulator(input: jax.Array) -> np.dtype:
    """Return the dtype of losses."""
    return np.dtype(np.float64 if input.dtype == np.float64 else np.float32)


def specs(rows: tuple[int, ...], input: jax.Array, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Return shapes and dtypes of the loss and of outputs by name."""
    shapes = {"correct": (), "loss": rows if settings.reduction == "none" else ()}
    integer = jax.dtypes.canonicalize_dtype(np.int64)
    dtypes = {"predicted": integer, "correct": integer}
    return {name: jax.ShapeDtypeStruct(shapes.get(name, rows), dtypes.get(name, accumulator(input))) for name in names}


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(
    target: str, settings: Settings, results: tuple[tuple[str, Any], ...], arrays: dict[str, jax.Array]
) -> list[jax.Array]:
    attributes = {
        "arguments": " ".join(arrays),
        "results": " ".join(name for name, _ in results),
        "reduction": settings.reduction,
        "ignore_index": np.int64(settings.ignore_index),
        "label_smoothing": np.float64(settings.label_smoothing),
        "lse_square_scale": np.float64(settings.lse_square_scale),
        "temperature": np.float64(settings.temperature),
        "denominator": np.float64(settings.denominator),
        "num_threads": np.int64(settings.num_threads),
        **{name: np.int64(each) if isinstance(each, int) else np.float64(each) for name, each in settings.others},
    }
    specs = [spec for _, spec in results]
    return compiled_call(target, specs, tuple(arrays.values()), attributes, takes_batches=False)


@_call.defjvp
def _refuse_second_order(target: str, *_: object) -> NoReturn:
    operator = target.removeprefix("ascend_grad_")
    raise NotImplementedError(f"{operator}: the gradient cannot be differentiated once more")


def call(target: str, settings: Settings, arrays: dict[str, jax.Array], results: Mapping[str, Any]) -> dict:
    """Call the compiled function `target`, and return its results by name. It cannot be differentiated."""
    return dict(zip(results, _call(target, settings, tuple(results.items()), arrays)))


def given(arrays: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    """Return the arrays that are not None."""
    return {name: each for name, each in arrays.items() if each is not None}


def refuse_gradients(operator: str, primals: Mapping[str, Any]) -> None:
    """Raise for an argument that is differentiated, although the loss has no gradient for it."""
    for name, each in primals.items():
        if each.perturbed and jnp.issubdtype(each.value.dtype, jnp.floating):
            message = "the loss has no gradient for it, got an array that is differentiated"
            raise NotImplementedError(f"{operator}: {name}: {message} (jax.lax.stop_gradient(array) is not)")


def upstream(cotangents: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the upstream gradients, without the symbolic zeros."""
    return {
        name: each
        for name, each in cotangents.items()
        if name in ("loss", *DIFFERENTIABLE) and not isinstance(each, jax.custom_derivatives.SymbolicZero)
    }


def scaled(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply a gradient by one number, rounded once."""
    if (
        not isinstance(factor, jax.core.Tracer) and factor == 1
    ):  # the pass over the gradient is saved outside of jax.jit
        return gradient
    return (gradient.astype(factor.dtype) * factor).astype(gradient.dtype)


def prepared(
    operator: str, arrays: dict[str, Any], temperature: Any, others: Sequence[str] = (), **settings: Any
) -> tuple[dict[str, jax.Array], Settings]:
    """Check the arguments of a loss, and return its arrays and settings. `others` names settings of this loss alone."""
    if isinstance(temperature, (jax.Array, np.ndarray)):
        arrays = {**arrays, "temperature": temperature}
    else:
        settings["temperature"] = temperature
        if isinstance(temperature, (list, tuple)) or getattr(temperature, "ndim", 0) != 0:
            as_array(temperature, "temperature", operator)  # raises, as for every other array
    found = {name: as_array(each, name, operator) for name, each in arrays.items()}
    arguments, num_threads = check(operator, found, **settings)
    return given(found), Settings(
        reduction=arguments["reduction"],
        ignore_index=arguments["ignore_index"],
        label_smoothing=arguments["label_smoothing"],
        lse_square_scale=arguments["lse_square_scale"],
        temperature=arguments["temperature"] if "temperature" in settings else 1.0,
        denominator=arguments["denominator"] or 0.0,
        outputs=arguments["outputs"],
        num_threads=num_threads,
        others=tuple((name, arguments[name] or 0.0) for name in others),
    )


def with_temperatures(arrays: dict[str, jax.Array], rows: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return the arrays with one temperature for each row, if one array of a single number holds for all rows."""
    temperature = arrays.get("temperature")
    if temperature is None or temperature.ndim:
        return arrays
    return {**arrays, "temperature": jnp.broadcast_to(temperature, rows).astype(accumulator(arrays["input"]))}


def sharded_results(found: dict[str, jax.Array], settings: Settings, input: jax.Array, axis: int) -> Any:
    """Return what the function of a loss returns. The rows' numbers have the sharding of the rows of `input`."""
    found = {name: sharded_as(each, input, axis) if each.ndim else each for name, each in found.items()}
    names = ("loss", *settings.outputs)
    return loss_result(names, map(found.__getitem__, names)) if settings.outputs else found["loss"]
