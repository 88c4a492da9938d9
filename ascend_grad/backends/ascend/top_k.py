"""The largest log-probabilities of a linear layer: products, top-k and log-sum-exp of one block of logits at a time.

The device's top-k returns equal elements in any order, and any of those that equal the last one. So these are found
again by another top-k, of keys that are larger for lower columns. A session does that only for blocks with such a tie.

Logits, their largest ones and the log-sum-exp are float32. The log-sum-exp is relative to the largest logit of a block,
so a log-probability has the error of the difference from that logit, not of the logit.
"""

from __future__ import annotations

from typing import Any

from ..._call import Call
from .array import DeviceArray
from .layer import INF, Layer
from .matrices import MAX_COLUMNS, cast, column, keys, limited, limited_scale, log_sum_exp, multiply, top_k
from .queue import FLOAT32, Queue, Results

#: Bytes for each logit of a block: the logit, whether it equals the last one of the largest, and its key.
LOGIT_BYTES = 4 + 1 + 4


def _is_finite(vector: Any) -> Any:
    return (vector > -INF) & (vector < INF)


class _Largest:
    """The largest logits of some rows, with the sum of the exponentials, over all blocks so far."""

    def __init__(self, queue: Queue, k: int, temperature: Any):
        self._queue, self._k, self._temperature = queue, k, temperature
        self._values: Any = None
        self._places: Any = None
        self._maximum: Any = None
        self._total: Any = None  # of exponentials relative to the maximum

    def add(self, z: DeviceArray, first: int) -> None:
        """Add a block of logits, the next one of the vocabulary, which begins at ``first``. It is overwritten."""
        xp = self._queue.xp
        maximum, values, places = self._candidates(z, first)
        total = self._sum_of_exponentials(z, maximum)
        if self._values is not None:
            values, places = (
                xp.concatenate([before, here], 1) for before, here in ((self._values, values), (self._places, places))
            )
            larger = xp.maximum(self._maximum, maximum)
            total = self._total * self._decay(self._maximum, larger) + total * self._decay(maximum, larger)
            maximum = larger
        self._values, self._places = self._queue.largest(values, places, self._k)
        self._maximum, self._total = maximum, total

    def _candidates(self, z: DeviceArray, first: int) -> tuple[Any, Any, Any]:
        """Return the maxima of the rows of a block, and logits with their places.

        The logits include the k largest ones, of equal ones those with the lowest places. Missing ones are -infinity.
        """
        queue, k, xp = self._queue, self._k, self._queue.xp
        rows, width = z.shape
        values, places = self._largest_of(z, min(k + 1, width))
        maximum, places = values[:, 0], places + first
        if width <= k:
            return maximum, values, places
        last = values[:, k - 1 : k]
        tied = values[:, k] == last[:, 0]
        values, places = values[:, :k], places[:, :k]
        if queue.select(tied, rows).is_empty:
            return maximum, values, places
        of_tied = queue.vector(top_k(queue, keys(queue, z, column(queue, last[:, 0])), k)[0], xp.int64)
        is_larger, is_there = values > last, of_tied > 0
        missing = first + width  # the place of missing logits, larger than that of any logit so far
        values = xp.concatenate([xp.where(is_larger, values, -INF), xp.where(is_there, last, -INF)], 1)
        places = xp.where(is_larger, places, missing)
        return maximum, values, xp.concatenate([places, xp.where(is_there, missing - of_tied, missing)], 1)

    def _largest_of(self, z: DeviceArray, count: int) -> tuple[Any, Any]:
        """Return the largest logits of each row, and their columns, as vectors."""
        values, places = top_k(self._queue, z, count)
        return self._queue.vector(values), self._queue.vector(places, self._queue.xp.int64)

    def _sum_of_exponentials(self, z: DeviceArray, maximum: Any) -> Any:
        """Return the sum of the exponentials relative to the maximum of each row, by which the logits are shifted."""
        queue, xp = self._queue, self._queue.xp
        queue.launch("inplace_add", z, column(queue, xp.where(_is_finite(maximum), -maximum, 0.0)))
        multiply(queue, z, 1 / self._temperature)
        total = xp.exp(queue.vector(log_sum_exp(queue, z)))
        return xp.where(maximum == -INF, 0.0, total)  # whatever the device makes of rows of -infinity

    def _decay(self, maximum: Any, larger: Any) -> Any:
        """Return the factors of sums relative to a maximum that make them relative to a larger one."""
        xp = self._queue.xp
        return xp.where(maximum == larger, 1.0, xp.exp((maximum - larger) / self._temperature))

    def results(self) -> tuple[Any, Any]:
        """Return the log-probabilities and the places."""
        queue, xp = self._queue, self._queue.xp
        temperature = self._temperature
        temperature = temperature if isinstance(temperature, float) else temperature[:, None]
        log_prob = (self._values - self._maximum[:, None]) / temperature - xp.log(self._total)[:, None]
        unknown = ~(_is_finite(self._maximum) & _is_finite(self._total))[:, None]
        return xp.where(unknown, xp.nan, log_prob), xp.where(unknown, queue.numbers(self._k), self._places)


class _Logits:
    """The logits of a call, in blocks."""

    def __init__(self, queue: Queue, call: Call):
        self._queue, self._a = queue, call.arguments
        self._input = queue.put(self._a["input"])
        self.layer = Layer(queue, call, LOGIT_BYTES, row_matrices=1, entry_matrices=1)
        self.layer.width = min(self.layer.width, MAX_COLUMNS)
        self._scale = limited_scale(self._a["logit_scale"])
        self._softcap = None if self._a["softcap"] is None else limited(queue, self._a["softcap"])
        self._temperature = limited(queue, self._a["temperature"])

    def results_of(self, block: slice, k: int) -> tuple[Any, Any]:
        """Return the results of the rows of a block."""
        queue, layer = self._queue, self.layer
        temperature = self._temperature if isinstance(self._temperature, float) else self._temperature[block]
        largest = _Largest(queue, k, temperature)
        rows = cast(queue, self._input.rows(block.start, block.stop), FLOAT32)
        for entries in layer.entry_blocks():
            largest.add(self._logits(rows, entries), entries.start)
        return largest.results()

    def _logits(self, rows: DeviceArray, entries: slice) -> DeviceArray:
        """Return logits that the temperature does not divide."""
        queue, layer = self._queue, self.layer
        z = layer.logits(rows, layer.weight_of(entries), entries)
        if self._softcap is None:
            multiply(queue, z, self._scale)
        else:
            multiply(queue, z, self._scale / self._softcap)
            queue.launch("inplace_tanh", z)
            multiply(queue, z, self._softcap)
        return z


def linear_top_k(queue: Queue, call: Call) -> Results:
    """Compute the largest log-probabilities and their places."""
    logits = _Logits(queue, call)
    parts = [logits.results_of(block, call.arguments["k"]) for block in logits.layer.row_blocks(call.dims["BT"])]
    return tuple(queue.xp.concatenate(list(each)) for each in zip(*parts))


def needed(call: Call) -> tuple[str, ...]:
    """Return the names of the device's operators that a call may be made of."""
    names = ["aclnnMm", "aclnnTopk", "aclnnLogSumExp", "aclnnCast", "aclnnEqTensor", "aclnnInplaceAdd"]
    names += ["aclnnInplaceMul"] if call.arguments["softcap"] is None else ["aclnnInplaceMul", "aclnnInplaceTanh"]
    return tuple(names)
