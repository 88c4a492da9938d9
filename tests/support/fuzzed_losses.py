"""Draw random calls of the losses with options, and compute their expected results."""

from __future__ import annotations

from typing import Any, NamedTuple

import fuzzed_sparse
import linear_oracles
import loss_bounds
import numpy as np
import oracles
from fuzzed_arrays import Draw
from linear_samples import KINDS, ONE_SIGN, WHOLE, Shape, accumulator, problem_of
from oracles import Expected, widen
from samples import BFLOAT16, DTYPES

from ascend_grad import bounds
from ascend_grad.operators import table

ROWS, BACKWARD = "cross_entropy", "linear_cross_entropy_backward"
ROWS_HVP, LAYER_HVP, HESSIAN = "cross_entropy_hvp", "linear_cross_entropy_hvp", "linear_cross_entropy_hessian"
#: The operator of each case.
OPERATOR_OF = {
    "rows": ROWS, "options": WHOLE, "loss_gradient": BACKWARD, "rows_hvp": ROWS_HVP, "layer_hvp": LAYER_HVP,
    "hessian": HESSIAN
}  # fmt: skip
#: The cases whose input is sparse, if SciPy is there, and their operators.
SPARSE = (
    {"sparse_loss": WHOLE, "sparse_gradient": BACKWARD, "sparse_hvp": LAYER_HVP} if fuzzed_sparse.IS_AVAILABLE else {}
)
OPERATOR_OF |= SPARSE
#: The operators of logits. The other operators compute losses of a linear layer.
OF_LOGITS = (ROWS, ROWS_HVP)

OUTPUTS = ("lse", "log_prob", "entropy", "predicted", "correct")
#: Outputs of the shape of the logits, which a layer lacks.
FULL_OUTPUTS = ("prob", "hessian_diag")
UPSTREAM = ("grad_lse", "grad_log_prob", "grad_entropy")
#: The arguments with their values where a call omits them.
DEFAULTS: dict[str, Any] = {
    "reduction": "mean", "ignore_index": -100, "vocab_start_index": 0, "grad_loss": None, "return_grad": True,
    "output_mask": (True, True), "filter_eps": 0.0, "token_weight": None, "class_weight": None, "target_prob": None,
    "label_smoothing": 0.0, "lse_square_scale": 0.0, "temperature": 1.0, "denominator": None, "bias": None,
    "logit_scale": 1.0, "softcap": None, "outputs": (), "axis": -1, "entropy": None, "vector_bias": None,
    "vector": None, "vector_input": None, **dict.fromkeys(UPSTREAM)
}  # fmt: skip


# ---- drawing ---------------------------------------------------------------------------------------------------------


