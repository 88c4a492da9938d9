"""The products of a linear layer on the device, in blocks of rows and of vocabulary entries, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import isqrt
from typing import Any

import numpy as np

from ..._call import Call
from ...operators.options import MIN_WORKSPACE_BYTES
from .array import DeviceArray
from .matrices import cast, row
from .queue import FLOAT32, Queue

INF = float("inf")
LARGEST = float(np.finfo(FLOAT32).max)

DEFAULT_BYTES = 64 << 20


class Layer:
    """The weight and the bias of a call, and how its logits are split into blocks.

    Parameters
    ----------
    logit_bytes : int
        Bytes for each logit of a block.
    row_matrices, entry_matrices : int
        How many matrices in float32 a block has with the features of its rows, and of its entries.
    """

    def __init__(self, queue: Queue, call: Call, logit_bytes: int, *, row_matrices: int, entry_matrices: int):
        self._queue, self._call = queue, call
        self.weight = queue.put(call.arguments["weight"])
        self.entries, self.features = self.weight.shape
        self._bias: Any = None
        if call.arguments["bias"] is not None:
            bias, xp = queue.vector(call.arguments["bias"]), queue.xp
            self._bias = xp.where((bias > LARGEST) & (bias < INF), LARGEST, bias)
        nbytes, features = self._bytes(), 4 * self.features
        most = min(isqrt(nbytes // logit_bytes) // 2, nbytes // (4 * features * row_matrices))
        #: The rows and the entries of a block, which fits into the workspace.
        self.height = max(min(call.dims["BT"], most), 1)
        width = nbytes - features * row_matrices * self.height
        width //= logit_bytes * self.height + features * entry_matrices
        self.width = min(max(width, 1), self.entries)

    def _bytes(self) -> int:
        call = self._call
        nbytes = call.arguments["workspace_bytes"]
        if nbytes is None:
            results = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in call.specs if spec is not None)
            nbytes = max(DEFAULT_BYTES, (call.arguments["input"].nbytes + self.weight.nbytes + results) // 4)
        return max(nbytes, MIN_WORKSPACE_BYTES)

    def row_blocks(self, count: int) -> Iterator[slice]:
        """Iterate over the blocks of `count` rows."""
        return (slice(begin, min(begin + self.height, count)) for begin in range(0, count, self.height))

    def entry_blocks(self) -> Iterator[slice]:
        """Iterate over the blocks of the vocabulary."""
        return (slice(first, min(first + self.width, self.entries)) for first in range(0, self.entries, self.width))

    def weight_of(self, entries: slice) -> DeviceArray:
        """Return the weight of a block in float32."""
        return cast(self._queue, self.weight.rows(entries.start, entries.stop), FLOAT32)

    def logits(self, rows: DeviceArray, weight: DeviceArray, entries: slice) -> DeviceArray:
        """Return the products of rows and the weight of a block, both in float32, with the bias."""
        z = self._queue.empty((rows.shape[0], entries.stop - entries.start), FLOAT32)
        self._queue.launch("mm", rows, weight.transposed((1, 0)), z)
        if self._bias is not None:
            self._queue.launch("inplace_add", z, row(self._queue, self._bias[entries]))
        return z
