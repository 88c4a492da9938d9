"""Right values of the cross-entropy of rows, by its definition in extended precision, and random arguments."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from samples import DTYPES, generator

from ascend_grad import LossResult

LONG = np.longdouble
#: Results of the shape of the logits.
FULL = ("input_grad", "prob", "hessian_diag", "product")


def rows_last(array: Any, axis: int) -> np.ndarray:
    """Return the rows of an array of logits in extended precision, shape (rows, V)."""
    wide = np.atleast_1d(np.asarray(array)).astype(np.float64).astype(LONG)
    moved = np.moveaxis(wide, axis, -1)
    return moved.reshape(int(np.prod(moved.shape[:-1], dtype=int)), moved.shape[-1])


@np.errstate(all="ignore")
def expected(
    input: np.ndarray,
    target: np.ndarray,
    axis: int = -1,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    class_weight: np.ndarray | None = None,
    token_weight: np.ndarray | None = None,
    target_prob: np.ndarray | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: Any = 1.0,
    denominator: float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    grad_loss: Any = 1.0,
    grad_lse: np.ndarray | None = None,
    grad_log_prob: np.ndarray | None = None,
    grad_entropy: np.ndarray | None = None,
    vector: np.ndarray | None = None,
    **_: Any,
) -> dict[str, np.ndarray]:
    """Return all results, row by row, from sums of probabilities as the definition has them."""
    x = rows_last(input, axis)
    count, vocabulary = x.shape
    is_dense = np.asarray(target).dtype.kind not in "iu"
    if is_dense:
        read = target if np.asarray(input).dtype.type is np.float64 else np.asarray(target).astype(np.float32)
        entries, prob = np.tile(np.arange(vocabulary), (count, 1)), rows_last(read, axis)
    else:
        entries = np.asarray(target).reshape(count, -1)
        prob = np.ones(entries.shape) if target_prob is None else np.asarray(target_prob, np.float64)
        prob = prob.reshape(entries.shape) if prob.ndim else np.zeros(entries.shape)
    c = np.ones(vocabulary, LONG) if class_weight is None else np.asarray(class_weight).astype(np.float64).astype(LONG)
    each = {"token": token_weight, "temperature": temperature, "grad": grad_loss}
    r, tau, g = (
        np.broadcast_to(np.asarray(1.0 if value is None else value).astype(np.float64).reshape(-1), count).astype(LONG)
        for value in each.values()
    )
    above = [
        np.zeros(count, LONG) if each is None else np.asarray(each).astype(np.float64).reshape(-1).astype(LONG)
        for each in (grad_lse, grad_entropy)
    ]
    of_targets = np.zeros(entries.shape, LONG)
    if grad_log_prob is not None:
        of_targets += np.asarray(grad_log_prob).astype(np.float64).reshape(entries.shape)
    s, live = LONG(label_smoothing), is_dense | ~np.all(entries == ignore_index, axis=-1)
    by_class = target_prob is None and not is_dense
    shares = [LONG(1), LONG(1)]
    if reduction == "mean":
        sums = [np.sum(r[live] * (c[entries[live, 0]] if by_class else 1)), np.sum(r[live])]
        sums = sums if denominator is None else [LONG(denominator)] * 2
        shares = [1 / each if each else LONG(0) for each in sums]

    results: dict[str, np.ndarray] = {
        "lse": np.zeros(count, LONG),
        "entropy": np.zeros(count, LONG),
        "log_prob": np.zeros(entries.shape, LONG),
        "predicted": np.full(count, -1),
        **{name: np.zeros(x.shape, LONG) for name in FULL},
    }
    losses, squares = np.zeros((2, count), LONG)
    for i in np.flatnonzero(live):
        z, slope, bend = LONG(logit_scale) * x[i] / tau[i], LONG(logit_scale) / tau[i], LONG(0)
        if softcap is not None:
            value = np.tanh(LONG(logit_scale) * x[i] / LONG(softcap))
            z, slope = LONG(softcap) * value / tau[i], slope * (1 - value**2)
            bend = -2 * value * slope * LONG(logit_scale) / LONG(softcap)
        shifted = z - np.max(z)
        lse = np.max(z) + np.log(np.sum(np.exp(shifted)))
        log_p = shifted - np.log1p(np.sum(np.sort(np.exp(shifted))[:-1]))
        p = np.exp(log_p)
        results["lse"][i], results["predicted"][i], results["prob"][i] = lse, np.argmax(z), p
        results["entropy"][i] = -np.sum(np.where(p == 0, 0, p * log_p))
        w = np.zeros(vocabulary, LONG)
        for k, entry in enumerate(entries[i]):
            if is_dense or entry != ignore_index:
                results["log_prob"][i, k] = log_p[entry]
                w[entry] += (1 - s) * LONG(prob[i, k]) * c[entry]
        smoothing = s / vocabulary
        loss = -np.sum(np.where(w == 0, 0, w * log_p))
        if s:
            loss -= smoothing * np.sum(np.where(c == 0, 0, c * log_p))
        scale = LONG(lse_square_scale)
        if r[i]:
            losses[i] = r[i] * loss
            squares[i] = r[i] * scale * lse**2 if scale else 0
        if g[i] * r[i]:
            a = (np.sum(w) + smoothing * np.sum(c)) * shares[0] + 2 * scale * (lse * shares[1] if scale else 0)
            gradient = g[i] * r[i] * (a * p - (w + smoothing * c) * shares[0])
            second = 2 * scale * shares[1] if scale else LONG(0)
            rest = np.where(shifted == 0, -np.expm1(log_p), 1 - p)
            results["input_grad"][i] = gradient * slope
            results["hessian_diag"][i] = g[i] * r[i] * p * (a * rest + second * p) * slope**2 + gradient * bend
            if vector is not None:
                v = rows_last(vector, axis)[i] * slope
                mean = np.sum(p * v)
                at = np.argmax(p)  # differences from its element keep their digits where p is almost 1
                results["product"][i] = p * (a * (v - v[at] - np.sum(p * (v - v[at]))) + second * mean) * slope
                results["product"][i] = (
                    g[i] * r[i] * results["product"][i] + gradient * bend * rows_last(vector, axis)[i]
                )
        of_lse, of_entropy = (each[i] for each in above)
        of_outputs = of_lse * p
        for k in np.flatnonzero((entries[i] != ignore_index) & (of_targets[i] != 0)):
            of_outputs -= of_targets[i, k] * p
            of_outputs[entries[i, k]] += of_targets[i, k]
        if of_entropy:
            of_outputs -= of_entropy * np.where(p == 0, 0, p * (log_p + results["entropy"][i]))
        if of_lse or np.any(of_targets[i]) or of_entropy:
            results["input_grad"][i] += of_outputs * slope
    if reduction == "none":
        results["loss"] = losses + squares
    else:
        nothing = reduction == "mean" and not shares[0]
        results["loss"] = np.asarray(np.nan if nothing else np.sum(losses) * shares[0] + np.sum(squares) * shares[1])
    results["correct"] = np.asarray(np.sum(live & (results["predicted"] == entries[:, 0])))
    results["log_prob"] = results["log_prob"].reshape(np.shape(target))
    rows = np.shape(target) if target_prob is None else np.shape(target)[:-1]
    if is_dense:
        rows = tuple(np.delete(np.shape(target), axis)) if np.ndim(target) else ()
    for name in ("lse", "entropy", "predicted", *(["loss"] if reduction == "none" else [])):
        results[name] = results[name].reshape(rows)
    shape = np.atleast_1d(np.asarray(input)).shape
    moved = tuple(np.moveaxis(np.empty(shape), axis, -1).shape)
    for name in FULL:
        results[name] = np.moveaxis(results[name].reshape(moved), -1, axis).reshape(np.shape(input))
    return results


def random_arguments(
    key: object,
    shape: tuple[int, ...],
    axis: int,
    dtype: str,
    *,
    options: dict[str, Any] | None = None,
    K: int = 0,
    dense: str | None = None,
) -> dict[str, Any]:
    """Make arguments with ignored rows, sparse targets if K > 0, and dense targets if `dense` is a dtype.

    The options "rows", "classes" and "targets" stand for random positive arrays.
    """
    random = generator("cross_entropy", key, shape, axis, dtype, K)
    rows = tuple(length for place, length in enumerate(shape) if place != axis % len(shape))
    accumulator = np.dtype("float64" if dtype == "float64" else "float32")
    vocabulary = shape[axis]
    targets = rows + ((K,) if K else ())
    target = random.integers(0, vocabulary, targets)
    arguments: dict[str, Any] = {
        "input": (3 * random.standard_normal(shape)).astype(DTYPES[dtype]),
        "target": np.where(random.random(targets) < 0.2, -100, target),
        "axis": axis,
    }
    if K:
        arguments["target_prob"] = random.random(targets).astype(accumulator)
    if dense:
        # They need not add up to 1, and some are 0.
        arguments["target"] = (random.random(shape) * (random.random(shape) < 0.8)).astype(DTYPES[dense])
    for name, value in (options or {}).items():
        if isinstance(value, str) and value in ("rows", "classes", "targets"):
            lengths = {"rows": rows, "classes": vocabulary, "targets": targets}
            value = np.asarray(random.random(lengths[value]) + 0.25, accumulator)
        arguments[name] = value
    return arguments


#: Values of options in random calls, as `random_arguments` takes them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "reduction": ("mean", "sum", "none"),
    "class_weight": (None, "classes"),
    "token_weight": (None, "rows"),
    "label_smoothing": (0.0, 0.1, 1.0),
    "lse_square_scale": (0.0, 0.01),
    "temperature": (1.0, 2.5, "rows"),
    "logit_scale": (1.0, 1.0, 0.6, -1.5),
    "softcap": (None, None, 30.0, 2.5),
    "outputs": ((), ("lse",), ("entropy", "lse"), ("predicted",)),
    "grad_lse": (None, "rows"),
    "grad_entropy": (None, "rows"),
}


#: Options of second derivatives, as `random_arguments` takes them.
OPTIONS_OF_SECOND_ORDER: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "class_weight": "classes", "grad_loss": "rows"},
    {"class_weight": "classes", "label_smoothing": 0.2, "temperature": 0.7, "lse_square_scale": 1e-2},
    {"temperature": "rows", "token_weight": "rows", "lse_square_scale": -0.3},
    {"denominator": 7.0, "token_weight": "rows", "grad_loss": -2.5},
    {"logit_scale": -1.3, "lse_square_scale": 0.1},
    {"logit_scale": 0.0},
    {"softcap": 20.0},
    {"softcap": 2.0, "logit_scale": -0.7, "temperature": "rows", "class_weight": "classes", "label_smoothing": 0.2},
    {"softcap": 1.5, "lse_square_scale": 0.1, "reduction": "none", "grad_loss": "rows", "token_weight": "rows"},
)


#: What the loss has and the product of the Hessian and a vector does not.
OF_THE_LOSS = ("outputs", "return_grad", "grad_lse", "grad_entropy")


def with_vector(key: object, arguments: dict[str, Any], dtype: str | None = None) -> dict[str, Any]:
    """Return arguments of a loss without the arguments of its outputs, but with a vector in a dtype."""
    x = arguments["input"]
    vector = generator("vector", key, x.shape).standard_normal(x.shape).astype(DTYPES[dtype] if dtype else x.dtype)
    return {name: each for name, each in arguments.items() if name not in OF_THE_LOSS} | {"vector": vector}


def products(key: object, shape: tuple[int, ...], axis: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of products with every option, and one target, several, or probabilities of all classes."""
    for number, options in enumerate(OPTIONS_OF_SECOND_ORDER):
        for K, dense in ((0, None), (3, None), (0, dtype)):
            arguments = random_arguments((key, number), shape, axis, dtype, options=options, K=K, dense=dense)
            yield with_vector(number, arguments, "float32" if number % 4 == 1 else None)


