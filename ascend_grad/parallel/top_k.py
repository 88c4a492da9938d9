"""The largest log-probabilities of each row over a vocabulary that is split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import arrays
from .._call import Call, checked
from .._dispatch import requested
from ..arguments import thread_count
from ..errors import ParamInvalidError, UnsupportedDeviceError
from ..operators import losses
from ..operators.options import MAX_TOP_K, OPTIONS
from ..operators.ranks import OF_ROWS, VOCABULARY_PARALLEL_TOP_K
from ..operators.results import LinearTopK
from ..operators.signatures import completed, options_like, with_options
from .agreement import Attempt, check_agreement
from .communicators import Collectives
from .part_backend import HostBackend
from .row_statistics import NUMBERS, RowStatistics, empty_part, write_summands
from .shard import check_entries, check_memory, facts_of, facts_of_shard, indices, placed
from .transports import collectives
from .vocabulary_parallel import SHARD_OPTIONS, WORDS, linear_cross_entropy

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup

    from ..option_types import TopKOptions
    from .communicators import Communicator

_NAME = VOCABULARY_PARALLEL_TOP_K.name
_OPTIONS = SHARD_OPTIONS | options_like(losses.linear_top_k)


@with_options(_OPTIONS, WORDS, like=linear_cross_entropy)
def linear_top_k(
    input: ArrayLike,
    weight_shard: ArrayLike,
    k: int,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    **options: Unpack[TopKOptions[ArrayLike, float]],
) -> LinearTopK[NDArray]:
    """Compute the k largest log-probabilities of a linear layer for each row, with the vocabulary split over ranks.

    All ranks of `comm` call it with the same tokens, each with its own rows of the weight. The results are what
    `ascend_grad.linear_top_k` computes from the whole weight, on every rank::

        log_prob, index = parallel.linear_top_k(input, weight_shard, k, comm=comm)

    Parameters
    ----------
    k : int
        The number of log-probabilities of each row: 1 to 128, and at most the number of entries of the whole
        vocabulary; the same on every rank.

    Returns
    -------
    log_prob : ndarray, shape (..., k)
        The k largest log-probabilities of each row, from the largest down; float32, or float64 if `input` is float64.
    index : ndarray of int64, shape (..., k)
        Their ids in the whole vocabulary. Of equal logits the one with the lower id comes first.

    Raises
    ------
    UnsupportedDeviceError
        361001: arrays are on an Ascend NPU, or it is requested, which does not have this operator.

    Notes
    -----
    Results are arrays of the library that the arguments belong to. Every rank computes the same bits.

    One call makes these collective operations: a gathering of 1024 bytes from each rank, a gathering of BT (2 k + 2)
    numbers in float64 from each rank, and the sum of one number.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad import parallel
    >>> logits = np.log([[0.5, 0.125, 0.25, 0.125]])
    >>> log_prob, index = parallel.linear_top_k(np.eye(1), logits.T, 3, comm=None)
    >>> index
    array([[0, 2, 1]])
    >>> np.exp(log_prob).round(3)
    array([[0.5  , 0.25 , 0.125]])
    """
    given = completed(options, _OPTIONS, "linear_top_k")
    ranks = collectives(comm, "comm", _NAME)
    attempt = Attempt(_NAME)

    def prepare() -> tuple[_Part, dict[str, Any]]:
        values = [input, weight_shard, k, *(given[name] for name in VOCABULARY_PARALLEL_TOP_K.parameters[3:])]
        check_entries(weight_shard, given, ranks, _NAME)
        call = checked(VOCABULARY_PARALLEL_TOP_K, values)
        part = _Part(call, ranks, given)
        return part, part.facts()

    prepared = attempt.run(prepare)
    records = attempt.exchange_records(ranks, None if prepared is None else prepared[1])
    assert prepared is not None  # otherwise exchange_records() has raised
    part, _ = prepared
    part.place(records)
    attempt.run(part.find_largest)
    gathered = ranks.allgather(part.largest, part.gathered)
    attempt.share(ranks)
    found = attempt.run(lambda: part.merged(gathered))
    attempt.raise_kept()
    assert found is not None  # otherwise raise_kept() has raised
    return found


class _Part:
    """This rank's part of a vocabulary, and the largest logits of its entries."""

    def __init__(self, call: Call, ranks: Collectives, options: dict[str, Any]):
        self._call, self._ranks, self._a = call, ranks, call.arguments
        check_memory(call, ranks)
        backend, _ = requested(options["backend"], call.operator)
        threads = thread_count(options["num_threads"], _NAME)
        self._backend = HostBackend(backend == "reference", self._a["workspace_bytes"] or 0, threads)
        if call.device is not None or backend not in ("auto", "cpu", "reference"):
            raise UnsupportedDeviceError("the function is not implemented for the NPU", operator=_NAME)
        self._start_index, self._size = indices(options, _NAME)
        self._options = {
            name: arrays.wide(value) if isinstance(value, np.ndarray) else value
            for name, value in self._a.items()
            if name in OPTIONS
        }
        rows, k = self._a["input"].shape[0], min(self._a["k"], MAX_TOP_K)
        #: For each row the largest logit of this rank (NaN if the row has no log-softmax), the sum of the other
        #: exponentials, and the k largest logits with their ids. Missing ones are -inf, with the id `vocab_size`.
        self.largest = np.zeros((rows, 2 + 2 * k))
        self.gathered = np.empty((ranks.size, *self.largest.shape))

    def facts(self) -> dict[str, Any]:
        """Return this rank's record for the others."""
        input = self._a["input"]
        same = {
            "operator": _NAME,
            "shape of input": list(input.shape),
            "dtype of input": arrays.native(input.dtype).name,
            "vocab_size": self._size,
            "k": self._a["k"],
            **facts_of(self._options, OF_ROWS),
        }
        return {"same": same, **facts_of_shard(self._a["weight_shard"], self._start_index)}

    def place(self, records: list[dict[str, Any]]) -> None:
        """Find this rank's part of the vocabulary, or raise the same error on every rank."""
        check_agreement([record["same"] for record in records], _NAME)
        self._start, self._vocab_size = placed(records, self._ranks.rank, self._size, _NAME)
        k, most = self._a["k"], min(MAX_TOP_K, self._vocab_size)
        if not most:
            raise ParamInvalidError("weight_shard: expected at least one row over all ranks, got none", operator=_NAME)
        if k > most:
            raise ParamInvalidError(f"k: expected an int in [1, {most}], got {k}", operator=_NAME)

    def find_largest(self) -> None:
        """Compute the largest logits of this rank."""
        k = self._a["k"]
        numbers, values, ids = np.split(self.largest, [2, 2 + k], axis=1)
        numbers[...], values[...], ids[...] = (-np.inf, 0), -np.inf, self._vocab_size
        known = min(k, len(self._a["weight_shard"]))
        if known and len(values):
            found = self._backend.top_k(self._a["input"], self._a["weight_shard"], known, self._options)
            values[:, :known], ids[:, :known], numbers[:, 1] = found[0], found[1] + float(self._start), found[2]
            numbers[:, 0] = np.where(np.isnan(found[2]), np.nan, values[:, 0])

    def merged(self, gathered: NDArray) -> LinearTopK[NDArray]:
        """Return the results, from the largest logits of all ranks."""
        k, rows = self._a["k"], len(self.largest)
        temperature = np.broadcast_to(self._options["temperature"], rows)
        maxima, rest = gathered[..., 0], gathered[..., 1]
        values, ids = (np.concatenate(list(gathered[..., begin : begin + k]), axis=1) for begin in (2, 2 + k))
        with np.errstate(all="ignore"):
            largest = maxima.max(axis=0)
            sums = np.zeros((rows, NUMBERS))
            for of_rank, others in zip(maxima, rest):
                part, summands = empty_part(rows, 0), np.zeros_like(sums)
                part.numbers[0], part.numbers[1] = of_rank / temperature, others
                write_summands(part, largest / temperature, 0.0, summands)
                sums += summands
            log_sum = RowStatistics(largest, sums, 0).log_sum
            order = np.lexsort((ids, -values))[:, :k]
            log_prob = (np.take_along_axis(values, order, axis=1) - largest[:, None]) / temperature[:, None]
            log_prob -= log_sum[:, None]
        found = np.take_along_axis(ids, order, axis=1).astype(np.int64)
        unknown = np.isnan(log_sum)
        log_prob[unknown], found[unknown] = np.nan, np.arange(k)
        accumulator = arrays.accumulator_dtype(self._a["input"].dtype)
        leading = (len(found),) if self._call.leading is None else self._call.leading
        results = [each.reshape((*leading, k)) for each in (log_prob.astype(accumulator), found)]
        return LinearTopK(*self._call.in_library(results))
