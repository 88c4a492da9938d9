"""How the rows are cut into blocks, one after another.

Where a block's logits are kept, they are computed once and not twice. Of several blocks, the input gradient of one
travels while the next one is computed, and the weight gradients are added up, slice by slice of the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Rows of a block, at least: fewer would make the additions to the weight's gradient count.
BLOCK_ROWS = 512
#: Blocks that suffice to hide communication, and blocks at most: their sums are simply added up.
OVERLAPPING_BLOCKS, MOST_BLOCKS = 4, 64
#: A slice of the weight's gradient takes such a part of the workspace.
SLICE_SHARE = 4


class Room(NamedTuple):
    """What one rank's workspace has room for."""

    cached_rows: int  #: rows whose logits it holds; 0: they are computed twice
    blocks: int  #: blocks at most


def room_for(
    rows: int,
    weight_shape: tuple[int, int],
    dtype: np.dtype,
    accumulator: np.dtype,
    weight_grad_dtype: np.dtype | None,
    workspace: int,
) -> Room:
    """What this rank can do; a weight gradient of None is not asked for.

    Logits come in the dtype of the inputs, so only those of accumulators lose nothing. Weight gradients of 16 bits are
    added up beside the result.
    """
    words, features = weight_shape
    kept = min(rows, workspace // max(1, words * accumulator.itemsize)) if dtype == accumulator else 0
    beside = weight_grad_dtype not in (None, accumulator)
    if beside and words * features * accumulator.itemsize > workspace:
        return Room(kept, 1)
    return Room(kept, max(1, min(rows // BLOCK_ROWS, MOST_BLOCKS)))


def common_blocks(rows: int, rooms: Sequence[Room], overlaps: bool) -> int:
    """How many blocks all ranks cut the rows into."""
    most = min(room.blocks for room in rooms)
    needed = [-(-rows // room.cached_rows) for room in rooms if room.cached_rows]
    return max([min(most, OVERLAPPING_BLOCKS) if overlaps else 1, *(each for each in needed if each <= most)])


def word_slices(weight_shape: tuple[int, int], itemsize: int, workspace: int) -> int:
    """How many slices of the words keep a part of the weight's gradient small."""
    words, features = weight_shape
    slices = -(-words * features * itemsize * SLICE_SHARE // workspace)
    return max(1, min(slices, words, MOST_BLOCKS))
