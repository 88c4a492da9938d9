"""Calls of the compiled functions of losses and of `linear_top_k`, and derivatives of their results.

The rules here are for the second order: they differentiate gradients that such a call has computed. The modules of the
functions define first derivatives by `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from ..errors import AscendGradError, rename
from ..operators.options import OUTPUT_GRADIENTS, OUTPUTS, largest_factor, statistics_for_backward
from ..operators.second_order import linear_cross_entropy_hvp
from .meshes import compiled_call

#: Arrays of a loss that have gradients.
LAYER = ("input", "weight", "bias")


class Settings(NamedTuple):
    """Arguments of a call that are no arrays: constants of the compiled program."""

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
        return () if self.operator == "cross_entropy" else statistics_for_backward(self.outputs, dict(self.attributes))

    @property
    def prob(self) -> tuple[str, ...]:
        """Return the names of the outputs that are probabilities, whose gradient is computed from them."""
        return ("prob",) if "prob" in self.outputs else ()


def accumulator(input: jax.Array) -> np.dtype:
    """Return the dtype of losses."""
    return np.dtype(np.float64 if input.dtype == np.float64 else np.float32)


def integers() -> np.dtype:
    """Return the dtype of indices and counts, which has 32 bits unless JAX has 64."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def rows_of(input: jax.Array, axis: int) -> tuple[int, ...]:
    """Return the shape of the rows of an array: its own without the dimension of the classes."""
    return input.shape[:axis] + input.shape[axis:][1:]


# ---- calls -----------------------------------------------------------------------------------------------------------


#: Names and types of the results of a call.
Results = tuple[tuple[str, jax.ShapeDtypeStruct], ...]


