"""Compare the functions of `ascend_grad.jax` with the same formulas in jnp, on four devices.

Run as a program, it prints one JSON object: for each check by name an empty text, or what was wrong. Arguments are
parts of names: only the checks that have all of them run.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ascend_grad as ag
import ascend_grad.jax as agj
from ascend_grad.operators.results import LinearTopK

ROWS, CLASSES, FEATURES, BATCH = 8, 6, 3, 2
STATISTICS = ("lse", "log_prob", "entropy")

# ---- formulas --------------------------------------------------------------------------------------------------------


def softmax(input, axis=-1):
    exponentials = jnp.exp(input - jax.lax.stop_gradient(input.max(axis, keepdims=True)))
    return exponentials / exponentials.sum(axis, keepdims=True)


def log_softmax(input, axis=-1):
    return jnp.log(softmax(input, axis))


def scaled_masked_softmax(x, mask, scale=1.0):
    return softmax(jnp.where(mask, -10000.0, scale * x))


def transformed(products, temperature=1.0, logit_scale=1.0, softcap=None):
    u = logit_scale * products
    z = u if softcap is None else softcap * jnp.tanh(u / softcap)
    return z / (temperature[..., None] if jnp.ndim(temperature) else temperature)


def cross_entropy(
    input, target, axis=-1, *, reduction="mean", ignore_index=-100, class_weight=None, token_weight=None,
    target_prob=None, label_smoothing=0.0, lse_square_scale=0.0, temperature=1.0, denominator=None, logit_scale=1.0,
    softcap=None, outputs=(),
):  # fmt: skip
    z = transformed(jnp.moveaxis(input, axis, -1), temperature, logit_scale, softcap)
    is_dense = jnp.issubdtype(target.dtype, jnp.floating)
    ids = jnp.argmax(z, -1)[..., None] if is_dense else target[..., None] if target_prob is None else target
    is_target = jnp.ones(ids.shape, bool) if is_dense else ids != ignore_index
    is_counted = is_target.any(-1)
    one_hot = jnp.where(is_target[..., None], ids[..., None] == jnp.arange(z.shape[-1]), False)
    probabilities = 1.0 if target_prob is None else jnp.broadcast_to(target_prob, ids.shape)[..., None]
    chosen = jnp.moveaxis(target, axis, -1).astype(z.dtype) if is_dense else (one_hot * probabilities).sum(-2)
    c = jnp.ones(z.shape[-1]) if class_weight is None else class_weight
    r = jnp.where(is_counted, 1.0 if token_weight is None else token_weight, 0)
    largest = jax.lax.stop_gradient(z.max(-1, keepdims=True))
    lse = jnp.log(jnp.exp(z - largest).sum(-1)) + largest[..., 0]
    nll = lse[..., None] - z
    shares = (1 - label_smoothing) * chosen * c + label_smoothing / z.shape[-1] * c
    losses, squares = r * (shares * nll).sum(-1), r * lse_square_scale * lse**2
    if reduction == "mean" and denominator is None:
        of_losses = r.sum() if is_dense or target_prob is not None else (r * (chosen * c).sum(-1)).sum()
        loss = losses.sum() / of_losses + squares.sum() / r.sum()
    else:
        loss = losses + squares
        loss = loss if reduction == "none" else loss.sum() / (denominator if reduction == "mean" else 1)
    predicted = jnp.where(is_counted, z.argmax(-1), -1)
    every = {
        "lse": jnp.where(is_counted, lse, 0),
        "log_prob": None if is_dense else jnp.reshape(-(one_hot * nll[..., None, :]).sum(-1), target.shape),
        "entropy": jnp.where(is_counted, (jnp.exp(-nll) * nll).sum(-1), 0),
        "prob": jnp.moveaxis(jnp.where(is_counted[..., None], jnp.exp(-nll), 0), -1, axis),
        "predicted": predicted,
        "correct": (is_counted & (predicted == ids[..., 0])).sum(),
    }
    return ag.LossResult(loss, **{name: every[name] for name in outputs}) if outputs else loss


def linear_cross_entropy(input, weight, target, *, bias=None, **options):
    products = jnp.einsum("...h,vh->...v", input, weight)
    return cross_entropy(products if bias is None else products + bias, target, **options)


def linear_top_k(input, weight, k, *, bias=0.0, **options):
    z = transformed(jnp.einsum("...h,vh->...v", input, weight) + bias, **options)
    return LinearTopK(*jax.lax.top_k(log_softmax(z), k))


FORMULAS = {
    each.__name__: each
    for each in (softmax, log_softmax, scaled_masked_softmax, cross_entropy, linear_cross_entropy, linear_top_k)
}

# ---- cases -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call: its function, arrays by name, and settings. `rows` names the arrays with one row per row of the input."""

    function: str
    arrays: dict[str, Any]
    rows: tuple[str, ...]
    settings: dict[str, Any]

    def arguments(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {**arrays, **self.settings}

    def ours(self, arrays):
        return getattr(agj, self.function)(**self.arguments(arrays))

    def formula(self, arrays):
        return FORMULAS[self.function](**self.arguments(arrays))


def _case(function: str, arrays: dict[str, Any], shared: tuple[str, ...] = (), **settings: Any) -> Case:
    return Case(function, arrays, tuple(name for name in arrays if name not in shared), settings)


def _cases() -> Iterator[tuple[str, Case]]:
    random = np.random.default_rng(3)
    normal, uniform = random.standard_normal, partial(random.uniform, 0.5, 2.0)
    target = random.integers(0, CLASSES, ROWS)
    target[[1, 6]] = -100
    several = np.where(target[:, None] < 0, -100, random.integers(0, CLASSES, (ROWS, 2)))
    yield "softmax", _case("softmax", {"input": normal((ROWS, CLASSES))})
    yield "softmax along rows", _case("softmax", {"input": normal((ROWS, CLASSES))}, axis=0)
    yield "log_softmax", _case("log_softmax", {"input": normal((ROWS, CLASSES, 3))}, axis=1)
    masked = {"x": normal((ROWS, 2, 3, 4)), "mask": random.random((1, 2, 3, 4)) < 0.3}
    yield "scaled_masked_softmax", _case("scaled_masked_softmax", masked, ("mask",), scale=0.7)
    masks = {**masked, "mask": random.random((ROWS, 1, 3, 4)) < 0.3}
    yield "scaled_masked_softmax of masks", _case("scaled_masked_softmax", masks)
    options: tuple[tuple[str, dict, dict], ...] = (
        ("mean", {}, {}),
        ("none", {}, {"reduction": "none"}),
        ("outputs", {}, {"outputs": ("lse", "log_prob", "entropy", "predicted", "correct"), "reduction": "sum"}),
        ("weights", {"class_weight": uniform(CLASSES), "token_weight": uniform(ROWS)}, {
            "lse_square_scale": 0.1, "denominator": 3.0, "label_smoothing": 0.2
        }),
        ("one temperature", {"temperature": np.array(0.6)}, {"outputs": ("entropy",), "reduction": "none"}),
        ("temperatures", {"temperature": uniform(ROWS)}, {"outputs": ("predicted",)}),
        ("several targets", {"target_prob": uniform((ROWS, 2)), "target": several}, {"outputs": ("lse", "log_prob")}),
        ("several log-probabilities", {"target": several}, {"target_prob": 0, "outputs": ("log_prob",)}),
        ("transformed", {}, {"softcap": 2.0, "logit_scale": -0.8, "outputs": ("log_prob", "entropy")}),
    )  # fmt: skip
    shared = ("weight", "bias", "class_weight")
    for name, arrays, settings in options:
        not_of_rows = (*shared, "temperature") if name == "one temperature" else shared
        logits = {"input": normal((ROWS, CLASSES)), "target": target}
        yield f"cross_entropy {name}", _case("cross_entropy", logits | arrays, not_of_rows, **settings)
        layer = {"input": normal((ROWS, FEATURES)), "weight": normal((CLASSES, FEATURES)), "target": target}
        if name != "mean":
            layer["bias"], settings = normal(CLASSES), {**settings, "logit_scale": 0.8, "softcap": 2.0}
        yield f"linear_cross_entropy {name}", _case("linear_cross_entropy", layer | arrays, not_of_rows, **settings)
    layer = {"input": normal((ROWS, FEATURES)), "weight": normal((CLASSES, FEATURES))}
    yield "linear_top_k", _case("linear_top_k", layer, shared, k=2)
    options_of_layer = {"bias": normal(CLASSES), "temperature": uniform(ROWS)}
    yield (
        "linear_top_k with options",
        _case("linear_top_k", layer | options_of_layer, shared, k=3, logit_scale=-0.8, softcap=2.0),
    )
    layer = {"input": normal((ROWS, BATCH, FEATURES)), "weight": layer["weight"]}
    yield "linear_top_k several dimensions", _case("linear_top_k", layer, shared, k=2)
    target = random.integers(0, CLASSES, (ROWS, BATCH))
    yield (
        "linear_cross_entropy several dimensions",
        _case("linear_cross_entropy", layer | {"target": target}, shared, reduction="none", outputs=("lse", "correct")),
    )


CASES = dict(_cases())
#: Cases of every function, for checks of the transformations.
FEW = (
    "softmax",
    "scaled_masked_softmax",
    "cross_entropy outputs",
    "linear_cross_entropy mean",
    "linear_cross_entropy outputs",
    "linear_top_k with options",
)

# ---- what is compared ------------------------------------------------------------------------------------------------


def total(results: Any) -> jax.Array:
    """Return one number of all results, whose gradient has another upstream gradient for each element."""
    return sum(
        (each * (1 + 0.5 * jnp.cos(jnp.arange(each.size, dtype=float))).reshape(each.shape)).sum()
        for each in jax.tree.leaves(results)
    )


def differentiable(case: Case) -> tuple[str, ...]:
    return tuple(name for name in ("input", "x", "weight", "bias") if name in case.arrays)


def parted(case: Case, arrays: dict[str, Any]) -> tuple[dict, dict]:
    """Return the arrays that are differentiated, and the others."""
    names = differentiable(case)
    return {name: arrays[name] for name in names}, {name: each for name, each in arrays.items() if name not in names}


def gradient(case: Case, function: Callable) -> Callable:
    """Return the gradient of a function of all arrays, with respect to those that have one."""

    def of(arrays):
        return jax.grad(lambda layer, others: function({**layer, **others}))(*parted(case, arrays))

    return of


def gradient_and_results(case: Case, function: Callable) -> Callable:
    """Return the gradient of the total of a function's results, and the results."""

    def found(layer, others):
        results = function({**layer, **others})
        return total(results), results

    return lambda arrays: jax.grad(found, has_aux=True)(*parted(case, arrays))


def specs(case: Case, rows: Any) -> dict[str, P]:
    return {name: P(rows) if name in case.rows else P() for name in case.arrays}


def same(got: Any, right: Any) -> None:
    def compare(got, right):
        assert got.shape == right.shape, f"shape {got.shape}, expected {right.shape}"
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-11)

    jax.tree.map(compare, got, right)


