"""The loss of some tokens over a vocabulary that is split over ranks, and its gradients.

Each rank computes the statistics of the rows of its logits, and collective operations combine them. Losses and outputs
are made of the statistics of the whole vocabulary. Each rank then computes the gradients of its part, and the input
gradients are summed over the ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays
from .._array_types import number
from .._call import Call
from .._dispatch import requested
from .._linear_python import default_workspace_bytes
from .._loss_arguments import weight_sums
from ..arguments import MAX_INDEX, integer, shown, thread_count, warn
from ..backends.ascend import limits
from ..errors import BackendUnavailableError, ParamInvalidError, ParamTypeError
from ..operators.options import FUSED, OUTPUT_GRADIENTS, OUTPUTS, has_own_divisor, needs_entropy
from ..operators.ranks import (
    ARGUMENTS_OF_PARTS,
    DATA_PARALLEL,
    OF_ENTRIES,
    OF_ROWS,
    SETTINGS,
    WITHOUT_ARGUMENT,
    given_over_ranks,
)
from ..operators.results import LinearCrossEntropyGradients, loss_result
from .agreement import Attempt, check_agreement
from .chunking import Capacity, common_chunks, find_capacity, vocab_blocks
from .communicators import Collectives
from .part_backend import DeviceBackend, HostBackend, is_on_device
from .ranges import vocab_range
from .row_chunk import ChunkGradients, RowChunk
from .row_losses import Problem, RowArrays
from .row_statistics import NUMBERS
from .sums import MatrixSum, Share, VectorSums

#: What to do where every rank has the whole weight.
_PASS_PART = "pass weight[start:stop] of vocab_range on each rank"
#: The most rows and features of the weight that are compared to find that every rank has the whole weight.
_SAMPLED_ROWS, _SAMPLED_FEATURES = 128, 256


class Shard:
    """This rank's part of a problem.

    Parameters
    ----------
    call : Call
        The checked arguments. With `lse`, there are gradients alone, and the statistics of rows are not computed.
    ranks : Collectives
        The ranks that the vocabulary is split over.
    share : True, "scatter" or False
        This rank's share of the input's gradient.
    options : dict
        Options by name; `backend`, `num_threads`, `vocab_start_index` and `vocab_size` are unchecked.
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
        share: Share,
        options: dict[str, Any],
        weight_grad: Any = None,
    ):
        self._operator = call.operator.name
        check_memory(call, ranks)
        self._call, self._ranks, self._is_scattered = call, ranks, share == "scatter"
        self._execution = {name: options[name] for name in ("backend", "num_threads")}
        self._names = call.operator.parameters[:3]
        self.input, self.weight, target = (call.arguments[name] for name in self._names)
        self._a = WITHOUT_ARGUMENT | call.arguments
        self._given = given_over_ranks(self._a)
        #: The first option or gradient that no device computes, if any, and what of it.
        self._lacking = limits.first_lacking(self._given, self._a, FUSED)
        # A rank without weight rows calls no operator, which would check these arguments.
        backend, source = requested(options["backend"], call.operator)
        threads = thread_count(options["num_threads"], self._operator)
        #: The backend of row chunks that no device computes.
        self._backend = HostBackend(backend == "reference", self._a["workspace_bytes"] or 0, threads)
        self._start_index, self._vocab_size = indices(options, self._operator)

        self.dtype = arrays.native(self.input.dtype)
        self.accumulator = arrays.accumulator_dtype(self.dtype)
        self.target = np.require(arrays.host_values(target), arrays.native(target.dtype), ["C", "A"])
        #: Whether each target is not ignored, shape (BT, targets of a row).
        self._is_target = (
            self.target.reshape(len(self.target), *self.target.shape[1:] or (1,)) != self._a["ignore_index"]
        )
        #: The arguments beside the required arrays that are arrays.
        self._vectors = {
            name: arrays.wide(self._a[name])
            for name in ("grad_loss", *OF_ROWS, *OF_ENTRIES)
            if self._a[name] is not None and not isinstance(self._a[name], float)
        }
        # The arrays of collective operations are allocated before the first one: a rank that lacks memory can say so.
        self._allocate_rows(*self._is_target.shape)
        #: Number of tokens on this rank that are not ignored.
        self.count = int(np.count_nonzero(self._rows.counted))
        #: The sum for the input's gradient: a `MatrixSum`, or a `DeviceMatrixSum` for arrays on a device.
        self.input_sum: Any = None
        self._weight_grad: Any = None
        self._capacity = Capacity(0, 1)
        self._allocate(share, weight_grad)
        if self._lacking and backend not in ("auto", "cpu", "reference"):
            reason = f"{self._lacking[0]}: the loss over ranks with this option is computed on the host only"
            message = f"backend {backend!r} ({source}) cannot compute this call: {reason}"
            raise BackendUnavailableError(message, operator=self._operator)

    def _allocate_rows(self, rows: int, targets: int) -> None:
        """Allocate the arrays with some numbers for each row."""
        dtype, in_order = self._statistics_dtype, self._a["deterministic"]
        outputs = {name for name in self._a["outputs"] if name != "correct"}
        if self._needs_predicted:
            outputs.add("predicted")
        counted = self._is_target.any(axis=-1) if targets != 1 else self._is_target[:, 0]
        of_statistics = rows if self._a["lse"] is None else 0

        def present(is_present: NDArray, name: str) -> NDArray:
            """Return a vector, or 1, where an element is present, and 0 elsewhere."""
            vector = self._vectors.get(name)
            return is_present.astype(np.float64) if vector is None else np.where(is_present, vector, 0.0)

        self._rows = RowArrays(
            counted=counted,
            is_target=self._is_target,
            token_weight=present(counted, "token_weight"),
            target_weights=present(self._is_target, "target_prob"),
            maxima=np.zeros(rows, dtype),
            sums=np.zeros((of_statistics, NUMBERS + targets), dtype),
            first=np.zeros(rows if self._needs_predicted else 0),
            losses=np.zeros(rows),
            squares=np.zeros(rows if has_own_divisor(self._a) else 0),
            outputs={
                name: np.zeros(
                    self.target.shape if OUTPUTS[name].is_of_targets else rows,
                    np.int64 if name == "predicted" else self.accumulator,
                )
                for name in outputs
            },
        )
        self._sums_of_ranks = VectorSums(self._ranks, self._rows.sums.size, dtype, in_order)
        classes = self._vectors.get("class_weight")
        #: Sum of the class weights of this rank's entries.
        self._own_class_sum = float(self.weight.shape[0] if classes is None else classes.sum())
        #: The class weights of the targets: first of this rank's entries, then of all.
        self._class_weights = np.ones((0, targets)) if classes is None else np.zeros((rows, targets))
        self._sums_of_classes = VectorSums(self._ranks, self._class_weights.size, np.float64, in_order)
        #: The divisors of a mean; see `weight_sums`.
        self._denominators = np.ones(2)

    @property
    def _statistics_dtype(self) -> np.dtype:
        """Return the dtype in which the statistics of rows are combined."""
        return np.dtype(np.float64)

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
        #: The gradient of this rank's bias in float64, and in the dtype of the bias. None: not requested.
        self.bias_grad = self._rounded_bias_grad = None
        if self._a["return_grad"] and "bias" in self._vectors:
            self.bias_grad = np.zeros(self.weight.shape[0])
            self._rounded_bias_grad = np.zeros(self.weight.shape[0], arrays.native(self._a["bias"].dtype))
        workspace = self._a["workspace_bytes"]
        self._workspace = default_workspace_bytes(self.input, self.weight, *wanted) if workspace is None else workspace
        #: Memory for the logits of a row chunk, once it is needed.
        self._logits: NDArray | None = None
        if any(wanted) or self.bias_grad is not None:
            weight_dtype = None if self._weight_grad is None else self._weight_grad.dtype
            self._capacity = find_capacity(
                rows, self.weight.shape, self.dtype, self.accumulator, weight_dtype, self._workspace
            )
            if self._a["lse"] is not None:  # logits are computed once anyway
                self._capacity = self._capacity._replace(cached_rows=0)

    # -- agreement between the ranks --

    def facts(self) -> dict[str, Any]:
        """Return this rank's record for the others: facts that must be the same on all ranks, and its own facts."""
        input, _, target = self._names
        same = {
            "operator": self._operator,
            f"memory of {input}": self.memory,
            f"shape of {input}": list(self.input.shape),
            f"dtype of {input}": self.dtype.name,
            f"dtype of {target}": self.target.dtype.name,
            f"checksum of {target}": checksum(self.target),
            **self.facts_of_options(("grad_loss", *OF_ROWS)),
        }
        own = {**facts_of_shard(self.weight, self._start_index), "capacity": self._capacity}
        return {"same": same, **own, "class_sum": self._own_class_sum}

    def facts_of_options(self, compared: Sequence[str]) -> dict[str, Any]:
        """Return facts about the optional arguments that must be the same on all ranks, except defaults of options."""
        values: dict[str, Any] = {name: self._a[name] for name in (*SETTINGS, *self._given)} | self._vectors
        if isinstance(upstream := values["grad_loss"], np.ndarray):
            del values["grad_loss"]
            if "grad_loss" in compared:  # otherwise it has one number for each token of this rank
                values["checksum of grad_loss"] = checksum(upstream)
        return {"vocab_size": self._vocab_size} | facts_of(values, compared)

    def place(self, records: list[dict[str, Any]]) -> None:
        """Find this rank's part of the vocabulary, or raise the same error on every rank."""
        input, _, target = self._names
        tokens = "; pass all tokens on every rank, or use parallel.data_parallel_linear_cross_entropy"
        compared = () if self._operator == DATA_PARALLEL.name else (f"shape of {input}", f"checksum of {target}")
        check_agreement([record["same"] for record in records], self._operator, dict.fromkeys(compared, tokens))
        self.start, self.vocab_size = placed(records, self._ranks.rank, self._vocab_size, self._operator)
        self._class_sum = sum(record["class_sum"] for record in records)
        overlaps = self.input_sum is not None and self.input_sum.overlaps
        capacities = [Capacity(*record["capacity"]) for record in records]
        self._chunks = common_chunks(len(self.target), capacities, overlaps) if len(self.target) else 0

    # -- the loss and the gradients --

    def solve(self, attempt: Attempt, count: int, token_sums: VectorSums | None = None) -> dict[str, Any]:
        """Compute the loss and the gradients, by name. For a mean, the loss is the sum of this shard's rows, divided.

        The divisor is of the tokens of all shards. `count` is their number. `token_sums` adds over the ranks that the
        tokens are split over, if any.
        """
        attempt.run(self._check_targets)
        if "class_weight" in self._vectors:
            attempt.run(self._write_class_weights)
            self._sums_of_classes.add(self._class_weights)
        attempt.run(partial(self._weigh_rows, count))
        if token_sums is not None and self._divides_by_weights:
            token_sums.add(self._denominators)
        attempt.run(self._prepare)
        for chunk in range(self._chunks):
            rows = slice(*vocab_range(len(self.target), chunk, self._chunks))
            self._solve_chunk(attempt, rows)
            if self.input_sum is not None and self.input_sum.overlaps:
                self.input_sum.start(rows)
        attempt.run(self._complete_gradients)
        values: dict[str, Any] = attempt.run(self._results) or {}
        if self.input_sum is None:
            attempt.share(self._ranks)
        else:
            values["input_grad"] = self.input_sum.result(attempt)
        return values

    @property
    def token_summands(self) -> int:
        """Return the number of elements that `write_token_summands` writes."""
        return 1 + ("correct" in self._a["outputs"]) + (0 if self.bias_grad is None else len(self.bias_grad))

    def write_token_summands(self, values: dict[str, Any], out: NDArray) -> None:
        """Write the results that are sums over the tokens of all ranks: the loss, the bias's gradient, `correct`."""
        out[0] = 0 if self._a["reduction"] == "none" else values["loss"]
        if self.bias_grad is not None:
            out[1 : 1 + len(self.bias_grad)] = self.bias_grad
        if "correct" in self._a["outputs"]:
            out[-1] = values["correct"]

    def take_sums_of_tokens(self, values: dict[str, Any], sums: NDArray) -> None:
        """Replace results by the sums over all ranks of what `write_token_summands` writes."""
        if self._a["reduction"] != "none":
            values["loss"] = np.asarray(sums[0], self.accumulator)
        if self.bias_grad is not None:
            self.bias_grad[...] = sums[1 : 1 + len(self.bias_grad)]
            arrays.round_into(values["bias_grad"], self.bias_grad)
        if "correct" in self._a["outputs"]:
            values["correct"] = np.asarray(sums[-1], np.int64)

    def in_library(self, values: dict[str, Any], attempt: Attempt, ranks: Collectives) -> Any:
        """Return the results as a tuple of arrays of the caller's library, or raise the kept exception."""
        attempt.raise_kept()
        if self._a["lse"] is not None:
            names = LinearCrossEntropyGradients._fields
            return LinearCrossEntropyGradients(*self._named_results(values, names))
        bias = ("bias_grad",) if "bias" in self._vectors else ()
        names = ("loss", "input_grad", "weight_grad", *bias, *self._a["outputs"])
        loss, *others = self._named_results(values, names)
        return loss_result(names, (loss if self._a["reduction"] == "none" else number(loss), *others))

    def _named_results(self, values: dict[str, Any], names: Sequence[str]) -> list[Any]:
        """Return results in the order of names, with all dimensions of the rows of the caller's input."""
        results = [values[name] for name in names]
        leading = self._call.leading
        if leading is not None:
            others = {"weight_grad", "bias_grad", *(("input_grad",) if self._is_scattered else ())}
            results = [
                each if each is None or not each.ndim or name in others else each.reshape(leading + each.shape[1:])
                for name, each in zip(names, results)
            ]
        return self._call.in_library(results)

    def _check_targets(self) -> None:
        target, ignored = self.target, self._a["ignore_index"]
        is_outside = (target != ignored) & ((target < 0) | (target >= self.vocab_size))
        if is_outside.any():
            place = tuple(np.argwhere(is_outside)[0])
            got = f"{target[place]} in row {place[0]}"
            message = f"{self._names[2]}: expected values in [0, {self.vocab_size}) or {ignored}, got {got}"
            raise ParamInvalidError(message, operator=self._operator)

    def _write_class_weights(self) -> None:
        """Write the class weights of the targets that are among this rank's entries."""
        place = self.target.reshape(self._is_target.shape).astype(np.int64) - self.start
        is_here = (place >= 0) & (place < self.weight.shape[0]) & self._is_target
        self._class_weights[is_here] = self._vectors["class_weight"][place[is_here]]

    @property
    def _divides_by_weights(self) -> bool:
        """Return whether the divisor of a mean is a sum of weights."""
        has_weights = "token_weight" in self._vectors or "class_weight" in self._vectors
        return self._a["reduction"] == "mean" and self._a["denominator"] is None and has_weights

    def _weigh_rows(self, count: int) -> None:
        """Find the weights of the targets, and this rank's part of the divisors of a mean."""
        if "class_weight" in self._vectors:
            weights = self._rows.target_weights
            with np.errstate(all="ignore"):  # 0 times the infinite weight of a class
                weights[...] = np.where(self._is_target, weights * self._class_weights, 0)
        if self._divides_by_weights:
            options = {"ignore_index": self._a["ignore_index"], "token_weight": self._vectors.get("token_weight")}
            if "target_prob" in self._vectors:
                options["target_prob"] = self._vectors["target_prob"]
            elif "class_weight" in self._vectors:
                options["target_class_weight"] = self._rows.target_weights[:, 0]
            self._denominators[...] = weight_sums(self.target, **options)
        elif self._a["reduction"] == "mean":
            self._denominators[...] = count if self._a["denominator"] is None else self._a["denominator"]

    def _prepare(self) -> None:
        """Describe the problem, and choose how the gradients of row chunks are added."""
        if self._denominators[0] == 0 or (has_own_divisor(self._a) and self._denominators[1] == 0):
            self._denominators[...] = 0  # the mean is NaN, and has no gradient
        options = {
            **{name: self._a[name] for name in ARGUMENTS_OF_PARTS},
            "grad_loss": self._a["grad_loss"] if isinstance(self._a["grad_loss"], float) else None,
            **{name: vector for name, vector in self._vectors.items() if name not in ("lse", "entropy")},
            "vocab_start_index": self.start,
            "with_more": self._needs_predicted or needs_entropy(self._a["outputs"], self._a),
            "with_outputs": bool(self._a["outputs"]) or any(name in self._vectors for name in OUTPUT_GRADIENTS),
            "vocab": self.vocab_size,
            "own_class_sum": self._own_class_sum,
            "class_sum": self._class_sum if self._a["label_smoothing"] else 0.0,  # it may be infinite
            "denominators": tuple(self._denominators.tolist()),
        }
        of_rows, of_entries = (
            tuple(name for name in names if isinstance(options.get(name), np.ndarray) and name in self._vectors)
            for names in (("grad_loss", *OF_ROWS), OF_ENTRIES)
        )
        self._problem = Problem(self.input, self.weight, self.target, self.start, options, of_rows, of_entries)
        self._prepare_gradients()

    def _prepare_gradients(self) -> None:
        """Choose the array for the sum of the weight gradients, and the number of vocabulary blocks."""
        if self._weight_grad is None:
            return
        if self._chunks > 1:
            self._vocab_blocks = vocab_blocks(self.weight.shape, self.accumulator.itemsize, self._workspace)
            if self._weight_grad.dtype != self.accumulator:
                self._weight_total = np.empty(self.weight.shape, self.accumulator)
        if not self._chunks:
            self._weight_grad[...] = 0

    def _solve_chunk(self, attempt: Attempt, rows: slice) -> None:
        """Compute the losses and the gradients of one row chunk, with the collective operations in between."""
        arrays_of_rows = self._rows.rows(rows)
        chunk = attempt.run(lambda: self._new_chunk(rows, arrays_of_rows))

        def step(name: str, *arguments: Any) -> None:
            attempt.run(lambda: getattr(chunk, name)(*arguments))

        if self._a["lse"] is not None:
            entropy = self._vectors.get("entropy")
            step("take_statistics", self._vectors["lse"][rows], None if entropy is None else entropy[rows])
        else:
            step("find_statistics")
            self._ranks.allreduce(arrays_of_rows.maxima, "max")
            if self._needs_predicted:
                step("find_candidates")
                self._ranks.allreduce(arrays_of_rows.first, "max")
            step("relate_to_global_maxima")
            self._sums_of_ranks.add(arrays_of_rows.sums)
            step("finish")
        if chunk is not None:  # otherwise the attempt has failed
            attempt.run(partial(self._find_gradients, chunk, rows))

    def _new_chunk(self, rows: slice, arrays_of_rows: RowArrays) -> RowChunk:
        """Choose the backend of a row chunk, and whether its logits are cached."""
        problem, count = self._problem.rows(rows), rows.stop - rows.start
        if self.weight.shape[0] and self._lacking is None and is_on_device(problem, self._execution):
            return RowChunk(problem, arrays_of_rows, self._device_backend)
        logits = None
        if count <= self._capacity.cached_rows and self._backend.caches_logits:
            if self._logits is None:  # the first chunk has the most rows
                self._logits = np.empty((count, self.weight.shape[0]), self.accumulator)
            logits = self._logits[:count]
        return RowChunk(problem, arrays_of_rows, self._backend, logits)

    @property
    def _device_backend(self) -> DeviceBackend:
        return DeviceBackend(self._execution, self._a["workspace_bytes"])

    def _find_gradients(self, chunk: RowChunk, rows: slice) -> None:
        """Add the gradients of a row chunk."""
        totals = {
            "input_grad": None if self.input_sum is None else self.input_sum.matrix[rows],
            "weight_grad": self._weight_total,
            "bias_grad": self.bias_grad,
        }
        chunk.find_gradients(ChunkGradients(totals, rows.start > 0, self._vocab_blocks))

    def _complete_gradients(self) -> None:
        """Round the gradients of weight and bias."""
        total, weight_grad = self._weight_total, self._weight_grad
        if total is not None and weight_grad is not None and total is not weight_grad:
            arrays.round_into(weight_grad, total)
        if self.bias_grad is not None and self._rounded_bias_grad is not None:
            arrays.round_into(self._rounded_bias_grad, self.bias_grad)

    @property
    def _needs_predicted(self) -> bool:
        return "predicted" in self._a["outputs"] or "correct" in self._a["outputs"]

    def _results(self) -> dict[str, Any]:
        """Return the results by name, except the gradient of the input."""
        values = {"input_grad": None, "weight_grad": self._weight_grad, "bias_grad": self._rounded_bias_grad}
        if self._a["lse"] is not None:
            return values
        values |= {"loss": self._loss(), **self._rows.outputs}
        if "correct" in self._a["outputs"]:
            is_correct = self._rows.counted & (self._rows.outputs["predicted"] == self.target)
            values["correct"] = np.asarray(np.count_nonzero(is_correct))
        return values

    def _loss(self) -> NDArray:
        losses, squares = self._rows.losses, self._rows.squares
        with np.errstate(all="ignore"):
            if self._a["reduction"] == "none":
                return (losses + squares if len(squares) else losses).astype(self.accumulator)
            total = np.float64(np.nan)
            if self._denominators[0]:
                total = losses.sum() / self._denominators[0]
                if len(squares):
                    total = total + squares.sum() / self._denominators[1]
            return np.asarray(total, self.accumulator)