class Arrays:
    """Make the arrays of a call."""

    def __init__(self, draw: Draw):
        self.draw, self.random = draw, np.random.Generator(np.random.PCG64(draw.getrandbits(32)))

    def floats(self, shape: tuple[int, ...], low: float, high: float, *, zeros: float = 0.0) -> np.ndarray:
        """Return uniform numbers in any of the four dtypes, or zeros with this probability."""
        values = np.asarray(low + (high - low) * self.random.random(shape))
        values[self.random.random(shape) < zeros] = 0
        return values.astype(DTYPES[self.draw.choice(tuple(DTYPES))])

    def vector(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return normal numbers of different magnitudes in any of the four dtypes, some of which may be 0."""
        values = np.asarray(self.draw.choice((1, 1, 1, 1e-3, 100, 0)) * self.random.standard_normal(shape))
        values[self.random.random(shape) < self.draw.choice((0, 0, 0.5, 0.95))] = 0
        return values.astype(DTYPES[self.draw.choice(tuple(DTYPES))])

    def targets(self, shape: tuple[int, ...], classes: int, ignored: int) -> np.ndarray:
        """Return classes, a quarter of which is ignored."""
        targets = np.asarray(self.random.integers(0, max(classes, 1), shape))
        targets[self.random.random(shape) < (0.25 if classes else 1)] = ignored
        return targets


def draw_options(draw: Draw, arrays: Arrays, rows: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Draw the options that all losses have, each with a separate probability."""
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        options["token_weight"] = arrays.floats(rows, 0, 2, zeros=0.2)
    if draw.chance(0.3):
        options["class_weight"] = arrays.floats((classes,), 0, 2, zeros=0.1)
    if draw.chance(0.3):
        options["label_smoothing"] = draw.choice((0, 0.1, 0.5, 1, np.float32(0.25)))
    if draw.chance(0.3):
        options["lse_square_scale"] = draw.choice((0, 1e-4, 0.1, -0.5, np.float16(0.5)))
    if draw.chance(0.4):
        options["temperature"] = draw.choice((1, 0.5, 3.0, np.float32(1.5), np.array(2.0), *["rows"] * 4))
        if isinstance(options["temperature"], str):
            options["temperature"] = arrays.floats(rows, 0.5, 4)
    if draw.chance(0.2):
        options["denominator"] = draw.choice((None, 1, 7.5, np.float32(1000)))
    if draw.chance(0.3):
        options["logit_scale"] = draw.choice((1, 0.5, -1.25, 0, np.float32(2)))
    if draw.chance(0.3):
        options["softcap"] = draw.choice((None, 1, 5.0, 30, np.float16(50)))
    return options


def is_dense(arguments: dict[str, Any]) -> bool:
    """Return whether the targets are probabilities of all classes."""
    return arguments["target"].dtype.kind not in "iu"


def draw_outputs(draw: Draw, arguments: dict[str, Any], further: tuple[str, ...] = ()) -> tuple[str, ...] | list[str]:
    refused = ("log_prob", "correct") if is_dense(arguments) else ("correct",) if "target_prob" in arguments else ()
    names = [name for name in OUTPUTS + further if name not in refused]
    return draw.choice((tuple, list))(draw.sample(names, draw.randrange(len(names) + 1)))


def draw_rows(draw: Draw, dtype: str, shape: tuple[int, ...], operator: str) -> dict[str, Any]:
    """Draw the arguments of `cross_entropy`, or of its products."""
    arrays = Arrays(draw)
    axis = draw.randrange(-max(len(shape), 1), max(len(shape), 1))
    rows = shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :] if shape else ()
    classes = shape[axis] if shape else 1
    if classes == 0 and 0 not in rows:  # such rows are refused
        shape, classes = tuple(max(length, 1) for length in shape), 1
    x = draw.choice((3, 3, 3, 100, 0)) * arrays.random.standard_normal(shape)
    most = 4 if classes == 3 else 3  # as many ids of 0 and 1 as classes raise a warning: they look one-hot
    several = (draw.choice((1, 2, most)),) if draw.chance(0.25) else ()
    targets = arrays.targets(rows + several, classes, -100)
    arguments: dict[str, Any] = {"input": np.asarray(x).astype(DTYPES[dtype]), "target": targets, "axis": axis}
    if several:
        arguments["target_prob"] = arrays.floats(rows + several, 0, 1)
    elif draw.chance(0.25):
        arguments["target"] = arrays.floats(shape, 0, 1, zeros=0.2)
    arguments |= draw_options(draw, arrays, rows, classes)
    arguments["reduction"] = draw.choice(("mean", "sum", "none"))
    draw_grad_loss(draw, arrays, arguments, rows)
    if operator == ROWS_HVP:
        arguments["vector"] = arrays.vector(shape)
        return arguments
    if draw.chance(0.2):
        arguments["return_grad"] = draw.choice((True, False, np.False_))
    has_upstream = draw.chance(0.3)
    if has_upstream:
        draw_upstream(draw, arrays, arguments, rows)
    arguments["outputs"] = draw_outputs(draw, arguments, FULL_OUTPUTS[:1] if has_upstream else FULL_OUTPUTS)
    return arguments


def draw_grad_loss(draw: Draw, arrays: Arrays, arguments: dict[str, Any], rows: tuple[int, ...]) -> None:
    arguments.pop("grad_loss", None)
    if arguments["reduction"] == "none" and draw.chance(0.5):
        arguments["grad_loss"] = arrays.floats(rows, -2, 2, zeros=0.2)
    elif draw.chance(0.5):
        arguments["grad_loss"] = draw.choice((None, 1, -0.5, 0.0, np.float16(3), np.array(2.0)))