def random_options(data: st.DataObject, **further: tuple[Any, ...]) -> tuple[tuple[int, ...], int, dict[str, Any]]:
    """Draw a shape, an axis, and options among `CHOICES` and further ones."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    options = {name: data.draw(st.sampled_from(each), label=name) for name, each in (CHOICES | further).items()}
    if options["reduction"] == "none":
        options["grad_loss"] = data.draw(st.sampled_from((1.0, "rows")))
    return shape, axis, options


#: Distances of the logit of a nearly certain entry from the other ones, for `near_certain`, and shapes and axes.
GAPS = (0.5, 3.0, 10.0, 20.0, 27.5)
CERTAIN_SHAPES = (((5, 17), -1), ((3, 4096), -1), ((2, 9, 70), 1), ((2, 40_000), -1))


def near_certain(gap: float, shape: tuple[int, ...], axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Make logits whose rows have one nearly certain entry, and the places of these entries along the axis."""
    random = generator("near certain", gap, shape, dtype)
    rows = tuple(length for number, length in enumerate(shape) if number != axis % len(shape))
    place = np.expand_dims(random.integers(0, shape[axis], rows), axis)
    logits = np.round(random.random(shape) * 4) / 4 - gap - np.log(shape[axis])
    np.put_along_axis(logits, place, 0, axis)
    return (logits + 2).astype(DTYPES[dtype]), place


