"""The cross-entropy of rows on the CPU: problems of validated calls, their results and workspaces."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _memory, _threads
from ascend_grad._call cimport Call, Result, doubles
from ascend_grad._cross_entropy_schedule cimport (
    CrossEntropy,
    loss_workspace_size,
    place_loss_workspace,
    plan_of,
    prepare_loss,
    run_loss,
    scale_of,
)
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT64
from ascend_grad._memory cimport ALIGNMENT
from ascend_grad._overlap cimport may_overlap, overlaps_partly
from ascend_grad._rowwise_kernels cimport ag_row_op
from ascend_grad._rowwise_plan cimport MAX_AXES, Problem, describe
from ascend_grad._rowwise_python cimport plan_name
from ascend_grad._rowwise_schedule cimport choose_threads, threads_of
from ascend_grad._views cimport View, view_of

from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef cnp.dtype _int64 = np.dtype(np.int64)

# Results, in the order of the contract.
cdef enum:
    LOSS
    INPUT_GRAD
    LSE
    LOG_PROB
    ENTROPY
    PREDICTED
    CORRECT


cdef inline object value(Call call, str name):
    return call.values[<Py_ssize_t>call.operator.slots[name]]


cdef bint is_array(object argument) except -1:
    return argument is not None and cnp.PyArray_CheckExact(argument)


cdef int set_options(CrossEntropy *x, Call call) except -1:
    """Fill in the arguments of a loss that are no addresses."""
    cdef tuple outputs = value(call, "outputs")
    cdef cnp.ndarray target = value(call, "target")
    memset(x, 0, sizeof(CrossEntropy))
    x.has_prob, x.has_class_weight = value(call, "target_prob") is not None, value(call, "class_weight") is not None
    x.has_temperatures, x.has_grad_of_rows = is_array(value(call, "temperature")), is_array(value(call, "grad_loss"))
    x.has_row_outputs = "entropy" in outputs or "predicted" in outputs or "correct" in outputs
    x.has_outputs = len(outputs) > 0
    x.target_count, x.ignore_index = 1, value(call, "ignore_index")
    if x.has_prob:
        x.target_count = cnp.PyArray_DIM(target, cnp.PyArray_NDIM(target) - 1)
    x.label_smoothing, x.lse_square_scale = value(call, "label_smoothing"), value(call, "lse_square_scale")
    x.is_mean = value(call, "reduction") == "mean"
    x.denominator = value(call, "denominator") or 0
    x.return_grad = value(call, "return_grad")
    return 0


cdef bint describe_call(Problem *p, Call call, const CrossEntropy *x, cnp.ndarray out) except -1:
    """Describe the problem of a validated call whose gradient is written to `out`; return False if it is empty.

    `set_options` has filled in `x`.
    """
    cdef cnp.ndarray input = value(call, "input")
    cdef View a = view_of(input), numbers = a, out_view = view_of(out)
    cdef Py_ssize_t[MAX_AXES] strides
    cdef Py_ssize_t stride = 1
    cdef int axis
    cdef double scale = 1.0
    cdef Py_ssize_t classes = a.shape[call.axis] if a.ndim else 1  # an array of rank 0 has one element
    cdef ag_row_op op = plan_of(x, classes, a.dtype != out_view.dtype)
    # An array of numbers of rows in C order, which has no memory: row i is at byte i.
    for axis in range(a.ndim - 1, -1, -1):
        strides[axis] = 0
        if axis != call.axis:
            strides[axis] = stride
            stride *= a.shape[axis]
    numbers.data, numbers.strides, numbers.itemsize = NULL, strides, 1
    if not is_array(value(call, "temperature")):
        scale = scale_of(value(call, "temperature"), a.dtype == AG_FLOAT64)
    return describe(p, op, &a, &a, &numbers, &out_view, call.axis, scale)


cdef class Results:
    """The arrays that a call computes its results into, in the order of the contract; None if not requested."""

    cdef list arrays
    cdef cnp.ndarray given, gradient  # the caller's array for the gradient, and where it is computed

    def __init__(self, Call call not None):
        cdef Result result
        self.arrays = [
            result.allocate(call) if result.is_asked_for(call) and (i != INPUT_GRAD or call.first_out is None) else None
            for i, result in enumerate(call.operator.result_specs)
        ]
        self.given = call.first_out
        self.gradient = self.arrays[INPUT_GRAD] if self.given is None else self.given
        if self.given is not None and is_overwritten(call, self.given):
            self.gradient = _memory.empty_like(self.given, <cnp.dtype>_dtypes[dtype_of(self.given)])

    cdef tuple deliver(self):
        if self.given is not None:
            if self.gradient is not self.given:
                _memory.copy_into(self.given, self.gradient)
            self.arrays[INPUT_GRAD] = self.given
        return tuple(self.arrays)


cdef bint is_overwritten(Call call, cnp.ndarray out) except -1:
    """Return whether writing the gradient to `out` would change arguments that are read later."""
    cdef object input = value(call, "input")
    for each in call.values:
        if is_array(each) and (overlaps_partly(out, input) if each is input else may_overlap(out, <cnp.ndarray>each)):
            return True
    return False


cdef void *data_of(cnp.ndarray array) noexcept:
    return NULL if array is None else cnp.PyArray_DATA(array)


cdef list set_arguments(CrossEntropy *x, Call call):
    """Fill in the arguments of a loss, and return the arrays that hold them."""
    cdef cnp.ndarray input = value(call, "input"), target, prob = None, classes = None
    cdef cnp.ndarray tokens = None, temperature, grad_loss
    target = value(call, "target")  # the copy of the check
    set_options(x, call)
    x.target, x.has_wide_targets = cnp.PyArray_DATA(target), cnp.PyArray_ITEMSIZE(target) == 8
    if x.has_prob:
        prob = doubles(value(call, "target_prob"))
        x.prob = <const double *>cnp.PyArray_DATA(prob)
    if x.has_class_weight:
        classes = doubles(value(call, "class_weight"))
        x.class_weight = <const double *>cnp.PyArray_DATA(classes)
    if value(call, "token_weight") is not None:
        tokens = doubles(value(call, "token_weight"))
        x.token_weight = <const double *>cnp.PyArray_DATA(tokens)
    temperature, grad_loss = doubles(value(call, "temperature")), doubles(value(call, "grad_loss"))
    x.temperature = <const double *>cnp.PyArray_DATA(temperature)
    x.grad_loss = <const double *>cnp.PyArray_DATA(grad_loss)
    x.is_double = dtype_of(input) == AG_FLOAT64
    return [target, prob, classes, tokens, temperature, grad_loss]


cdef object number_of_rows(Call call):
    cdef cnp.ndarray target = value(call, "target")
    cdef object count = cnp.PyArray_SIZE(target)
    if value(call, "target_prob") is not None:
        count = 1
        for axis in range(cnp.PyArray_NDIM(target) - 1):
            count *= cnp.PyArray_DIM(target, axis)
    return count


cdef object compute(Call call, int threads):
    """Compute a validated call, and return its results."""
    cdef Results results = Results(call)
    cdef CrossEntropy x
    cdef Problem p
    cdef list arguments = set_arguments(&x, call)
    cdef cnp.npy_intp rows = number_of_rows(call)
    cdef cnp.ndarray losses = results.arrays[LOSS], predicted = results.arrays[PREDICTED]
    cdef cnp.ndarray terms = None, squares = None, gradient = results.gradient
    cdef bint is_reduced = value(call, "reduction") != "none"
    if gradient is None:
        gradient = value(call, "input")  # never written
    if is_reduced:
        terms = _memory.empty(1, &rows, _float64)
        if x.lse_square_scale != 0:
            squares = _memory.empty(1, &rows, _float64)
    if predicted is None and results.arrays[CORRECT] is not None:
        predicted = _memory.empty(1, &rows, _int64)
    x.losses = NULL if is_reduced else cnp.PyArray_DATA(losses)
    x.loss_terms, x.square_terms = <double *>data_of(terms), <double *>data_of(squares)
    x.lse, x.log_prob = data_of(results.arrays[LSE]), data_of(results.arrays[LOG_PROB])
    x.entropy, x.predicted = data_of(results.arrays[ENTROPY]), <int64_t *>data_of(predicted)
    if describe_call(&p, call, &x, gradient):
        solve(&x, &p, threads)
    elif is_reduced:
        # The mean over no rows is NaN, unless the caller gave the denominator.
        x.loss = float("nan") if x.is_mean and x.denominator == 0 else 0
    if is_reduced and cnp.PyArray_ITEMSIZE(losses) == 8:
        (<double *>cnp.PyArray_DATA(losses))[0] = x.loss
    elif is_reduced:
        (<float *>cnp.PyArray_DATA(losses))[0] = <float>x.loss  # NumPy would warn if it becomes infinite
    if results.arrays[CORRECT] is not None:
        (<cnp.ndarray>results.arrays[CORRECT])[()] = x.correct
    del arguments
    return results.deliver()


cdef int solve(CrossEntropy *x, const Problem *p, int asked) except -1:
    cdef int threads = choose_threads(p, asked)
    cdef cnp.ndarray memory
    cdef double last_check = 0
    prepare_loss(x, p, threads)
    memory = _memory.workspace(loss_workspace_size(x))
    _memory.check_layout(place_loss_workspace(x, _memory.aligned(cnp.PyArray_BYTES(memory))) + ALIGNMENT, memory)
    with nogil:
        run_loss(x, asked == 0, &last_check)
    return 0


cdef Py_ssize_t copied_bytes(Call call) except -1:
    """Return the most bytes of arguments that are copied, and of the losses and predictions of rows."""
    cdef object rows = number_of_rows(call), size = 8 * rows * (1 + (<double>value(call, "lse_square_scale") != 0))
    if "correct" in value(call, "outputs"):
        size += 8 * rows
    for name in ("target", "target_prob", "class_weight", "token_weight", "temperature", "grad_loss"):
        if is_array(value(call, name)):
            size += 8 * value(call, name).size
    return size + 2 * sizeof(double)


cdef cnp.ndarray shape_of_gradient(Call call):
    """Return an array like the one that the gradient is computed into; it may have no memory."""
    cdef cnp.ndarray out = call.first_out
    if not value(call, "return_grad"):
        return value(call, "input")
    if out is None:
        return without_memory(call.specs[INPUT_GRAD].shape, call.specs[INPUT_GRAD].dtype)
    if is_overwritten(call, out):
        return without_memory((<object>out).shape, _dtypes[dtype_of(out)])
    return out


cdef Py_ssize_t workspace_bound(Call call, int threads) except -1:
    """Return the most bytes that `compute` allocates in addition to the results, from shapes, dtypes and layouts."""
    cdef Problem p
    cdef CrossEntropy x
    cdef cnp.ndarray out = shape_of_gradient(call)
    cdef Py_ssize_t most = 0, copies = copied_bytes(call)
    if call.first_out is not None and out is not call.first_out:
        copies += cnp.PyArray_NBYTES(out)
    set_options(&x, call)
    if not describe_call(&p, call, &x, out):
        return copies
    for count in [threads] if threads else [1, _threads.default_threads()]:
        prepare_loss(&x, &p, count)
        most = max(most, loss_workspace_size(&x))
    return copies + most


cdef tuple chosen(Call call, int threads):
    """Return the name of the plan of a call, and the number of threads of calls that follow one another."""
    cdef Problem p
    cdef CrossEntropy x
    set_options(&x, call)
    if not describe_call(&p, call, &x, shape_of_gradient(call)):
        return "nothing to compute", 1
    threads = threads_of(&p, threads)
    prepare_loss(&x, &p, threads)
    return plan_name(&x.s), threads