def draw_linear(draw: Draw, dtype: str, shape: list[int], case: str) -> tuple[dict[str, Any], float, bool]:
    """Draw the arguments of a linear loss. Return also the constant of the bound and if the data are ordinary."""
    arrays, operator = Arrays(draw), OPERATOR_OF[case]
    kind = draw.choice(("centred", "centred", *KINDS))
    sizes = Shape(*shape)
    problem = problem_of(WHOLE, sizes, dtype, kind=kind, reduction=draw.choice(("mean", "sum", "none")))
    arguments = dict(problem.arguments)
    rows, constant = (sizes.BT,), problem.constant
    if case in SPARSE:
        arguments["input"] = fuzzed_sparse.with_zeros(draw, arguments["input"])
    if draw.chance(0.25):
        several = (sizes.BT, draw.choice((1, 2, 3)))
        arguments["target"] = 100 + arrays.targets(several, sizes.V, -107)
        arguments["target_prob"] = arrays.floats(several, 0, 1)
    elif draw.chance(0.25) and (sizes.V or not sizes.BT):
        arguments["target"] = arrays.floats((sizes.BT, sizes.V), 0, 1, zeros=0.2)
    arguments |= draw_options(draw, arrays, rows, sizes.V)
    if draw.chance(0.4):
        arguments["bias"] = arrays.floats((sizes.V,), -1, 1)
    draw_grad_loss(draw, arrays, arguments, rows)
    if operator == WHOLE:
        if draw.chance(0.2):
            arguments["return_grad"] = draw.choice((True, False, np.True_))
        arguments["outputs"] = draw_outputs(draw, arguments)
    elif operator == BACKWARD:
        draw_statistics(draw, arrays, arguments, rows)
    elif operator == LAYER_HVP:
        arguments["vector"] = arrays.vector((sizes.V, sizes.H))
        if "bias" in arguments and draw.chance(0.7):
            arguments["vector_bias"] = arrays.vector((sizes.V,))
        if case not in SPARSE and draw.chance(0.3):
            arguments["vector_input"] = arrays.vector((sizes.BT, sizes.H))
            if draw.chance(0.2):
                arguments["vector"] = None
        # Products with the vector have a sign of their own.
        constant = max(constant, ONE_SIGN)
    return arguments, constant, kind in ("centred", "positive")


def draw_upstream(draw: Draw, arrays: Arrays, arguments: dict[str, Any], rows: tuple[int, ...]) -> None:
    """Draw gradients of outputs, each with a separate probability."""
    for name in UPSTREAM:
        if draw.chance(0.4) and not (name == "grad_log_prob" and is_dense(arguments)):
            shape = arguments["target"].shape if name == "grad_log_prob" else rows
            arguments[name] = arrays.floats(shape, -1, 1, zeros=0.2)


def draw_statistics(draw: Draw, arrays: Arrays, arguments: dict[str, Any], rows: tuple[int, ...]) -> None:
    """Draw statistics of about the right size, and gradients of outputs. The loss or an output has a gradient."""
    arguments["lse"] = arrays.floats(rows, 1, 4)
    if arguments.get("grad_loss") is None or draw.chance(0.4):
        draw_upstream(draw, arrays, arguments, rows)
    if all(arguments.get(name) is None for name in ("grad_loss", *UPSTREAM)):
        arguments["grad_lse"] = arrays.floats(rows, -1, 1, zeros=0.2)
    if "grad_entropy" in arguments or draw.chance(0.1):
        arguments["entropy"] = arrays.floats(rows, 0, 3)


