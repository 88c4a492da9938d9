"""The files of a Zarr array: one for each cell of the grid of its chunks, or of its shards."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import zarr

#: The part of an array that an operator takes at a time: a slice for each axis.
Box = tuple[slice, ...]


class Grid(NamedTuple):
    """Divide an array into cells, each of which is a file."""

    shape: tuple[int, ...]
    #: The lengths of a cell.
    lengths: tuple[int, ...]
    #: Returns the key of a cell, which is the path of its file below the array.
    encode: Callable[[tuple[int, ...]], str]

    @classmethod
    def of(cls, array: zarr.Array) -> Grid:
        """Return the grid of an array."""
        return cls(array.shape, array.shards or array.chunks, array.metadata.encode_chunk_key)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of cells along each axis."""
        return tuple(-(-length // n) for length, n in zip(self.shape, self.lengths))

    def boxes(self, dim: int) -> Iterator[Box]:
        """Yield boxes that cover the array, each whole along ``dim`` and one cell long along all other axes."""
        rows = self._rows(dim)
        for cell in np.ndindex(rows.counts):
            yield tuple(slice(i * n, min((i + 1) * n, m)) for i, n, m in zip(cell, rows.lengths, self.shape))

    def number_of_boxes(self, dim: int) -> int:
        """Return how many boxes there are."""
        return math.prod(self._rows(dim).counts)

    def keys(self, box: Box) -> Iterator[str]:
        """Yield the keys of the cells that a box touches."""
        cells = (range(part.start // n, -(-part.stop // n)) for part, n in zip(box, self.lengths))
        return map(self.encode, itertools.product(*cells))

    def has(self, path: str, is_folder: bool) -> bool:
        """Return whether a path below the array is the key of a cell, or a folder with keys of cells."""
        numbers = [int(digits) for digits in re.findall("[0-9]+", path)]
        cell = tuple((numbers + [0] * len(self.shape))[: len(self.shape)])
        if any(i >= count for i, count in zip(cell, self.counts)):
            return False
        key = self.encode(cell)
        return key.startswith(f"{path}/") if is_folder else key == path

    def _rows(self, dim: int) -> Grid:
        """Return the grid with cells that are whole along an axis."""
        lengths = (max(m, 1) if axis == dim else n for axis, (n, m) in enumerate(zip(self.lengths, self.shape)))
        return self._replace(lengths=tuple(lengths))
