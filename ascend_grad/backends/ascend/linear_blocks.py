"""The loss of a linear layer and its gradients from products, one block of logits at a time.

Two passes over the vocabulary compute logits in float32. The first one keeps the lse of each row and the loss of its
target, relative to the lse of the entries so far. The second one computes the gradient of each block of logits. It
writes the block's rows of `weight_grad`, and adds to `input_grad`, which is in float32 until the end.

In each block the device's operators of `cross_entropy` compute the loss and the gradient. A row whose target is in
another block has the first entry as its target there, without a loss. (Ids that are ignored differ among devices.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import _aclnn
from ..._call import Call
from .array import DeviceArray
from .cross_entropy import Extents, OneTarget, SoftmaxTerms, add_shares, gradient_of_losses, losses_of
from .layer import INF, Layer
from .matrices import (
    cast,
    column,
    log_sum_exp,
    multiply,
    multiply_by_slope,
    number,
    product,
    row,
    weighted_log_probs,
)
from .queue import FLOAT32, Queue, Results, Rows
from .tokens import NAN

#: Bytes for each logit of a block: the logit, the tangent of its softcap, its probability, its gradient, and the
#: gradient's term of its class.
LOGIT_BYTES = 4 + 4 + 4 + 4 + 4
#: Matrices with the features of a block: the rows and their gradient; the weight, its gradient, and a term of it.
ROW_MATRICES, ENTRY_MATRICES = 2, 3


class _Statistics:
    """The lse of some rows, and the losses relative to it, over all blocks so far.

    Attributes
    ----------
    nll : vector
        The negative log-probability of each target, 0 if its entry has not come yet.
    deficits : vector or None
        The sums of ``c_v (lse - z_v)`` with the class weights c; None without smoothing.
    """

    def __init__(self, queue: Queue):
        self._queue = queue
        self.lse: Any = None
        self.nll: Any = None
        self.deficits: Any = None
        self._is_seen: Any = None
        self._class_sum: Any = None

    def add(self, lse: Any, nll: Any, is_here: Any, deficits: Any, class_sum: Any) -> None:
        """Add the statistics of a block, relative to its own lse. ``is_here``: which targets are in it."""
        xp, vector = self._queue.xp, self._queue.vector
        nll, is_here = xp.where(lse == -INF, INF, nll), vector(is_here)  # no entry of the block counts
        if deficits is not None:
            deficits = xp.where(lse == -INF, xp.where(vector(class_sum) == 0, 0, INF), deficits)
        if self.lse is None:
            self.lse, self.deficits, self._class_sum = lse, deficits, class_sum
            self.nll, self._is_seen = _moved(xp, nll, is_here, 0), is_here
            return
        larger = xp.maximum(self.lse, lse)
        total = larger + xp.log(xp.exp(self.lse - larger) + xp.exp(lse - larger))
        total = xp.where((larger > -INF) & (larger < INF), total, larger)
        before, here = total - self.lse, total - lse
        self.nll = _moved(xp, self.nll, self._is_seen, before) + _moved(xp, nll, is_here, here)
        self._is_seen = self._is_seen + is_here
        if deficits is not None:
            self.deficits = _moved(xp, self.deficits, self._class_sum, before) + _moved(xp, deficits, class_sum, here)
            self._class_sum = self._class_sum + class_sum
        self.lse = total


def _moved(xp: Any, losses: Any, weights: Any, step: Any) -> Any:
    """Return weighted losses relative to an lse that is larger by a step; 0 for weights of 0."""
    return xp.where(weights == 0, 0, losses + weights * step)


class _LinearLoss(OneTarget):
    """The loss of a call, with the blocks of its logits."""

    def __init__(self, queue: Queue, call: Call):
        super().__init__(queue, call, Extents(call.dims["BT"], call.dims["V"]))
        self._targets = self._tokens.places
        self._layer = Layer(queue, call, LOGIT_BYTES, row_matrices=ROW_MATRICES, entry_matrices=ENTRY_MATRICES)
        self._input: DeviceArray | None = None  # of the rows that the device computes

    # ---- statistics

    def _computed(self) -> None:
        """Compute the lse of the rows, and their losses, which become vectors."""
        queue, layer, xp, rows = self.queue, self._layer, self.queue.xp, self.rows
        self._input = input = rows.put(self.a["input"])
        targets, factor = rows.of(self._targets), self._last_factor_of(rows)
        blocks = list(layer.row_blocks(input.shape[0]))
        found = [_Statistics(queue) for _ in blocks]
        for entries in layer.entry_blocks():
            weight = layer.weight_of(entries)
            for block, statistics in zip(blocks, found):
                z, _ = self._block(_in_float32(queue, input, block), weight, entries, factor(block))
                self._add_statistics(statistics, z, targets[block], entries)
        lse = xp.concatenate([each.lse for each in found])
        is_known = (lse > -INF) & (lse < INF)
        self._lse = lse
        self._nll = xp.where(is_known, xp.concatenate([each.nll for each in found]), NAN)
        if self.smoothing:
            deficits = xp.where(is_known, xp.concatenate([each.deficits for each in found]), NAN)
            self._smoothed = self.share_of_target(self._nll, targets) + self.smoothing * deficits

    def _add_statistics(self, statistics: _Statistics, z: DeviceArray, targets: Any, entries: slice) -> None:
        queue = self.queue
        is_here, target = self._relative(targets, entries)
        lse, log_prob = queue.vector(log_sum_exp(queue, z)), queue.empty(z.shape, FLOAT32)
        losses = queue.vector(losses_of(queue, z, target, log_prob))
        deficits = class_sum = None
        if self.smoothing:
            weights = self._class_weights(entries)
            deficits, class_sum = -self._weighted_log_probs(log_prob, weights), weights.sum()
        statistics.add(lse, losses, is_here, deficits, class_sum)

    def _weighted_log_probs(self, log_prob: DeviceArray, weights: Any) -> Any:
        """Return the sums of the rows' log-probabilities times the weights of the classes, as a vector."""
        if self.class_weight is None:
            return _product_with(self.queue, log_prob, weights)
        return weighted_log_probs(self.queue, log_prob, row(self.queue, weights))

    def _class_weights(self, entries: slice) -> Any:
        """Return the class weights of a block, ones if there are none."""
        if self.class_weight is None:
            return self.queue.xp.ones_like(self.queue.vector(self.queue.numbers(entries.stop - entries.start)))
        return self.class_weight[entries]

    # ---- blocks of logits

    def _last_factor_of(self, rows: Rows) -> Callable[[slice], Any]:
        """Return the function that returns the last factor of the logits of a block of these rows."""
        factor = self._scale if self._softcap is None else self._softcap
        factor = factor / self._temperature
        if isinstance(factor, float):
            return lambda block: factor
        factors = rows.of(factor)
        return lambda block: factors[block]

    def _block(
        self, rows: DeviceArray, weight: DeviceArray, entries: slice, factor: Any, *, keeps_tanh: bool = False
    ) -> tuple[DeviceArray, DeviceArray | None]:
        """Return the logits z of a block, and the hyperbolic tangents of a softcap if they are to be kept."""
        queue, z = self.queue, self._layer.logits(rows, weight, entries)
        if self._softcap is not None:
            multiply(queue, z, self._scale / self._softcap)
            queue.launch("inplace_tanh", z)
            if keeps_tanh:
                factors = number(queue, factor) if isinstance(factor, float) else column(queue, factor)
                return product(queue, z, factors), z
        multiply(queue, z, factor)
        return z, None

    def _relative(self, targets: Any, entries: slice) -> tuple[Any, DeviceArray]:
        """Return which targets are in a block, and all targets relative to it: 0 for those that are not."""
        is_here = (targets >= entries.start) & (targets < entries.stop)
        return is_here, self.queue.put(self.queue.xp.where(is_here, targets - entries.start, 0))

    # ---- gradients

    def backward(self) -> Results:
        """Return the results of a call that gives the lse."""
        lse = self.without_ignored(self.queue.vector(self.a["lse"]))
        b = self._square_terms(lse)[1] if self.a["lse_square_scale"] else None
        return self.in_order(self._gradients(b, lse, lambda used: used.put(self.a["input"], 0)))

    def gradients(self, b: Any, entropy: Any) -> dict[str, Any]:
        input = self._input
        if input is None:
            return self._gradients(b, self.rows.vector(None), lambda used: used.put(self.a["input"], 0))
        return self._gradients(b, self.rows.vector(self._lse), lambda used: used.put_from(self.rows, input))

    def _gradients(self, b: Any, lse: Any, input_of: Callable[[Rows], DeviceArray]) -> dict[str, Any]:
        """Return the requested gradients by name. ``input_of`` returns the input of some rows."""
        queue, xp = self.queue, self.queue.xp
        of_targets, terms, e, present = self.coefficients_of_logits(b, None)
        used = queue.select(present, self.logits.rows)
        wanted = [
            name
            for name, spec in zip(self.call.operator.results, self.call.specs)
            if name.endswith("_grad") and spec is not None
        ]
        if used.is_empty:
            shapes = {"input_grad": self.a["input"].shape, "weight_grad": self._layer.weight.shape}
            return {
                name: used.cleared(queue.empty(shapes[name], self._dtype_of(name)))
                if name in shapes
                else xp.zeros(self.logits.classes)
                for name in wanted
            }
        is_known = (lse > -INF) & (lse < INF)  # no probability follows from an infinite one
        lse = used.of(xp.where(present, xp.where(is_known, lse, NAN), INF))
        input, factor, terms = input_of(used), self._last_factor_of(used), terms.of(used)
        of_targets, targets = used.of(of_targets), used.of(self._targets)
        e = None if e is None else used.of(e)
        gradient_of = _BlockGradients(wanted, input, self._layer.weight.shape, queue, self._dtype_of("weight_grad"))
        for entries in self._layer.entry_blocks():
            weight = self._layer.weight_of(entries)
            gradient_of.begin(entries)
            for block in self._layer.row_blocks(input.shape[0]):
                rows = _in_float32(queue, input, block)
                z, tanh = self._block(rows, weight, entries, factor(block), keeps_tanh=True)
                queue.launch("inplace_add", z, column(queue, -lse[block]))
                is_here, target = self._relative(targets[block], entries)
                grads = queue.put(queue.vector(xp.where(is_here, of_targets[block], 0)), FLOAT32)
                result = gradient_of_losses(queue, grads, z, target)
                # The term of a target is p times its coefficient for rows whose target is elsewhere.
                b = xp.where(is_here, 0, of_targets[block])
                b = b if terms.b is None else b + terms.b[block]
                queue.launch("inplace_add", result, SoftmaxTerms(b, None, None).gradient(queue, z))
                del z
                if e is not None:
                    add_shares(
                        queue, result, e[block], None if self.class_weight is None else self.class_weight[entries]
                    )
                if tanh is not None:
                    multiply_by_slope(queue, result, tanh)
                gradient_of.add(result, rows, weight, block)
                del result, rows, tanh
            gradient_of.end()
        return gradient_of.results(used, self._dtype_of("input_grad"))

    def _dtype_of(self, name: str) -> np.dtype:
        """Return the dtype in which a gradient leaves the device: float32 if the caller rounds it to another one."""
        out, dtype = dict(zip(self.call.operator.results, self.call.outs))[name], self._dtype
        return dtype if out is None or out.dtype == dtype else FLOAT32