# ---- expected results ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Hold the quantities that the results of a loss follow from, row by row. Rows that are not ignored are `live`."""

    p: bounds.Precision
    arguments: dict[str, Any]
    rows: tuple[int, ...]
    live: np.ndarray
    known: np.ndarray  # rows whose logits are finite, and do not overflow in the kernels
    terms: loss_bounds.LossTerms
    statistics: loss_bounds.Statistics
    over: tuple[Any, Any]  # the denominators of the two terms of the loss
    grad: np.ndarray  # upstream gradient of each row

    def of_rows(self, expected: Expected) -> Expected:
        """Return an output of each row: 0 for ignored rows, and without a bound where logits are not finite."""
        values = np.where(self.live, expected.values, 0)
        bound = np.where(self.live, np.where(self.known, expected.bound, np.inf), 0)
        return _claimed(values.reshape(self.rows), bound.reshape(self.rows))

    def log_prob(self) -> Expected:
        """Return the log-probabilities of the targets, 0 for ignored targets."""
        entries = np.maximum(self.terms.entries, 0)
        values, bound = (np.take_along_axis(each, entries, -1) for each in self.statistics.negative_log_prob)
        values = np.where(self.terms.entries >= 0, -values, 0)
        bound = np.where(self.terms.entries >= 0, np.where(self.known[:, None], bound, np.inf), 0)
        shape = self.arguments["target"].shape
        return _claimed(values.reshape(shape), bound.reshape(shape))

    def loss(self) -> Expected:
        first, second = loss_bounds.losses(self.p, self.statistics, self.terms)
        claimed = self.known | (self.terms.token_weight == 0)
        errors = [np.where(claimed, each.bound, np.inf) for each in (first, second)]
        if self.arguments["reduction"] == "none":
            return _claimed((first.values + second.values).reshape(self.rows), sum(errors).reshape(self.rows))
        if not self.over[0]:
            return Expected(np.asarray(self.p.wide(np.nan)), np.asarray(0.0))
        terms = [(each.values, error, over) for each, error, over in zip((first, second), errors, self.over)]
        terms = terms if self.arguments["lse_square_scale"] else terms[:1]
        value = sum(values.sum() / over for values, _, over in terms)
        # Sums over rows are in float64.
        of_sums = [self.p.eps * (8 + len(self.live) * 2.0**-53 / self.p.eps) * np.abs(values) for values, _, _ in terms]
        bound = sum((error + more).sum() / abs(over) for (_, error, over), more in zip(terms, of_sums))
        return _claimed(np.asarray(value), np.asarray(bound))

    def divided(self) -> list[np.ndarray]:
        """Return the upstream gradients of the two terms of the loss, 0 for rows without weight."""
        token = self.terms.token_weight
        return [np.where(token == 0, 0, self.grad / each if each else 0 * self.grad) for each in self.over]

    def gradient(self) -> tuple[Expected, np.ndarray]:
        """Return the gradient with respect to the logits, and which rows have one."""
        of_loss, of_square = self.divided()
        upstream, entries = [], self.terms.entries
        for name in UPSTREAM:
            given = np.zeros(1) if self.arguments[name] is None else self.arguments[name]
            there = entries >= 0 if name == "grad_log_prob" else self.live[:, None]
            given = np.broadcast_to(
                widen(given, self.p.wide).reshape(-1, there.shape[1] if given.size > 1 else 1), there.shape
            )
            upstream.append(np.where(there, given, 0))
        present = of_loss != 0
        for each in upstream:
            present = present | (each != 0).any(-1)
        upstream = [each if name == "grad_log_prob" else each[:, 0] for name, each in zip(UPSTREAM, upstream)]
        present &= self.live
        value, error = loss_bounds.gradient_of_logits(
            self.p, self.statistics, self.terms, of_loss, of_square, *upstream
        )
        error = np.where(self.known[:, None], error, np.inf)
        error += self.p.eps * (8 + len(self.live) * 2.0**-53 / self.p.eps) * np.abs(value)
        return Expected(np.where(present[:, None], value, 0), np.where(present[:, None], error, 0)), present

    def curvature(self, logits: loss_bounds.Logits, vector: Expected | None) -> tuple[Expected, np.ndarray]:
        """Return the product of the Hessian with respect to the products and a vector, or its diagonal.

        Return also which rows have one.
        """
        gradient, present = self.gradient()
        shared = self.p, self.statistics, self.terms, *self.divided()
        if vector is None:
            hessian = loss_bounds.hessian_diagonal(*shared)
        else:
            hessian = loss_bounds.hessian_product(*shared, loss_bounds.sloped(self.p, logits, vector))
        value, error = loss_bounds.of_products(self.p, hessian, gradient, logits, vector)
        error = np.where(self.known[:, None], error, np.inf)
        error += self.p.eps * (8 + len(self.live) * 2.0**-53 / self.p.eps) * np.abs(value)
        return Expected(np.where(present[:, None], value, 0), np.where(present[:, None], error, 0)), present

    def entries(self, logits: np.ndarray, error: np.ndarray, result: np.ndarray) -> Expected:
        """Return the expected predicted entries: a result's, where their logits have the maximum up to errors."""
        rows, start = np.arange(len(logits)), self.arguments["vocab_start_index"]
        largest = logits.argmax(-1)
        chosen = np.clip(result.reshape(-1) - start, 0, logits.shape[1] - 1)
        is_near = logits[rows, largest] - logits[rows, chosen] <= 2 * error.max(-1)
        right = np.where(self.live, np.where(is_near | ~self.known, chosen, largest) + start, -1)
        return Expected(right.reshape(self.rows).astype(self.p.wide), np.zeros(self.rows))