def same_or_refused(make: Callable[[Callable], Any], case: Case) -> None:
    """Check that a program with our function has the results of the formula, or is refused with the same kind."""

    def outcome(function):
        try:
            return make(function), None
        except (TypeError, ValueError, NotImplementedError) as error:
            return None, error

    (got, error), (right, refused) = outcome(case.ours), outcome(case.formula)
    if refused is None and error is not None:
        raise error
    assert type(error) is type(refused), f"expected {refused!r}, got {error!r}"
    if refused is None:
        same(got, right)


def mesh_of(*sizes: int, kind: AxisType = AxisType.Auto) -> Any:
    names = ("a", "b")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


CHECKS: dict[str, Callable[[], None]] = {}


def check(cases: Any) -> Callable:
    """Register a function that checks a case, for each of these cases."""

    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        title = function.__name__.replace("_", " ")
        CHECKS.update({f"{title}: {name}": partial(function, CASES[name]) for name in cases})
        return function

    return register


# ---- jax.shard_map ---------------------------------------------------------------------------------------------------


def summed(function: Callable, *axes: str) -> Callable:
    """Return a function of arrays whose result is one number, the sum over the devices."""
    return lambda arrays: jax.lax.psum(total(function(arrays)), axes)


def of_rows(case, function):
    """Return the sum of a function's results where the rows are split over one axis."""
    return jax.shard_map(summed(function, "a"), mesh=mesh_of(4), in_specs=(specs(case, "a"),), out_specs=P())


