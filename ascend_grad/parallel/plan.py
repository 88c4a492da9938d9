"""Division of a problem's rows into blocks, which are computed in order.

If a block's logits are cached, they are computed once instead of twice. With several blocks, the input gradient of one
is transferred while the next one is computed. Their weight gradients are summed by slices of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Minimum number of rows of a block. With fewer, the additions to the weight's gradient would take notable time.
BLOCK_ROWS = 512
#: Number of blocks that is enough to hide communication, and the maximum: blocks are added without compensation.
OVERLAPPING_BLOCKS, MOST_BLOCKS = 4, 64
#: A slice of the weight's gradient takes at most 1/SLICE_SHARE of the workspace (more if MOST_BLOCKS limits slices).
SLICE_SHARE = 4


class Room(NamedTuple):
    """Capacity of one rank's workspace."""

    cached_rows: int  #: number of rows whose logits fit; 0: logits are computed twice
    blocks: int  #: maximum number of row blocks


def room_for(
    rows: int,
    weight_shape: tuple[int, int],
    dtype: np.dtype,
    accumulator: np.dtype,
    weight_grad_dtype: np.dtype | None,
    workspace: int,
) -> Room:
    """Return the capacity of this rank's workspace. `weight_grad_dtype` None: that gradient is not requested.

    Logits are cached in the dtype of the inputs, so only if it is the accumulator's: rounded logits lose accuracy.
    Weight gradients of 16 bits are summed in a temporary array.
    """
    words, features = weight_shape
    kept = min(rows, workspace // max(1, words * accumulator.itemsize)) if dtype == accumulator else 0
    beside = weight_grad_dtype not in (None, accumulator)
    if beside and words * features * accumulator.itemsize > workspace:
        return Room(kept, 1)
    return Room(kept, max(1, min(rows // BLOCK_ROWS, MOST_BLOCKS)))


def common_blocks(rows: int, rooms: Sequence[Room], overlaps: bool) -> int:
    """Return the number of row blocks, the same on all ranks."""
    most = min(room.blocks for room in rooms)
    needed = [-(-rows // room.cached_rows) for room in rooms if room.cached_rows]
    return max([min(most, OVERLAPPING_BLOCKS) if overlaps else 1, *(each for each in needed if each <= most)])


def word_slices(weight_shape: tuple[int, int], itemsize: int, workspace: int) -> int:
    """Return the number of vocabulary slices that keeps a slice of the weight's gradient small."""
    words, features = weight_shape
    slices = -(-words * features * itemsize * SLICE_SHARE // workspace)
    return max(1, min(slices, words, MOST_BLOCKS))
