"""The loss of one part of the tokens, whose vocabulary is split over ranks.

Each rank computes the statistics of its logits, which two collective operations combine, then the gradients of its
part; those of the input are summed over the ranks. All arithmetic is that of the three operators that the device has.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays, ops
from .._call import Call
from .._linear import default_workspace
from ..arguments import MAX_INDEX, integer, shown
from ..errors import ParamInvalidError, ParamTypeError
from ..results import LinearCrossEntropy
from .agreement import Attempt, check_agreement
from .communicators import Collectives
from .ranges import vocab_range
from .sums import MatrixSum, Share, sum_vector

#: Rows of a block, at least, whose input gradient is summed while the next block is computed, and blocks at most.
BLOCK_ROWS, MOST_BLOCKS = 512, 4


class Shard:
    """This rank's part of a problem.

    Parameters
    ----------
    call : Call
        The arguments, checked.
    ranks : Collectives
        Those that the vocabulary is split over.
    vocab_start_index, vocab_size : int or None
        As the caller gave them.
    share : True, "scatter" or False
        What this rank gets of the input's gradient.
    execution : dict
        `backend` and `num_threads` of each operator.
    weight_grad : ndarray or None
        Where the weight's gradient goes, if not into a new array of its dtype.
    """

    def __init__(
        self,
        call: Call,
        ranks: Collectives,
        vocab_start_index: object,
        vocab_size: object,
        share: Share,
        execution: dict[str, Any],
        weight_grad: NDArray | None = None,
    ):
        self._operator = call.operator.name
        names = call.operator.parameters[:3]
        for name in names:
            if isinstance(call.arguments[name], arrays.AbstractDeviceArray):
                expected = "an array on the host"
                got = f"one on device {call.device} (numpy() copies it)"
                raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=self._operator)
        self.input, self.weight, target = (call.arguments[name] for name in names)
        self._names = names
        self._a = call.arguments
        self._execution = execution
        self._ranks = ranks
        self._share = share
        self._start_index = _index(vocab_start_index, "vocab_start_index", self._operator)
        self._vocab_size = _index(vocab_size, "vocab_size", self._operator)

        self.dtype = arrays.native(self.input.dtype)
        self.accumulator = arrays.accumulator_dtype(self.dtype)
        self._target = np.ascontiguousarray(target, arrays.native(target.dtype))
        self._counted = self._target != self._a["ignore_index"]
        #: How many tokens count here.
        self.count = int(np.count_nonzero(self._counted))

        # What collective operations take is allocated before the first of them: who lacks the memory can still say so.
        rows, features = self.input.shape
        wanted = [self._a["return_grad"] and asked for asked in self._a["output_mask"]]
        self._maxima = np.zeros(rows + 1, self.accumulator)
        self._sums = np.zeros((2, rows), self.accumulator)  # of exponentials, and the targets' logits
        self._input_sum: MatrixSum | None = None
        if wanted[0]:
            self._input_sum = MatrixSum(ranks, rows, features, self.accumulator, share, self._a["deterministic"])
        self._weight_grad: NDArray | None = None
        if wanted[1]:
            self._weight_grad = np.empty(self.weight.shape, self.dtype) if weight_grad is None else weight_grad

    # -- what the ranks have to agree on --

    def facts(self) -> dict[str, Any]:
        """What this rank tells the others: what has to be the same, and what is its own."""
        input, _, target = self._names
        same = {
            "operator": self._operator,
            f"shape of {input}": list(self.input.shape),
            f"dtype of {input}": self.dtype.name,
            f"dtype of {target}": self._target.dtype.name,
            f"checksum of {target}": _checksum(self._target),
            **self.options(),
        }
        if not isinstance(self._a["grad_loss"], float):
            same["checksum of grad_loss"] = _checksum(self._a["grad_loss"].astype(np.float64))
        return {"same": same, "rows": len(self.weight), "start": self._start_index, "blocks": self._most_blocks()}

    def options(self) -> dict[str, Any]:
        """The arguments that are no arrays."""
        names = ("reduction", "ignore_index", "deterministic", "return_grad", "output_mask", "workspace_bytes")
        same = {name: self._a[name] for name in names}
        same |= {"filter_eps": repr(self._a["filter_eps"]), "vocab_size": self._vocab_size}
        if isinstance(self._a["grad_loss"], float):
            same["grad_loss"] = repr(self._a["grad_loss"])
        return same

    def place(self, cards: list[dict[str, Any]]) -> None:
        """Find this rank's part of the vocabulary, or raise the same error on every rank."""
        check_agreement([card["same"] for card in cards], self._operator)
        rows = [card["rows"] for card in cards]
        starts = [card["start"] for card in cards]
        if all(start is None for start in starts):
            starts = [sum(rows[:rank]) for rank in range(len(rows))]
        for rank, start in enumerate(starts):
            if start is None:
                self._fail("vocab_start_index", "an int on every rank or None on every rank", f"None on rank {rank}")
        end = 0
        for start, rank in sorted((start, rank) for rank, start in enumerate(starts) if rows[rank]):
            if start != end:
                expected = "shards that follow each other from 0 on without gap or overlap"
                got = f"{start} on rank {rank}, where the shard before ends at {end}"
                self._fail("vocab_start_index", expected, got)
            end += rows[rank]
        if self._vocab_size not in (None, end):
            self._fail("vocab_size", f"{end}, the rows of all shards", str(self._vocab_size))
        self.vocab_size = end
        self._start = starts[self._ranks.rank]
        self._blocks = min(card["blocks"] for card in cards)

    def _fail(self, argument: str, expected: str, got: str) -> None:
        raise ParamInvalidError(f"{argument}: expected {expected}, got {got}", operator=self._operator)

    def _most_blocks(self) -> int:
        """Blocks of rows that this rank could take: their weight gradients are added up in the workspace."""
        if self._input_sum is None or not self._input_sum.overlaps:
            return 1
        if self._weight_grad is not None:
            needed = self.weight.size * self.accumulator.itemsize * (1 + (self._weight_grad.dtype != self.accumulator))
            room = self._a["workspace_bytes"] or default_workspace(self.input, self.weight, True, True)
            if needed > room:
                return 1
        return max(1, min(len(self.input) // BLOCK_ROWS, MOST_BLOCKS))

    # -- the loss and the gradients --

    def solve(self, attempt: Attempt, count: int) -> LinearCrossEntropy:
        """Loss and gradients, where `count` tokens count in the mean; of a mean this rank's part of the sum."""
        ranks, rows = self._ranks, len(self.input)
        attempt.run(self._compute_statistics)
        self._maxima[-1] = attempt.failed
        ranks.allreduce(self._maxima, "max")
        attempt.settle(ranks, self._maxima[-1])
        attempt.run(self._relate_to_global_maxima)
        sum_vector(ranks, self._sums, self._a["deterministic"])

        loss = attempt.run(lambda: self._loss(count))
        if self._a["return_grad"]:
            attempt.run(lambda: self._prepare_gradients(count))
            for block in range(self._blocks):
                block_rows = slice(*vocab_range(rows, block, self._blocks))
                attempt.run(partial(self._add_block, block_rows))
                if self._input_sum is not None:
                    self._input_sum.start(block_rows)
        if self._input_sum is None:
            attempt.share(ranks)
            return LinearCrossEntropy(loss, None, self._weight_grad)  # type: ignore[arg-type]  # nothing failed
        input_grad = self._input_sum.result(attempt)
        if self._share is not False:
            input_grad = rounded(input_grad, self.dtype)
        return LinearCrossEntropy(loss, input_grad, self._weight_grad)  # type: ignore[arg-type]

    def _compute_statistics(self) -> None:
        self._check_targets()
        stop = self._start + len(self.weight)
        rows = len(self.input)
        if len(self.weight):
            found = ops.fused_linear_online_max_sum(
                self.input, self.weight, self._target, self._start, stop, **self._execution
            )
            self._mask, self._masked_target = found.target_mask, found.masked_target
            self._largest, self._sums[0], self._sums[1] = found[:3]
        else:
            self._mask, self._masked_target = np.ones(rows, np.bool_), np.zeros_like(self._target)
            self._largest = np.full(rows, -np.inf, self.accumulator)
        # Engines disagree on the larger one of NaN and a number; the sum of exponentials is NaN in any case.
        np.copyto(self._maxima[:-1], np.where(np.isnan(self._largest), -np.inf, self._largest))

    def _check_targets(self) -> None:
        target, ignored = self._target, self._a["ignore_index"]
        outside = np.flatnonzero(self._counted & ((target < 0) | (target >= self.vocab_size)))
        if outside.size:
            row = outside[0]
            self._fail(self._names[2], f"values in [0, {self.vocab_size}) or {ignored}", f"{target[row]} in row {row}")

    def _relate_to_global_maxima(self) -> None:
        """Statistics relative to this rank's largest logits become parts of those of the whole vocabulary."""
        sums, predicted = self._sums
        maxima = self._maxima[:-1]
        # No finite logit here: its exponentials add nothing to those of others, where there are some.
        nothing = (self._largest == -np.inf) & (maxima != -np.inf)
        with np.errstate(all="ignore"):
            shift = self._largest - maxima
            sums *= np.exp(shift)
            predicted += shift
        sums[nothing], predicted[nothing] = 0, -np.inf
        predicted[arrays.unpacked(self._mask, len(maxima))] = 0

    def _loss(self, count: int) -> NDArray:
        reduction = self._a["reduction"]
        losses, _ = ops.fused_cross_entropy_loss_with_max_sum(self._maxima[:-1], *self._sums, **self._execution)
        losses[~self._counted] = 0
        if reduction == "none":
            return losses
        with np.errstate(all="ignore"):
            total = np.sum(losses, dtype=np.float64)
            return np.asarray(total / np.float64(count) if reduction == "mean" else total).astype(self.accumulator)

    def _prepare_gradients(self, count: int) -> None:
        upstream = np.asarray(self._a["grad_loss"], np.float64)
        with np.errstate(all="ignore"):
            if self._a["reduction"] == "mean":
                upstream = upstream / max(count, 1)
            self._grad = np.where(self._counted, upstream, 0).astype(self.accumulator)
        self._elsewhere = arrays.unpacked(self._mask, len(self.input))
        self._weight_total = self._weight_grad
        if self._blocks > 1 and self._weight_grad is not None:
            self._weight_part = np.empty(self.weight.shape, self.accumulator)
            if self._weight_grad.dtype != self.accumulator:
                self._weight_total = np.empty_like(self._weight_part)

    def _add_block(self, rows: slice) -> None:
        """The gradients of a block of rows: the input's, and a part of the weight's."""
        total, is_first, is_last = self._weight_total, rows.start == 0, rows.stop == len(self.input)
        input_grad = None if self._input_sum is None else self._input_sum.matrix[rows]
        weight_grad = total if is_first or total is None else self._weight_part
        ops.fused_linear_cross_entropy_loss_grad(
            self._grad[rows],
            self.input[rows],
            self.weight,
            self._elsewhere[rows],
            self._masked_target[rows],
            logits_max=self._maxima[:-1][rows],
            sum_exp_logits=self._sums[0, rows],
            output_mask=(input_grad is not None, weight_grad is not None),
            workspace_bytes=self._a["workspace_bytes"],
            filter_eps=self._a["filter_eps"],
            out=(input_grad, weight_grad),
            **self._execution,
        )
        if total is None or self._weight_grad is None:
            return
        if not is_first:
            total += self._weight_part
        if is_last and total is not self._weight_grad:
            arrays.round_into(self._weight_grad, total)


def rounded(values: NDArray, dtype: np.dtype) -> NDArray:
    """In this dtype, rounded to nearest even; itself where that is its own."""
    if values.dtype == dtype:
        return values
    result = np.empty(values.shape, dtype)
    arrays.round_into(result, values)
    return result


def _index(value: object, name: str, operator: str) -> int | None:
    """An optional argument that is an index."""
    if value is None:
        return None
    index = integer(value, name, operator, "None or an int")
    if not 0 <= index <= MAX_INDEX:
        message = f"{name}: expected None or an int in [0, {MAX_INDEX}], got {shown(index)}"
        raise ParamInvalidError(message, operator=operator)
    return index


def _checksum(array: NDArray) -> str:
    return f"{zlib.crc32(array.tobytes()):08x}"
