"""Differences of the device from the contract, and the repair of each.

=====================================================  =================================================================
quirk of the device                                    repair
=====================================================  =================================================================
Q1 the fused gradient overwrites its ``softmax``       `Rows.put`: it gets a copy, if the array is the caller's
Q2 the fused gradient computes NaN from rows of NaN    `Queue.select`: a session leaves those rows out of the call, and
   or infinity even where ``grad`` is 0                their ``input_grad`` is 0; of tensors they become 0 before and
                                                       after
Q3 ``target_mask`` is documented only as bits          `Queue.mask_bits`: bools are packed first. `packed_copy`: they
                                                       are packed when `asarray` copies them, as they may become a mask
Q4 the fused gradient uses ``masked_target`` of        `Queue.safe_targets`: it is 0 there, for the mask of the last
   masked rows as a place in memory                    call kept beside an array on the device
Q5 the bits of ``target_mask`` beyond the last row     `Queue.clear_padding`: of tensors on the device, else where they
   are undefined                                       are copied to the host
Q6 some operators write the bits of their dtype into   `computing_dtype`: results of another dtype are computed in
   an ``out`` of another dtype                         float32 on the device (exact for 16-bit arguments) and rounded
                                                       once: on the host for arrays, by torch on the device for tensors;
                                                       nothing but the arguments' dtype is passed
Q7 arrays without elements: results stay unwritten     `is_empty`: such calls are computed on the host
Q8 rank 0 is not a rank                                `shape_for_device`: it is rank 1
Q9 the online max sum compares ids as float32, which   `tokens.Tokens.places`: where only one shard is worked on, its
   is exact up to 2**24                                ids start at 0
=====================================================  =================================================================

For tensors nothing may wait for values, so operators of torch repair Q1 to Q5 and Q9 in the order of the same stream. A
target outside of the weight, which the contract makes an error, becomes 0 there, and the row's loss, log-probability
and ``grad`` become NaN. One difference remains: a row of ``weight_grad`` may be NaN if the weight has an infinity there
and some rows have no gradient.

(Other layouts - negative strides, byte order, alignment - need no repair: the copy on the device is contiguous.)
"""

from __future__ import annotations

import numpy as np

from ... import arrays
from ..._call import Call
from ...operators.table import LOSSES, ROWWISE
from .array import DeviceArray


def computing_dtype(call: Call) -> np.dtype | None:
    """Return the dtype in which a row-wise operator's arrays go to the device, None for their own (Q6)."""
    (out,) = call.outs
    if out is None or arrays.native(out.dtype) == arrays.native(call.arrays[0].dtype):
        return None
    return np.dtype(np.float32)


def is_empty(call: Call) -> bool:
    """Return whether an array of the call has no elements (Q7)."""
    of_logits = call.operator in (*ROWWISE, *LOSSES)
    return 0 in call.arrays[0].shape if of_logits else 0 in call.dims.values()


def shape_for_device(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with at least one dimension (Q8)."""
    return shape or (1,)


def layout_for_device(array: DeviceArray) -> tuple[tuple[int, ...], int, int] | None:
    """Return strides, offset and space of an array in memory of another library, None for other arrays (Q8)."""
    layout = array.storage.layout
    return None if layout is None else (shape_for_device(layout.strides), layout.offset, layout.storage_size)
