"""Validated calls on the CPU: results allocated around the schedules of `_rowwise_python` and `_linear_python`.

Whatever is allocated is allocated before kernels begin to write: after that, nothing can fail for memory.
"""

import math

import numpy as np

cimport numpy as cnp

from ascend_grad cimport _memory, _rowwise_python
from ascend_grad._call cimport BT, H, V, Call, Result, accumulator_of, native_vector
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._linear_rows cimport Rows
from ascend_grad._linear_rows cimport holds_sums
from ascend_grad._memory cimport SIZE_LIMIT
from ascend_grad._overlap cimport may_overlap

from . import _linear_python
from ._dtypes import FLOATING_DTYPES
from .arrays import counted

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float64 = np.dtype(np.float64)


# ---- linear operators ------------------------------------------------------------------------------------------------


cdef bint overlaps_an_input(Call call, cnp.ndarray out) except -1:
    for value in call.values:
        if cnp.PyArray_CheckExact(value) and may_overlap(out, <cnp.ndarray>value):
            return True
    return False


cdef cnp.ndarray place_for(Call call, int i, list aside):
    """Where to compute a result: a new array, the caller's, or a new one aside of it, if that shares memory with an input.

    None where the result is not asked for. Of an array aside, a pair is added to the list: the caller's, and the new one.
    """
    cdef Result result = call.operator.result_specs[i]
    cdef cnp.ndarray out = None
    if i < 2:
        out = call.second_out if i else call.first_out
    if not result.is_asked_for(call):
        return None
    if out is None:
        return result.allocate(call)
    if not overlaps_an_input(call, out):
        return out
    cdef cnp.ndarray beside = _memory.empty_like(out, <cnp.dtype>_dtypes[dtype_of(out)])
    aside.append((out, beside))
    return beside


cdef tuple delivered(Call call, cnp.ndarray first, cnp.ndarray second):
    """What a call with two results returns."""
    if call.first_out is not None:
        first = call.first_out
    if call.second_out is not None:
        second = call.second_out
    return first, second


cdef object linear_gradient(Call call, int threads):
    cdef object grad, x, weight, mask, target, logits_max, sum_exp, softmax, workspace_bytes, filter_eps
    grad, x, weight, mask, target, _, logits_max, sum_exp, softmax, _, workspace_bytes, filter_eps = call.values
    cdef list aside = []
    cdef cnp.ndarray input_grad = place_for(call, 0, aside), weight_grad = place_for(call, 1, aside)
    rows = Rows(
        native_vector(target), 0, call.sizes[V], native_vector(counted(mask, call.sizes[BT])), native_vector(grad),
        None if logits_max is None else native_vector(logits_max), None if sum_exp is None else native_vector(sum_exp)
    )
    _linear_python.gradient(
        x, weight, rows, softmax, input_grad, weight_grad, workspace_bytes or 0, filter_eps, threads, aside
    )
    return delivered(call, input_grad, weight_grad)


cdef object linear_statistics(Call call, int threads):
    cdef object x, weight, target, start, end, return_logits
    x, weight, target, start, end, return_logits = call.values
    return _linear_python.statistics(x, weight, native_vector(target), start, end, return_logits, threads)


cdef object linear_loss(Call call, int threads):
    cdef object logits_max, sum_exp, predicted, logits
    logits_max, sum_exp, predicted, _, logits = call.values
    cdef list aside = []
    cdef cnp.ndarray result = place_for(call, 0, aside), softmax = place_for(call, 1, aside)
    sum_exp, predicted = native_vector(sum_exp), native_vector(predicted)
    if softmax is not None:
        _linear_python.probabilities(logits, native_vector(logits_max), sum_exp, softmax, threads)
    _linear_python.losses(sum_exp, predicted, result)
    _linear_python.copy_all(aside)
    return delivered(call, result, softmax)


cdef cnp.ndarray doubles(object numbers):
    """One number, or a vector of any floating dtype and layout, as a contiguous vector of float64."""
    cdef cnp.npy_intp one = 1
    cdef cnp.ndarray result
    if not isinstance(numbers, float):
        with np.errstate(all="ignore"):
            return np.require(numbers, _float64, ["C", "A"])
    result = _memory.empty(1, &one, _float64)
    (<double *>cnp.PyArray_DATA(result))[0] = numbers
    return result