class _BlockGradients:
    """The sums of the gradients of blocks of products, which have the features of ``input`` and of the weight."""

    def __init__(
        self, wanted: list[str], input: DeviceArray, shape: tuple[int, ...], queue: Queue, weight_dtype: np.dtype
    ):
        self._queue = queue
        self._input_grad = queue.empty(input.shape, FLOAT32) if "input_grad" in wanted else None
        self._weight_grad = queue.empty(shape, weight_dtype) if "weight_grad" in wanted else None
        self._of_entries: DeviceArray | None = None  # the rows of `weight_grad` of a block
        self._total: DeviceArray | None = None  # their sum so far, in float32
        self._bias_grads: list[Any] | None = [] if "bias_grad" in wanted else None
        self._is_first = False

    def begin(self, entries: slice) -> None:
        """Begin a block of the vocabulary."""
        self._is_first = entries.start == 0
        if self._weight_grad is not None:
            self._of_entries = self._total = self._weight_grad.rows(entries.start, entries.stop)
            if self._of_entries.dtype != FLOAT32:
                self._total = self._queue.empty(self._of_entries.shape, FLOAT32)
        if self._bias_grads is not None:
            self._bias_grads.append(0.0)

    def add(self, gradient: DeviceArray, rows: DeviceArray, weight: DeviceArray, block: slice) -> None:
        """Add the gradient of the products of a block of rows and the block's weight."""
        queue = self._queue
        if self._input_grad is not None:
            of_rows = self._input_grad.rows(block.start, block.stop)
            _add_product(queue, of_rows, gradient, weight, is_first=self._is_first)
        transposed = gradient.transposed((1, 0))
        if self._total is not None:
            _add_product(queue, self._total, transposed, rows, is_first=block.start == 0)
        if self._bias_grads is not None:
            ones = queue.xp.ones_like(queue.vector(queue.numbers(block.stop - block.start)))
            self._bias_grads[-1] = self._bias_grads[-1] + _product_with(queue, transposed, ones)

    def end(self) -> None:
        """End a block of the vocabulary."""
        total, of_entries = self._total, self._of_entries
        if total is not None and of_entries is not None and total is not of_entries:
            self._queue.launch("cast", total, _aclnn.DTYPES[of_entries.dtype.name], of_entries)
        self._total = self._of_entries = None

    def results(self, used: Rows, input_dtype: np.dtype) -> dict[str, Any]:
        """Return the gradients of all rows by name. ``used`` are the rows that were added."""
        found: dict[str, Any] = {}
        if self._input_grad is not None:
            found["input_grad"] = used.restored(cast(self._queue, self._input_grad, input_dtype))
        if self._weight_grad is not None:
            found["weight_grad"] = used.cleared(self._weight_grad)
        if self._bias_grads is not None:
            found["bias_grad"] = self._queue.xp.concatenate(self._bias_grads)
        return found