@check(FEW)
def gradients_outside(case):
    def make(function):
        return jax.jit(gradient(case, of_rows(case, function)))(case.arrays)

    same_or_refused(make, case)


@check(CASES)
def gradients_inside(case):
    """Rows are split over two axes. The gradient of an array that all devices hold is the sum over the devices."""

    def make(function):
        def program(arrays):
            gradients, results = gradient_and_results(case, function)(arrays)
            return gradients, jax.lax.psum(total(results), ("a", "b"))

        spec = specs(case, ("a", "b"))
        out = {name: spec[name] for name in differentiable(case)}
        return jax.jit(jax.shard_map(program, mesh=mesh_of(2, 2), in_specs=(spec,), out_specs=(out, P())))(case.arrays)

    same_or_refused(make, case)


@check(name for name in FEW if CASES[name].function != "scaled_masked_softmax")
def arrays_that_vary_along_different_axes(case):
    """Rows are split over one axis, and the other arrays differ along another one."""

    def make(function):
        def of_group(arrays):
            scale = 1 + 0.1 * jax.lax.axis_index("b")
            return function({name: each if name in case.rows else scale * each for name, each in arrays.items()})

        program = summed(of_group, "a", "b")
        program = jax.shard_map(program, mesh=mesh_of(2, 2), in_specs=(specs(case, "a"),), out_specs=P())
        return jax.jit(gradient(case, program))(case.arrays)

    same_or_refused(make, case)


