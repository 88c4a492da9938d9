"""The loss of logits: the device's operators for one target or all probabilities of a row, and arithmetic around them.

The operators compute losses and gradients of rows, in float32. The weights of rows and classes, the divisor of a mean
and upstream gradients are vectors of the queue. With the probabilities p of the logits z, the gradient of a row is

- with the target t: ``a (p - [v = t]) + b p + e_v``. The device's operator computes the first term, for ``a``.
- with probabilities q of all classes: ``a (p - labels + (sum(labels) - 1) p) + b p``, where ``labels`` is q times the
  class weights, with the smoothing. The device's operator computes ``p - labels``.

Here ``a`` holds the upstream gradient of the loss and of the log-probability, ``b`` the gradients of the lse, of its
square and of the smoothing, and ``e`` the rest of the smoothing. All are divided by the temperature, as z is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import arrays
from ..._call import Call
from .array import DeviceArray
from .matrices import cast, column, limited, limited_scale, log_sum_exp, number, product, row, row_sums
from .queue import FLOAT32, Queue, Results, Rows
from .tokens import Tokens, Weights


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

    def matrix(self, array: Any, dtype: np.dtype | None = None) -> DeviceArray:
        """Return an array of the shape of the logits as a matrix on the device. `dtype` is for arrays of the host."""
        there = self._queue.put(array, dtype)
        if self._axes != tuple(range(len(self._axes))):
            there = self._queue.permuted(there, self._axes)
        return self._queue.reshaped(there, (self.rows, self.classes))

    def restored(self, matrix: DeviceArray) -> DeviceArray:
        """Return a matrix in the shape of the logits."""
        if self._axes == tuple(range(len(self._axes))):
            return self._queue.reshaped(matrix, self._shape)
        moved = self._queue.reshaped(matrix, self._moved_shape)
        return self._queue.permuted(moved, tuple(self._axes.index(each) for each in range(len(self._axes))))


class _Loss:
    """Hold the arguments of one call, and compute what does not depend on the kind of targets."""

    def __init__(self, queue: Queue, call: Call):
        self.queue, self.call, self.a = queue, call, call.arguments
        self.logits = Logits(queue, call)
        self.dtype = arrays.native(call.arrays[0].dtype)
        self.smoothing = self.a["label_smoothing"] / self.logits.classes
        self.factor = self._factor()

    def _factor(self) -> Any:
        """Return the factor of the logits of each row, or a number for all rows; None stands for 1."""
        scale, temperature = limited_scale(self.a["logit_scale"]), limited(self.queue, self.a["temperature"])
        factor = scale / temperature
        return None if isinstance(factor, float) and factor == 1 else factor

    def scaled(self, matrix: DeviceArray, rows: Rows) -> DeviceArray:
        """Return the logits z of some rows in float32."""
        matrix = cast(self.queue, matrix, FLOAT32)
        if self.factor is None:
            return matrix
        if isinstance(self.factor, float):
            return product(self.queue, matrix, number(self.queue, self.factor))
        return product(self.queue, matrix, column(self.queue, rows.of(self.factor)))

    def times_factor(self, vector: Any) -> Any:
        """Multiply gradients with respect to the logits z by the factors of the rows."""
        return vector if self.factor is None else vector * self.factor

    @property
    def needs_lse(self) -> bool:
        return self.a["lse_square_scale"] != 0 or "lse" in self.a["outputs"]

    def square_terms(self, lse: Any, weights: Weights) -> tuple[Any, Any]:
        """Return the terms of the squared lse of the rows, and their gradients with respect to the lse."""
        scale = self.a["lse_square_scale"]
        slope = weights.upstream(weights.divided_upstream())
        xp = self.queue.xp
        gradient = xp.where(slope == 0, 0, 2 * scale * lse * slope)
        return weights.weighted(scale * lse * lse), gradient

    def gradient(self, of_rows: DeviceArray, rows: Rows) -> DeviceArray:
        """Return the gradient in the dtype and shape of the result, from that of some rows."""
        out, input = self.call.outs[1], self.call.arrays[0]
        if out is None or out.dtype == input.dtype:  # else the caller rounds it, once
            of_rows = cast(self.queue, of_rows, self.dtype)
        return self.logits.restored(rows.restored(of_rows))

    def no_gradient(self, rows: Rows) -> DeviceArray:
        """Return a gradient of zeros in the shape of the logits."""
        shape = self.logits.rows, self.logits.classes
        return self.logits.restored(rows.cleared(self.queue.empty(shape, self.dtype)))

    def results(self, found: dict[str, Any]) -> Results:
        """Return the results in the order and the shapes of the call's results."""
        return tuple(
            None if spec is None else found[name] if name == "input_grad" else found[name].reshape(spec.shape)
            for name, spec in zip(self.call.operator.results, self.call.specs)
        )


