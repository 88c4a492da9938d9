"""The loss of some tokens over a vocabulary that is split over ranks.

Each rank computes the row statistics of its logits, and two collective operations combine them. Each rank then computes
the gradients of its part, and the input gradients are summed over the ranks.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays
from .._call import Call
from .._dispatch import requested
from .._linear_python import default_workspace_bytes
from ..arguments import MAX_INDEX, integer, shown, thread_count
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.options import OPTIONS, OUTPUT_GRADIENTS
from ..operators.results import LossResult, loss_result
from .agreement import Attempt, check_agreement
from .communicators import Collectives
from .part_backend import PartBackend
from .plan import Capacity, common_chunks, find_capacity, vocab_blocks
from .ranges import vocab_range
from .row_chunk import ChunkGradients, ChunkProblem, ChunkStatistics, HostChunk, RowChunk
from .row_statistics import NUMBERS
from .sums import MatrixSum, Share, VectorSums


class Shard:
    """This rank's part of a problem.

    Parameters
    ----------
    call : Call
        The checked arguments.
    ranks : Collectives
        The ranks that the vocabulary is split over.
    vocab_start_index, vocab_size : int or None
        The caller's arguments, unchecked.
    share : True, "scatter" or False
        This rank's share of the input's gradient.
    execution : dict
        `backend` and `num_threads` for each operator.
    weight_grad : ndarray or None
        The array that receives the weight's gradient; None for a new array. (A `DeviceShard` takes a sum instead.)

    Attributes
    ----------
    memory : str
        The memory that holds the arrays. It has to be the same on every rank, as it decides how matrices are summed.
    """

    memory = "on the host"

    def __init__(
        self,
        call: Call,
        ranks: Collectives,
        vocab_start_index: object,
        vocab_size: object,
        share: Share,
        execution: dict[str, Any],
        weight_grad: Any = None,
    ):
        self._operator = call.operator.name
        check_memory(call, ranks)
        self._call = call
        self._names = call.operator.parameters[:3]
        self.input, self.weight, target = (call.arguments[name] for name in self._names)
        self._a = call.arguments
        self._gradient_options = {name: call.arguments[name] for name in ("workspace_bytes", "filter_eps")}
        # A rank without weight rows calls no operator, which would check these arguments.
        self._requested = requested(execution["backend"], call.operator)
        threads = thread_count(execution["num_threads"], self._operator)
        #: The backend of calls, or of row chunks, that no device computes.
        self._backend = PartBackend(self._requested[0] == "reference", self._a["workspace_bytes"] or 0, threads)
        self._execution = execution
        self._ranks = ranks
        self._start_index = _index(vocab_start_index, "vocab_start_index", self._operator)
        self._vocab_size = _index(vocab_size, "vocab_size", self._operator)

        self.dtype = arrays.native(self.input.dtype)
        self.accumulator = arrays.accumulator_dtype(self.dtype)
        self.target = np.require(arrays.host_values(target), arrays.native(target.dtype), ["C", "A"])
        is_target = self.target != self._a["ignore_index"]
        self._counted = is_target if is_target.ndim == 1 else is_target.any(axis=-1)
        #: Number of tokens on this rank that are not ignored.
        self.count = int(np.count_nonzero(self._counted))

        # The arrays of collective operations are allocated before the first one: a rank that lacks memory can say so.
        self._allocate_rows(len(self.target))
        #: The sum for the input's gradient: a `MatrixSum`, or a `DeviceMatrixSum` for arrays on a device.
        self.input_sum: Any = None
        self._weight_grad: Any = None
        self._capacity = Capacity(0, 1)
        self._allocate(share, weight_grad)

    def _allocate_rows(self, rows: int) -> None:
        """Allocate the arrays with some numbers for each row."""
        self._maxima = np.zeros(rows)
        #: As `write_summands` writes them.
        self._sums = np.zeros((rows, NUMBERS + 1))
        self._sums_of_ranks = VectorSums(self._ranks, self._sums.size, np.float64, self._a["deterministic"])
        self._losses = np.empty(rows, self.accumulator)
        #: The upstream gradient of each row.
        self._grad = np.zeros(rows)

    @property
    def wanted(self) -> list[bool]:
        """Return whether the gradients of the input and of the weight are requested."""
        return [self._a["return_grad"] and asked for asked in self._a["output_mask"]]

    def _allocate(self, share: Share, weight_grad: Any) -> None:
        """Allocate the gradients and the arrays in which they are summed."""
        (rows, features), wanted = self.input.shape, self.wanted
        if wanted[0]:
            result_dtype = self.accumulator if share is False else self.dtype
            self.input_sum = MatrixSum(
                self._ranks, rows, features, self.accumulator, result_dtype, share, self._a["deterministic"]
            )
        if wanted[1]:
            shape = self.weight.shape
            self._weight_grad = self._call.empty(shape, self.dtype) if weight_grad is None else weight_grad
        #: The sum of the weight gradients of all row chunks, and the number of vocabulary blocks to compute it in.
        self._weight_total, self._vocab_blocks = self._weight_grad, 1
        workspace = self._a["workspace_bytes"]
        self._workspace = default_workspace_bytes(self.input, self.weight, *wanted) if workspace is None else workspace
        if any(wanted):
            weight_dtype = None if self._weight_grad is None else self._weight_grad.dtype
            self._capacity = find_capacity(
                rows, self.weight.shape, self.dtype, self.accumulator, weight_dtype, self._workspace
            )

    # -- agreement between the ranks --

    def facts(self) -> dict[str, Any]:
        """Return this rank's card for the others: facts that must be the same on all ranks, and its own facts."""
        input, _, target = self._names
        same = {
            "operator": self._operator,
            f"memory of {input}": self.memory,
            f"shape of {input}": list(self.input.shape),
            f"dtype of {input}": self.dtype.name,
            f"dtype of {target}": self.target.dtype.name,
            f"checksum of {target}": checksum(self.target),
            **self.options(),
        }
        if not isinstance(self._a["grad_loss"], float):
            same["checksum of grad_loss"] = checksum(arrays.host_values(self._a["grad_loss"]).astype(np.float64))
        return {"same": same, "rows": self.weight.shape[0], "start": self._start_index, "capacity": self._capacity}

    def facts_of_entries(self) -> dict[str, Any]:
        """Return facts about vectors over the vocabulary, the same on ranks with the same vocabulary entries."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return the arguments that are not arrays."""
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
        self.start = starts[self._ranks.rank]
        overlaps = self.input_sum is not None and self.input_sum.overlaps
        capacities = [Capacity(*card["capacity"]) for card in cards]
        self._chunks = common_chunks(len(self.target), capacities, overlaps) if len(self.target) else 0

    def _fail(self, argument: str, expected: str, got: str) -> None:
        raise ParamInvalidError(f"{argument}: expected {expected}, got {got}", operator=self._operator)

    # -- the loss and the gradients --

    def solve(self, attempt: Attempt, count: int, token_sums: VectorSums | None = None) -> LossResult:
        """Compute the loss and the gradients. For a mean, this shard's loss is the sum of its rows divided by `count`.

        `count` is the number of tokens in the mean, which may include other shards' tokens. `token_sums` adds over the
        ranks that the tokens are split over, if any. A mean with options is divided by such a sum of weights.
        """
        attempt.run(partial(self._prepare, count))
        for chunk in range(self._chunks):
            rows = slice(*vocab_range(len(self.target), chunk, self._chunks))
            self._solve_chunk(attempt, rows)
            if self.input_sum is not None and self.input_sum.overlaps:
                self.input_sum.start(rows)
        attempt.run(self._complete_weight_grad)
        loss = attempt.run(partial(self._loss, count))
        if self.input_sum is None:
            attempt.share(self._ranks)
            return LossResult(loss, input_grad=None, weight_grad=self._weight_grad)
        return LossResult(loss, input_grad=self.input_sum.result(attempt), weight_grad=self._weight_grad)

    @property
    def token_summands(self) -> int:
        """Return the number of elements that `write_token_summands` writes."""
        return 1

    def write_token_summands(self, result: LossResult, out: NDArray) -> None:
        """Write the results that are sums over the tokens of all ranks."""
        out[0] = 0 if self._a["reduction"] == "none" else result.loss

    def with_sums_of_tokens(self, result: LossResult, sums: NDArray) -> LossResult:
        """Return the results with the sums over all ranks of what `write_token_summands` writes."""
        if self._a["reduction"] == "none":
            return result
        return result._replace(loss=np.asarray(sums[0], self.accumulator))

    def convert_results(self, result: LossResult, attempt: Attempt, ranks: Collectives) -> LossResult:
        """Return the results as arrays of the caller's library, or raise the kept exception."""
        attempt.raise_kept()
        return loss_result(result._fields, self._call.in_library(result))

    def _solve_chunk(self, attempt: Attempt, rows: slice) -> None:
        """Compute the losses and the gradients of one row chunk."""
        problem = ChunkProblem(
            input=self.input[rows],
            weight=self.weight,
            target=self.target[rows],
            start=self.start,
            grad=self._grad[rows],
            gradient_options=self._gradient_options,
            execution=self._execution,
        )
        gradients = ChunkGradients(
            input_grad=None if self.input_sum is None else self.input_sum.matrix[rows],
            weight_grad=self._weight_total,
            adds_weight_grad=rows.start > 0,
            vocab_blocks=self._vocab_blocks,
        )
        options = {**self._part_options(), "grad_loss": self._grad[rows], "vocab": self.vocab_size}
        caches_logits = rows.stop - rows.start <= self._capacity.cached_rows
        chunk = HostChunk(problem, self._statistics(rows), gradients, options, self._backend, caches_logits)
        self._run_chunk(attempt, chunk)

    def _part_options(self) -> dict[str, Any]:
        """Return the options as functions for parts of a vocabulary accept them."""
        names = (*OPTIONS, *OUTPUT_GRADIENTS, "reduction", "ignore_index", "filter_eps")
        more = {"vocab_start_index": self.start, "with_more": False, "with_outputs": False}
        return {**{name: self._a[name] for name in names}, **more}

    def _statistics(self, rows: slice) -> ChunkStatistics:
        return ChunkStatistics(self._maxima[rows], self._sums[rows], self._losses[rows])

    def _run_chunk(self, attempt: Attempt, chunk: RowChunk) -> None:
        """Compute a row chunk's results, with the collective operations in between."""
        attempt.run(chunk.find_statistics)
        self._ranks.allreduce(chunk.maxima, "max")
        attempt.run(chunk.relate_to_global_maxima)
        self._sums_of_ranks.add(chunk.sums)
        attempt.run(chunk.finish)

    def _check_targets(self) -> None:
        target, ignored = self.target, self._a["ignore_index"]
        outside = np.argwhere((target != ignored) & ((target < 0) | (target >= self.vocab_size)))
        if outside.size:
            place = tuple(outside[0])
            got = f"{target[place]} in row {place[0]}"
            self._fail(self._names[2], f"values in [0, {self.vocab_size}) or {ignored}", got)

    def _prepare(self, count: int) -> None:
        """Check the targets, and compute the upstream gradient of each row."""
        self._check_targets()
        upstream = np.asarray(arrays.host_values(self._a["grad_loss"]), np.float64)
        with np.errstate(all="ignore"):
            if self._a["reduction"] == "mean":
                upstream = upstream / max(count, 1)
            self._grad[...] = np.where(self._counted, upstream, 0)
        self._prepare_weight_grad()

    def _prepare_weight_grad(self) -> None:
        """Choose the array for the sum of the weight gradients, and the number of vocabulary blocks."""
        if self._weight_grad is None:
            return
        if self._chunks > 1:
            self._vocab_blocks = vocab_blocks(self.weight.shape, self.accumulator.itemsize, self._workspace)
            if self._weight_grad.dtype != self.accumulator:
                self._weight_total = np.empty(self.weight.shape, self.accumulator)
        if not self._chunks:
            self._weight_grad[...] = 0

    def _complete_weight_grad(self) -> None:
        total, weight_grad = self._weight_total, self._weight_grad
        if total is not None and weight_grad is not None and total is not weight_grad:
            arrays.round_into(weight_grad, total)

    def _loss(self, count: int) -> NDArray:
        self._losses[~self._counted] = 0
        if self._a["reduction"] == "none":
            return self._losses
        with np.errstate(all="ignore"):
            total = np.sum(self._losses, dtype=np.float64)
            over = np.float64(count) if self._a["reduction"] == "mean" else 1
            return np.asarray(total / over, self.accumulator)


def check_memory(call: Call, ranks: Collectives) -> None:
    """Refuse arrays in memory that the ranks cannot sum, and dtypes that a device does not compute."""
    name, dtype = call.operator.parameters[0], call.arrays[0].dtype
    if call.device is not None and dtype.itemsize != 2:
        message = f"{name}: expected dtype float16 or bfloat16 on a device, got {dtype}"
        raise ParamTypeError(message, operator=call.operator.name)
    needed = ranks.required_device
    if needed is None or call.device == needed:
        return
    expected = f"an array on device {needed}, torch's current one, since the process group takes no tensors of the CPU"
    got = "one on the host" if call.device is None else f"one on device {call.device}"
    raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=call.operator.name)


def _index(value: object, name: str, operator: str) -> int | None:
    """Check and return an optional argument that is an index."""
    if value is None:
        return None
    index = integer(value, name, operator, "None or an int")
    if not 0 <= index <= MAX_INDEX:
        message = f"{name}: expected None or an int in [0, {MAX_INDEX}], got {shown(index)}"
        raise ParamInvalidError(message, operator=operator)
    return index


def checksum(array: NDArray) -> str:
    return f"{zlib.crc32(array.tobytes()):08x}"