@check(FEW)
def without_jit(case):
    def make(function):
        return of_rows(case, function)(case.arrays)

    same_or_refused(make, case)


@check(FEW)
def results_that_differ_are_not_equal_ones(case):
    """Results of a device's rows are refused where results equal on all devices are promised."""

    def make(function):
        program = lambda arrays: total(function(arrays))  # noqa: E731
        return jax.jit(jax.shard_map(program, mesh=mesh_of(4), in_specs=(specs(case, "a"),), out_specs=P()))(
            case.arrays
        )

    for function in (case.ours, case.formula):
        with pytest.raises(ValueError, match="out_specs"):
            make(function)


@check(FEW)
def results_of_equal_arrays_are_equal(case):
    def make(function):
        program = gradient_and_results(case, function)
        return jax.jit(jax.shard_map(program, mesh=mesh_of(4), in_specs=(P(),), out_specs=P()))(case.arrays)

    same_or_refused(make, case)


@check(FEW)
def without_the_check_of_varying_axes(case):
    def make(function):
        settings = {"mesh": mesh_of(4), "in_specs": (specs(case, "a"),), "check_vma": False}
        inside = gradient(case, lambda arrays: total(function(arrays)))
        names = {name: P("a") for name in differentiable(case)}
        return (
            jax.jit(gradient(case, jax.shard_map(summed(function, "a"), out_specs=P(), **settings)))(case.arrays),
            jax.jit(jax.shard_map(inside, out_specs=names, **settings))(case.arrays),
        )

    same_or_refused(make, case)


@check(FEW)
def one_axis_is_automatic(case):
    def make(function):
        program = jax.shard_map(
            summed(function, "a"), mesh=mesh_of(2, 2), in_specs=(specs(case, "a"),), out_specs=P(), axis_names={"a"}
        )
        return jax.jit(gradient(case, program))(case.arrays)

    same_or_refused(make, case)


@check(FEW)
def not_compiled(case):
    def make(function):
        return gradient(case, of_rows(case, function))(case.arrays)

    same_or_refused(make, case)


#: Cases whose gradient can be differentiated once more.
SECOND_ORDER = (
    "softmax",
    "log_softmax",
    "scaled_masked_softmax",
    *(f"cross_entropy {each}" for each in ("mean", "none", "weights")),
    *(f"linear_cross_entropy {each}" for each in ("mean", "none")),
)


@check(SECOND_ORDER)
def gradients_of_gradients(case):
    def make(function):
        program = of_rows(case, function)
        return jax.jit(gradient(case, lambda arrays: total(gradient(case, program)(arrays))))(case.arrays)

    same_or_refused(make, case)


@check(SECOND_ORDER[3:])
def products_of_the_hessian_inside(case):
    """Products in forward mode, and the gradient of a function of the gradient, of each device's rows."""

    def make(function):
        def program(arrays):
            of_input = lambda x: total(function({**arrays, "input": x}))  # noqa: E731
            gradient, x = jax.grad(of_input), arrays["input"]
            return jax.jvp(gradient, (x,), (jnp.cos(x),))[1], jax.grad(lambda x: total(gradient(x)))(x)

        spec = specs(case, ("a", "b"))
        shards = jax.shard_map(program, mesh=mesh_of(2, 2), in_specs=(spec,), out_specs=spec["input"])
        return jax.jit(shards)(case.arrays)

    same_or_refused(make, case)


