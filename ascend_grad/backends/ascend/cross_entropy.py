"""The loss of logits: the device's operators for the targets of a row, and arithmetic around them.

The operators compute losses, log-probabilities and gradients of rows, in float32. The weights of rows and classes, the
divisor of a mean and upstream gradients are vectors of the queue. With the probabilities p of the logits z and the
entropy H, the gradient of a row is

- with one target t: ``a (p - [v = t]) + e_v``. The device's operator computes the first term, for ``a``.
- with K targets: ``sum(a_k) p - sum(a_k [v = t_k]) + e_v``. The device adds up the second term by the targets' columns.
- with probabilities q of all classes: ``a (p - labels + (sum(labels) - 1) p)``, where ``labels`` is q times the class
  weights, with the smoothing. The device's operator computes ``p - labels``.

and for all of them ``p (b + h (log p + H))``. Here ``a`` holds the upstream gradients of the loss and of the
log-probabilities, ``b`` the gradients of the lse, of its square and of the smoothing, ``h`` minus the upstream gradient
of the entropy, and
``e`` the rest of the smoothing. All are multiplied by the derivative of z with respect to the logits.

A log-probability that is -infinity adds nothing where its weight is 0. The device would compute NaN.

The Hessian of a row with respect to z, times a vector v, is ``a p (v - sum(p v)) + c sum(p v) p``. Here ``a`` is the
factor of p in the gradient of the loss, ``c`` the second derivative of the squared lse, and ``p (v - sum(p v))`` the
gradient of a softmax, which the device's operator computes. Vector and product are multiplied by the derivative of z. A
softcap adds the gradient of the loss with respect to z, times v and the second derivative of z.

At most three matrices of float32 are alive at the same time, four with a softcap (of products with the Hessian: five),
and one of truth values: whatever is dropped here serves the operators that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ..._call import Call
from . import matrices
from .array import DeviceArray
from .matrices import cast, column, number, product, row, row_sums
from .queue import FLOAT32, Queue, Results, Rows
from .tokens import SeveralTargets, Tokens, Weights

#: A log-probability from which on down the probability is 0 in float32. Lower ones become this one where probabilities
#: are multiplied by their logarithms.
LEAST_LOG_PROB = -128.0

#: What the losses, the gradients and the products of the Hessian lack among the arguments of each other.
WITHOUT_ARGUMENT: dict[str, Any] = {
    "outputs": (), "return_grad": True, "grad_lse": None, "grad_log_prob": None, "grad_entropy": None
}  # fmt: skip


class Logits:
    """Convert arrays in the shape of the logits to matrices of rows, and back."""

    def __init__(self, queue: Queue, call: Call):
        self._queue = queue
        self._shape = call.arrays[0].shape
        shape = self._shape or (1,)
        axis = call.arguments["axis"] % len(shape)
        self._axes = (*range(axis), *range(axis + 1, len(shape)), axis)
        self._moved_shape = tuple(shape[each] for each in self._axes)
        self.classes = shape[axis]
        self.rows = int(np.prod(self._moved_shape[:-1], dtype=np.int64))

    @property
    def _are_rows(self) -> bool:
        """Return whether the classes are the last axis."""
        return self._axes == tuple(range(len(self._axes)))

    def matrix(self, array: Any, dtype: np.dtype | None = None) -> DeviceArray:
        """Return an array of the shape of the logits as a matrix on the device. `dtype` is for arrays of the host."""
        there = self._queue.put(array, dtype)
        if not self._are_rows:
            there = self._queue.permuted(there, self._axes)
        return self._queue.reshaped(there, (self.rows, self.classes))

    def put(self, array: Any, rows: Rows, dtype: np.dtype | None = None) -> DeviceArray:
        """Return these rows of an array of the shape of the logits as a matrix on the device.

        Of arrays of the host whose rows lie one after the other, no other rows are sent, unless `dtype` is another one.
        """
        is_sent_by_rows = isinstance(array, np.ndarray) and self._are_rows and array.flags.c_contiguous
        if is_sent_by_rows and dtype in (None, array.dtype):
            return rows.put(array.reshape(self.rows, self.classes))
        return rows.put(self.matrix(array, dtype))

    def restored(self, matrix: DeviceArray) -> DeviceArray:
        """Return a matrix in the shape of the logits."""
        if self._are_rows:
            return self._queue.reshaped(matrix, self._shape)
        moved = self._queue.reshaped(matrix, self._moved_shape)
        return self._queue.permuted(moved, tuple(self._axes.index(each) for each in range(len(self._axes))))


class Extents(NamedTuple):
    """The extents of logits that are never in one matrix."""

    rows: int
    classes: int


def _total(*vectors: Any) -> Any:
    """Return the sum of the vectors that are given, None if there are none."""
    given = [each for each in vectors if each is not None]
    return sum(given[1:], given[0]) if given else None


class SoftmaxTerms(NamedTuple):
    """The coefficients of ``p (b + h (log p + H))``: vectors of the rows, or None."""

    b: Any
    h: Any
    entropy: Any

    @property
    def are_zero(self) -> bool:
        """Return whether there are no such terms."""
        return self.b is None and self.h is None

    def of(self, used: Rows) -> SoftmaxTerms:
        """Return the coefficients of some rows."""
        return SoftmaxTerms(*(None if each is None else used.of(each) for each in self))

    def gradient(self, queue: Queue, log_prob: DeviceArray) -> DeviceArray:
        """Return the terms. The log-probabilities are overwritten if there is ``h``."""
        p = matrices.exponentials(queue, log_prob)
        if self.h is None:
            queue.launch("inplace_mul", p, column(queue, self.b))
            return p
        queue.launch("inplace_add", log_prob, column(queue, self.entropy))
        queue.launch("inplace_mul", log_prob, column(queue, self.h))
        if self.b is not None:
            queue.launch("inplace_add", log_prob, column(queue, self.b))
        queue.launch("inplace_mul", p, log_prob)
        return p


class Loss(ABC):
    """One call. The matrices of its rows are dropped as soon as nothing that follows needs them.

    Attributes
    ----------
    counted : vector of bool
        Which rows are not ignored.
    rows : Rows
        The rows that the device computes.
    weights : Weights
        The weights of the rows, without class weights.
    """

    counted: Any
    rows: Rows
    weights: Weights

    def __init__(self, queue: Queue, call: Call, logits: Logits | Extents | None = None):
        self.queue, self.call, self.a = queue, call, WITHOUT_ARGUMENT | call.arguments
        self.logits: Any = Logits(queue, call) if logits is None else logits
        a = self.a
        self._scale = matrices.limited_scale(a["logit_scale"])
        self._temperature = matrices.limited(queue, a["temperature"])
        self._softcap = None if a["softcap"] is None else matrices.limited(queue, a["softcap"])
        self.smoothing = a["label_smoothing"] / self.logits.classes
        self.class_weight = None if a["class_weight"] is None else queue.vector(a["class_weight"])
        self._z: DeviceArray | None = None
        self._log_prob: DeviceArray | None = None
        self._tanh: DeviceArray | None = None  # of a softcap, for the gradient
        self._lse: DeviceArray | None = None
        self._keys: DeviceArray | None = None
        self._entropy: DeviceArray | None = None

    # ---- what differs between targets

    @abstractmethod
    def of_logits(self) -> DeviceArray | None:
        """Launch the operators that need the logits, and return the log-probabilities of all classes if needed."""

    def taken_logits(self) -> DeviceArray:
        """Return the logits z, which are dropped as soon as the caller drops them."""
        z, self._z = self._z, None
        assert z is not None, "logits are taken once"
        return z

    @abstractmethod
    def loss(self) -> Any:
        """Return the loss without the squared lse, reduced."""

    @abstractmethod
    def log_prob(self) -> Any:
        """Return the log-probabilities of the targets."""

    @abstractmethod
    def coefficients(self) -> tuple[Any, Any, Any]:
        """Return the coefficients of the targets, and ``b`` and ``e`` of the loss, as the module names them."""

    @abstractmethod
    def factor_of_p(self) -> Any:
        """Return the factor of p in the gradient of the loss without the squared lse, after `of_targets_alone`."""

    def of_targets_alone(self) -> None:
        """Launch the operators that `factor_of_p` needs, if `of_logits` does not."""
        return

    @abstractmethod
    def gradient(self, used: Rows, of_targets: Any, log_prob: DeviceArray, terms: SoftmaxTerms) -> DeviceArray:
        """Return the gradient of some rows with respect to z, without ``e``."""

    # ---- from the logits to the results

    def results(self) -> Results:
        """Return the results in the order and the shapes of the call's results."""
        a, queue, xp = self.a, self.queue, self.queue.xp
        if not self.rows.is_empty:
            self._log_prob = self._computed()
            if self._needs_entropy and self._log_prob is not None:
                self._log_prob, self._entropy = self._with_entropy(self._log_prob)
        found: dict[str, Any] = {"loss": self.loss()}
        b = None
        if self._needs_lse:
            found["lse"] = self.without_ignored(self.rows.vector(self._lse))
        if a["lse_square_scale"]:
            squares, b = self._square_terms(found["lse"])
            found["loss"] = queue.vector(found["loss"] + self.weights.reduced(squares))
        if "log_prob" in a["outputs"]:
            found["log_prob"] = self.log_prob()
        if self._needs_entropy:
            found["entropy"] = self.without_ignored(-self.rows.vector(self._entropy))
        if self._needs_predicted:
            key = self.rows.vector(self._keys)
            predicted = xp.where(key > 0, self.logits.classes - key, 0)  # no key is of a row that has a NaN
            found["predicted"] = queue.vector(xp.where(self.counted, predicted, -1), xp.int64)
        if "correct" in a["outputs"]:
            is_correct = self.counted & (found["predicted"] == queue.vector(a["target"], xp.int64).reshape(-1))
            found["correct"] = queue.vector(is_correct.sum(), xp.int64)
        if a["return_grad"]:
            found |= self.gradients(b, found.get("entropy"))
        return self.in_order(found)

    def in_order(self, found: dict[str, Any]) -> Results:
        """Return results in the order of the call's results, and vectors in their shapes."""
        return tuple(
            None if spec is None else found[name] if name.endswith("_grad") else found[name].reshape(spec.shape)
            for name, spec in zip(self.call.operator.results, self.call.specs)
        )

    def without_ignored(self, numbers: Any) -> Any:
        """Return numbers of the rows, 0 for ignored rows."""
        return self.queue.xp.where(self.counted, numbers, 0)

    @property
    def _needs_lse(self) -> bool:
        return self.a["lse_square_scale"] != 0 or "lse" in self.a["outputs"]

    @property
    def _needs_entropy(self) -> bool:
        return "entropy" in self.a["outputs"] or self.a["grad_entropy"] is not None

    @property
    def _needs_predicted(self) -> bool:
        return "predicted" in self.a["outputs"] or "correct" in self.a["outputs"]

    @property
    def needs_log_prob(self) -> bool:
        """Return whether the log-probabilities of all classes are needed."""
        return self.a["return_grad"] or self._needs_entropy

    def _computed(self) -> DeviceArray | None:
        """Compute what needs the logits, and return the log-probabilities."""
        self._put_logits()
        return self.of_logits()

    def _put_logits(self) -> None:
        """Put the logits z on the device, and compute the statistics that are not the loss's."""
        queue = self.queue
        z = self._scaled(self.logits.put(self.a["input"], self.rows))
        if self._needs_lse:
            self._lse = matrices.log_sum_exp(queue, z)
        if self._needs_predicted:
            largest, _ = matrices.top_k(queue, z, 1)
            keys, _ = matrices.top_k(queue, matrices.keys(queue, z, largest), 1)
            self._keys = queue.reshaped(keys, (z.shape[0],))
        self._z = z

    def _scaled(self, matrix: DeviceArray) -> DeviceArray:
        """Return the logits z of a matrix of logits."""
        queue = self.queue
        matrix = cast(queue, matrix, FLOAT32)
        if self._softcap is None:
            slope = self._slope
            return matrix if slope is None else self._times(matrix, slope)
        bounded = self._times(matrix, self._scale / self._softcap)
        del matrix
        queue.launch("inplace_tanh", bounded)
        if self.a["return_grad"]:
            self._tanh = bounded
        return self._times(bounded, self._softcap / self._temperature)

    def _times(self, matrix: DeviceArray, factor: Any) -> DeviceArray:
        """Return a matrix of the call's rows times a number, or times the numbers of its rows."""
        queue = self.queue
        factors = number(queue, factor) if isinstance(factor, float) else column(queue, self.rows.of(factor))
        return product(queue, matrix, factors)

    @property
    def _slope(self) -> Any:
        """Return the derivative of z with respect to the logits, without the softcap; None stands for 1."""
        slope = self._scale / self._temperature
        return None if isinstance(slope, float) and slope == 1 else slope

    def _with_entropy(self, log_prob: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """Return the log-probabilities without infinite ones, and minus the entropy of each row."""
        queue = self.queue
        finite = matrices.finite(queue, log_prob, LEAST_LOG_PROB)
        self._log_prob = None
        del log_prob
        terms = matrices.exponentials(queue, finite)
        queue.launch("inplace_mul", terms, finite)
        return finite, row_sums(queue, terms)

    def _square_terms(self, lse: Any) -> tuple[Any, Any]:
        """Return the terms of the squared lse of the rows, and their gradients with respect to the lse."""
        terms = self.weights.weighted(self.a["lse_square_scale"] * lse * lse)
        return terms, self._square_gradient(lse, self._square_curvature())

    def _square_curvature(self) -> Any:
        """Return the second derivatives of the terms of the squared lse with respect to the lse."""
        return 2 * self.a["lse_square_scale"] * self.weights.upstream(self.weights.divided_upstream())

    def _square_gradient(self, lse: Any, curvature: Any) -> Any:
        """Return the first derivatives of the terms of the squared lse from the second ones."""
        return self.queue.xp.where(curvature == 0, 0, curvature * lse)

    def of_all_classes(self, operator: str) -> DeviceArray:
        """Return the "softmax" or the "log_softmax" of the logits, which are dropped."""
        z = self.taken_logits()
        result = self.queue.empty(z.shape, FLOAT32)
        self.queue.launch(operator, z, 1, result)
        return result

    # ---- gradients

    def gradients(self, b: Any, entropy: Any) -> dict[str, Any]:
        """Return the gradients by name, in the dtypes and shapes of the results; ``b`` is that of the squared lse."""
        queue = self.queue
        of_targets, terms, e, present = self.coefficients_of_logits(b, entropy)
        used = queue.select(present, self.logits.rows)
        log_prob, self._log_prob = self._log_prob, None
        if used.is_empty or log_prob is None:
            return {"input_grad": self._zeros(used)}
        log_prob = used.put_from(self.rows, log_prob)
        return {"input_grad": self._finished(used, self.gradient(used, of_targets, log_prob, terms), e)}

    def coefficients_of_logits(self, b: Any, entropy: Any) -> tuple[Any, SoftmaxTerms, Any, Any]:
        """Return all coefficients times the derivative of z without the softcap, and which rows have any."""
        of_targets, b_of_loss, e = self.coefficients()
        b, h = _total(b, b_of_loss, self._upstream_of("lse")), self._upstream_of("entropy")
        b, h, e = (None if each is None else self.without_ignored(each) for each in (b, h, e))
        present = of_targets != 0 if of_targets.ndim == 1 else (of_targets != 0).any(1)
        for each in (b, h, e):
            present = present if each is None else present | (each != 0)
        of_targets = self._chained(of_targets)  # a factor of 0 leaves out no row: a NaN stays
        b, h, e = (None if each is None else self._chained(each) for each in (b, h, e))
        return of_targets, SoftmaxTerms(b, None if h is None else -h, entropy), e, present

    def _upstream_of(self, output: str) -> Any:
        """Return the upstream gradient of an output that has one number for each row, None if there is none."""
        grad = self.a[f"grad_{output}"]
        return None if grad is None else self.queue.vector(grad).reshape(-1)

    def _chained(self, numbers: Any) -> Any:
        """Multiply gradients with respect to z by the derivative of z, without the softcap."""
        slope = self._slope
        if slope is None:
            return numbers
        return numbers * (slope if isinstance(slope, float) or numbers.ndim == 1 else slope[:, None])

    def _finished(self, used: Rows, result: DeviceArray, e: Any) -> DeviceArray:
        """Return the gradient in the dtype and shape of the result, from that of some rows without ``e``."""
        queue = self.queue
        if e is not None:
            add_shares(queue, result, used.of(e), self.class_weight)
        tanh, self._tanh = self._tanh, None
        if tanh is not None:
            tanh = used.put_from(self.rows, tanh)
            matrices.multiply_by_slope(queue, result, tanh)
            del tanh
        out = self.call.outs[1]
        is_rounded = out is None or out.dtype == self.call.arrays[0].dtype  # else the caller rounds it, once
        return self._restored(used, cast(queue, result, self._dtype) if is_rounded else result)

    def _restored(self, used: Rows, matrix: DeviceArray) -> DeviceArray:
        """Return a matrix of some rows in the shape of the logits, with zeros in the other rows."""
        return self.logits.restored(used.restored(matrix))

    def _zeros(self, used: Rows) -> DeviceArray:
        """Return zeros in the shape and dtype of the logits, if there are no rows."""
        shape = self.logits.rows, self.logits.classes
        return self.logits.restored(used.cleared(self.queue.empty(shape, self._dtype)))

    @property
    def _dtype(self) -> np.dtype:
        return arrays.native(self.call.arrays[0].dtype)

    def smoothing_terms(self, upstream: Any) -> tuple[Any, Any]:
        """Return ``b`` and ``e`` of the smoothing, for upstream gradients of the rows; None without smoothing."""
        if not self.smoothing:
            return None, None
        e = -self.smoothing * upstream
        of_classes = float(self.logits.classes) if self.class_weight is None else self.class_weight.sum()
        return self.queue.xp.where(e == 0, 0, -e * of_classes), e

    # ---- products of the Hessian and a vector

    def product(self) -> DeviceArray:
        """Return the product of the Hessian with respect to the logits and the vector of the call."""
        queue, softcap = self.queue, self._softcap
        p: Any = None
        if not self.rows.is_empty:
            self._put_logits()
            if softcap is not None:
                self._log_prob = self.of_logits()
            else:
                self.of_targets_alone()
                p = self.of_all_classes("softmax")
        a, b, c = self._curvature()
        present = a != 0 if c is None else (a != 0) | (c != 0)
        gradient: Any = None
        slope: Any = None
        if softcap is not None:
            *coefficients, has_gradient = self.coefficients_of_logits(b, None)
            present = present | has_gradient
        used = queue.select(present, self.logits.rows)
        if used.is_empty:
            return self._zeros(used)
        if softcap is not None:
            p, slope, gradient = self._terms_of_cap(used, softcap, *coefficients)
        else:
            p = used.put_from(self.rows, p)
        vector = self._vector(used)
        if softcap is not None:
            queue.launch("inplace_mul", gradient, vector)
            vector = product(queue, vector, slope)
        means = None if c is None else row_sums(queue, product(queue, p, vector))
        result = queue.empty(p.shape, FLOAT32)
        queue.launch("softmax_backward", vector, p, 1, result)
        del vector
        # The derivative of z is a factor twice, as its square may exceed the range of float32.
        matrices.multiply(queue, result, used.of(self._chained(a)))
        if means is not None:
            queue.launch("inplace_mul", p, queue.reshaped(means, (p.shape[0], 1)))
            matrices.multiply(queue, p, used.of(self._chained(c)))
            queue.launch("inplace_add", result, p)
        del p
        if softcap is not None:
            queue.launch("inplace_mul", result, slope)
        if (factor := self._slope) is not None:
            matrices.multiply(queue, result, factor if isinstance(factor, float) else used.of(factor))
        if softcap is not None:
            queue.launch("inplace_add", result, gradient)
        return self._restored(used, cast(queue, result, self._dtype))

    def _curvature(self) -> tuple[Any, Any, Any]:
        """Return ``a``, the gradient of the squared lse with respect to the lse, and ``c``, as the module names them.

        The last two are None without the squared lse.
        """
        b = c = None
        if self.a["lse_square_scale"]:
            c = self.without_ignored(self._square_curvature())
            b = self._square_gradient(self.rows.vector(self._lse), c)
        return self.without_ignored(_total(self.factor_of_p(), b)), b, c

    def _vector(self, used: Rows) -> DeviceArray:
        """Return some rows of the vector in float32, rounded to the dtype of the logits first."""
        there = self.logits.put(self.a["vector"], used, self._dtype)
        return cast(self.queue, cast(self.queue, there, self._dtype), FLOAT32)

    def _terms_of_cap(
        self, used: Rows, softcap: Any, of_targets: Any, terms: SoftmaxTerms, e: Any
    ) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        """Return p, the derivative ``1 - tanh**2`` of a softcap, and the gradient with respect to z times z''.

        All are of some rows.
        """
        queue = self.queue
        log_prob, self._log_prob = self._log_prob, None
        tanh, self._tanh = self._tanh, None
        assert log_prob is not None, "there are rows"
        assert tanh is not None, "there is a softcap"
        log_prob = used.put_from(self.rows, log_prob)
        gradient = self.gradient(used, of_targets, log_prob, terms)
        if e is not None:
            add_shares(queue, gradient, used.of(e), self.class_weight)
        p = matrices.exponentials(queue, log_prob)
        del log_prob
        tanh = used.put_from(self.rows, tanh)
        queue.launch("inplace_mul", gradient, tanh)
        slope = matrices.slope_of(queue, tanh)
        queue.launch("inplace_mul", gradient, slope)  # may be 0, where the next factor may be huge
        matrices.multiply(queue, gradient, -2 * self._scale / softcap)
        return p, slope, gradient


def losses_of(
    queue: Queue,
    z: DeviceArray,
    target: DeviceArray,
    log_prob: DeviceArray,
    smoothing: float = 0.0,
) -> DeviceArray:
    """Return the losses of rows with one target each, and write the log-probabilities of all classes."""
    result, unused, unused_too = (queue.empty((z.shape[0],), FLOAT32) for _ in range(3))
    queue.launch("cross_entropy_loss", z, target, None, smoothing, result, log_prob, unused, unused_too)
    return result


def gradient_of_losses(queue: Queue, grads: DeviceArray, log_prob: DeviceArray, target: DeviceArray) -> DeviceArray:
    """Return the gradient of the losses of rows with one target each with respect to z."""
    result = queue.empty(log_prob.shape, FLOAT32)
    queue.launch("cross_entropy_loss_grad", grads, log_prob, target, result)
    return result


def add_shares(queue: Queue, result: DeviceArray, e: Any, class_weight: Any) -> None:
    """Add ``e`` of the rows to a gradient, times the weights of the classes if there are any."""
    shares = column(queue, e)
    if class_weight is not None:
        shares = product(queue, shares, row(queue, class_weight))
    queue.launch("inplace_add", result, shares)


class OneTarget(Loss):
    """One call with one target in each row."""

    def __init__(self, queue: Queue, call: Call, logits: Logits | Extents | None = None):
        super().__init__(queue, call, logits)
        self._tokens = Tokens(queue, call, self.logits.classes)
        self.counted = self._tokens.counted
        self.weights = Weights(queue, call, self.counted, self._tokens.row_weights())
        if self.a["lse_square_scale"]:
            self._tokens.share_zeros(self.weights)
        self.rows = queue.compact(self.counted)
        self._target: DeviceArray | None = None
        self._nll: DeviceArray | None = None
        self._smoothed: Any = None  # losses with the smoothing

    def of_logits(self) -> DeviceArray | None:
        queue, a, z = self.queue, self.a, self.taken_logits()
        self._target = self.rows.put(self._tokens.places)
        log_prob = queue.empty(z.shape, FLOAT32)
        if self.smoothing and self.class_weight is None:
            self._smoothed = losses_of(queue, z, self._target, log_prob, a["label_smoothing"])
        if not self.smoothing or self.class_weight is not None or "log_prob" in a["outputs"]:
            self._nll = losses_of(queue, z, self._target, log_prob)
        del z
        if self.smoothing and self.class_weight is not None:
            sums = matrices.weighted_log_probs(queue, log_prob, row(queue, self.class_weight))
            share = self.share_of_target(queue.vector(self._nll), self.rows.of(self._tokens.places))
            self._smoothed = share - self.smoothing * sums
        return log_prob if self.needs_log_prob else None

    def share_of_target(self, nll: Any, targets: Any) -> Any:
        """Return the part of each row's smoothed loss that belongs to its target."""
        share = 1 - self.a["label_smoothing"]
        weights = share if self.class_weight is None else share * self.class_weight[targets]
        return self.queue.xp.where(self.queue.vector(weights) == 0, 0, weights * nll)

    def loss(self) -> Any:
        if self.smoothing:
            total = self.weights.weighted(self.rows.vector(self._smoothed))
        else:
            total = self._tokens.weighted(self.rows.vector(self._nll))
        return self._tokens.reduced(self._tokens.of_targets(total))

    def log_prob(self) -> Any:
        return self._tokens.of_targets(-self.rows.vector(self._nll))

    def coefficients(self) -> tuple[Any, Any, Any]:
        tokens, grad_log_prob = self._tokens, self.a["grad_log_prob"]
        divided = tokens.divided_upstream()
        grad = tokens.upstream(divided) * (1 - self.a["label_smoothing"])
        if grad_log_prob is not None:
            grad = grad - self.queue.vector(grad_log_prob).reshape(-1)
        return tokens.of_targets(grad), *self.smoothing_terms(self.weights.upstream(divided))

    def factor_of_p(self) -> Any:
        of_targets, b, _ = self.coefficients()
        return _total(of_targets, b)

    def gradient(self, used: Rows, of_targets: Any, log_prob: DeviceArray, terms: SoftmaxTerms) -> DeviceArray:
        queue, target = self.queue, self._target
        assert target is not None, "there are rows"
        grads = used.put(queue.vector(of_targets, queue.xp.float32), 0)
        result = gradient_of_losses(queue, grads, log_prob, used.put_from(self.rows, target))
        if not terms.are_zero:
            queue.launch("inplace_add", result, terms.of(used).gradient(queue, log_prob))
        return result


class _SeveralTargets(Loss):
    def __init__(self, queue: Queue, call: Call):
        super().__init__(queue, call)
        self.weights = self._targets = SeveralTargets(queue, call, self.logits.classes)
        self.counted = self._targets.counted
        self._factors = self._targets.factors * (1 - self.a["label_smoothing"])
        self.rows = queue.compact(self.counted)
        self._places: DeviceArray | None = None
        self._taken: DeviceArray | None = None  # log-probabilities of the targets
        self._weighted_sum: Any = None  # of log-probabilities times class weights

    def of_logits(self) -> DeviceArray | None:
        queue, log_prob = self.queue, self.of_all_classes("log_softmax")
        self._places = self.rows.put(self._targets.places)
        self._taken = queue.empty(self._places.shape, FLOAT32)
        queue.launch("gather", log_prob, self._places, self._taken)
        if self.smoothing and self.class_weight is None:
            self._weighted_sum = row_sums(queue, log_prob)
        elif self.smoothing:
            self._weighted_sum = matrices.weighted_log_probs(queue, log_prob, row(queue, self.class_weight))
        return log_prob if self.needs_log_prob else None

    def _negative_log_prob(self) -> Any:
        xp = self.queue.xp
        return xp.zeros_like(self._factors) if self._taken is None else -self.rows.vector(self._taken)

    def loss(self) -> Any:
        xp, factors = self.queue.xp, self._factors
        losses = xp.where(factors == 0, 0, factors * self._negative_log_prob())
        losses = self._targets.of_targets(losses).sum(1)
        if self.smoothing:
            losses = losses - self.smoothing * self.rows.vector(self._weighted_sum)
        return self.weights.reduced(self.weights.weighted(self.without_ignored(losses)))

    def log_prob(self) -> Any:
        return self._targets.of_targets(-self._negative_log_prob())

    def coefficients(self) -> tuple[Any, Any, Any]:
        queue, xp, grad_log_prob = self.queue, self.queue.xp, self.a["grad_log_prob"]
        upstream = self.weights.upstream(self.weights.divided_upstream())
        upstream = xp.broadcast_to(upstream, (self.logits.rows,))
        grad = xp.where(upstream[:, None] == 0, 0, upstream[:, None] * self._factors)
        if grad_log_prob is not None:
            grad = grad - queue.vector(grad_log_prob).reshape(grad.shape)
        grad = self._targets.of_targets(grad)
        b, e = self.smoothing_terms(upstream)
        return grad, _total(b, grad.sum(1)), e

    def factor_of_p(self) -> Any:
        return self.coefficients()[1]

    def gradient(self, used: Rows, of_targets: Any, log_prob: DeviceArray, terms: SoftmaxTerms) -> DeviceArray:
        queue, places = self.queue, self._places
        assert places is not None, "there are rows"
        result = terms.of(used).gradient(queue, log_prob)
        grads = used.put(queue.vector(-of_targets, queue.xp.float32), 0)
        queue.launch("inplace_scatter_add", result, used.put_from(self.rows, places), grads)
        return result


class _AllClasses(Loss):
    def __init__(self, queue: Queue, call: Call):
        super().__init__(queue, call)
        given, everywhere = self.a["token_weight"], queue.xp.broadcast_to(queue.vector(1.0), (self.logits.rows,))
        self.weights = Weights(queue, call, everywhere, None if given is None else queue.vector(given).reshape(-1))
        self.counted = everywhere == 1
        self.rows = queue.compact(self.counted)
        self._losses: Any = None
        self._difference: DeviceArray | None = None  # of probabilities and labels
        self._sums: DeviceArray | None = None  # of the labels

    def of_logits(self) -> DeviceArray | None:
        queue = self.queue
        log_prob = matrices.finite(queue, self.of_all_classes("log_softmax"), matrices.LOWEST)
        labels = self._labels()
        of_infinite = matrices.weights_of(queue, log_prob, matrices.LOWEST, labels)
        sums = row_sums(queue, labels)
        losses, difference = queue.empty((log_prob.shape[0],), FLOAT32), queue.empty(log_prob.shape, FLOAT32)
        queue.launch("softmax_cross_entropy_with_logits", log_prob, labels, losses, difference)
        self._losses = matrices.with_infinite(queue, queue.vector(losses), of_infinite)
        is_zero = (queue.vector(sums) == 0) & queue.xp.isnan(self._losses)  # a row without labels, but with a NaN
        self._losses = queue.xp.where(is_zero, 0, self._losses)
        if self.a["return_grad"]:
            self._difference, self._sums = difference, sums
        return log_prob if self.needs_log_prob else None

    def _labels(self) -> DeviceArray:
        """Return the probabilities of all classes times their weights, with the smoothing, in float32."""
        queue, a = self.queue, self.a
        labels = cast(queue, self.logits.matrix(a["target"], FLOAT32), FLOAT32)
        if self.class_weight is not None:
            labels = product(queue, labels, row(queue, self.class_weight))
        if self.smoothing:
            labels = product(queue, labels, number(queue, 1 - a["label_smoothing"]))
            share = queue.vector(self.smoothing)
            share = share if self.class_weight is None else share * self.class_weight
            queue.launch("inplace_add", labels, row(queue, share))
        return labels

    def loss(self) -> Any:
        return self.weights.reduced(self.weights.weighted(self.rows.vector(self._losses)))

    def log_prob(self) -> Any:
        raise AssertionError("probabilities of all classes have no targets")

    def coefficients(self) -> tuple[Any, Any, Any]:
        grad = self._upstream()
        return grad, self.queue.xp.where(grad == 0, 0, grad * (self.rows.vector(self._sums) - 1)), None

    def of_targets_alone(self) -> None:
        self._sums = row_sums(self.queue, self._labels())

    def factor_of_p(self) -> Any:
        grad = self._upstream()
        return self.queue.xp.where(grad == 0, 0, grad * self.rows.vector(self._sums))

    def _upstream(self) -> Any:
        """Return the upstream gradients of the rows."""
        upstream = self.weights.upstream(self.weights.divided_upstream())
        return self.queue.xp.broadcast_to(upstream, (self.logits.rows,))

    def gradient(self, used: Rows, of_targets: Any, log_prob: DeviceArray, terms: SoftmaxTerms) -> DeviceArray:
        queue, difference = self.queue, self._difference
        assert difference is not None, "there are rows"
        self._difference = None
        difference = used.put_from(self.rows, difference)
        queue.launch("inplace_mul", difference, column(queue, used.of(of_targets)))
        queue.launch("inplace_add", difference, terms.of(used).gradient(queue, log_prob))
        return difference


def _loss_of(queue: Queue, call: Call) -> Loss:
    """Return the loss of a call, for its kind of targets."""
    a = call.arguments
    if a["target"].dtype.kind not in "iu":
        return _AllClasses(queue, call)
    return (OneTarget if a["target_prob"] is None else _SeveralTargets)(queue, call)


def cross_entropy(queue: Queue, call: Call) -> Results:
    """Compute the loss and its gradient."""
    return _loss_of(queue, call).results()


def cross_entropy_hvp(queue: Queue, call: Call) -> Results:
    """Compute the product of the Hessian and a vector."""
    return (_loss_of(queue, call).product(),)


def needed_for_product(call: Call) -> tuple[str, ...]:
    """Return the names of the device's operators that a product of the Hessian and a vector may be made of."""
    a = call.arguments
    names = {"Cast", "InplaceAdd", "InplaceCopy", "InplaceMul", "Mul", "SoftmaxBackward"}
    if a["softcap"] is None:
        names |= {"Softmax"}
    if a["lse_square_scale"]:
        names |= {"LogSumExp", "ReduceSum"}
    if a["target"].dtype.kind not in "iu":
        names |= {"ReduceSum"}
    found = {f"aclnn{name}" for name in names}
    if a["softcap"] is not None:
        found |= {*needed(call), "aclnnExp"}
    return tuple(sorted(found))


def needed(call: Call) -> tuple[str, ...]:
    """Return the names of the device's operators that a loss and its gradient may be made of."""
    a = WITHOUT_ARGUMENT | call.arguments
    is_dense, has_gradient = a["target"].dtype.kind not in "iu", a["return_grad"]
    is_single = not is_dense and a["target_prob"] is None
    has_entropy = "entropy" in a["outputs"] or a["grad_entropy"] is not None
    names = {"Cast", "InplaceCopy", "Mul", "InplaceAdd"}
    if is_dense:
        names |= {"SoftmaxCrossEntropyWithLogits", "LogSoftmax", "ReduceSum", "Maximum", "EqTensor", "InplaceMul"}
    elif is_single:
        names |= {"CrossEntropyLoss", "CrossEntropyLossGrad"} if has_gradient else {"CrossEntropyLoss"}
    else:
        names |= {"LogSoftmax", "Gather", "ScatterAdd"} if has_gradient else {"LogSoftmax", "Gather"}
        if a["label_smoothing"]:
            names |= {"ReduceSum"}
    if a["label_smoothing"] and a["class_weight"] is not None and not is_dense:
        names |= {"ReduceSum", "Maximum", "EqTensor", "InplaceMul"}
    if a["lse_square_scale"] or "lse" in a["outputs"]:
        names |= {"LogSumExp"}
    if has_entropy:
        names |= {"Maximum", "Exp", "InplaceMul", "ReduceSum"}
    if has_gradient and not (
        is_single and not a["label_smoothing"] and not a["lse_square_scale"] and a["grad_lse"] is None
    ):
        names |= {"Exp", "InplaceMul"}
    if a["softcap"] is not None:
        names |= {"InplaceTanh", "InplaceMul"} if has_gradient else {"InplaceTanh"}
    if "predicted" in a["outputs"] or "correct" in a["outputs"]:
        names |= {"Topk", "EqTensor", "InplaceMul"}
    return tuple(f"aclnn{name}" for name in sorted(names))