def facts_of_shard(weight: Any, start: int | None) -> dict[str, Any]:
    """Return the facts that `placed` takes: the number of a rank's entries, its `vocab_start_index`, and a sample.

    The sample is a checksum of some elements; None if they are all equal, as where a weight is not initialized yet, or
    not on the host.
    """
    sample = None
    if isinstance(weight, np.ndarray) and weight.size:
        step = -(-len(weight) // _SAMPLED_ROWS)
        elements = np.ascontiguousarray(weight[::step, :_SAMPLED_FEATURES])
        sample = None if (elements == elements[0, 0]).all() else checksum(elements)
    return {"rows": weight.shape[0], "start": start, "sample": sample}


def check_entries(weight: Any, options: Mapping[str, Any], ranks: Collectives, operator: str) -> None:
    """Refuse class weights and biases that have more vocabulary entries than the weight of this rank."""
    rows = getattr(weight, "shape", None)
    if not rows or ranks.size == 1:
        return
    for name in OF_ENTRIES:
        shape = tuple(getattr(options.get(name), "shape", ()))
        if len(shape) == 1 and shape[0] > rows[0]:
            expected = f"shape (V of this rank = {rows[0]})"
            message = f"{name}: expected {expected}, got {shape}; pass the part [start:stop] of vocab_range"
            raise ParamInvalidError(message, operator=operator)


def placed(records: list[dict[str, Any]], rank: int, vocab_size: int | None, operator: str) -> tuple[int, int]:
    """Return the id of the first vocabulary entry of a rank, and the number of all entries.

    The records have `facts_of_shard` of each rank. All ranks raise the same errors.
    """
    alone = ""
    if len(records) == 1:
        comm = "vocab_comm" if operator == DATA_PARALLEL.name else "comm"
        alone = f" ({comm} is None or has one rank)"

    def fail(argument: str, expected: str, got: str) -> None:
        raise ParamInvalidError(f"{argument}: expected {expected}, got {got}", operator=operator)

    rows = [record["rows"] for record in records]
    starts = [record["start"] for record in records]
    if all(start is None for start in starts):
        samples = {record["sample"] for record in records}
        if vocab_size is None and len(records) > 1 and len(set(rows)) == len(samples) == 1 and None not in samples:
            message = f"{operator}: the weights of all ranks look the same; if this is the whole weight, {_PASS_PART}"
            warn(message)
        starts = [sum(rows[:rank]) for rank in range(len(rows))]
    for each, start in enumerate(starts):
        if start is None:
            fail("vocab_start_index", "an int on every rank or None on every rank", f"None on rank {each}")
    end = 0
    for start, each in sorted((start, each) for each, start in enumerate(starts) if rows[each]):
        if start != end:
            expected = "shards from 0 without gaps or overlaps"
            note = alone or (f"; {_PASS_PART}" if start < end else "")
            fail("vocab_start_index", expected, f"{start} on rank {each}, where the previous shard ends at {end}{note}")
        end += rows[each]
    if vocab_size not in (None, end):
        note = alone or (f"; {_PASS_PART}" if all(each == vocab_size for each in rows) else "")
        fail("vocab_size", f"{end}, the sum of the rows of all shards", f"{vocab_size}{note}")
    return starts[rank], end


def check_memory(call: Call, ranks: Collectives) -> None:
    """Refuse arrays in memory that the ranks cannot sum, and dtypes that a device does not compute."""
    name, dtype = call.operator.parameters[0], call.arrays[0].dtype
    if call.device is not None and dtype.itemsize != 2:
        message = f"{name}: expected dtype float16 or bfloat16 on a device, got {dtype}"
        raise ParamTypeError(message, operator=call.operator.name)
    needed = ranks.required_device
    if needed is None or call.device == needed:
        return
    expected = f"an array on torch's current device, {needed}, as the process group has no CPU backend"
    got = "one on the host" if call.device is None else f"one on device {call.device}"
    raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=call.operator.name)


def indices(options: dict[str, Any], operator: str) -> Iterator[int | None]:
    """Check and return the optional arguments `vocab_start_index` and `vocab_size`."""
    for name in ("vocab_start_index", "vocab_size"):
        index = None if options[name] is None else integer(options[name], name, operator, "None or an int")
        if index is not None and not 0 <= index <= MAX_INDEX:
            message = f"{name}: expected None or an int in [0, {MAX_INDEX}], got {shown(index)}"
            raise ParamInvalidError(message, operator=operator)
        yield index


def facts_of(options: Mapping[str, Any], compared: Sequence[str]) -> dict[str, Any]:
    """Return facts about optional arguments for other ranks, which compare the elements of the arrays in `compared`."""

    def fact(name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return f"checksum {checksum(value)}" if name in compared else "an array"
        return repr(value) if isinstance(value, float) else value

    return {name: fact(name, value) for name, value in options.items() if value is not None}


def checksum(array: NDArray) -> str:
    return f"{zlib.crc32(array.tobytes()):08x}"
