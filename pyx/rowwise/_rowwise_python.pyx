"""Row-wise operators on the CPU: the problems of validated calls, and workspaces for their schedules."""

from cython.parallel cimport prange

cimport numpy as cnp

from ascend_grad cimport _cpu, _memory, _openmp
from ascend_grad._call cimport FIRST_OPERAND, MASK_OPERAND, SCALE_OPERAND, SECOND_OPERAND, Call, Result
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport ag_stream_add, ag_variant
from ascend_grad._memory cimport ALIGNMENT, ceil_div
from ascend_grad._overlap cimport overlaps_partly
from ascend_grad._rowwise_kernels cimport AG_MASKED_LOGIT, ag_row_op
from ascend_grad._rowwise_plan cimport Plan, Problem, describe, has_b, has_mask
from ascend_grad._rowwise_schedule cimport (
    Schedule,
    choose_threads,
    compute_at_once,
    place_workspace,
    prepare,
    run,
    threads_of,
    workspace_size,
)
from ascend_grad._views cimport View, view_of

from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

#: The logit of masked positions.
MASKED_LOGIT = float(AG_MASKED_LOGIT)

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype

#: Names of plans, in the order of `Layout`.
cdef tuple _LAYOUTS = ("rows in place", "columns in place", "rows, gathered", "columns, gathered")


cdef int compute_problem(const Problem *p, int asked) except -1:
    cdef Plan serial
    cdef int threads = choose_threads(p, asked, &serial)
    cdef Schedule schedule
    cdef cnp.ndarray memory
    cdef Py_ssize_t nbytes
    cdef double last_check = 0
    # A small problem keeps the interpreter's lock, as releasing it would take as long as the problem.
    if compute_at_once(p, threads):
        return 0
    prepare(&schedule, p, threads, &serial)
    nbytes = workspace_size(&schedule)
    if nbytes:
        memory = _memory.workspace(nbytes)
        _memory.check_layout(
            place_workspace(&schedule, _memory.aligned(cnp.PyArray_BYTES(memory))) + ALIGNMENT, memory
        )
    with nogil:
        run(&schedule, asked == 0, &last_check)
    return 0


cdef bint describe_call(Problem *p, Call call, cnp.ndarray out) except -1:
    """Describe the problem of a validated call whose result is written to `out`; return False if it is empty."""
    cdef const int *slots = call.operator.operand_slots
    cdef cnp.ndarray a = call.values[slots[FIRST_OPERAND]], b = a, mask = a
    cdef double scale = 1.0
    cdef ag_row_op op = <ag_row_op>call.operator.kernels
    cdef int dim = cnp.PyArray_NDIM(a) - 1 if has_mask(op) else call.axis
    if has_b(op):
        b = call.values[slots[SECOND_OPERAND]]
    if has_mask(op):
        mask, scale = call.values[slots[MASK_OPERAND]], call.values[slots[SCALE_OPERAND]]
    cdef View a_view = view_of(a), b_view = view_of(b), mask_view = view_of(mask), out_view = view_of(out)
    return describe(p, op, &a_view, &b_view, &mask_view, &out_view, dim, scale)


cdef object compute(Call call, int threads):
    """Compute a validated call, and return its result."""
    cdef Result result = call.operator.result_specs[0]
    cdef cnp.ndarray given = call.first_out, out = given
    cdef Problem p
    cdef int i
    if given is None:
        out = result.allocate(call)
    else:
        for i in range(call.operator.array_count):
            if overlaps_partly(given, <cnp.ndarray>call.values[i]):
                out = new_like(given)
                break
    if describe_call(&p, call, out):
        compute_problem(&p, threads)
    if given is not None and out is not given:
        _memory.copy_into(given, out)
        return given
    return out


cdef cnp.ndarray new_like(cnp.ndarray given):
    """Allocate a temporary array for a result that overlaps an input."""
    return _memory.empty_like(given, <cnp.dtype>_dtypes[dtype_of(given)])


cdef cnp.ndarray shape_of_result(Call call):
    """Return the caller's array for the result, or an array without memory if it is new or would be temporary."""
    cdef cnp.ndarray out = call.first_out
    if out is None:
        return without_memory(*call.specs[0])
    if any([overlaps_partly(out, each) for each in call.arrays]):
        return without_memory((<object>out).shape, _dtypes[dtype_of(out)])
    return out


cdef Py_ssize_t workspace_bound(Call call, int threads) except -1:
    """Return the most bytes that `compute` allocates in addition to the result, from shapes, dtypes and layouts."""
    cdef Problem p
    cdef Py_ssize_t most = 0, copy = 0
    cdef cnp.ndarray out = shape_of_result(call)
    cdef Schedule schedule
    if call.first_out is not None and out is not call.first_out:
        copy = cnp.PyArray_NBYTES(out)
    if not describe_call(&p, call, out):
        return copy
    for count in [threads] if threads else [1, threads_of(&p, 0)]:
        prepare(&schedule, &p, count, NULL)
        most = max(most, workspace_size(&schedule))
    return copy + most


cdef str plan_name(const Schedule *schedule):
    cdef str blocks = ", in boxes" if schedule.plan.is_boxed else ""
    return _LAYOUTS[<int>schedule.plan.layout] + (", split" if schedule.plan.is_split else blocks)


cdef tuple plan_and_threads(Call call, int threads):
    """Return the name of the plan of a call, the threads of calls that follow one another, and the estimated nanoseconds."""
    cdef Problem p
    cdef Schedule schedule
    if not describe_call(&p, call, shape_of_result(call)):
        return "nothing to compute", 1, 0.0
    threads = threads_of(&p, threads)
    prepare(&schedule, &p, threads, NULL)
    return plan_name(&schedule), threads, schedule.plan.cost


def stream_add(float[::1] a, float[::1] b, float[::1] out, bint nontemporal, int num_threads):
    """Compute out = a + b: the memory traffic of a backward operator without its arithmetic, for benchmarks."""
    cdef Py_ssize_t block = 1 << 14, blocks = ceil_div(a.shape[0], 1 << 14), index
    cdef ag_variant variant = _cpu.active()
    if not _openmp.can_start_team(num_threads):
        num_threads = 1
    for index in prange(blocks, nogil=True, num_threads=num_threads, schedule="dynamic"):
        ag_stream_add(
            variant, &a[index * block], &b[index * block], &out[index * block],
            min(block, a.shape[0] - index * block), nontemporal
        )
    _openmp.record_pool(num_threads)