def _in_float32(queue: Queue, matrix: DeviceArray, block: slice) -> DeviceArray:
    """Return some rows of a matrix in float32."""
    return cast(queue, matrix.rows(block.start, block.stop), FLOAT32)


def _product_with(queue: Queue, matrix: DeviceArray, vector: Any) -> Any:
    """Return the product of a matrix and a vector, as a vector."""
    result = queue.empty((matrix.shape[0], 1), FLOAT32)
    queue.launch("mm", matrix, column(queue, vector), result)
    return queue.vector(result).reshape(-1)


def _add_product(queue: Queue, total: DeviceArray, left: DeviceArray, right: DeviceArray, *, is_first: bool) -> None:
    """Add the product of two matrices to a total, which has no values yet if it is the first one."""
    if is_first:
        queue.launch("mm", left, right, total)
        return
    term = queue.empty(total.shape, FLOAT32)
    queue.launch("mm", left, right, term)
    queue.launch("inplace_add", total, term)


def linear_cross_entropy(queue: Queue, call: Call) -> Results:
    """Compute the loss and its gradients."""
    return _LinearLoss(queue, call).results()


def linear_cross_entropy_backward(queue: Queue, call: Call) -> Results:
    """Compute the gradients for upstream gradients of the loss, of the lse and of the log-probabilities."""
    return _LinearLoss(queue, call).backward()


def needed(call: Call) -> tuple[str, ...]:
    """Return the names of the device's operators that a call may be made of."""
    is_backward = "lse" in call.arguments
    names = ["aclnnMm", "aclnnCast", "aclnnInplaceAdd", "aclnnInplaceMul"]
    if call.arguments["softcap"] is not None:
        names.append("aclnnInplaceTanh")
    if not is_backward:
        names += ["aclnnLogSumExp", "aclnnCrossEntropyLoss"]
        if call.arguments["label_smoothing"] and call.arguments["class_weight"] is not None:
            names += ["aclnnMaximum", "aclnnEqTensor", "aclnnReduceSum"]
    if is_backward or call.arguments["return_grad"]:
        names += ["aclnnCrossEntropyLossGrad", "aclnnExp", "aclnnMul"]
    return tuple(names)