def _call(
    p: bounds.Precision, a: dict[str, Any], rows: tuple[int, ...], classes: int, z: np.ndarray, error: np.ndarray
) -> _Call:
    """Return the quantities that the results of a loss follow from, for logits with at most these errors."""
    count = len(z)
    prob = a["target_prob"]
    if is_dense(a):
        read = a["target"] if a["input"].dtype.type is np.float64 else a["target"].astype(np.float32)
        prob = np.moveaxis(np.atleast_1d(read), a["axis"], -1).reshape(count, -1 if count else classes)
        entries = np.tile(np.arange(classes) + a["vocab_start_index"], (count, 1))
        is_target, live = np.ones(entries.shape, bool), np.ones(count, bool)
    else:
        entries = a["target"].astype(np.int64).reshape(count, -1 if count else 1)
        is_target = entries != a["ignore_index"]
        live = is_target.any(-1)

    def of_rows(value: Any) -> np.ndarray:
        return np.broadcast_to(widen(np.asarray(1.0 if value is None else value), p.wide).reshape(-1), count)

    prob = np.ones(entries.shape) if prob is None else prob
    terms = loss_bounds.LossTerms(
        np.where(is_target, entries - a["vocab_start_index"], -1),
        np.where(is_target, widen(prob, p.wide).reshape(entries.shape), 0),
        np.ones(classes, p.wide) if a["class_weight"] is None else widen(a["class_weight"], p.wide),
        np.where(live, of_rows(a["token_weight"]), 0),
        {name: p.wide(float(a[name])) for name in ("label_smoothing", "lse_square_scale")},
    )
    over = p.wide(1), p.wide(1)
    if a["reduction"] == "mean" and a["denominator"] is not None:
        over = p.wide(float(a["denominator"])), p.wide(float(a["denominator"]))
    elif a["reduction"] == "mean":
        total = terms.token_weight.sum()
        of_classes = total
        if a["target_prob"] is None and not is_dense(a) and classes:
            of_classes = (terms.token_weight * terms.class_weight[np.maximum(terms.entries[:, 0], 0)]).sum()
        over = of_classes, total
        if not over[0] or (terms.square_scale and not over[1]):
            over = p.wide(0), p.wide(0)
    # With smoothing the logits of a row are added up, in float64.
    terms_of_sum = max(classes, 1) if terms.options["label_smoothing"] and p.dtype is np.float64 else 1
    known = (np.abs(z) < p.largest / 4 / terms_of_sum).all(-1)
    z, error = np.where((live & known)[:, None], z, 0), np.where((live & known)[:, None], error, 0)
    if a.get("lse") is not None:
        entropy = np.zeros(count) if a["entropy"] is None else a["entropy"]
        rows_of = loss_bounds.given_statistics(p, z, error, widen(a["lse"], p.wide), widen(entropy, p.wide))
    else:
        rows_of = loss_bounds.statistics(p, z, error)
    return _Call(p, a, rows, live, known | ~live, terms, rows_of, over, of_rows(a["grad_loss"]))


