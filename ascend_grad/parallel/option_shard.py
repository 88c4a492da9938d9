"""The loss with options, of some tokens over a vocabulary that is split over ranks.

Each rank computes the statistics of its logits in float64. The maximum and the sum over the ranks are the statistics of
the whole vocabulary, of which losses and outputs are made. Each rank then computes its gradients from them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays
from .._loss_arguments import weight_sums
from ..errors import BackendUnavailableError
from ..operators.options import OUTPUT_GRADIENTS
from ..operators.ranks import given_over_ranks
from ..operators.results import LossResult, loss_result
from .agreement import Attempt
from .communicators import Collectives
from .row_statistics import (
    NUMBERS,
    RowStatistics,
    candidates,
    comparable_maxima,
    empty_part,
    predicted,
    write_summands,
)
from .shard import Shard, checksum
from .sums import Share, VectorSums

#: Options with one number for each row, or for each target of a row.
_OF_ROWS = ("token_weight", "target_prob", "temperature", *OUTPUT_GRADIENTS)
#: Options with one number for each vocabulary entry of this rank.
_OF_ENTRIES = ("bias", "class_weight")


class OptionShard(Shard):
    """This rank's part of a problem with options, like `Shard`. All rows are one chunk.

    Attributes
    ----------
    bias_grad : ndarray or None
        The gradient with respect to this rank's bias, in float64; None if it is not requested.
    """

    def _allocate_rows(self, rows: int) -> None:
        self._given = given_over_ranks(self._a)
        self._outputs: tuple[str, ...] = self._a["outputs"]
        self._targets = 1 if self.target.ndim == 1 else self.target.shape[1]
        #: The options that are arrays.
        self._vectors = {
            name: _wide(self._a[name])
            for name in (*_OF_ROWS, *_OF_ENTRIES)
            if self._a[name] is not None and not isinstance(self._a[name], float)
        }
        classes = self._vectors.get("class_weight")
        #: Sum of the class weights of this rank's entries.
        self._own_class_sum = float(len(self.weight) if classes is None else classes.sum())
        columns = NUMBERS + self._targets * (1 if classes is None else 2)
        self._maxima, self._first, self._sums = np.zeros(rows), np.zeros(rows), np.zeros((rows, columns))
        self._sums_of_ranks = VectorSums(self._ranks, self._sums.size, np.float64, self._a["deterministic"])
        self._part = empty_part(rows, self._targets)
        self._denominators = np.ones(2)

    def _allocate(self, share: Share, weight_grad: Any) -> None:
        super()._allocate(share, weight_grad)
        wanted = self._a["return_grad"] and "bias" in self._vectors
        self.bias_grad = np.zeros(len(self.weight)) if wanted else None
        #: The same in the dtype of the bias, as the caller gets it.
        self._rounded_bias_grad: NDArray | None = None
        if wanted:
            self._rounded_bias_grad = np.zeros(len(self.weight), arrays.native(self._a["bias"].dtype))
        backend, source = self._requested
        if backend not in ("auto", "cpu", "reference"):
            reason = f"{self._given[0]}: over ranks, a loss with options is computed on the host"
            message = f"backend {backend!r} ({source}) cannot compute this call: {reason}"
            raise BackendUnavailableError(message, operator=self._operator)

    # -- agreement between the ranks --

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        vectors = {name: self._vectors[name] for name in _OF_ROWS if name in self._vectors}
        found["same"] |= {name: f"checksum {checksum(each)}" for name, each in vectors.items()}
        return found | {"class_sum": self._own_class_sum}

    def facts_of_entries(self) -> dict[str, Any]:
        return {name: f"checksum {checksum(self._vectors[name])}" for name in _OF_ENTRIES if name in self._vectors}

    def options(self) -> dict[str, Any]:
        given = {
            name: "an array" if name in self._vectors else each if name == "outputs" else repr(each)
            for name, each in ((name, self._a[name]) for name in self._given)
        }
        return {**super().options(), **given}

    def place(self, cards: list[dict[str, Any]]) -> None:
        super().place(cards)
        self._class_sum = sum(card["class_sum"] for card in cards)

    # -- the loss and the gradients --

    def solve(self, attempt: Attempt, count: int, token_sums: VectorSums | None = None) -> LossResult:
        attempt.run(self._check_targets)
        attempt.run(self._find_statistics)
        self._ranks.allreduce(self._maxima, "max")
        if self._needs_predicted:
            attempt.run(self._find_candidates)
            self._ranks.allreduce(self._first, "max")
        attempt.run(self._relate_to_global_maxima)
        self._sums_of_ranks.add(self._sums)
        attempt.run(self._use_global_statistics)
        if token_sums is not None and self._divides_by_weights:
            token_sums.add(self._denominators)
        result = attempt.run(self._finish)
        if self.input_sum is None:
            attempt.share(self._ranks)
            return result  # type: ignore[return-value]  # nothing failed
        input_grad = self.input_sum.result(attempt)
        return result if result is None else result._replace(input_grad=input_grad)  # type: ignore[return-value]

    @property
    def token_summands(self) -> int:
        return super().token_summands + 1 + (0 if self.bias_grad is None else len(self.bias_grad))

    def write_token_summands(self, result: LossResult, out: NDArray) -> None:
        super().write_token_summands(result, out)
        out[1] = result.correct if "correct" in self._outputs else 0
        if self.bias_grad is not None:
            out[2:] = self.bias_grad

    def with_sums_of_tokens(self, result: LossResult, sums: NDArray) -> LossResult:
        result = super().with_sums_of_tokens(result, sums)
        if "correct" in self._outputs:
            result = result._replace(correct=np.asarray(sums[1], np.int64))  # type: ignore[call-arg]  # one of its fields
        if self.bias_grad is not None:
            self.bias_grad[...] = sums[2:]
            self._round_bias_grad()
        return result

    def convert_results(self, result: LossResult, attempt: Attempt, ranks: Collectives) -> LossResult:
        attempt.raise_kept()
        return result._replace(**dict(zip(result._fields, self._call.in_library(result))))

    def _round_bias_grad(self) -> None:
        """Write the gradient of the bias in the dtype of the bias, if it is requested."""
        if self.bias_grad is not None and self._rounded_bias_grad is not None:
            arrays.round_into(self._rounded_bias_grad, self.bias_grad)

    @property
    def _needs_predicted(self) -> bool:
        return "predicted" in self._outputs or "correct" in self._outputs

    @property
    def _divides_by_weights(self) -> bool:
        return self._a["reduction"] == "mean" and self._a["denominator"] is None

    def _part_options(self) -> dict[str, Any]:
        needs_entropy = "entropy" in self._outputs or "grad_entropy" in self._vectors
        return {
            **super()._part_options(),
            **self._vectors,
            "grad_loss": self._a["grad_loss"],
            "with_more": self._needs_predicted or needs_entropy,
            "with_outputs": bool(self._outputs) or any(name in self._vectors for name in OUTPUT_GRADIENTS),
        }

    def _find_statistics(self) -> None:
        """Compute the statistics of this rank's logits."""
        if self.weight.shape[0] and len(self.target):
            self._part = self._backend.statistics(self.input, self.weight, self.target, self._part_options())
        self._maxima[...] = comparable_maxima(self._part)

    def _find_candidates(self) -> None:
        """Find this rank's candidates for the predicted entries. A rank without vocabulary entries has none."""
        self._first[...] = -np.inf
        if len(self.weight):
            self._first[...] = candidates(self._part, self._maxima, self.start, self.vocab_size)

    def _relate_to_global_maxima(self) -> None:
        write_summands(self._part, self._maxima, self._own_class_sum, self._sums)
        if "class_weight" in self._vectors:
            place = self.target.reshape(-1, self._targets) - self.start
            is_here = (place >= 0) & (place < len(self.weight)) & self._is_target
            of_targets = self._sums[:, NUMBERS + self._targets :]
            of_targets[...] = 0
            of_targets[is_here] = self._vectors["class_weight"][place[is_here]]

    @property
    def _is_target(self) -> NDArray:
        """Return whether each target is not ignored, shape (BT, targets of a row)."""
        return self.target.reshape(len(self.target), self._targets) != self._a["ignore_index"]

    def _use_global_statistics(self) -> None:
        """Find the weights of tokens and targets, and this rank's part of the denominators of a mean."""
        self._rows = RowStatistics(self._maxima, self._sums, self._targets)
        of_class = self._sums[:, NUMBERS + self._targets :] if "class_weight" in self._vectors else 1.0
        prob = self._vectors.get("target_prob", 1.0)
        #: The targets' probabilities times class weights, 0 for ignored targets: shape (BT, targets of a row).
        with np.errstate(all="ignore"):  # 0 times the infinite weight of a class
            self._target_weights = np.where(self._is_target, prob * np.ones(self._is_target.shape) * of_class, 0)
        self._token_weight = np.where(self._counted, self._vectors.get("token_weight", 1.0), 0)
        if self._divides_by_weights:
            options = {"ignore_index": self._a["ignore_index"], "token_weight": self._vectors.get("token_weight")}
            if "target_prob" in self._vectors:
                options["target_prob"] = prob
            elif "class_weight" in self._vectors:
                options["target_class_weight"] = self._target_weights[:, 0]
            self._denominators[...] = weight_sums(self.target, **options)
        elif self._a["reduction"] == "mean":
            self._denominators[...] = self._a["denominator"]

    def _finish(self) -> LossResult:
        """Compute the loss, the outputs and the gradients from the statistics of the whole vocabulary."""
        square = self._a["lse_square_scale"]
        if self._denominators[0] == 0 or (square and self._denominators[1] == 0):
            self._denominators[...] = 0  # the mean is NaN, and has no gradient
        with np.errstate(all="ignore"):
            values = {"loss": self._reduced_loss(), "input_grad": None, "weight_grad": self._weight_grad}
            values |= self._outputs_of_rows()
        self._find_gradients()
        self._round_bias_grad()
        if "bias" in self._vectors:
            values["bias_grad"] = self._rounded_bias_grad
        names = (*(("bias_grad",) if "bias" in self._vectors else ()), *self._outputs)
        fields = ("loss", "input_grad", "weight_grad", *names)
        return loss_result(fields, map(values.__getitem__, fields))

    def _reduced_loss(self) -> NDArray:
        cross_entropy, square = self._losses_of_rows()
        if self._a["reduction"] == "none":
            return (cross_entropy + square).astype(self.accumulator)
        total = np.float64(np.nan)
        if self._denominators[0]:
            total = cross_entropy.sum() / self._denominators[0]
            if self._a["lse_square_scale"]:
                total = total + square.sum() / self._denominators[1]
        return np.asarray(total, self.accumulator)

    def _losses_of_rows(self) -> tuple[NDArray, NDArray]:
        """Return the cross-entropy and the term of the squared lse of each row, times its token weight."""
        rows, s = self._rows, self._a["label_smoothing"]
        weights = (1 - s) * self._target_weights
        loss = np.where(weights == 0, 0, weights * rows.negative_log_prob()).sum(axis=-1)
        if s:
            loss = loss + s / max(self.vocab_size, 1) * rows.smoothed_sum(self._class_sum)
        square = self._a["lse_square_scale"] * rows.lse**2 if self._a["lse_square_scale"] else np.zeros_like(loss)
        r = self._token_weight
        return np.where(r == 0, 0, r * loss), np.where((r == 0) | (square == 0), 0, r * square)

    def _outputs_of_rows(self) -> dict[str, NDArray]:
        """Return the requested results beside the loss, by name."""
        found: dict[str, NDArray] = {}
        for name in self._outputs:
            if name == "log_prob":
                value = -self._rows.negative_log_prob()[:, 0]
            elif name in ("lse", "entropy"):
                value = getattr(self._rows, name)
            else:
                continue
            found[name] = np.where(self._counted, value, 0).astype(self.accumulator)
        if self._needs_predicted:
            entries = predicted(self._first, self.vocab_size)
            found["predicted"] = np.where(self._counted, entries, -1).astype(np.int64)
            if "correct" in self._outputs:
                found["correct"] = np.asarray(np.count_nonzero(self._counted & (entries == self.target)))
        return found

    def _find_gradients(self) -> None:
        """Compute the gradients of this rank's logits, if there are any and gradients are requested."""
        results = {
            "input_grad": None if self.input_sum is None else self.input_sum.matrix,
            "weight_grad": self._weight_grad,
            "bias_grad": self.bias_grad,
        }
        if all(each is None for each in results.values()):
            return
        if not (self.weight.shape[0] and len(self.target)):
            if self._weight_grad is not None:
                self._weight_grad[...] = 0
            return
        options = self._part_options() | {
            "vocab": self.vocab_size,
            "class_sum": self._class_sum if self._a["label_smoothing"] else 0.0,  # it may be infinite
            "denominators": tuple(self._denominators.tolist()),
        }
        self._backend.gradients(
            self.input, self.weight, self.target, options, self._rows, self._target_weights, results
        )


def _wide(values: Any) -> NDArray:
    """Return numbers as a contiguous array of float64."""
    with np.errstate(all="ignore"):
        return np.require(values, np.float64, ["C", "A"])