def assert_right(
    result: Any, right: dict[str, np.ndarray], dtype: str, text: str = "", *, absolute: float = 1e-15
) -> None:
    """Check all results that are there.

    Errors are relative to the largest right value, or `absolute` where that is 0, and in float16 at least 1e-7.
    """
    exact = 1e-11 if dtype == "float64" else 2e-5
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-8}.get(dtype, 0.0)
    for name, value in result._asdict().items():
        if value is None:
            continue
        wanted = right[name]
        assert value.shape == wanted.shape, (name, text)
        if name in ("predicted", "correct"):
            assert np.array_equal(value, wanted), (name, text)
            continue
        error = exact + (rounding if name in FULL else 0)
        size = np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0)
        np.testing.assert_allclose(
            value.astype(np.float64),
            wanted.astype(np.float64),
            rtol=error,
            atol=float(exact * size + max(absolute, 1e-7 if dtype == "float16" else 0)),
            err_msg=f"{name} {text}",
        )


def expected_product(arguments: dict[str, Any], dtype: str) -> Any:
    """Return what `assert_product` compares the product of the Hessian and a vector with."""
    return expected(**arguments | {"vector": arguments["vector"].astype(DTYPES[dtype])})


def assert_product(product: np.ndarray, right: Any, dtype: str, text: str = "", *, absolute: float = 1e-15) -> None:
    """Check the product of the Hessian and a vector; `absolute` is as in `assert_right`."""
    assert_right(SimpleNamespace(_asdict=lambda: {"product": product}), right, dtype, text, absolute=absolute)
    assert product.dtype == DTYPES[dtype]