def _with_outputs(call: _Call, logits: np.ndarray, error: np.ndarray, results: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the loss and the outputs. Predictions are near the largest logits, and `correct` follows from them."""
    rows, entries = call.statistics, np.maximum(call.terms.entries[:, 0], 0)
    found: dict[str, Any] = {"loss": call.loss()}
    found["lse"], found["entropy"] = call.of_rows(rows.lse), call.of_rows(rows.entropy)
    found["log_prob"] = call.log_prob()
    if "predicted" in results:
        found["predicted"] = call.entries(logits, error, results["predicted"])
    if "correct" in results:
        target = call.terms.entries[:, 0]
        largest = logits.max(-1)
        reached = logits[np.arange(len(logits)), entries]
        near = 2 * error.max(-1)
        unknown = ~call.known | (np.abs(largest - reached) <= near) & (near > 0)
        surely = call.live & ~unknown & (logits.argmax(-1) == target)
        found["correct"] = Expected(
            np.asarray(surely.sum(), call.p.wide), np.asarray(float((unknown & call.live).sum()))
        )
    return found


def expected_of_rows(arguments: dict[str, Any], results: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the expected results of `cross_entropy` by name."""
    a = DEFAULTS | arguments
    x, axis = a["input"], a["axis"]
    p = oracles.precision_of(x.dtype)
    moved = np.moveaxis(np.atleast_1d(widen(x, p.wide)), axis, -1)
    shape, classes = moved.shape[:-1], moved.shape[-1]
    rows = shape if x.ndim else ()
    count = int(np.prod(shape, dtype=np.int64))
    logits = moved.reshape(count, classes)
    temperature = np.broadcast_to(widen(np.asarray(a["temperature"]), p.wide).reshape(-1), count)
    if not classes:  # then there are no rows
        logits, temperature = np.zeros((0, 1), p.wide), np.ones(0, p.wide)
    scale, softcap = p.wide(float(a["logit_scale"])), None if a["softcap"] is None else p.wide(float(a["softcap"]))
    exact = Expected(logits, np.zeros(logits.shape))
    of_input = loss_bounds.transformed(p, exact, p.wide(0), scale, softcap, temperature)
    if softcap is None and scale == 1 and not np.any(temperature != 1):
        of_input = of_input._replace(z=exact)
    call = _call(p, a if classes else a | {"class_weight": None}, rows, logits.shape[1], *of_input.z)

    def in_shape(values: np.ndarray, bound: np.ndarray) -> Expected:
        """Return a result of the shape of the logits."""
        return _claimed(
            *(
                np.moveaxis(each[:, :classes].reshape(moved.shape), -1, axis).reshape(x.shape)
                for each in (values, bound)
            )
        )

    if a["vector"] is not None:
        vector = np.moveaxis(np.atleast_1d(widen(a["vector"].astype(x.dtype), p.wide)), axis, -1)
        changes = Expected(vector.reshape(count, classes) if classes else 0 * logits, np.zeros(logits.shape))
        return {"product": in_shape(*call.curvature(of_input, changes)[0])}
    # Entries are compared before the temperature divides the logits.
    undivided = loss_bounds.transformed(p, exact, p.wide(0), scale, softcap, np.ones(len(logits), p.wide)).z
    plain = softcap is None and scale in (1, -1)
    compared = undivided.values, np.zeros(logits.shape) if plain else undivided.bound
    found = _with_outputs(call, *compared, results)
    if a["return_grad"]:
        gradient, _ = call.gradient()
        slope = of_input.slope
        values = gradient.values * slope.values
        bound = gradient.bound * np.abs(slope.values) + np.abs(gradient.values) * slope.bound
        has_slope = np.any(slope.values != 1)
        found["input_grad"] = in_shape(
            values, bound + 8 * p.eps * np.abs(values) + (2 * p.smallest if has_slope else 0)
        )
    if "prob" in a["outputs"]:
        prob = (np.where(call.live[:, None], each, 0) for each in call.statistics.prob)
        found["prob"] = in_shape(*(next(prob), np.where(call.known[:, None], next(prob), np.inf)))
    if "hessian_diag" in a["outputs"]:
        found["hessian_diag"] = in_shape(*call.curvature(of_input, None)[0])
    return found


def _has_no_options(a: dict[str, Any]) -> bool:
    """Return whether exponentials of a linear loss in bfloat16 may be cached."""
    names = "lse", "class_weight", "target_prob", "softcap"
    return (
        all(a.get(name) is None for name in names)
        and a["label_smoothing"] == a["lse_square_scale"] == 0
        and a["logit_scale"] == 1
        and bool(np.all(np.asarray(a["temperature"]) == 1))
        and not is_dense(a)
    )


class _Layer(NamedTuple):
    """Hold the quantities that the results of a linear loss follow from. A vocabulary without entries has one here."""

    sizes: linear_oracles.Sizes
    x: np.ndarray
    w: np.ndarray
    logits: loss_bounds.Logits
    call: _Call


def _layer(a: dict[str, Any], constant: float) -> _Layer:
    p = oracles.precision_of(a["input"].dtype)
    s = linear_oracles.Sizes(p, constant, a["input"].dtype == BFLOAT16)
    x, w = (widen(a[name], p.wide) for name in ("input", "weight"))
    classes = len(w)
    if not classes:  # all rows are ignored, as if there were one entry
        w = np.zeros((1, x.shape[1]), p.wide)
    products = Expected(*linear_oracles.logits_of(s, x, w))
    bias = np.zeros(len(w), p.wide) if a["bias"] is None or not classes else widen(a["bias"], p.wide)
    temperature = np.broadcast_to(widen(np.asarray(a["temperature"]), p.wide).reshape(-1), len(x))
    softcap = None if a["softcap"] is None else p.wide(float(a["softcap"]))
    is_plain = a["bias"] is None and a["logit_scale"] == 1 and softcap is None and np.all(temperature == 1)
    logits = loss_bounds.transformed(p, products, bias, p.wide(float(a["logit_scale"])), softcap, temperature)
    if is_plain:
        logits = loss_bounds.Logits(products, Expected(logits.slope.values, np.zeros(logits.z.values.shape)))
    a = a if classes else a | {"class_weight": None}
    # A softcap makes logits of infinite products finite, but not their gradients.
    z = np.where(np.isfinite(products.values), logits.z.values, np.nan)
    return _Layer(s, x, w, logits, _call(p, a, (len(x),), len(w), z, logits.z.bound))


def expected_of_linear(arguments: dict[str, Any], constant: float, results: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the expected results of a linear loss by name."""
    a = DEFAULTS | arguments
    s, x, w, logits, call = _layer(a, constant)
    p, classes = s.p, len(a["weight"])
    if a["input"].dtype == BFLOAT16 and _has_no_options(a):
        prob, error = call.statistics.prob
        prob = Expected(prob, error + bounds.cached_exp_error(prob))
        call = call._replace(statistics=call.statistics._replace(prob=prob))
    found = {} if a.get("lse") is not None else _with_outputs(call, *logits.z, results)
    asked = a["output_mask"] if a["return_grad"] else (False, False)
    gradient, present = call.gradient()
    slope, slope_error = (np.where(present[:, None], each, 0) for each in logits.slope)
    tile = gradient.values * slope
    error = gradient.bound * np.abs(slope) + np.abs(gradient.values) * slope_error + 4 * p.eps * np.abs(tile)
    tile, error = _as_tile(p, call, present, tile, error)
    eps = float(a["filter_eps"])
    if asked[0]:
        first = linear_oracles.product(s, tile, error, w)
        bound = np.where(present[:, None], first.bound + eps * np.abs(w).sum(0), 0)
        found["input_grad"] = _claimed(np.where(present[:, None], first.values, 0), bound)
    x = np.where((present & np.isfinite(x).all(-1))[:, None], x, 0)
    if asked[1]:
        second = linear_oracles.product(s, np.ascontiguousarray(tile.T), np.ascontiguousarray(error.T), x)
        bound = second.bound + eps * np.abs(x).sum(0)
        found["weight_grad"] = _claimed(second.values[:classes], bound[:classes])
    if a["return_grad"] and a["bias"] is not None:
        found["bias_grad"] = _column_sums(s, tile, error, classes, eps * len(tile))
    return found


def _as_tile(
    p: bounds.Precision, call: _Call, present: np.ndarray, tile: np.ndarray, error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of a product with the input, without a claim where they are not known, or may overflow."""
    error = np.where(np.abs(tile) + error < p.largest / 4, error, np.inf)
    error = np.where(present[:, None], error, 0)
    return np.where(present[:, None] & call.known[:, None], tile, 0), error


def _column_sums(
    s: linear_oracles.Sizes, tile: np.ndarray, error: np.ndarray, classes: int, filtered: float = 0.0
) -> Expected:
    size = np.abs(tile).sum(0)
    more = (bounds.BFLOAT16_P if s.bfloat16 else 0) * size + filtered + len(tile) * s.p.normal
    bound = error.sum(0) + more + s.p.eps * 4 * size
    return _claimed(tile.sum(0)[:classes], bound[:classes])


def expected_of_hvp(arguments: dict[str, Any], constant: float) -> dict[str, Any]:
    """Return the expected products of the Hessian of a linear loss and a vector by name."""
    a = DEFAULTS | arguments
    s, x, w, logits, call = _layer(a, constant)
    p, classes = s.p, len(a["weight"])
    of_weight, of_input = (
        None if a[f"vector{suffix}"] is None else a[f"vector{suffix}"].astype(a[name].dtype.newbyteorder("="))
        for suffix, name in (("", "weight"), ("_input", "input"))
    )
    vector = 0 * w if of_weight is None or not classes else widen(of_weight, p.wide)
    changes = Expected(*linear_oracles.logits_of(s, x, vector))
    added = [] if of_input is None else [Expected(*linear_oracles.logits_of(s, widen(of_input, p.wide), w))]
    if a["vector_bias"] is not None and classes:
        added.append(Expected(np.broadcast_to(widen(a["vector_bias"], p.wide), changes.values.shape), 0))
    for values, bound in added:
        rounding = 4 * p.eps * (np.abs(changes.values) + np.abs(values))
        changes = Expected(changes.values + values, changes.bound + bound + rounding)
    product, present = call.curvature(logits, changes)
    tile = _as_tile(p, call, present, *product)
    is_read = (present & np.isfinite(x).all(-1))[:, None]
    x = np.where(is_read, x, 0)
    parts = [_transposed_product(s, *tile, x)]
    if of_input is not None:
        y, (slope, slope_error) = widen(of_input, p.wide), logits.slope
        gradient = call.gradient()[0]
        values = gradient.values * slope
        error = gradient.bound * (np.abs(slope) + slope_error) + np.abs(gradient.values) * slope_error
        of_loss = _as_tile(p, call, present, values, error + 4 * p.eps * np.abs(values))
        parts.append(_transposed_product(s, *of_loss, np.where(is_read, y, 0)))
        of_rows = _sum([linear_oracles.product(s, *tile, w), linear_oracles.product(s, *of_loss, vector)], p)
        found = [np.where(present[:, None], each, 0) for each in of_rows]
        results = {"input_product": _claimed(*found)}
    else:
        results = {}
    first = _sum(parts, p)
    results["weight_product"] = _claimed(first.values[:classes], first.bound[:classes])
    if a["bias"] is not None:
        results["bias_product"] = _column_sums(s, *tile, classes)
    return results


def _transposed_product(s: linear_oracles.Sizes, tile: np.ndarray, error: np.ndarray, x: np.ndarray) -> Expected:
    return linear_oracles.product(s, np.ascontiguousarray(tile.T), np.ascontiguousarray(error.T), x)


def _sum(parts: list[Expected], p: bounds.Precision) -> Expected:
    if len(parts) == 1:
        return parts[0]
    rounding = 4 * p.eps * sum(np.abs(part.values) for part in parts)
    return Expected(sum(part.values for part in parts), sum(part.bound for part in parts) + rounding)


def expected_of_hessian(arguments: dict[str, Any], constant: float) -> dict[str, Any]:
    """Return the expected Hessian of a linear loss."""
    a = DEFAULTS | arguments
    s, x, _, logits, call = _layer(a, constant)
    p, classes = s.p, len(a["weight"])
    if a["bias"] is not None:
        x = np.column_stack([x, np.ones(len(x), p.wide)])
    width, present = x.shape[1], call.gradient()[1]
    x = np.where((present & np.isfinite(x).all(-1))[:, None], x, 0)
    size = np.abs(x)
    values, bound = np.zeros((2, classes, width, classes, width), p.wide)
    for w in range(classes):
        unit = np.broadcast_to(np.arange(classes) == w, (len(x), classes)).astype(p.wide)
        product, _ = call.curvature(logits, Expected(unit, np.zeros(unit.shape)))
        column, error = _as_tile(p, call, present, *product)
        error = error + (s.eps + 4 * p.eps) * np.abs(column) + p.normal
        values[:, :, w] = np.einsum("iv,ij,ik->vjk", column, x, x)
        bound[:, :, w] = np.einsum("iv,ij,ik->vjk", error, size, size)
        # Subnormal products of two factors may become 0.
        bound[:, :, w] += p.normal * (len(x) + size.sum(0) + np.einsum("iv,ij->vj", np.abs(column), size)[..., None])
    # An element and its mirror image are one number, computed once.
    bound = np.maximum(bound, bound.transpose(2, 3, 0, 1))
    return {"hessian": _claimed(values, np.where(np.isnan(bound), np.inf, bound))}


def expected_of_layer(
    operator: str, arguments: dict[str, Any], constant: float, results: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Return the expected results of an operator of a linear loss by name."""
    if operator == LAYER_HVP:
        return expected_of_hvp(arguments, constant)
    if operator == HESSIAN:
        return expected_of_hessian(arguments, constant)
    return expected_of_linear(arguments, constant, results)


def _claimed(values: np.ndarray, bound: np.ndarray) -> Expected:
    """Return values without a claim where the bound is not finite, also if the value is NaN or infinite."""
    return Expected(np.where(np.isfinite(bound), values, 0), np.where(np.isfinite(bound), bound, np.inf))


def names_of_results(arguments: dict[str, Any], operator: str) -> tuple[str, ...]:
    """Return the names of the results in order."""
    if operator == ROWS:
        return ("loss", "input_grad", *arguments["outputs"])
    if operator == WHOLE:
        fields = ("bias_grad",) if arguments.get("bias") is not None else ()
        return ("loss", "input_grad", "weight_grad", *fields, *arguments["outputs"])
    return table.OPERATORS[operator].results


def dtype_of_result(name: str, values: dict[str, np.ndarray]) -> np.dtype:
    """Return the dtype that the contract demands of a new result."""
    if name in ("predicted", "correct"):
        return np.dtype(np.int64)
    if name in FULL_OUTPUTS or name.endswith(("_grad", "product")):
        like = values.get(name.removesuffix("_grad").removesuffix("_product"))
        return values["input"].dtype if like is None else like.dtype
    return accumulator(values["input"].dtype)
