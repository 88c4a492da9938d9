"""Losses, outputs and upstream gradients of rows, from statistics over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.loss_reference import Terms, losses
from .row_statistics import RowStatistics, predicted


@dataclass(frozen=True)
class Problem:
    """Some tokens, and this rank's rows of the weight, which are a part of the vocabulary.

    Attributes
    ----------
    input, weight, target : ndarray; DeviceArray on a device, but for the target
        The tokens' features and target ids, and this rank's rows of the weight.
    start : int
        The id of the first row of `weight`.
    options : dict
        The other arguments by name, as `_linear_python.part_gradients` accepts them.
    of_rows, of_entries : sequence of str
        The options that are arrays with one number for each token, or for each row of `weight`.
    """

    input: Any
    weight: Any
    target: NDArray
    start: int
    options: dict[str, Any]
    of_rows: tuple[str, ...]
    of_entries: tuple[str, ...]

    def rows(self, rows: slice) -> Problem:
        """Return the problem of some of the tokens."""
        if rows == slice(0, len(self.target)):
            return self
        options = self.options | {name: self.options[name][rows] for name in self.of_rows}
        return replace(self, input=self.input[rows], target=self.target[rows], options=options)

    def entries(self, entries: slice) -> Problem:
        """Return the problem of some rows of the weight."""
        if entries == slice(0, len(self.weight)):
            return self
        start = self.start + entries.start
        vectors = {name: self.options[name][entries] for name in self.of_entries}
        options = self.options | vectors | {"vocab_start_index": start}
        return replace(self, weight=self.weight[entries], start=start, options=options)


@dataclass(frozen=True)
class RowArrays:
    """Arrays with numbers for each row. A `slice` of them has views of some rows.

    Attributes
    ----------
    counted : ndarray of bool, shape (BT,)
        Whether the row is not ignored.
    is_target : ndarray of bool, shape (BT, targets of a row)
        Whether each target is not ignored.
    token_weight : ndarray, shape (BT,)
        The weight of each row, 0 for ignored rows.
    target_weights : ndarray, shape (BT, targets of a row)
        The targets' probabilities times class weights, 0 for ignored targets.
    maxima : ndarray, shape (BT,)
        The largest logit of each row: first of this rank, then, once the caller has reduced them, of all ranks.
    sums : ndarray, shape (BT, columns)
        The statistics of each row that are sums, as `write_summands` writes them: of this rank, then of all ranks.
    first : ndarray, shape (BT,)
        This rank's candidates for the predicted entries, then the maxima of all ranks; see `candidates`.
    losses, squares : ndarray, shape (BT,)
        The weighted cross-entropy of each row, and the weighted term of its squared lse.
    outputs : dict of ndarray, shape (BT,)
        Results beside the loss. The log-probabilities have the shape of the targets.
    """

    counted: NDArray
    is_target: NDArray
    token_weight: NDArray
    target_weights: NDArray
    maxima: NDArray
    sums: NDArray
    first: NDArray
    losses: NDArray
    squares: NDArray
    outputs: dict[str, NDArray]

    def rows(self, rows: slice) -> RowArrays:
        """Return views of some of the rows."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)[:-1]}
        outputs = {name: array[rows] for name, array in self.outputs.items()}
        return RowArrays(**{name: array[rows] for name, array in arrays.items()}, outputs=outputs)


def write_losses(options: dict[str, Any], statistics: RowStatistics, rows: RowArrays) -> None:
    """Write the cross-entropy and the term of the squared lse of each row."""
    entries = classes = rows.counted[:0]  # the statistics and the options tell of the whole vocabulary
    terms = Terms(entries, rows.target_weights, classes, rows.token_weight, options, rows.target_weights)
    rows.losses[...], square = losses(statistics, terms)
    if len(rows.squares):
        rows.squares[...] = square


def write_outputs(vocabulary: int, statistics: RowStatistics, rows: RowArrays) -> None:
    """Write the results beside the loss."""
    for name, out in rows.outputs.items():
        if name == "predicted":
            out[...] = np.where(rows.counted, predicted(rows.first, vocabulary), -1)
            continue
        if name == "log_prob":
            out[...] = np.where(rows.is_target, -statistics.negative_log_prob(), 0).reshape(out.shape)
        else:
            out[...] = np.where(rows.counted, getattr(statistics, name), 0)


def upstream_of_rows(options: dict[str, Any], rows: RowArrays) -> tuple[NDArray, NDArray]:
    """Return coefficients of the gradient w (p - [v = t]) + g p of the logits of each row, which has one target."""
    upstream, divisor, r = options["grad_loss"], options["denominators"][0], rows.token_weight
    with np.errstate(all="ignore"):
        of_target = np.zeros(len(r))
        if divisor:
            of_target = np.where((r != 0) & (upstream != 0), upstream / divisor * r * rows.target_weights[:, 0], 0)
        of_target = of_target - _of_counted(options["grad_log_prob"], rows)
    return of_target, _of_counted(options["grad_lse"], rows)


def _of_counted(gradient: NDArray | None, rows: RowArrays) -> NDArray:
    return np.zeros(len(rows.counted)) if gradient is None else np.where(rows.counted, gradient, 0)