def _call(settings: Settings, results: Results, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    numbers = {int: np.int64, float: np.float64, str: str}
    attributes = {
        "arguments": " ".join(arrays),
        "results": " ".join(name for name, _ in results),
        **{name: numbers[type(each)](each) for name, each in settings.attributes},
    }
    target, specs = f"ascend_grad_{settings.operator}", [spec for _, spec in results]
    return compiled_call(target, specs, tuple(arrays.values()), attributes, takes_batches=False)


#: Call a compiled function. The results have derivatives.
call_operator = jax.custom_jvp(_call, nondiff_argnums=(0, 1))


def compute(
    settings: Settings, arrays: dict[str, jax.Array], names: Sequence[str], gradients: Sequence[str]
) -> dict[str, jax.Array]:
    """Compute the results of these names, and the gradients with respect to these arrays.

    Results of the shape of the logits have the classes in the last dimension.
    """
    input = arrays["input"]
    rows, integer = rows_of(input, settings.axis), integers()
    results = {}
    for name in names:
        output = OUTPUTS.get(name)
        is_one = settings.is_reduced if output is None else output.is_total
        shape = arrays["target"].shape if output is not None and output.is_of_targets else rows
        dtype = integer if output is not None and output.is_integer else accumulator(input)
        if output is not None and output.is_of_logits:
            shape, dtype = (*rows, input.shape[settings.axis]), input.dtype
        results[name] = jax.ShapeDtypeStruct(() if is_one else shape, dtype)
    for name in gradients:
        results[f"{name}_grad"] = jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
    return dict(zip(results, call_operator(settings, tuple(results.items()), arrays)))


# ---- derivatives -----------------------------------------------------------------------------------------------------
# A gradient is linear in the upstream gradient of the loss. Its derivative with respect to the input, and to a layer's
# weight and bias, is a product of the Hessian and the tangent. JAX asks for the tangents of all other results as well,
# which follow from their gradients. A compiled program computes only the tangents that it uses.


def refuse_derivatives(operator: str, names: Collection[str], results_have: str) -> None:
    """Refuse arrays of these names, which are differentiated and which there are no gradients for."""
    for name in names:
        message = f"{results_have} no gradient for it; pass jax.lax.stop_gradient({name})"
        raise NotImplementedError(f"{operator}: {name}: {message}")


@partial(call_operator.defjvp, symbolic_zeros=True)
def _differentiate(
    settings: Settings, results: Results, primals: tuple[dict[str, jax.Array]], tangents: tuple[dict[str, Any]]
) -> tuple[list[jax.Array], list[Any]]:
    (arrays,), (given,) = primals, tangents
    operator, names = settings.operator, [name for name, _ in results]
    moving = {name: each for name, each in given.items() if not isinstance(each, SymbolicZero)}
    if any(name in arrays for name in OUTPUT_GRADIENTS):
        outputs = " and ".join(name.removeprefix("grad_") for name in OUTPUT_GRADIENTS if name in arrays)
        raise NotImplementedError(f"{operator}: the gradient of {outputs} cannot be differentiated once more")
    refuse_derivatives(operator, [name for name in moving if name not in (*LAYER, "grad_loss")], "the loss has")
    found = dict(zip(names, call_operator(settings, results, arrays)))
    of_results = (_Tangents if operator == "cross_entropy" else _LayerTangents)(settings, arrays, found, moving)
    return list(found.values()), [of_results.of(name) for name in names]


class _TangentsOfResults:
    """Compute tangents of results of a loss from tangents of its arrays, of which those that are 0 are absent."""

    def __init__(
        self,
        settings: Settings,
        arrays: dict[str, jax.Array],
        found: dict[str, jax.Array],
        tangents: dict[str, jax.Array],
    ):
        self._settings, self._arrays, self._found, self._tangents = settings, arrays, found, tangents
        #: The tangent of the upstream gradient, or None.
        self._of_upstream = tangents.get("grad_loss")


class _Tangents(_TangentsOfResults):
    """Compute tangents of results of the loss of logits from tangents of the input and of the upstream gradient."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        #: The tangent of the input, or None.
        self._vector: Any = self._tangents.get("input")

    def of(self, name: str) -> Any:
        """Return the tangent of a result, in its dtype."""
        result = self._found[name]
        if name == "input_grad":
            tangent = self._of_gradient()
        elif self._vector is None or not jnp.issubdtype(result.dtype, jnp.floating) or name == "hessian_diag":
            return zero_from_primal(result, symbolic_zeros=True)  # the diagonal of the Hessian has no derivative
        elif name == "loss":
            tangent = self._product_of_rows(self._unit_gradient())
            tangent = tangent if result.ndim else tangent.sum()
        elif name == "log_prob":
            tangent = self._of_log_prob()
        elif name == "prob":
            p, changes = result.astype(accumulator(result)), self._change_of_logits()
            tangent = p * (changes - jnp.sum(p * changes, -1, keepdims=True))
        else:
            tangent = self._of_statistic(name)
        return tangent.astype(result.dtype)

    def _of_gradient(self) -> jax.Array:
        terms = [] if self._vector is None else [_hessian_product(self._settings, self._arrays, self._vector)]
        if self._of_upstream is not None:
            factor = self._of_upstream
            factor = jnp.expand_dims(factor, self._settings.axis) if factor.ndim else factor
            terms.append((self._unit_gradient() * factor).astype(self._arrays["input"].dtype))
        return sum(terms[1:], terms[0])

    def _of_statistic(self, name: str) -> jax.Array:
        """Return the tangent of the lse or of the entropy of each row."""
        rows, dtype = rows_of(self._arrays["input"], self._settings.axis), accumulator(self._arrays["input"])
        upstream = {"grad_loss": jnp.zeros((), dtype), f"grad_{name}": jnp.ones(rows, dtype)}
        return self._product_of_rows(self._gradient(upstream))

    def _of_log_prob(self) -> jax.Array:
        target, changes = self._arrays["target"], self._change_of_logits()
        ids = target if target.ndim == changes.ndim else target[..., None]
        is_target = ids != dict(self._settings.attributes)["ignore_index"]
        at_targets = jnp.take_along_axis(changes, jnp.where(is_target, ids, 0), -1)
        tangent = jnp.where(is_target, at_targets - self._of_statistic("lse")[..., None], 0)
        return tangent.reshape(target.shape)

    def _change_of_logits(self) -> jax.Array:
        """Return the tangent of the transformed logits, with the classes in the last dimension."""
        vector = self._vector.astype(accumulator(self._vector)) * slope_of_logits(self._settings, self._arrays)
        return jnp.moveaxis(vector, self._settings.axis, -1)

    def _product_of_rows(self, gradient: jax.Array) -> jax.Array:
        """Return the tangent of a result of each row from its gradient."""
        return jnp.sum(gradient * self._vector.astype(gradient.dtype), self._settings.axis)

    def _unit_gradient(self) -> jax.Array:
        """Return the gradient of the loss for the upstream gradient 1."""
        found = self._found.get("input_grad")
        is_unit = found is not None and found.dtype == accumulator(found) and "grad_loss" not in self._arrays
        return found if is_unit else self._gradient({})

    def _gradient(self, upstream: dict[str, jax.Array]) -> jax.Array:
        """Return the gradient for these upstream gradients, which is not rounded to 16 bits."""
        arrays = {name: each for name, each in self._arrays.items() if name != "grad_loss"}
        input = arrays["input"].astype(accumulator(arrays["input"]))
        return compute(self._settings, {**arrays, "input": input, **upstream}, ("loss",), ("input",))["input_grad"]


def slope_of_logits(settings: Settings, arrays: dict[str, jax.Array]) -> jax.Array:
    """Return the derivative of the transformed logits with respect to the input, which broadcasts to its shape.

    It is composed of JAX's functions, so that it may be differentiated.
    """
    numbers, dtype = dict(settings.attributes), accumulator(arrays["input"])
    largest = largest_factor(dtype == np.float64)
    scale = jnp.clip(jnp.asarray(numbers["logit_scale"], dtype), -largest, largest)
    temperature = jnp.clip(jnp.asarray(arrays.get("temperature", numbers["temperature"]), dtype), 1 / largest, largest)
    slope = scale / temperature
    slope = jnp.expand_dims(slope, settings.axis) if slope.ndim else slope
    if numbers["softcap"]:
        cap = min(max(float(numbers["softcap"]), 1 / largest), largest)
        slope *= 1 - jnp.tanh(arrays["input"].astype(dtype) * (scale / cap)) ** 2
    return slope


class _LayerTangents(_TangentsOfResults):
    """Compute tangents of results of a layer's loss from tangents of the layer and of the upstream gradient."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._dtype = accumulator(self._arrays["input"])
        #: The tangents of the arrays of the layer.
        self._vectors = {name: self._tangents[name] for name in LAYER if name in self._tangents}
        self._wanted = [name for name in LAYER if f"{name}_grad" in self._found]
        self._of_gradients = self._tangents_of_gradients() if self._wanted else {}

    def of(self, name: str) -> Any:
        """Return the tangent of a result, in its dtype."""
        result = self._found[name]
        if name.endswith("_grad"):
            tangent = self._of_gradients[name.removesuffix("_grad")]
        elif not self._vectors or not jnp.issubdtype(result.dtype, jnp.floating):
            return zero_from_primal(result, symbolic_zeros=True)
        elif name == "loss" and self._settings.is_reduced:
            tangent = self._total(self._unit_gradients(tuple(self._vectors)))
        else:
            tangent = self._by_rows(name, {**self._vectors, name: _zeros(result, self._vectors)})[name]
        return tangent.astype(result.dtype)

    def _tangents_of_gradients(self) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        if self._vectors:
            names = [name for name in LAYER if name in self._vectors or name in self._wanted]
            vectors = {name: self._vectors.get(name, _zeros(self._arrays[name], self._vectors)) for name in names}
            found = _layer_product(self._settings, self._arrays, vectors)
        if self._of_upstream is None:
            return found
        if self._settings.is_reduced:
            unit = self._unit_gradients(tuple(self._wanted))
            linear = {name: (each * self._of_upstream).astype(self._arrays[name].dtype) for name, each in unit.items()}
        else:
            upstream = {"loss": self._of_upstream.astype(self._dtype)}
            zeros = {name: _zeros(self._arrays[name], upstream) for name in self._wanted}
            linear = self._by_rows("loss", {**zeros, **upstream})
        return {name: found[name] + linear[name] if name in found else linear[name] for name in self._wanted}

    def _total(self, gradients: dict[str, jax.Array]) -> jax.Array:
        """Return the tangent of the loss, which is one number, from its gradients."""
        return sum(jnp.sum(each * self._vectors[name].astype(each.dtype)) for name, each in gradients.items())

    def _unit_gradients(self, names: tuple[str, ...]) -> dict[str, jax.Array]:
        """Return gradients of the loss for the upstream gradient 1, which are not rounded to 16 bits."""
        found = {name: self._found.get(f"{name}_grad") for name in names}
        is_computed = all(each is not None and each.dtype == accumulator(each) for each in found.values())
        if is_computed and "grad_loss" not in self._arrays:
            return found
        arrays = {name: each for name, each in self._arrays.items() if name != "grad_loss"}
        arrays |= {name: arrays[name].astype(self._dtype) for name in LAYER if name in arrays}
        found = compute(self._settings._replace(outputs=()), arrays, ("loss",), names)
        return {name: found[f"{name}_grad"] for name in names}

    def _by_rows(self, name: str, vectors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return tangents of gradients and of a result of each row, for tangents of the layer and upstream gradients.

        `name` is that of the result, which is the loss or an output, in `vectors` and in the tangents. The two tangents
        are transposes of one another, as the derivative of a gradient with respect to the upstream gradient is. So both
        together are a symmetric linear function.
        """
        settings = self._settings._replace(outputs=())
        given = {name: each for name, each in self._arrays.items() if name != "grad_loss"}
        statistics = {} if name == "loss" else {each: self._found[each] for each in self._settings.saved}
        arrays, statistics = (_without_third_order(settings.operator, each) for each in (given, statistics))
        layer = [each for each in LAYER if each in vectors]

        def gradients(of_rows: jax.Array, arrays: dict[str, jax.Array], names: Sequence[str]) -> dict[str, jax.Array]:
            upstream = {"grad_loss": of_rows}
            if name != "loss":
                upstream = {"grad_loss": jnp.zeros((), self._dtype), **statistics, f"grad_{name}": of_rows}
            found = compute(settings, {**arrays, **upstream}, ("loss",) if name == "loss" else (), names)
            return {each: found[f"{each}_grad"] for each in names}

        def product(_: object, vectors: dict[str, jax.Array]) -> dict[str, jax.Array]:
            found = gradients(vectors[name], arrays, layer)
            wide, along = _widened(arrays, vectors, self._dtype)
            tangent = lambda of_rows: jnp.sum(gradients(of_rows, wide, ("input",))["input"] * along, -1)  # noqa: E731
            shape = vectors[name].shape
            if len(shape) == 1:
                of_rows = tangent(jnp.ones(shape, self._dtype))
            else:  # several targets of a row
                units = jnp.broadcast_to(jnp.eye(shape[1], dtype=self._dtype)[:, None], (shape[1], *shape))
                of_rows = jax.lax.map(tangent, units).T
            return {**found, name: of_rows}

        return jax.lax.custom_linear_solve(lambda vectors: vectors, vectors, product, symmetric=True)


def _zeros(like: jax.Array, tangents: dict[str, jax.Array]) -> jax.Array:
    """Return zeros of the shape of an array that are a linear function of tangents, as JAX transposes no constants."""
    first = next(iter(tangents.values()))
    return jnp.broadcast_to(jnp.sum(first.reshape(-1)[:0]).astype(like.dtype), like.shape)


def _widened(
    arrays: dict[str, jax.Array], vectors: dict[str, jax.Array], dtype: np.dtype
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return a layer whose input has further features, which are 0, and whose weight has the vectors as columns there.

    Its logits are the same. Its gradient with respect to the input, multiplied by the second result and summed over the
    features, is the tangent of each row.
    """
    input, weight = arrays["input"].astype(dtype), arrays["weight"].astype(dtype)
    zeros, one = jnp.zeros_like(input), jnp.ones((input.shape[0], 1), dtype)
    inputs, weights, along = [input], [weight], [vectors.get("input", zeros).astype(dtype)]
    if "weight" in vectors:
        inputs, weights, along = [*inputs, zeros], [*weights, vectors["weight"].astype(dtype)], [*along, input]
    if "bias" in vectors:
        inputs, along = [*inputs, jnp.zeros_like(one)], [*along, one]
        weights = [*weights, vectors["bias"].astype(dtype)[:, None]]
    inputs, weights, along = (jnp.concatenate(each, -1) for each in (inputs, weights, along))
    return {**arrays, "input": inputs, "weight": weights}, along


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_third_order(operator: str, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return arrays


@_without_third_order.defjvp
def _refuse_third_order(operator: str, *_: object) -> NoReturn:
    raise NotImplementedError(f"{operator}: the gradient cannot be differentiated twice")


#: Names of the vectors of a layer's product, as the function for NumPy has them.
_VECTORS = {"weight": "vector", "bias": "vector_bias", "input": "vector_input"}


def _layer_product(
    settings: Settings, arrays: dict[str, jax.Array], vectors: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the product of the Hessian of a layer's loss and vectors, with the same names."""
    arrays = _without_third_order(settings.operator, arrays)
    of_product = settings._replace(operator="linear_cross_entropy_hvp")
    results = tuple((f"{name}_product", jax.ShapeDtypeStruct(each.shape, each.dtype)) for name, each in vectors.items())

    names = tuple(vectors)  # JAX sorts them

    def product(_: object, vectors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        given = {_VECTORS[name]: vectors[name] for name in names}
        return dict(zip(names, _call(of_product, results, {**arrays, **given})))

    return jax.lax.custom_linear_solve(lambda vectors: vectors, vectors, product, symmetric=True)


def hessian_product(arguments: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Compute the product of the Hessian of a layer's loss and vectors, for NumPy's arrays that XLA passes."""
    further = {name: attributes[name] or None for name in ("denominator", "softcap", "num_threads")}
    options = {name: each for name, each in attributes.items() if name != "filter_eps"}
    if "vector" not in arguments and "vector_input" not in arguments:
        arguments = {**arguments, "vector": np.zeros_like(arguments["weight"])}
    if "grad_loss" in arguments and not arguments["grad_loss"].ndim:
        arguments = {**arguments, "grad_loss": float(arguments["grad_loss"])}
    try:
        found = linear_cross_entropy_hvp(**{**options, **further, **arguments}, backend="cpu")
    except AscendGradError as error:
        rename(error, "linear_cross_entropy", {})
        raise
    return found._asdict()


def _hessian_product(settings: Settings, arrays: dict[str, jax.Array], vector: jax.Array) -> jax.Array:
    """Return the product of the Hessian of the loss and a vector of the shape of the input."""
    input, arrays = arrays["input"], _without_third_order(settings.operator, arrays)
    shape = *rows_of(input, settings.axis), input.shape[settings.axis]
    results = (("product", jax.ShapeDtypeStruct(shape, input.dtype)),)

    def product(_: object, vector: jax.Array) -> jax.Array:
        of_rows = _call(settings, results, {**arrays, "vector": jnp.moveaxis(vector, settings.axis, -1)})[0]
        return jnp.moveaxis(of_rows, -1, settings.axis)

    # `custom_linear_solve` is JAX's only function that transposes a symmetric linear function to itself in batches. The
    # product stands for the solution of an equation. Its left side is never evaluated: it has no derivative, as it
    # contains no array.
    return jax.lax.custom_linear_solve(lambda vector: vector, vector, product, symmetric=True)
