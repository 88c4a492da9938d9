"""Differences of the device from the contract, and the repair of each.

=====================================================  =================================================================
quirk of the device                                    repair
=====================================================  =================================================================
Q1 the fused gradient overwrites its ``softmax``       `writable_copy`: it gets a copy, if the array is the caller's
Q2 the fused gradient computes NaN from rows of NaN    `rows_with_gradient`: those rows are left out of the call, and
   or infinity even where ``grad`` is 0                their ``input_grad`` is 0
Q3 ``target_mask`` is documented as bits alone         `mask_bits`: bools are packed first; `packed_copy`: bools are
                                                       packed when `asarray` copies them, as they may become a mask
Q4 the fused gradient reads ``masked_target`` on       `safe_targets`: it is 0 there, for the mask of the last call kept
   masked rows, too, as a place in memory              beside an array on the device
Q5 the bits of ``target_mask`` beyond the last row     `arrays.clear_padding`, where they are copied to the host
   are undefined
Q6 some operators take an ``out`` of another dtype     `computing_dtype`: results of another dtype are computed in
   for one of their own, bit by bit                    float32 on the device (exact for 16-bit arguments) and rounded
                                                       once: on the host for arrays, by torch on the device for tensors;
                                                       nothing but the arguments' dtype is passed
Q7 arrays without elements: results stay unwritten     `is_empty`: such calls are computed on the host
Q8 rank 0 is not a rank                                `shape_for_device`: it is rank 1
Q9 the online max sum compares ids as float32, which   `places`: where only one shard is worked on, its ids start at 0
   is exact up to 2**24
=====================================================  =================================================================

(For tensors of torch_npu `tensor_operators` repairs Q1 to Q5 and Q9 without reading values on the host.)

(Other layouts - negative strides, byte order, alignment - need no repair: the copy on the device is contiguous.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import arrays
from ..._call import Call
from ...operators.table import ROWWISE
from .array import DeviceArray
from .session import Session


def writable_copy(session: Session, softmax: Any, rows: NDArray | None) -> DeviceArray:
    """Return the probabilities on the device, in memory that the operator may overwrite (Q1)."""
    there = session.put(softmax, rows=rows)
    return session.copied(there) if there is softmax else there


def rows_with_gradient(session: Session, grad: NDArray | DeviceArray) -> NDArray | None:
    """Return the rows whose ``grad`` is not 0; None if all rows are such (Q2)."""
    values = session.values(grad)
    absent = values == 0  # zeros of either sign; a NaN is a gradient
    return np.flatnonzero(~absent) if np.any(absent) else None


def mask_bits(session: Session, mask: Any, count: int, rows: NDArray | None) -> DeviceArray:
    """Return the mask of ``count`` rows, or of some of them, as bits on the device (Q3)."""
    if rows is None and mask.dtype == np.uint8:
        return mask if isinstance(mask, DeviceArray) else session.put(arrays.counted(mask, count))
    if rows is None and isinstance(mask, DeviceArray) and mask.known.packed is not None:
        return mask.known.packed
    chosen = arrays.unpacked(session.values(mask), count)
    return session.put(np.packbits(chosen if rows is None else chosen[rows], bitorder="little"))


def packed_copy(session: Session, array: NDArray) -> DeviceArray | None:
    """Return the bits of a vector of bools on the device; None for other arrays (Q3)."""
    return session.put(np.packbits(array, bitorder="little")) if array.dtype == np.bool_ and array.ndim == 1 else None


def safe_targets(session: Session, target: Any, mask: Any, extent: int, rows: NDArray | None) -> DeviceArray:
    """Return the targets with 0 on masked rows (Q4). Targets that the device made with their mask have that already."""
    if not (isinstance(target, DeviceArray) and target.is_known_below(extent, mask)):
        values = session.values(target)
        elsewhere = arrays.unpacked(session.values(mask), values.size)
        if np.any(elsewhere & ((values < 0) | (values >= extent))):
            target = _repaired(session, target, mask, elsewhere)
    return session.put(target, rows=rows)


def _repaired(session: Session, target: Any, mask: Any, elsewhere: NDArray) -> NDArray | DeviceArray:
    """Return the repaired targets. If they are of an array on the device, they go there once for the same mask."""

    def repaired() -> NDArray:
        return np.where(elsewhere, target.dtype.type(0), session.values(target))

    if not isinstance(target, DeviceArray) or target.known.is_shared or mask.known.is_shared:
        return repaired()
    there = target.known.repaired_for(mask)
    if there is None:
        there = session.put(repaired())
        session.keep(there)
        target.known.remember_repaired(mask, there)
    return session.keep_alive(there)  # another thread may replace them by the targets for another mask


def places(session: Session, target: Any, rows: NDArray | None, start: int) -> DeviceArray:
    """Return the targets of these rows of the only shard, less the id that the shard starts with (Q9)."""
    if rows is None and not start:
        return session.put(target)
    values = session.values(target).astype(np.int64)
    return session.put((values if rows is None else values[rows]) - start)


def computing_dtype(call: Call) -> np.dtype | None:
    """Return the dtype in which a row-wise operator's arrays go to the device, None for their own (Q6)."""
    (out,) = call.outs
    if out is None or arrays.native(out.dtype) == arrays.native(call.arrays[0].dtype):
        return None
    return np.dtype(np.float32)


def is_empty(call: Call) -> bool:
    """Return whether an array of the call has no elements (Q7)."""
    return 0 in call.arrays[0].shape if call.operator in ROWWISE else 0 in call.dims.values()


def shape_for_device(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with at least one dimension (Q8)."""
    return shape or (1,)


def layout_for_device(array: DeviceArray) -> tuple[tuple[int, ...], int, int] | None:
    """Return strides, offset and space of an array in memory of another library, None for other arrays (Q8)."""
    layout = array.known.layout
    return None if layout is None else (shape_for_device(layout.strides), layout.offset, layout.storage_size)
