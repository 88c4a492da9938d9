"""A queue that knows values: vectors are on the host, and rows that do not matter stay away from the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import arrays
from .array import DeviceArray
from .transfers import Transfers


class SelectedRows:
    """Some of the ``count`` rows of a call, as `queue.Rows`; ``index`` is their numbers, or None for all rows."""

    def __init__(self, queue: ArrayQueue, index: NDArray | None, count: int):
        self._queue, self._index, self._count = queue, index, count

    @property
    def is_empty(self) -> bool:
        return self._index is not None and not self._index.size

    @property
    def is_complete(self) -> bool:
        return self._index is None

    def put(self, array: Any, otherwise: float | None = None, *, is_overwritten: bool = False) -> DeviceArray:
        rows = None if self._index is None else self._index % array.shape[0]
        there = self._queue.put(array, rows=rows)
        return self._queue.copied(there) if is_overwritten and there is array else there

    def put_from(self, rows: SelectedRows, array: DeviceArray) -> DeviceArray:
        index, among = self._index, rows._index
        if index is None or index is among or (among is not None and np.array_equal(index, among)):
            return array
        return self._queue.gathered(array, index if among is None else np.searchsorted(among, index))

    def put_mask(self, mask: Any, count: int) -> DeviceArray:
        if self._index is None:
            return self._queue.mask_bits(mask, count)
        selected = arrays.unpacked(self._queue.values(mask), count)[self._index]
        return self._queue.put(np.packbits(selected, bitorder="little"))

    def of(self, vector: NDArray) -> NDArray:
        return vector if self._index is None else vector[self._index]

    def vector(self, array: Any) -> NDArray:
        if self._index is None:
            return self._queue.vector(array)
        vector = np.zeros((self._count, *(() if array is None else array.shape[1:])))
        if array is not None:
            vector[self._index] = self._queue.values(array)
        return vector

    def restored(self, array: DeviceArray) -> DeviceArray | NDArray:
        """As `queue.Rows` says. If a row is there twice, the sums are computed on the host, and not yet rounded."""
        if self._index is None:
            return array
        places = self._index % self._count
        first, second = np.split(places, [np.searchsorted(self._index, self._count)])
        if not np.intersect1d(first, second).size:
            return self._queue.scattered(array, places, self._count)
        values = self._queue.values(array).astype(np.float64)
        total = np.zeros((self._count, *array.shape[1:]))
        total[first] = values[: first.size]
        total[second] += values[first.size :]
        return total

    def cleared(self, array: DeviceArray) -> DeviceArray:
        return self._queue.cleared(array) if self.is_empty else array


class ArrayQueue(Transfers):
    """The vectors of a session, and the repairs that look at values."""

    xp = np

    def vector(self, array: Any, dtype: Any = np.float64) -> NDArray:
        return np.asarray(self.values(array), dtype)

    def numbers(self, count: int) -> NDArray:
        return np.arange(count)

    def largest(self, values: NDArray, places: NDArray, count: int) -> tuple[NDArray, NDArray]:
        order = np.lexsort((places, -values))[:, :count]
        return np.take_along_axis(values, order, 1), np.take_along_axis(places, order, 1)

    def compact(self, counted: NDArray) -> SelectedRows:
        return self.select(counted, counted.size)

    def select(self, present: NDArray, count: int) -> SelectedRows:
        is_complete = present.size == count and bool(np.all(present))
        return SelectedRows(self, None if is_complete else np.flatnonzero(present), count)

    def mask_bits(self, mask: Any, count: int) -> DeviceArray:
        if mask.dtype == np.uint8:
            return mask if isinstance(mask, DeviceArray) else self.put(arrays.counted(mask, count))
        if isinstance(mask, DeviceArray) and mask.cache.packed is not None:
            return mask.cache.packed
        return self.put(np.packbits(self.values(mask), bitorder="little"))

    def packed_copy(self, array: NDArray) -> DeviceArray | None:
        """Return the bits of a vector of bools on the device; None for other arrays (Q3)."""
        return self.mask_bits(array, array.size) if array.dtype == np.bool_ and array.ndim == 1 else None

    def safe_targets(self, grad: Any, target: Any, mask: Any, extent: int) -> tuple[Any, Any]:
        """As `queue.Queue` says. Targets that the device made with their mask are safe already."""
        if not (isinstance(target, DeviceArray) and target.is_known_below(extent, mask)):
            values = self.values(target)
            elsewhere = arrays.unpacked(self.values(mask), values.size)
            if np.any(elsewhere & ((values < 0) | (values >= extent))):
                target = self._repaired(target, mask, elsewhere)
        return grad, target

    def _repaired(self, target: Any, mask: Any, elsewhere: NDArray) -> NDArray | DeviceArray:
        """Return the repaired targets. If they are of an array on the device, they go there once for the same mask."""

        def repaired() -> NDArray:
            return np.where(elsewhere, target.dtype.type(0), self.values(target))

        if not isinstance(target, DeviceArray) or target.storage.is_shared or mask.storage.is_shared:
            return repaired()
        there = target.cache.repaired_for(mask)
        if there is None:
            there = self.put(repaired())
            self.keep(there)
            target.cache.remember_repaired(mask, there)
        return self.keep_alive(there)  # another thread may replace them by the targets for another mask

    def clear_padding(self, mask: DeviceArray, count: int) -> None:
        mask.cache.set_bits(count)
