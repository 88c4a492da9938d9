"""Division of a problem's rows into chunks, which are computed in order.

If a chunk's logits are cached, they are computed once instead of twice. With several chunks, the input gradient of one
is transferred while the next one is computed. Their weight gradients are summed in vocabulary blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Minimum number of rows of a chunk. With fewer, the additions to the weight's gradient would take notable time.
CHUNK_ROWS = 512
#: Minimum number of features for which logits of 16-bit inputs are cached, in float32. With fewer, it is faster to
#: compute them again than to write and read them. With AVX-512 and products in float32, 256 features were measured to
#: make no difference. Products of pairs of bfloat16 may be twice as fast.
MIN_FEATURES_TO_CACHE_16_BITS = 512
#: Number of chunks that is enough to hide communication.
OVERLAPPING_CHUNKS = 4
#: Maximum number of chunks and of vocabulary blocks: their gradients are added without compensation.
MAX_CHUNKS = MAX_VOCAB_BLOCKS = 64
#: A vocabulary block of the weight's gradient takes at most 1/VOCAB_BLOCK_SHARE of the workspace, unless there would
#: be more than MAX_VOCAB_BLOCKS of them.
VOCAB_BLOCK_SHARE = 4


class Capacity(NamedTuple):
    """Capacity of one rank's workspace."""

    cached_rows: int  #: number of rows whose logits fit; 0: logits are computed twice
    chunks: int  #: maximum number of row chunks


def find_capacity(
    rows: int,
    weight_shape: tuple[int, int],
    dtype: np.dtype,
    accumulator: np.dtype,
    weight_grad_dtype: np.dtype | None,
    workspace: int,
) -> Capacity:
    """Return the capacity of this rank's workspace. `weight_grad_dtype` None: that gradient is not requested.

    Logits are cached in the accumulator's dtype. Weight gradients of 16 bits are summed in a temporary array.
    """
    entries, features = weight_shape
    cached_rows = min(rows, workspace // max(1, entries * accumulator.itemsize))
    if dtype != accumulator and features < MIN_FEATURES_TO_CACHE_16_BITS:
        cached_rows = 0
    needs_array = weight_grad_dtype not in (None, accumulator)
    if needs_array and entries * features * accumulator.itemsize > workspace:
        return Capacity(cached_rows, 1)
    return Capacity(cached_rows, max(1, min(rows // CHUNK_ROWS, MAX_CHUNKS)))


def common_chunks(rows: int, capacities: Sequence[Capacity], overlaps: bool) -> int:
    """Return the number of row chunks, the same on all ranks."""
    most = min(each.chunks for each in capacities)
    needed = [-(-rows // each.cached_rows) for each in capacities if each.cached_rows]
    return max([min(most, OVERLAPPING_CHUNKS) if overlaps else 1, *(each for each in needed if each <= most)])


def vocab_blocks(weight_shape: tuple[int, int], itemsize: int, workspace: int) -> int:
    """Return the number of vocabulary blocks that keeps a block of the weight's gradient small."""
    entries, features = weight_shape
    blocks = -(-entries * features * itemsize * VOCAB_BLOCK_SHARE // workspace)
    return max(1, min(blocks, entries, MAX_VOCAB_BLOCKS))