def _of_one_target(loss: _Loss) -> Results:
    queue, a, xp, logits = loss.queue, loss.a, loss.queue.xp, loss.logits
    tokens = Tokens(queue, loss.call, logits.classes)
    of_rows = Weights(queue, loss.call, tokens.counted, tokens.row_weights())
    if a["lse_square_scale"]:
        tokens.share_zeros(of_rows)
    rows = queue.compact(tokens.counted)
    class_weight = a["class_weight"]
    smoothed = loss.smoothing != 0
    losses = nll = lse = log_prob = target = None
    if not rows.is_empty:
        z = loss.scaled(rows.put(logits.matrix(a["input"])), rows)
        target = rows.put(tokens.places)
        count = z.shape[0]
        log_prob = queue.empty((count, logits.classes), FLOAT32)

        def launched(smoothing: float, factors: Any) -> DeviceArray:
            result, unused, unused_too = (queue.empty((count,), FLOAT32) for _ in range(3))
            queue.launch("cross_entropy_loss", z, target, factors, smoothing, result, log_prob, unused, unused_too)
            return result

        if smoothed:
            factors = None if class_weight is None else queue.put(queue.vector(class_weight), FLOAT32)
            losses = launched(a["label_smoothing"], factors)
        if not smoothed or "log_prob" in a["outputs"]:
            nll = launched(0.0, None)
        if loss.needs_lse:
            lse = log_sum_exp(queue, z)
    found: dict[str, Any] = {}
    total = of_rows.weighted(rows.vector(losses)) if smoothed else tokens.weighted(rows.vector(nll))
    found["loss"] = tokens.reduced(tokens.of_targets(total))
    if "log_prob" in a["outputs"]:
        found["log_prob"] = tokens.of_targets(-rows.vector(nll))
    b = None
    if loss.needs_lse:
        lse = found["lse"] = tokens.without_ignored(rows.vector(lse))
    if a["lse_square_scale"]:
        squares, b = loss.square_terms(lse, of_rows)
        found["loss"] = queue.vector(found["loss"] + of_rows.reduced(tokens.of_targets(squares)))
    if not a["return_grad"]:
        return loss.results(found)

    divided = tokens.divided_upstream()
    grad = tokens.upstream(divided) * (1 - a["label_smoothing"])
    if a["grad_log_prob"] is not None:
        grad = grad - queue.vector(a["grad_log_prob"]).reshape(-1)
    grad = loss.times_factor(tokens.of_targets(grad))
    e = None
    if a["grad_lse"] is not None:
        grad_lse = queue.vector(a["grad_lse"]).reshape(-1)
        b = grad_lse if b is None else b + grad_lse
    if smoothed:
        e = -loss.smoothing * of_rows.upstream(divided)
        of_classes = float(logits.classes) if class_weight is None else queue.vector(class_weight).sum()
        smoothed_p = xp.where(e == 0, 0, -e * of_classes)
        b = smoothed_p if b is None else b + smoothed_p
        e = loss.times_factor(tokens.without_ignored(e))
    present = grad != 0
    if b is not None:
        b = loss.times_factor(tokens.without_ignored(b))
        present = present | (b != 0)
    if e is not None:
        present = present | (e != 0)
    used = queue.select(present, logits.rows)
    if used.is_empty or log_prob is None or target is None:
        found["input_grad"] = loss.no_gradient(used)
        return loss.results(found)
    log_prob = used.put_from(rows, log_prob)
    result = queue.empty(log_prob.shape, FLOAT32)
    grads = used.put(queue.vector(grad, xp.float32), 0)
    queue.launch("cross_entropy_loss_grad", grads, log_prob, used.put_from(rows, target), result)
    if b is not None:
        p = queue.empty(log_prob.shape, FLOAT32)
        queue.launch("exp", log_prob, p)
        queue.launch("inplace_add", result, product(queue, p, column(queue, used.of(b))))
    if e is not None:
        shares = column(queue, used.of(e))
        queue.launch(
            "inplace_add", result, shares if class_weight is None else product(queue, shares, row(queue, class_weight))
        )
    found["input_grad"] = loss.gradient(result, used)
    return loss.results(found)