# ---- calls ----


def in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Return the same values with other strides or another byte order."""
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "steps":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "reversed":
        return array[..., ::-1].copy()[..., ::-1]
    if layout == "swapped" and array.dtype != ml_dtypes.bfloat16:
        return array.astype(array.dtype.newbyteorder())
    return array


LAYOUTS = ("C", "Fortran", "steps", "reversed", "swapped")
#: Rows and columns around the edges of vectors, segments and splits.
SHAPES = (
    ((7,), 0),
    ((1, 1), -1),
    ((2, 3), -1),
    ((33, 10), -1),
    ((9, 64), -1),
    ((6, 129), -1),
    ((3, 4100), -1),
    ((2, 3, 5, 4), 1),
    ((2, 30, 9, 9), 1),
    ((2, 70, 65), 1),
    ((300, 21), 0),
    ((3, 2, 130), 0),
)
#: Rows in place, cached and not, gathered, short and long columns, and rows that are split.
PLACES = (((33, 10), -1), ((3, 4100), -1), ((2, 5, 70), 1), ((2, 300, 9), 1), ((2, 70_001), -1))


def same_bits(results: list[LossResult]) -> bool:
    return all(
        one is other is None or np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for result in results[1:]
        for one, other in zip(results[0], result, strict=True)
    )


def assert_slopes(function, x, gradient):
    """Check a gradient by central differences of a function in each element."""
    step = 1e-5
    for index in np.ndindex(x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            sides.append(function(moved))
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(gradient[index], abs=1e-8)