cdef object linear_cross_entropy(Call call, int threads):
    cdef object x, weight, target, reduction, ignored, grad_loss, start, workspace_bytes, filter_eps
    x, weight, target, reduction, ignored, grad_loss, start, _, _, workspace_bytes, filter_eps = call.values
    cdef list aside = []
    cdef cnp.ndarray result = place_for(call, 0, aside)
    cdef cnp.ndarray input_grad = place_for(call, 1, aside), weight_grad = place_for(call, 2, aside)
    _linear_python.loss_and_gradients(
        x, weight, native_vector(target), start, ignored, reduction, doubles(grad_loss), result, input_grad, weight_grad,
        workspace_bytes or 0, filter_eps, threads
    )
    return result, input_grad, weight_grad


cdef object linear_workspace_size(Call call):
    """Bytes beyond arguments and results, at most, from shapes, dtypes and layouts alone.

    The workspace; an accumulator of input's size where the result cannot be one (16 bits, another dtype, no unit
    stride); a copy of each result whose `out` overlaps an input; some numbers for each row.
    """
    cdef object a = call.arguments, rows = call.sizes[BT]  # Python's numbers: sums of them may be beyond 2**63
    size = sum([out.nbytes for out in call.outs if out is not None and overlaps_an_input(call, out)])
    if call.operator.name == "fused_cross_entropy_loss_with_max_sum":
        return size + 64 * rows
    x, weight, itemsize = a["input"], a["weight"], a["input"].itemsize
    first, second = a.get("output_mask", (False, False)) if a.get("return_grad", True) else (False, False)
    workspace = a.get("workspace_bytes")
    if workspace is None:
        beside = a["softmax"].nbytes if a.get("softmax") is not None else 0
        if a.get("return_logits"):
            beside = rows * call.sizes[V] * itemsize
        workspace = _linear_python.default_workspace(x, weight, first, second, beside)

    plans, bound = _linear_python.plans, _linear_python.workspace_bound
    passes = [0]
    if call.operator.name != "fused_linear_cross_entropy_loss_grad":
        passes.append(bound(plans(x, weight, rows, workspace, True, False, False, False), workspace))
    if first or second:
        acc_size = accumulator_of(x).itemsize
        # Whether the weight's gradient is added up in the workspace first.
        *_, input_grad, weight_grad = call.outs
        buffered = second and (itemsize != acc_size or weight_grad is not None)
        recomputed = a.get("softmax") is None
        passes.append(bound(plans(x, weight, rows, workspace, recomputed, first, second, buffered), workspace))
        if call.operator.name == "linear_cross_entropy":
            # Where all rows' logits cannot be kept, those of fewer rows may be, in the whole workspace.
            keeping = plans(x, weight, rows, workspace, True, first, second, buffered, True)
            passes.append(bound(keeping, workspace) if keeping else workspace)
        holds = itemsize == acc_size if input_grad is None else holds_sums(input_grad, acc_size)
        if first and not holds:
            size += acc_size * rows * call.sizes[H]
    return size + max(passes) + 64 * rows


# ---- any operator ----------------------------------------------------------------------------------------------------


cpdef object run(Call call, int threads):
    """The result of a validated call, or a tuple of its results. `threads`: 0 for the default."""
    cdef str name = call.operator.name
    if call.sizes[BT] < 0:  # only linear operators have sizes
        return _rowwise_python.compute(call, threads)
    if name == "fused_linear_cross_entropy_loss_grad":
        return linear_gradient(call, threads)
    if name == "fused_linear_online_max_sum":
        return linear_statistics(call, threads)
    if name == "fused_cross_entropy_loss_with_max_sum":
        return linear_loss(call, threads)
    return linear_cross_entropy(call, threads)


def workspace_size(Call call, int threads):
    """Return the bytes that `run` takes beyond arguments and results, at most: by shapes, dtypes and layouts alone."""
    # Arguments may be of any size: rows without a stride take no memory.
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in call.specs if spec is not None]
    if max(sizes, default=0) > SIZE_LIMIT:
        raise MemoryError(f"{call.operator.name}: a result of {max(sizes)} bytes fits no memory")
    return _rowwise_python.workspace_bound(call, threads) if call.sizes[BT] < 0 else linear_workspace_size(call)
