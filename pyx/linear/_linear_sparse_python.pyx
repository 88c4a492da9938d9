"""The loss of a linear layer whose input is sparse, and products of its Hessian: calls, and memory for their schedules.

Rows and classes exist: without any, the input is not read, and `_linear_python` computes the call.
"""

import numpy as np

cimport numpy as cnp
from libc.string cimport memset

from ascend_grad cimport _cpu, _memory, _threads
from ascend_grad._call cimport BT, LAYER_PRODUCT, LOSS, LOSS_GRADIENT, Call, native_vector
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport ag_dtype
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_problem cimport matrix_of
from ascend_grad._linear_results cimport write_doubles
from ascend_grad._linear_sparse cimport (
    SparseLoss,
    are_starts_valid,
    choose_sparse_threads,
    expected_sparse_threads,
    fits_memory,
    place_sparse_workspace,
    prepare_sparse,
    run_sparse,
    sparse_workspace_size,
)
from ascend_grad._loss_arguments cimport (
    bytes_of_ids_from_zero,
    data_of,
    ids_from_zero,
    option,
    set_options,
    set_results,
    vector_of,
)
from ascend_grad._memory cimport ALIGNMENT
from ascend_grad._views cimport View, view_of

from ._dtypes import FLOATING_DTYPES

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype


cdef int place_of_weight(Call call) noexcept:
    """Return the place of the weight's gradient or product among the results. The bias's is the next."""
    if call.operator.kernels == LAYER_PRODUCT:
        return 0
    return 2 if call.operator.kernels == LOSS else 1


cdef int describe_sparse(SparseLoss *s, Call call, list results, list held, bint with_values) except -1:
    """Fill in the loss of a validated call. `results` has an array, or None, for each result.

    The arrays that hold the options are added to `held`. Without `with_values`, the elements of arrays mean nothing.
    """
    cdef cnp.ndarray data = call.sparse.data, indices = call.sparse.indices, starts = call.sparse.starts
    cdef cnp.ndarray target = option(call, "target"), weight = option(call, "weight")
    cdef int place = place_of_weight(call)
    memset(s, 0, sizeof(SparseLoss))
    s.x.values, s.x.indices, s.x.is_wide = data_of(data), data_of(indices), cnp.PyArray_ITEMSIZE(indices) == 8
    s.x.starts, s.x.features = <const cnp.int64_t *>data_of(starts), call.sparse.shape[1]
    s.rows, s.nonzeros, s.dtype = call.sizes[BT], call.sparse.nonzeros, <ag_dtype>dtype_of(data)
    s.weight, s.weight_grad = view_of(weight), view_of(results[place])
    s.with_bias_grad = results[place + 1] is not None
    if dtype_of(target) >= 0:
        s.prob = view_of(target)
        held += set_options(&s.o, target, call, with_values)
    else:
        describe_targets(s, native_vector(target), call, held, with_values)
    s.o.is_double = cnp.PyArray_ITEMSIZE(data) == 8
    s.bias = vector_of(option(call, "bias"), held, with_values)
    if call.operator.kernels == LOSS:
        set_results(&s.o, results)
    elif call.operator.kernels == LOSS_GRADIENT:
        s.lse = vector_of(option(call, "lse"), held, with_values)
        s.entropy = vector_of(option(call, "entropy"), held, with_values)
    else:
        describe_vector(s, call, held, with_values)
    held += [data, indices, starts]
    if not fits_memory(s):
        shape = f"({cnp.PyArray_DIM(weight, 0)}, {cnp.PyArray_DIM(weight, 1)})"
        raise MemoryError(f"{call.operator.name}: a weight of shape {shape}, transposed, fits no memory")
    return 0


cdef int describe_vector(SparseLoss *s, Call call, list held, bint with_values) except -1:
    """Fill in the vector of a product, rounded to the dtype of the weight."""
    cdef cnp.ndarray vector = option(call, "vector")
    if with_values:
        with np.errstate(all="ignore"):
            vector = vector.astype(_dtypes[dtype_of(option(call, "weight"))], copy=False)
        held.append(vector)
    s.vector, s.vector_bias = view_of(vector), vector_of(option(call, "vector_bias"), held, with_values)
    return 0


cdef int describe_targets(SparseLoss *s, cnp.ndarray target, Call call, list held, bint with_values) except -1:
    """Fill in the options of a loss whose targets are entries of the vocabulary, which count from 0 here."""
    cdef cnp.ndarray shifted = target
    first, ignored = option(call, "vocab_start_index"), option(call, "ignore_index")
    if first and with_values:
        shifted = ids_from_zero(target, first, ignored)
    held += set_options(&s.o, shifted, call, with_values)
    if shifted is not target:
        s.o.ignore_index = -1
    s.o.first_entry = 0
    return 0


cdef Py_ssize_t workspace_of(Call call) except -1:
    """Return the limit of the workspace, 0 for the default."""
    return option(call, "workspace_bytes") or 0


cdef int compute(Call call, list results, int num_threads) except -1:
    """Compute a validated call into new arrays. `results` has an array, or None, for each result."""
    cdef SparseLoss s
    cdef list held = []
    cdef cnp.ndarray memory, bias_grad, predicted
    cdef ag_matrix to
    cdef View view
    cdef double last_check = 0
    describe_sparse(&s, call, results, held, True)
    if not are_starts_valid(&s):
        call.sparse.refuse_starts(call.operator.name)
    prepare_sparse(&s, workspace_of(call), choose_sparse_threads(&s, num_threads))
    memory = _memory.workspace(sparse_workspace_size(&s))
    _memory.check_layout(
        place_sparse_workspace(&s, _memory.aligned(cnp.PyArray_BYTES(memory))) + ALIGNMENT, memory
    )
    with nogil:
        run_sparse(&s, num_threads, &last_check)
    if s.is_outside:
        call.sparse.refuse_columns(call.operator.name)
    if s.with_bias_grad:
        bias_grad = results[place_of_weight(call) + 1]
        view = view_of(bias_grad)
        to = matrix_of(&view)
        write_doubles(_cpu.active(), s.bias_sums, cnp.PyArray_DIM(bias_grad, 0), &to)
    if s.o.outputs.predicted != NULL and option(call, "vocab_start_index"):
        predicted = results[call.operator.results.index("predicted")]
        np.add(predicted, option(call, "vocab_start_index"), out=predicted, where=predicted >= 0)
    return 0


cdef Py_ssize_t workspace_bound_of(Call call, list results, int num_threads) except -1:
    """Return the most bytes that `compute` allocates for arrays of these shapes, but copies of options."""
    cdef SparseLoss s
    cdef cnp.ndarray target
    cdef Py_ssize_t size
    describe_sparse(&s, call, results, [], False)
    prepare_sparse(&s, workspace_of(call), num_threads or _threads.default_threads())
    target = option(call, "target")
    size = sparse_workspace_size(&s) + 8 * cnp.PyArray_SIZE(target)  # ids in native byte order
    size += call.sparse.copied_bytes
    if option(call, "vocab_start_index") and dtype_of(target) < 0:
        size += bytes_of_ids_from_zero(target)
    return size


cdef tuple plan_and_threads(Call call, list results, int num_threads):
    """Return the name of the plan of a call, and the number of threads of calls that follow one another."""
    cdef SparseLoss s
    describe_sparse(&s, call, results, [], False)
    prepare_sparse(&s, workspace_of(call), 1)
    return "nonzeros of rows", expected_sparse_threads(&s, num_threads)