def _of_all_classes(loss: _Loss) -> Results:
    queue, a, xp, logits = loss.queue, loss.a, loss.queue.xp, loss.logits
    given = a["token_weight"]
    everywhere = xp.broadcast_to(queue.vector(1.0), (logits.rows,))
    weights = Weights(queue, loss.call, everywhere, None if given is None else queue.vector(given).reshape(-1))
    rows = queue.compact(everywhere == 1)
    z = loss.scaled(logits.matrix(a["input"]), rows)
    labels = _labels(loss)
    losses, difference = queue.empty((logits.rows,), FLOAT32), queue.empty(z.shape, FLOAT32)
    queue.launch("softmax_cross_entropy_with_logits", z, labels, losses, difference)
    found: dict[str, Any] = {"loss": weights.reduced(weights.weighted(rows.vector(losses)))}
    b = None
    if loss.needs_lse:
        found["lse"] = rows.vector(log_sum_exp(queue, z))
    if a["lse_square_scale"]:
        squares, b = loss.square_terms(found["lse"], weights)
        found["loss"] = queue.vector(found["loss"] + weights.reduced(squares))
    if not a["return_grad"]:
        return loss.results(found)

    grad = loss.times_factor(xp.broadcast_to(weights.upstream(weights.divided_upstream()), (logits.rows,)))
    present = grad != 0
    if a["grad_lse"] is not None:
        grad_lse = queue.vector(a["grad_lse"]).reshape(-1)
        b = grad_lse if b is None else b + grad_lse
    if b is not None:
        b = loss.times_factor(b)
        present = present | (b != 0)
    used = queue.select(present, logits.rows)
    if used.is_empty:
        found["input_grad"] = loss.no_gradient(used)
        return loss.results(found)
    p = queue.empty(z.shape, FLOAT32)
    queue.launch("softmax", z, 1, p)
    excess = column(queue, row_sums(queue, labels))  # sum(labels) - 1
    queue.launch("inplace_add", excess, number(queue, -1.0))
    queue.launch("inplace_add", difference, product(queue, p, excess))
    result = product(queue, used.put_from(rows, difference), column(queue, used.of(grad)))
    if b is not None:
        queue.launch("inplace_add", result, product(queue, used.put_from(rows, p), column(queue, used.of(b))))
    found["input_grad"] = loss.gradient(result, used)
    return loss.results(found)


def _labels(loss: _Loss) -> DeviceArray:
    """Return the probabilities of all classes times their weights, with the smoothing, in float32."""
    queue, a = loss.queue, loss.a
    labels = cast(queue, loss.logits.matrix(a["target"], FLOAT32), FLOAT32)
    if a["class_weight"] is not None:
        labels = product(queue, labels, row(queue, a["class_weight"]))
    if loss.smoothing:
        labels = product(queue, labels, number(queue, 1 - a["label_smoothing"]))
        share = queue.vector(loss.smoothing)
        if a["class_weight"] is not None:
            share = share * queue.vector(a["class_weight"])
        queue.launch("inplace_add", labels, row(queue, share))
    return labels


def cross_entropy(queue: Queue, call: Call) -> Results:
    """Compute the loss and its gradient."""
    loss = _Loss(queue, call)
    return _of_one_target(loss) if call.arguments["target"].dtype.kind in "iu" else _of_all_classes(loss)


def needed(call: Call) -> tuple[str, ...]:
    """Return the names of the device's operators that a call may be made of."""
    a = call.arguments
    names = ["aclnnCast", "aclnnInplaceCopy", "aclnnMul", "aclnnInplaceAdd"]
    if a["target"].dtype.kind in "iu":
        names.append("aclnnCrossEntropyLoss")
        if a["return_grad"]:
            names.append("aclnnCrossEntropyLossGrad")
            if a["label_smoothing"] or a["lse_square_scale"] or a["grad_lse"] is not None:
                names.append("aclnnExp")
    else:
        names.append("aclnnSoftmaxCrossEntropyWithLogits")
        if a["return_grad"]:
            names += ["aclnnSoftmax", "aclnnReduceSum"]
    if a["lse_square_scale"] or "lse" in a["outputs"]:
        names.append("aclnnLogSumExp")
    return tuple(names)
