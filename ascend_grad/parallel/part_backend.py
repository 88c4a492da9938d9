"""Statistics and gradients of a part of a vocabulary, by the backends of the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _linear_python
from ..backends import reference
from .row_statistics import PartStatistics, RowStatistics


class PartBackend(NamedTuple):
    """A backend of the host, which computes with this rank's rows of the weight."""

    is_reference: bool
    #: Limit of the workspace, 0 for the default.
    workspace_bytes: int
    #: Number of threads, 0 for the default.
    threads: int

    def statistics(
        self, input: NDArray, weight: NDArray, target: NDArray, options: dict[str, Any], logits: NDArray | None = None
    ) -> PartStatistics:
        """Compute the statistics of the logits of `input` (rows, H) and `weight` (entries, H), which has entries.

        `options` are as in `_linear_python.part_statistics`. `logits` receives the logits (rows, entries) of the rows
        that are not ignored; None: the logits are not requested. The reference backend never returns them.
        """
        if self.is_reference:
            return PartStatistics(*reference.part_statistics(input, weight, target, options))
        found = _linear_python.part_statistics(
            input, weight, target, options, logits, self.workspace_bytes, self.threads
        )
        return PartStatistics(*found)

    def gradients(
        self,
        input: NDArray,
        weight: NDArray,
        target: NDArray,
        options: dict[str, Any],
        rows: RowStatistics,
        target_weights: NDArray,
        results: dict[str, NDArray | None],
    ) -> None:
        """Compute gradients from the statistics of the whole vocabulary, as `_linear_python.part_gradients` does."""
        arguments = input, weight, target, options, rows.numbers
        if self.is_reference:
            reference.part_gradients(*arguments, target_weights, results)
            return
        _linear_python.part_gradients(
            *arguments,
            rows.target_logits,
            np.ascontiguousarray(target_weights),
            results,
            self.workspace_bytes,
            self.threads,
        )