# ---- jax.vmap --------------------------------------------------------------------------------------------------------


def batch_of(case: Case) -> dict[str, Any]:
    """Return a batch of each array that is differentiated, and one of the others."""
    layer, others = parted(case, case.arrays)
    return {**{name: np.stack([each, -each]) for name, each in layer.items()}, **others}


def batch_axes(case: Case) -> dict[str, int | None]:
    return {name: 0 if name in differentiable(case) else None for name in case.arrays}


@check(FEW)
def batches_inside(case):
    def make(function):
        spec = {
            name: P(None, *each) if batch_axes(case)[name] == 0 else each for name, each in specs(case, "a").items()
        }
        program = jax.shard_map(
            summed(jax.vmap(function, in_axes=(batch_axes(case),)), "a"),
            mesh=mesh_of(4),
            in_specs=(spec,),
            out_specs=P(),
        )
        return jax.jit(gradient(case, program))(batch_of(case))

    same_or_refused(make, case)


@check(FEW)
def batches_outside(case):
    def make(function):
        program = jax.shard_map(summed(function, "a"), mesh=mesh_of(2, 2), in_specs=(specs(case, "a"),), out_specs=P())
        options = {"in_axes": (batch_axes(case),), "spmd_axis_name": "b"}
        return jax.jit(jax.vmap(gradient(case, program), **options))(batch_of(case))

    same_or_refused(make, case)


# ---- jax.jit with sharded arrays -------------------------------------------------------------------------------------


def on_mesh(mesh: Any, arrays: dict[str, Any], spec: dict[str, P]) -> dict[str, jax.Array]:
    return {name: jax.device_put(each, NamedSharding(mesh, spec[name])) for name, each in arrays.items()}


def shardings(results: Any) -> list[Any]:
    return [jax.typeof(each).sharding.spec for each in jax.tree.leaves(results)]


@check(FEW)
def automatic_sharding(case):
    def make(function):
        arrays = on_mesh(mesh_of(2, 2), case.arrays, specs(case, "a"))
        return jax.jit(gradient_and_results(case, function))(arrays)

    same_or_refused(make, case)


def explicit(case: Case, program: Callable, arrays: dict[str, Any], spec: dict[str, P]) -> None:
    """Compare results, and their types, on a mesh with explicit axes."""
    mesh = mesh_of(2, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        got, right = (jax.jit(program(each))(on_mesh(mesh, arrays, spec)) for each in (case.ours, case.formula))
        same(got, right)
        assert shardings(got) == shardings(right), f"{shardings(got)}, expected {shardings(right)}"


@check(FEW)
def explicit_sharding(case):
    explicit(case, partial(gradient_and_results, case), case.arrays, specs(case, "a"))


@check(SECOND_ORDER[3:])
def explicit_sharding_of_products(case):
    def program(function):
        def products(arrays):
            layer, others = parted(case, arrays)
            of_layer = jax.grad(lambda layer: total(function({**layer, **others})))
            return jax.jvp(of_layer, (layer,), (jax.tree.map(jnp.cos, layer),))[1], jax.grad(
                lambda layer: total(of_layer(layer))
            )(layer)

        return products

    explicit(case, program, case.arrays, specs(case, "a"))


@check(name for name in CASES if name.endswith("several dimensions"))
def explicit_sharding_of_the_second_dimension(case):
    spec = {name: P(None, "a") if name in case.rows else P() for name in case.arrays}
    explicit(case, partial(gradient_and_results, case), case.arrays, spec)


@check(FEW)
def explicit_sharding_of_batches(case):
    def program(function):
        return gradient_and_results(case, jax.vmap(function, in_axes=(batch_axes(case),)))

    spec = {name: P("b", *each) if batch_axes(case)[name] == 0 else each for name, each in specs(case, "a").items()}
    explicit(case, program, batch_of(case), spec)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # programs run once
    wrong = {}
    for name, function in CHECKS.items():
        if not all(part in name for part in sys.argv[1:]):
            continue
        try:
            function()
            wrong[name] = ""
        except Exception as error:
            wrong[name] = "".join(traceback.format_exception(error))
    json.dump(wrong, sys.stdout)


if __name__ == "__main__":
    main()
