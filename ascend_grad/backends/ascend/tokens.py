"""The rows of a loss as vectors of a queue: their targets, their weights, and the divisor of a mean."""

from __future__ import annotations

from typing import Any

from ..._call import Call
from .queue import Queue

NAN = float("nan")


class Weights:
    """Factors of the losses of rows, and the divisor that a reduction of these losses has.

    Attributes
    ----------
    values : vector, optional
        The factor of each row, 0 for ignored rows; None stands for no factors.
    """

    def __init__(self, queue: Queue, call: Call, counted: Any, values: Any):
        self._queue, self._arguments = queue, call.arguments
        self.values = values
        self._denominator: Any = 1.0
        if self._arguments["reduction"] == "mean":
            given = self._arguments["denominator"]
            weights = counted if values is None else values
            self._denominator = queue.vector(weights.sum()) if given is None else given

    def share_zeros(self, other: Weights) -> None:
        """Make the denominators of two terms of a loss 0 if one of them is: a mean that is NaN has no gradient."""
        if not isinstance(self._denominator, float):
            is_zero, xp = (self._denominator == 0) | (other._denominator == 0), self._queue.xp
            self._denominator = xp.where(is_zero, 0, self._denominator)
            other._denominator = xp.where(is_zero, 0, other._denominator)

    def weighted(self, numbers: Any) -> Any:
        """Multiply numbers by the weights. The result is 0 for rows of weight 0, whatever the number."""
        return numbers if self.values is None else self._queue.xp.where(self.values == 0, 0, numbers * self.values)

    def divided(self, numbers: Any, otherwise: float) -> Any:
        """Divide numbers by the denominator. `otherwise` is the result where the denominator is 0."""
        denominator = self._denominator
        if isinstance(denominator, float):
            return numbers / denominator
        return self._queue.xp.where(denominator == 0, otherwise, numbers / denominator)

    def reduced(self, losses: Any) -> Any:
        """Return the weighted losses of the rows as the call reduces them."""
        if self._arguments["reduction"] == "none":
            return losses
        return self._queue.vector(self.divided(losses.sum(), NAN))

    def divided_upstream(self) -> Any:
        """Return the upstream gradient of each row's weighted loss, or one number for all rows."""
        grad, vector = self._arguments["grad_loss"], self._queue.vector
        if isinstance(grad, float) and isinstance(self._denominator, float):
            return vector(grad / self._denominator)  # may be in the range of float32, even if neither number is
        upstream = vector(grad).reshape(-1)
        return self._queue.xp.where(upstream == 0, 0, self.divided(upstream, 0))

    def upstream(self, divided: Any) -> Any:
        """Return the upstream gradient of each row's loss. A gradient of 0 stays 0, whatever the weight is."""
        return self._queue.xp.where(divided == 0, 0, self.weighted(divided))


class SeveralTargets(Weights):
    """The rows of a loss with K targets each, and the weights of the rows.

    Attributes
    ----------
    counted : vector of bool
        Which rows are not ignored, as not all of their targets are.
    places : matrix of int64
        The classes that the targets of each row stand for; 0 for ignored ones and for targets outside of the classes.
    factors : matrix
        The product of each target's probability and its class's weight, 0 for ignored ones.
    """

    def __init__(self, queue: Queue, call: Call, classes: int):
        a, xp = call.arguments, queue.xp
        target = queue.vector(a["target"], xp.int64)
        target = target.reshape(-1, target.shape[-1])
        self._queue = queue
        self._is_target = target != a["ignore_index"]
        self._inside = (target >= 0) & (target < classes)
        self.counted = self._is_target.any(1)
        self.places = xp.where(self._inside & self._is_target, target, 0)
        self.factors = self.without_ignored(queue.vector(a["target_prob"]).reshape(target.shape))
        if a["class_weight"] is not None:
            weights = self.factors * queue.vector(a["class_weight"])[self.places]
            self.factors = xp.where(self.factors == 0, 0, weights)
        given = a["token_weight"]
        weights = None if given is None else xp.where(self.counted, queue.vector(given).reshape(-1), 0)
        super().__init__(queue, call, self.counted, weights)

    def without_ignored(self, numbers: Any) -> Any:
        """Return numbers of the targets, 0 for ignored targets."""
        return self._queue.xp.where(self._is_target, numbers, 0)

    def of_targets(self, numbers: Any) -> Any:
        """Return numbers of the targets: 0 for ignored ones, NaN for those outside of the classes."""
        return self.without_ignored(self._queue.xp.where(self._inside, numbers, NAN))


class Tokens(Weights):
    """The rows of a loss with one target each.

    Attributes
    ----------
    counted : vector of bool
        Which rows are not ignored.
    places : vector of int64
        The class that each target stands for; 0 for ignored rows and for targets outside of the classes.
    values : vector, optional
        The product of the row's weight and its class's weight, 0 for ignored rows; None stands for no weights.
    """

    def __init__(self, queue: Queue, call: Call, classes: int):
        a, xp = call.arguments, queue.xp
        target, start = queue.vector(a["target"], xp.int64).reshape(-1), a.get("vocab_start_index", 0)
        places = target - start
        self.counted = target != a["ignore_index"]
        self._inside = (target >= start) & (places < classes)
        self.places = xp.where(self._inside & self.counted, places, 0)
        self._queue, self._call = queue, call
        weights = row_weights = self.row_weights()
        if a["class_weight"] is not None:  # a row of weight 0 adds nothing, whatever its class
            of_rows = queue.vector(self.counted) if row_weights is None else row_weights
            weights = xp.where(of_rows == 0, 0, of_rows * queue.vector(a["class_weight"])[self.places])
        super().__init__(queue, call, self.counted, weights)

    @property
    def masked_target(self) -> Any:
        """Return `places` in the dtype of the call's targets."""
        return self._queue.vector(self.places, getattr(self._queue.xp, self._arguments["target"].dtype.name))

    def row_weights(self) -> Any:
        """Return the weight of each row, 0 for ignored rows; None stands for no weights."""
        weights = self._call.arguments["token_weight"]
        return None if weights is None else self.without_ignored(self._queue.vector(weights).reshape(-1))

    def without_ignored(self, numbers: Any) -> Any:
        """Return numbers of the rows, 0 for ignored rows."""
        return self._queue.xp.where(self.counted, numbers, 0)

    def of_targets(self, numbers: Any) -> Any:
        """Return numbers of the targets: 0 for ignored rows, NaN for targets outside of the classes."""
        return self.without_ignored(self._queue.xp.where(self._inside, numbers, NAN))
