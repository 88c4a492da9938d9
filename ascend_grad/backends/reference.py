"""The reference backend: every formula in plain NumPy and float64. It is specification, fallback and oracle."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._call import Call, ResultSpec
from .._rowwise_python import MASKED_LOGIT
from ..operators.options import OUTPUT_GRADIENTS, OUTPUTS, has_own_divisor, largest_factor
from ..operators.table import ROWWISE
from . import loss_reference

NAME = "reference"

#: Maximum number of logits that are computed together, so that a large vocabulary needs no (BT, V) array.
CHUNK_ELEMENTS = 1 << 22


def status() -> tuple[bool, str]:
    return True, "plain NumPy in float64; slow, meant for comparison"


# Rows are contiguous along the last axis, so that NumPy sums every row in the same order for any original layout.


def softmax_backward(grad_output, output):
    return (grad_output - np.sum(grad_output * output, axis=-1, keepdims=True)) * output


def log_softmax_backward(grad_output, output):
    return grad_output - np.sum(grad_output, axis=-1, keepdims=True) * np.exp(output)


def scaled_masked_softmax_backward(grad_output, y, mask, scale):
    return np.where(mask, 0.0, softmax_backward(grad_output, y) * scale)


def softmax(input):
    exponential = np.exp(input - np.max(input, axis=-1, keepdims=True))
    return exponential / np.sum(exponential, axis=-1, keepdims=True)


def log_softmax(input):
    shifted = input - np.max(input, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def scaled_masked_softmax(x, mask, scale):
    # The product is rounded to scale's dtype, as this rounding is part of the formula.
    scaled = np.asarray(x * scale, scale.dtype).astype(np.float64)
    return softmax(np.where(mask, MASKED_LOGIT, scaled))


# ---- row-wise operators: from calls to rows, from rows to results ----------------------------------------------------


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """Return the values in float64 (a mask stays bool) with rows along the last axis. Rank 0 counts as rank 1."""
    wide = array if array.dtype == np.bool_ else array.astype(np.float64)
    return np.ascontiguousarray(np.moveaxis(np.atleast_1d(wide), axis, -1))


def _run_rowwise(call: Call) -> np.ndarray:
    (spec,) = call.specs
    assert spec is not None
    out = _result(spec, call.outs[0])
    dtype = arrays.native(call.arrays[0].dtype)
    if out.size == 0:
        return out
    axis = call.arguments.get("axis", -1)
    settings = {}
    with np.errstate(all="ignore"):
        if "scale" in call.arguments:
            settings["scale"] = arrays.accumulator_dtype(dtype).type(call.arguments["scale"])
        values = globals()[call.operator.name](*(_rows(array, axis) for array in call.arrays), **settings)
        values = np.moveaxis(values, -1, axis).reshape(out.shape)
    arrays.round_into(out, values)
    return out


# ---- linear operators ------------------------------------------------------------------------------------------------
#
# Everything is computed before anything is written, so an out may overlap the inputs.


class _Nonzeros:
    """Rows of a sparse input, which multiply as matrices do, but that elements that are not stored add nothing."""

    __array_ufunc__ = None  # products with arrays call __rmatmul__

    def __init__(self, data: np.ndarray, columns: np.ndarray, starts: np.ndarray, width: int):
        self._data, self._columns, self._starts = data, columns, starts
        self.shape, self.dtype = (len(starts) - 1, width), data.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> _Nonzeros:
        begins, counts = self._starts[rows], np.diff(self._starts)[rows]
        starts = np.append(0, np.cumsum(counts))
        places = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        return _Nonzeros(self._data[places], self._columns[places], starts, self.shape[1])

    def _sums(self, factors: np.ndarray, of: np.ndarray, to: np.ndarray, count: int) -> np.ndarray:
        """Return sums, for each row of factors, of the elements times the factors at `of`, added up at `to`."""
        data = self._data.astype(np.float64)
        return np.reshape([np.bincount(to, data * each[of], count) for each in factors], (len(factors), count))

    def __matmul__(self, other: np.ndarray) -> np.ndarray:
        return self._sums(other.T, self._columns, self._rows, len(self)).T

    def __rmatmul__(self, other: np.ndarray) -> np.ndarray:
        return self._sums(other, self._rows, self._columns, self.shape[1])

    @property
    def _rows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), np.diff(self._starts))


def _wide(array: Any) -> Any:
    if isinstance(array, _Nonzeros):
        return array
    return np.require(array, np.float64, ["C", "A"])  # other layouts are multiplied without BLAS, in another order


def _chunks(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield the row numbers in chunks, so that a chunk's length times `width` stays small."""
    step = max(CHUNK_ELEMENTS // max(width, 1), 1)
    for begin in range(0, rows.size, step):
        yield rows[begin : begin + step]


def fused_linear_cross_entropy_loss_grad(
    grad, input, weight, target_mask, masked_target, logits_max, sum_exp_logits, softmax, **_
):
    """Compute ``P @ weight`` and ``P.T @ input`` for ``P = grad * (softmax - one_hot)``."""
    weight = _wide(weight)
    elsewhere = arrays.unpacked(target_mask, grad.size)
    input_grad, weight_grad = np.zeros(input.shape), np.zeros(weight.shape)
    # A row whose grad is 0 is absent, whatever it holds.
    for rows in _chunks(np.flatnonzero(grad != 0), len(weight)):
        x = _wide(input[rows])
        if softmax is not None:
            p = _wide(softmax[rows])
        else:
            p = np.exp(x @ weight.T - _wide(logits_max[rows])[:, None]) / _wide(sum_exp_logits[rows])[:, None]
        here = np.flatnonzero(~elsewhere[rows])
        p[here, masked_target[rows[here]]] -= 1
        p *= _wide(grad[rows])[:, None]
        input_grad[rows] = p @ weight
        weight_grad += p.T @ x
    return input_grad, weight_grad


def fused_linear_online_max_sum(input, weight, target, vocab_start_index, vocab_end_index, return_logits):
    weight = _wide(weight)
    target = target.astype(np.int64)
    masked = (target < vocab_start_index) | (target >= vocab_end_index)
    masked_target = np.where(masked, vocab_start_index, target) - vocab_start_index
    logits_max, sum_exp_logits, predicted_logits = np.zeros((3, len(input)))
    kept = np.empty((len(input), len(weight)), arrays.native(input.dtype)) if return_logits else None
    for rows in _chunks(np.arange(len(input)), len(weight)):
        logits = _wide(input[rows]) @ weight.T
        logits_max[rows] = np.max(logits, axis=-1)
        shifted = logits - logits_max[rows, None]
        sum_exp_logits[rows] = np.sum(np.exp(shifted), axis=-1)
        predicted_logits[rows] = np.where(masked[rows], 0, shifted[np.arange(rows.size), masked_target[rows]])
        if kept is not None:
            arrays.round_into(kept[rows[0] : rows[-1] + 1], logits)
    packed = np.packbits(masked, bitorder="little")
    return logits_max, sum_exp_logits, predicted_logits, packed, masked_target, kept


def fused_cross_entropy_loss_with_max_sum(
    logits_max, sum_exp_logits, predicted_logits, vocab_parallel_logits, label_smoothing
):
    loss = np.log(_wide(sum_exp_logits)) - _wide(predicted_logits)
    if vocab_parallel_logits is None:
        return loss, None
    softmax = np.exp(_wide(vocab_parallel_logits) - _wide(logits_max)[:, None]) / _wide(sum_exp_logits)[:, None]
    return loss, softmax


def _factor_limits(dtype):
    """Return the least and the largest temperature and cap of logits. Others count as the nearest one."""
    largest = largest_factor(dtype.type is np.float64)  # of either byte order
    return 1 / largest, largest


def _products(x, weight, options):
    """Return the products of rows with the weight, and the bias added."""
    products, bias = _wide(x) @ weight.T, options["bias"]
    return products if bias is None else products + _wide(bias)


def _logits(products, dtype, temperature, options):
    """Return the logits of rows, and their derivatives with respect to the products. `dtype` is that of the input."""
    least, largest = _factor_limits(dtype)
    softcap = options["softcap"]
    scale = np.clip(options["logit_scale"], -largest, largest)
    temperature = np.clip(temperature, least, largest)[:, None]
    if softcap is None:
        return scale * products / temperature, np.broadcast_to(scale / temperature, products.shape)
    softcap = np.clip(softcap, least, largest)
    value = np.tanh(scale * products / softcap)
    return softcap * value / temperature, scale / temperature * (1 - value**2)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _of_rows(value: Any, count: int, default: float = 1.0) -> np.ndarray:
    """Return one number for each row, in float64."""
    return np.broadcast_to(np.asarray(default if value is None else value, np.float64).reshape(-1), count)


def _targets(target: np.ndarray, input: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return dense targets as the kernels read them, with rows along the last axis, and other targets as they are."""
    if target.dtype.kind in "iu":
        return target
    return _rows(target if input.dtype.type is np.float64 else target.astype(np.float32), axis)


class _Loss(ABC):
    """The rows and targets of a loss, with its divisors, and the gradients so far.

    `arguments` has the call's arguments by name, and for a part of a vocabulary the `denominators` of the whole one.
    """

    def __init__(self, arguments: dict[str, Any], count: int, vocabulary: int):
        a = self._a = arguments
        self._start, self._has_classes = a.get("vocab_start_index", 0), a["target_prob"] is None
        if a["target"].dtype.kind in "iu":
            target = a["target"].astype(np.int64).reshape(count, 1 if self._has_classes else a["target"].shape[-1])
            is_target = target != a["ignore_index"]
            entries = np.where(
                is_target & (target < self._start + vocabulary), np.maximum(target - self._start, -1), -1
            )
            prob = np.where(is_target, _of_rows(a["target_prob"], target.size).reshape(target.shape), 0)
            self.counted = is_target.any(axis=-1)
        else:  # dense targets: all classes are targets
            self._has_classes = False
            entries = np.broadcast_to(np.arange(vocabulary), (count, vocabulary))
            prob = a["target"].reshape(count, vocabulary)
            self.counted = np.ones(count, bool)
        tokens = np.where(self.counted, _of_rows(a["token_weight"], count), 0)
        self.terms = loss_reference.Terms(entries, prob, _of_rows(a["class_weight"], vocabulary), tokens, a)
        self.temperature, self._grad_loss = _of_rows(a["temperature"], count), _of_rows(a["grad_loss"], count)
        given = {name: a[name] for name in OUTPUT_GRADIENTS if a.get(name) is not None}
        #: Upstream gradients of outputs, shape (rows,), or (rows, K) of the targets' log-probabilities.
        self._upstream = {name: _of_rows(value, count) for name, value in given.items() if name != "grad_log_prob"}
        if "grad_log_prob" in given:
            grads = _of_rows(given["grad_log_prob"], target.size).reshape(target.shape)
            self._upstream["grad_log_prob"] = np.where(is_target, grads, 0)
        self._divisors = a["denominators"] if "denominators" in a else self._own_divisors()

    def _own_divisors(self) -> tuple[Any, Any]:
        """Return what the two terms of the loss are divided by, 0 for a mean that has no gradient."""
        given, terms = self._a["denominator"], self.terms.of(self.counted)
        if self._a["reduction"] != "mean" or given is not None:
            return (1.0, 1.0) if self._a["reduction"] != "mean" else (given, given)
        weights = tokens = terms.token_weight
        if self._has_classes:
            weights = np.where(tokens == 0, 0, tokens * terms.class_weight[terms.entries[:, 0]])
        sums = np.sum(weights), np.sum(tokens)
        return sums if sums[0] and (sums[1] or not has_own_divisor(terms.options)) else (0.0, 0.0)

    def curvature(self, rows, row, slope, logits, dtype, vector):
        """Return the Hessian's product with a vector for some rows, None: its diagonal, and the rows that have one.

        Both belong to the `logits` before scale and softcap. `dtype` is that of the input.
        """
        terms, grad = self.terms.of(rows), self._grad_of(rows)
        grad_loss, grad_square = self._divided(grad)
        if vector is None:
            result = loss_reference.hessian_diagonal(row, terms, grad_loss, grad_square) * slope**2
        else:
            result = loss_reference.hessian_product(row, terms, grad_loss, grad_square, vector * slope) * slope
        if self._a["softcap"] is not None:
            least, largest = _factor_limits(dtype)
            cap = np.clip(self._a["softcap"], least, largest)
            scale = np.clip(self._a["logit_scale"], -largest, largest)
            bend = -2 * scale / cap * np.tanh(scale * logits / cap) * (1.0 if vector is None else vector)
            result += loss_reference.gradient(row, terms, grad_loss, grad_square) * slope * bend
        return grad != 0, result

    @abstractmethod
    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the rows that are not ignored in chunks, with their logits and derivatives of logits."""

    @abstractmethod
    def add(self, rows: np.ndarray, gradient: np.ndarray) -> None:
        """Add the gradients that follow from the derivatives of some rows."""

    def add_gradients(self, rows: np.ndarray, row: Any, slope: np.ndarray) -> None:
        """Add the gradients of some rows with these statistics. A row without upstream gradients is absent."""
        terms, upstream = self.terms.of(rows), {name: each[rows] for name, each in self._upstream.items()}
        grad = self._grad_of(rows)
        present = np.any(np.column_stack([grad, *upstream.values()]) != 0, axis=1)
        of_loss, of_square = self._divided(grad)
        if upstream or has_own_divisor(terms.options):
            gradient = loss_reference.gradient(row, terms, of_loss, of_square, **upstream)
        else:  # the upstream gradient is the last factor, so that an infinite one leaves no differences of infinities
            ones = np.ones(rows.size)
            gradient = loss_reference.gradient(row, terms._replace(token_weight=ones), ones, 0 * ones)
            gradient *= np.where(of_loss == 0, 0, of_loss * terms.token_weight)[:, None]
        self.add(rows[present], (gradient * slope)[present])

    def _grad_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the upstream gradients of the losses of some rows; 0 for rows that have no gradient."""
        is_present = (self.terms.token_weight[rows] != 0) & (self._divisors[0] != 0)
        return np.where(is_present, self._grad_loss[rows], 0)

    def _divided(self, grad: np.ndarray) -> list[np.ndarray]:
        """Return upstream gradients of the two terms of the loss."""
        return [np.where((grad == 0) | (each == 0), 0, grad / each) for each in self._divisors]

    def results(self) -> dict[str, Any]:
        """Compute the loss and all outputs by name, and add the gradients if they are requested."""
        count = len(self.counted)
        loss, square, lse, entropy = np.zeros((4, count))
        log_prob, predicted = np.zeros(self.terms.entries.shape), np.full(count, -1)
        for rows, z, slope in self.chunks():
            row, terms = loss_reference.RowStatistics(z), self.terms.of(rows)
            loss[rows], square[rows] = loss_reference.losses(row, terms)
            lse[rows], entropy[rows], predicted[rows] = row.lse, row.entropy, row.predicted + self._start
            log_prob[rows] = np.where(terms.entries < 0, 0, -row.negative_log_prob(terms.entries))
            if self._a["return_grad"]:
                self.add_gradients(rows, row, slope)
            self.add_full_outputs(rows, row, slope)
        # Without classes there are no targets.
        is_target = predicted[:, None] == self.terms.entries[:, :1] + self._start
        correct = np.count_nonzero(is_target & self.counted[:, None])
        if self._a["reduction"] == "none":
            total: Any = loss + square
        else:
            means = [np.sum(each) / by if by else np.nan for each, by in zip((loss, square), self._divisors)]
            total = means[0] + means[1] if has_own_divisor(self._a) else means[0]
        outputs = {"lse": lse, "log_prob": log_prob, "entropy": entropy, "predicted": predicted, "correct": correct}
        return {"loss": total, **outputs}

    def add_full_outputs(self, rows: np.ndarray, row: loss_reference.RowStatistics, slope: np.ndarray) -> None:
        """Compute the outputs of the shape of the logits for some rows. A layer's loss has none."""
        return


class _LayerLoss(_Loss):
    """A loss of a linear layer, or of the part of a vocabulary that belongs to its rows of the weight."""

    def __init__(self, input: np.ndarray, weight: np.ndarray, arguments: dict[str, Any]):
        arguments["target"] = _targets(arguments["target"], input)
        super().__init__(arguments, len(input), len(weight))
        self._input, self._weight = input, _wide(weight)
        #: What the gradient with respect to the logits is multiplied by.
        self.factors = {"input": self._weight, "weight": input}
        shapes = {"weight_grad": weight.shape, "bias_grad": weight.shape[:1]}
        self.gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.gradients["input_grad"] = None if isinstance(input, _Nonzeros) else np.zeros(input.shape)

    def chunks(self):
        for rows in _chunks(np.flatnonzero(self.counted), len(self._weight)):
            products = _products(self._input[rows], self._weight, self._a)
            yield rows, *_logits(products, self._input.dtype, self.temperature[rows], self._a)

    def add(self, rows, gradient):
        if self.gradients["input_grad"] is not None:
            self.gradients["input_grad"][rows] = gradient @ self.factors["input"]
        self.gradients["weight_grad"] += gradient.T @ _wide(self.factors["weight"][rows])
        self.gradients["bias_grad"] += gradient.sum(axis=0)

    def products(self, vectors):
        """Yield the Hessian's products with vectors of all rows, for the rows of a chunk.

        Parameters
        ----------
        vectors : callable
            Returns the vectors, shape (rows, V), for row numbers.

        Yields
        ------
        rows : ndarray
            The numbers of the rows that have a gradient.
        products : list of ndarray, shape (rows, V)
            One for each vector.
        """
        for rows, z, slope in self.chunks():
            row, logits = loss_reference.RowStatistics(z), _products(self._input[rows], self._weight, self._a)
            results = [self.curvature(rows, row, slope, logits, self._input.dtype, vector) for vector in vectors(rows)]
            yield rows[results[0][0]], [product[present] for present, product in results]


class _LogitsLoss(_Loss):
    """A loss of logits, which lie along one dimension of the input."""

    def __init__(self, input: np.ndarray, axis: int, arguments: dict[str, Any]):
        arguments["target"] = _targets(arguments["target"], input, axis)
        self._logits = _rows(input, axis)
        self._shape, vocabulary = self._logits.shape, self._logits.shape[-1]
        count = math.prod(self._shape[:-1])
        self._logits = self._logits.reshape(count, vocabulary)
        super().__init__(arguments, count, vocabulary)
        self._dtype = input.dtype
        self._gradient = np.zeros(self._logits.shape)
        #: The outputs of the shape of the logits that are requested.
        self._full = {name: np.zeros(self._logits.shape) for name in arguments["outputs"] if OUTPUTS[name].is_of_logits}
        self._vector = None
        if arguments.get("vector") is not None:
            vector = arguments["vector"].astype(input.dtype, copy=False)
            self._vector = _rows(vector, axis).reshape(self._logits.shape)
            self._full["product"] = np.zeros(self._logits.shape)

    def chunks(self):
        rows = np.flatnonzero(self.counted)
        if rows.size:
            yield rows, *_logits(self._logits[rows], self._dtype, self.temperature[rows], self._a)

    def add(self, rows, gradient):
        self._gradient[rows] = gradient

    def add_full_outputs(self, rows, row, slope):
        if "prob" in self._full:
            self._full["prob"][rows] = loss_reference.probabilities(row)[0]
        for name in self._full.keys() & {"hessian_diag", "product"}:
            self._add_curvature(name, rows, row, slope)

    def _add_curvature(self, name, rows, row, slope):
        """Compute the diagonal of the Hessian, or the product of the Hessian and the vector, for some rows."""
        vector = None
        if name == "product" and self._vector is not None:
            vector = self._vector[rows]
        present, result = self.curvature(rows, row, slope, self._logits[rows], self._dtype, vector)
        self._full[name][rows[present]] = result[present]

    def full_results(self, like: np.ndarray, axis: int) -> dict[str, np.ndarray]:
        """Return the gradient and the outputs of the shape of the logits in the layout of the input."""
        return {
            name: np.moveaxis(each.reshape(self._shape), -1, axis).reshape(like.shape)
            for name, each in {"input_grad": self._gradient, **self._full}.items()
        }


def cross_entropy(input, axis, **arguments):
    loss = _LogitsLoss(input, axis, arguments)
    return {**dict.fromkeys(OUTPUTS), **loss.results(), **loss.full_results(input, axis)}


def cross_entropy_hvp(input, axis, **arguments):
    loss = _LogitsLoss(input, axis, {**arguments, "outputs": (), "return_grad": False})
    loss.results()
    return loss.full_results(input, axis)


def _direction(vector, like):
    """Return a vector, rounded to the dtype of an array of its shape. None: zeros."""
    return np.zeros(like.shape) if vector is None else _wide(vector.astype(arrays.native(like.dtype), copy=False))


def linear_cross_entropy_hvp(input, weight, vector, vector_bias, vector_input, **arguments):
    loss = _LayerLoss(input, weight, arguments)
    along, of_weight = _direction(vector, weight), _wide(weight)
    moved = 0.0 if vector_bias is None else _wide(vector_bias)
    of_input = None if vector_input is None else _direction(vector_input, input)

    def changes(rows):
        further = 0.0 if of_input is None else of_input[rows] @ of_weight.T
        return [_wide(input[rows]) @ along.T + moved + further]

    weight_product, bias_product = np.zeros(weight.shape), np.zeros(len(weight))
    input_product = None if of_input is None else np.zeros(input.shape)
    for rows, (product,) in loss.products(changes):
        weight_product += product.T @ _wide(input[rows])
        bias_product += product.sum(axis=0)
        if input_product is not None:
            input_product[rows] = product @ of_weight
    if of_input is not None:
        loss.factors = {"input": along, "weight": of_input}
        for rows, z, slope in loss.chunks():
            loss.add_gradients(rows, loss_reference.RowStatistics(z), slope)
        weight_product += loss.gradients["weight_grad"]
        input_product += loss.gradients["input_grad"]
    return {"weight_product": weight_product, "bias_product": bias_product, "input_product": input_product}


def linear_cross_entropy_hessian(input, weight, **arguments):
    loss, vocabulary = _LayerLoss(input, weight, arguments), len(weight)
    width = weight.shape[1] + (arguments["bias"] is not None)
    hessian = np.zeros((vocabulary, width, vocabulary, width))
    for rows, columns in loss.products(
        lambda rows: (np.broadcast_to(unit, (rows.size, vocabulary)) for unit in np.eye(vocabulary))
    ):
        x = np.column_stack([_wide(input[rows]), np.ones((rows.size, width - weight.shape[1]))])
        for w, column in enumerate(columns):
            for v in range(w, vocabulary):
                hessian[v, :, w] += x.T @ (column[:, v, None] * x)
    matrix = hessian.reshape(vocabulary * width, vocabulary * width)
    return {"hessian": np.tril(matrix) + np.tril(matrix, -1).T}


def linear_cross_entropy(input, weight, **arguments):
    loss = _LayerLoss(input, weight, arguments)
    return {**loss.results(), **loss.gradients}


class _GivenStatistics(NamedTuple):
    """Hold statistics of rows that the caller gives, with the attributes of `loss_reference.RowStatistics`."""

    distance: np.ndarray
    lse: np.ndarray
    moment: np.ndarray
    rest: np.ndarray


def linear_cross_entropy_backward(input, weight, lse, entropy, **arguments):
    loss = _LayerLoss(input, weight, arguments)
    lse, entropy = np.where(np.isfinite(lse), _wide(lse), np.nan), _of_rows(entropy, len(input), 0.0)
    for rows, z, slope in loss.chunks():  # no probability follows from an infinite lse
        row = _GivenStatistics(lse[rows, None] - z, lse[rows], entropy[rows], np.zeros(rows.size))
        loss.add_gradients(rows, row, slope)
    return loss.gradients


def part_statistics(input, weight, target, options):
    """Compute the statistics of a part of a vocabulary, as `_linear_python.part_statistics` returns them."""
    with np.errstate(all="ignore"):
        loss = _LayerLoss(input, weight, {**options, "target": target})
        entries = loss.terms.entries
        numbers, argmax, logits = np.zeros((4, len(input))), np.zeros(len(input), np.int64), np.zeros(entries.shape)
        for rows, z, _ in loss.chunks():
            row, here = loss_reference.RowStatistics(z), entries[rows]
            numbers[:, rows] = row.max, row.rest, row.moment, row.deficits(loss.terms.class_weight)
            argmax[rows] = row.predicted
            logits[rows] = np.where(here < 0, 0, np.take_along_axis(z, np.maximum(here, 0), axis=-1))
    return numbers, argmax, logits


def part_gradients(input, weight, target, options, numbers, target_weights, results):
    """Compute the gradients of a part of a vocabulary, as `_linear_python.part_gradients` does."""
    with np.errstate(all="ignore"):
        loss = _LayerLoss(input, weight, {**options, "target": target})
        loss.terms = loss.terms._replace(weights=target_weights)
        for rows, z, slope in loss.chunks():
            maximum, rest, moment, _ = numbers[:, rows]
            row = _GivenStatistics(maximum[:, None] - z, maximum + np.log1p(rest), moment, rest)
            loss.add_gradients(rows, row, slope)
        for name, result in results.items():
            if result is not None:
                arrays.round_into(result, loss.gradients[name])


# ---- the largest log-probabilities -----------------------------------------------------------------------------------


def _undivided_logits(input, weight, options):
    """Yield rows in chunks, with logits that the temperature does not divide, and with those that it divides."""
    weight, ones = _wide(weight), np.ones(len(input))
    temperature = np.clip(_of_rows(options["temperature"], len(input)), *_factor_limits(input.dtype))
    for rows in _chunks(np.arange(len(input)), len(weight)):
        logits, _ = _logits(_products(input[rows], weight, options), input.dtype, ones[rows], options)
        yield rows, logits, logits / temperature[rows, None]


def part_top_k(input, weight, k, options):
    """Compute the largest logits of a part of a vocabulary, as `HostBackend.top_k` returns them."""
    logits, index, rest = np.empty((len(input), k)), np.empty((len(input), k), np.int64), np.empty(len(input))
    with np.errstate(all="ignore"):
        for rows, z, divided in _undivided_logits(input, weight, options):
            index[rows] = np.argsort(-z, axis=-1, kind="stable")[:, :k]
            logits[rows] = np.take_along_axis(z, index[rows], axis=-1)
            rest[rows] = np.where(np.isneginf(z).all(axis=-1), 0, loss_reference.RowStatistics(divided).rest)
    return logits, index, rest


def linear_top_k(input, weight, k, **options):
    log_prob, index = np.empty((len(input), k)), np.empty((len(input), k), np.int64)
    for rows, z, divided in _undivided_logits(input, weight, options):  # logits are compared before the division
        all_of_row = log_softmax(divided)
        # The sort is stable, so that the lower index comes first. A row of NaN has the indices 0 to k - 1.
        unknown = np.isnan(all_of_row).any(-1)
        index[rows] = np.argsort(np.where(unknown[:, None], 0, -z), axis=-1, kind="stable")[:, :k]
        log_prob[rows] = np.take_along_axis(all_of_row, index[rows], axis=-1)
        log_prob[rows[unknown]] = np.nan
    return log_prob, index


# ---- all -------------------------------------------------------------------------------------------------------------


def _result(spec: ResultSpec, out: np.ndarray | None) -> np.ndarray:
    return np.ndarray(spec.shape, spec.dtype, strides=spec.strides) if out is None else out


def _run(call: Call) -> Any:
    """Compute the results of a linear operator or of a loss."""
    arguments, operator = call.arguments, call.operator.name
    if call.sparse is not None:
        arguments = {**arguments, "input": _Nonzeros(*call.sparse.parts(operator), call.sparse.shape[1])}
    with np.errstate(all="ignore"):
        values = globals()[operator](**arguments)
    if isinstance(values, dict):
        values = [values[name] for name in call.operator.results]
    results = []
    for value, spec, out in zip(values, call.specs, call.outs):
        result = None if spec is None else _result(spec, out)
        if result is not None and result.dtype.kind == "i":
            result[...] = np.reshape(value, result.shape)
        elif result is not None:
            arrays.round_into(result, np.reshape(value, result.shape))
        results.append(result)
    return tuple(results) if len(results) > 1 else results[0]


def run(call: Call, threads: int) -> Any:
    return _run_rowwise(call) if call.operator in ROWWISE else _run(call)
