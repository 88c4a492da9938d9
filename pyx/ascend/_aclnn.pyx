"""The operators of the device: two typed calls each, without the interpreter's lock.

Stage 1, aclnn<Name>GetWorkspaceSize, checks the arguments and makes an executor. Stage 2, aclnn<Name>, puts the work on
a stream and consumes the executor, even if it fails. Tensors have to exist until stage 2 has returned, and their memory
until the stream is synchronised.

A function here is stage 1 of one operator. It returns an `Executor`, which tells the size of its workspace, is launched once
and is closed on every path.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from . import _acl
from .errors import BackendUnavailableError, device_error

from ascend_grad cimport _acl
from ascend_grad._acl cimport (
    AnyStream,
    DeviceRange,
    ag_acl_executor,
    ag_acl_integers,
    ag_acl_scalar,
    ag_acl_tensor,
    ag_aclnn_status,
    destroyer,
)
from ascend_grad._aclnn_types cimport (
    ag_aclnn_binary,
    ag_aclnn_cast,
    ag_aclnn_cross_entropy,
    ag_aclnn_cross_entropy_gradient,
    ag_aclnn_dense_cross_entropy,
    ag_aclnn_gather,
    ag_aclnn_inplace_add,
    ag_aclnn_inplace_unary,
    ag_aclnn_launch,
    ag_aclnn_linear_gradient,
    ag_aclnn_log_sum_exp,
    ag_aclnn_loss,
    ag_aclnn_masked,
    ag_aclnn_masked_gradient,
    ag_aclnn_mm,
    ag_aclnn_online_max_sum,
    ag_aclnn_row,
    ag_aclnn_row_gradient,
    ag_aclnn_scatter_add,
    ag_aclnn_sum,
    ag_aclnn_top_k,
    ag_aclnn_unary,
)

cdef extern from "ascend_grad/acl/types.h" nogil:
    enum:
        AG_ACL_FLOAT
        AG_ACL_FLOAT16
        AG_ACL_INT32
        AG_ACL_UINT8
        AG_ACL_INT64
        AG_ACL_BOOL
        AG_ACL_BF16
        AG_ACL_FORMAT_ND

#: The device's codes of the dtypes that its operators take, by NumPy's names.
DTYPES = {
    "float32": AG_ACL_FLOAT,
    "float16": AG_ACL_FLOAT16,
    "bfloat16": AG_ACL_BF16,
    "int32": AG_ACL_INT32,
    "int64": AG_ACL_INT64,
    "uint8": AG_ACL_UINT8,
    "bool": AG_ACL_BOOL,
}

cdef enum:
    SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD, SCALED_MASKED_SOFTMAX_BACKWARD, SOFTMAX, LOG_SOFTMAX
    SCALED_MASKED_SOFTMAX, LINEAR_GRADIENT, ONLINE_MAX_SUM, LOSS, CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT
    DENSE_CROSS_ENTROPY, LOG_SUM_EXP, SUM, EXP, INPLACE_COPY, CAST, MUL, INPLACE_ADD, INPLACE_MUL, INPLACE_TANH
    EQUAL, MAXIMUM, MM, TOP_K, GATHER, SCATTER_ADD, OPERATOR_COUNT

#: Names of the operators, in the order of the enumeration.
NAMES = (
    "aclnnSoftmaxBackward",
    "aclnnLogSoftmaxBackward",
    "aclnnScaledMaskedSoftmaxBackward",
    "aclnnSoftmax",
    "aclnnLogSoftmax",
    "aclnnScaledMaskedSoftmax",
    "aclnnFusedLinearCrossEntropyLossGrad",
    "aclnnFusedLinearOnlineMaxSum",
    "aclnnFusedCrossEntropyLossWithMaxSum",
    "aclnnCrossEntropyLoss",
    "aclnnCrossEntropyLossGrad",
    "aclnnSoftmaxCrossEntropyWithLogits",
    "aclnnLogSumExp",
    "aclnnReduceSum",
    "aclnnExp",
    "aclnnInplaceCopy",
    "aclnnCast",
    "aclnnMul",
    "aclnnInplaceAdd",
    "aclnnInplaceMul",
    "aclnnInplaceTanh",
    "aclnnEqTensor",
    "aclnnMaximum",
    "aclnnMm",
    "aclnnTopk",
    "aclnnGather",
    "aclnnScatterAdd",
)

cdef void *_prepare[OPERATOR_COUNT]
cdef ag_aclnn_launch _launch[OPERATOR_COUNT]


def bind(libraries):
    """Look up both calls of every operator, and return a dict from operators that lack one to the missing symbol."""
    absent = {}
    for index, name in enumerate(NAMES):
        prepare, launch = _acl.find(libraries, name + "GetWorkspaceSize"), _acl.find(libraries, name)
        _prepare[index] = <void *><uintptr_t>prepare
        _launch[index] = <ag_aclnn_launch><void *><uintptr_t>launch
        if not prepare or not launch:
            absent[name] = name if prepare else name + "GetWorkspaceSize"
    if _acl.table.aclCreateScalar == NULL:
        absent["aclnnInplaceAdd"] = "aclCreateScalar"
    if _acl.table.aclCreateIntArray == NULL:
        absent["aclnnLogSumExp"] = absent["aclnnReduceSum"] = "aclCreateIntArray"
    return absent


cdef class Tensor:
    """The device's description of an array in memory that it does not own.

    ``memory`` may be None if the tensor is used only in stage 1. ``layout`` is None for a C-contiguous array, or a
    tuple of three, all counted in elements: strides, offset of the first element, size of the memory.
    """

    cdef ag_acl_tensor *handle
    cdef DeviceRange memory

    def __cinit__(self, DeviceRange memory, shape, int dtype, layout=None):
        cdef int64_t[8] dims
        cdef int64_t[8] strides
        cdef int64_t *storage = dims
        cdef uint64_t rank = len(shape), storage_rank = rank
        cdef int64_t step = 1, offset = 0, storage_size
        cdef int axis
        self.handle = NULL
        if not 1 <= rank <= 8:
            raise ValueError(f"rank {rank}")
        for axis in range(<int>rank - 1, -1, -1):
            dims[axis] = shape[axis]
            strides[axis] = step
            step *= dims[axis]
        if layout is not None:
            own_strides, offset, storage_size = layout
            for axis in range(<int>rank):
                strides[axis] = own_strides[axis]
            storage, storage_rank = &storage_size, 1
        cdef void *address = NULL if memory is None else memory.address
        self.memory = memory
        with nogil:
            self.handle = _acl.table.aclCreateTensor(
                dims, rank, dtype, strides, offset, AG_ACL_FORMAT_ND, storage, storage_rank, address
            )
        if self.handle == NULL:
            raise device_error(None, "aclCreateTensor", _acl.recent_message())

    def close(self):
        cdef ag_acl_tensor *handle = self.handle
        self.handle = NULL
        _acl.destroy(<destroyer>_acl.table.aclDestroyTensor, handle, "aclDestroyTensor")

    def __dealloc__(self):
        _acl.destroy(<destroyer>_acl.table.aclDestroyTensor, self.handle, "aclDestroyTensor")


cdef ag_acl_tensor *handle_of(Tensor tensor) noexcept:
    """Return the handle of a tensor, or NULL for None, an optional argument that is not given."""
    return NULL if tensor is None else tensor.handle


cdef class LastAxis:
    """The device's list of axes that has only the last axis of a matrix."""

    cdef ag_acl_integers *handle

    def __cinit__(self):
        cdef int64_t last = 1
        with nogil:
            self.handle = _acl.table.aclCreateIntArray(&last, 1)
        if self.handle == NULL:
            raise device_error(None, "aclCreateIntArray", _acl.recent_message())

    def __dealloc__(self):
        _acl.destroy(<destroyer>_acl.table.aclDestroyIntArray, self.handle, "aclDestroyIntArray")


cdef class One:
    """The device's scalar 1, in float32."""

    cdef ag_acl_scalar *handle

    def __cinit__(self):
        cdef float value = 1
        with nogil:
            self.handle = _acl.table.aclCreateScalar(&value, AG_ACL_FLOAT)
        if self.handle == NULL:
            raise device_error(None, "aclCreateScalar", _acl.recent_message())

    def __dealloc__(self):
        _acl.destroy(<destroyer>_acl.table.aclDestroyScalar, self.handle, "aclDestroyScalar")


cdef class Executor:
    """The executor that stage 1 of an operator made, to be launched once."""

    cdef int operator
    cdef readonly uint64_t workspace_size
    cdef ag_acl_executor *handle
    cdef ag_aclnn_status status
    cdef object attribute  # an argument of stage 1 that has to exist until stage 2 has returned

    def __cinit__(self, int operator):
        if _prepare[operator] == NULL or _launch[operator] == NULL:
            # A call was accepted for other operators, which another thread has found to be missing meanwhile.
            raise BackendUnavailableError(f"this toolkit lacks {NAMES[operator]}")
        self.operator = operator
        self.workspace_size = 0
        self.handle = NULL
        self.status = 0

    cdef Executor checked(self):
        if self.status != 0:
            self.handle = NULL  # whatever stage 1 left there is not to be used
            _acl.check(self.status, NAMES[self.operator] + "GetWorkspaceSize")
        return self

    def launch(self, DeviceRange workspace, AnyStream stream not None):
        """Put the work on the stream (stage 2)."""
        cdef ag_acl_executor *handle = self.handle
        cdef void *address = NULL if workspace is None else workspace.address
        cdef ag_aclnn_status status
        if handle == NULL:
            raise RuntimeError("an executor is launched once")
        if self.workspace_size and (workspace is None or workspace.size < self.workspace_size):
            raise ValueError("the workspace is too small")
        self.handle = NULL  # consumed by the call, also where it fails
        with nogil:
            status = _launch[self.operator](address, self.workspace_size, handle, stream.handle)
        _acl.check(status, NAMES[self.operator])

    def close(self):
        cdef ag_acl_executor *handle = self.handle
        self.handle = NULL
        _acl.destroy(<destroyer>_acl.table.aclDestroyAclOpExecutor, handle, "aclDestroyAclOpExecutor")
        self.attribute = None

    def __dealloc__(self):
        _acl.destroy(<destroyer>_acl.table.aclDestroyAclOpExecutor, self.handle, "aclDestroyAclOpExecutor")


# ---- stage 1 of every operator ---------------------------------------------------------------------------------------


cdef Executor row_gradient(int operator, Tensor grad_output, Tensor output, int64_t dim, Tensor out):
    cdef Executor executor = Executor(operator)
    with nogil:
        executor.status = (<ag_aclnn_row_gradient>_prepare[operator])(
            grad_output.handle, output.handle, dim, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def softmax_backward(Tensor grad_output not None, Tensor output not None, int64_t dim, Tensor out not None):
    return row_gradient(SOFTMAX_BACKWARD, grad_output, output, dim, out)


def log_softmax_backward(Tensor grad_output not None, Tensor output not None, int64_t dim, Tensor out not None):
    return row_gradient(LOG_SOFTMAX_BACKWARD, grad_output, output, dim, out)


cdef Executor row(int operator, Tensor input, int64_t dim, Tensor out):
    cdef Executor executor = Executor(operator)
    with nogil:
        executor.status = (<ag_aclnn_row>_prepare[operator])(
            input.handle, dim, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def softmax(Tensor input not None, int64_t dim, Tensor out not None):
    return row(SOFTMAX, input, dim, out)


def log_softmax(Tensor input not None, int64_t dim, Tensor out not None):
    return row(LOG_SOFTMAX, input, dim, out)


def scaled_masked_softmax_backward(
    Tensor grad_output not None, Tensor y not None, Tensor mask not None, double scale, Tensor out not None
):
    cdef Executor executor = Executor(SCALED_MASKED_SOFTMAX_BACKWARD)
    with nogil:
        executor.status = (<ag_aclnn_masked_gradient>_prepare[SCALED_MASKED_SOFTMAX_BACKWARD])(
            grad_output.handle, y.handle, mask.handle, scale, False, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def scaled_masked_softmax(Tensor x not None, Tensor mask not None, double scale, Tensor out not None):
    cdef Executor executor = Executor(SCALED_MASKED_SOFTMAX)
    with nogil:
        executor.status = (<ag_aclnn_masked>_prepare[SCALED_MASKED_SOFTMAX])(
            x.handle, mask.handle, scale, False, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def fused_linear_cross_entropy_loss_grad(
    Tensor grad not None,
    Tensor input not None,
    Tensor weight not None,
    Tensor target_mask not None,
    Tensor masked_target not None,
    Tensor logits_max,
    Tensor sum_exp_logits,
    Tensor softmax,
    Tensor input_grad not None,
    Tensor weight_grad not None,
):
    cdef Executor executor = Executor(LINEAR_GRADIENT)
    cdef ag_acl_tensor *maximum = handle_of(logits_max)
    cdef ag_acl_tensor *total = handle_of(sum_exp_logits)
    cdef ag_acl_tensor *probabilities = handle_of(softmax)
    with nogil:
        executor.status = (<ag_aclnn_linear_gradient>_prepare[LINEAR_GRADIENT])(
            grad.handle, input.handle, weight.handle, target_mask.handle, masked_target.handle, 0.0, maximum, total,
            probabilities, input_grad.handle, weight_grad.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def fused_linear_online_max_sum(
    Tensor input not None,
    Tensor weight not None,
    Tensor target not None,
    int64_t vocab_start_index,
    int64_t vocab_end_index,
    Tensor logits_max not None,
    Tensor sum_exp_logits not None,
    Tensor predicted_logits not None,
    Tensor target_mask not None,
    Tensor masked_target not None,
    Tensor vocab_parallel_logits,
):
    cdef Executor executor = Executor(ONLINE_MAX_SUM)
    cdef ag_acl_tensor *logits = handle_of(vocab_parallel_logits)
    with nogil:
        executor.status = (<ag_aclnn_online_max_sum>_prepare[ONLINE_MAX_SUM])(
            input.handle, weight.handle, target.handle, vocab_start_index, vocab_end_index, logits_max.handle,
            sum_exp_logits.handle, predicted_logits.handle, target_mask.handle, masked_target.handle, logits,
            &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def fused_cross_entropy_loss_with_max_sum(
    Tensor logits_max not None,
    Tensor sum_exp_logits not None,
    Tensor predicted_logits not None,
    Tensor vocab_parallel_logits,
    Tensor loss not None,
    Tensor softmax,
):
    cdef Executor executor = Executor(LOSS)
    cdef ag_acl_tensor *logits = handle_of(vocab_parallel_logits)
    cdef ag_acl_tensor *probabilities = handle_of(softmax)
    with nogil:
        executor.status = (<ag_aclnn_loss>_prepare[LOSS])(
            logits_max.handle, sum_exp_logits.handle, predicted_logits.handle, 0.0, NULL, NULL, logits, loss.handle,
            probabilities, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


# ---- losses of logits; the arithmetic around them --------------------------------------------------------------------


def cross_entropy_loss(
    Tensor input not None,
    Tensor target not None,
    Tensor class_weight,
    double label_smoothing,
    Tensor loss not None,
    Tensor log_prob not None,
    Tensor zloss not None,
    Tensor lse_for_zloss not None,
):
    """Prepare the loss of each row. Targets that are -100 are ignored."""
    cdef Executor executor = Executor(CROSS_ENTROPY)
    cdef ag_acl_tensor *factors = handle_of(class_weight)
    with nogil:
        executor.status = (<ag_aclnn_cross_entropy>_prepare[CROSS_ENTROPY])(
            input.handle, target.handle, factors, b"none", -100, label_smoothing, 0.0, False, loss.handle,
            log_prob.handle, zloss.handle, lse_for_zloss.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def cross_entropy_loss_grad(
    Tensor grad_loss not None, Tensor log_prob not None, Tensor target not None, Tensor out not None
):
    """Prepare the gradient of each row's loss. Targets that are -100 are ignored."""
    cdef Executor executor = Executor(CROSS_ENTROPY_GRADIENT)
    with nogil:
        executor.status = (<ag_aclnn_cross_entropy_gradient>_prepare[CROSS_ENTROPY_GRADIENT])(
            grad_loss.handle, log_prob.handle, target.handle, NULL, NULL, NULL, b"none", -100, 0.0, 0.0, out.handle,
            &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def softmax_cross_entropy_with_logits(
    Tensor features not None, Tensor labels not None, Tensor loss not None, Tensor backprop not None
):
    cdef Executor executor = Executor(DENSE_CROSS_ENTROPY)
    with nogil:
        executor.status = (<ag_aclnn_dense_cross_entropy>_prepare[DENSE_CROSS_ENTROPY])(
            features.handle, labels.handle, loss.handle, backprop.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def log_sum_exp(Tensor input not None, Tensor out not None):
    """Prepare the logarithms of the sums of the exponentials of a matrix's rows, as one column."""
    cdef Executor executor = Executor(LOG_SUM_EXP)
    cdef LastAxis last = LastAxis()
    executor.attribute = last
    with nogil:
        executor.status = (<ag_aclnn_log_sum_exp>_prepare[LOG_SUM_EXP])(
            input.handle, last.handle, True, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def row_sums(Tensor input not None, Tensor out not None):
    """Prepare the sums of a matrix's rows in float32, as one column."""
    cdef Executor executor = Executor(SUM)
    cdef LastAxis last = LastAxis()
    executor.attribute = last
    with nogil:
        executor.status = (<ag_aclnn_sum>_prepare[SUM])(
            input.handle, last.handle, True, AG_ACL_FLOAT, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


cdef Executor of_two(int operator, Tensor first, Tensor second):
    cdef Executor executor = Executor(operator)
    with nogil:
        executor.status = (<ag_aclnn_unary>_prepare[operator])(
            first.handle, second.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def exp(Tensor input not None, Tensor out not None):
    return of_two(EXP, input, out)


def inplace_copy(Tensor out not None, Tensor source not None):
    return of_two(INPLACE_COPY, out, source)


def cast(Tensor input not None, int dtype, Tensor out not None):
    cdef Executor executor = Executor(CAST)
    with nogil:
        executor.status = (<ag_aclnn_cast>_prepare[CAST])(
            input.handle, dtype, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


cdef Executor of_three(int operator, Tensor input, Tensor other, Tensor out):
    cdef Executor executor = Executor(operator)
    with nogil:
        executor.status = (<ag_aclnn_binary>_prepare[operator])(
            input.handle, other.handle, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def mul(Tensor input not None, Tensor other not None, Tensor out not None):
    return of_three(MUL, input, other, out)


def equal(Tensor input not None, Tensor other not None, Tensor out not None):
    """Prepare where elements are equal, as bools."""
    return of_three(EQUAL, input, other, out)


def maximum(Tensor input not None, Tensor other not None, Tensor out not None):
    return of_three(MAXIMUM, input, other, out)


def inplace_mul(Tensor out not None, Tensor other not None):
    return of_two(INPLACE_MUL, out, other)


def inplace_tanh(Tensor out not None):
    cdef Executor executor = Executor(INPLACE_TANH)
    with nogil:
        executor.status = (<ag_aclnn_inplace_unary>_prepare[INPLACE_TANH])(
            out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def inplace_add(Tensor out not None, Tensor other not None):
    cdef Executor executor = Executor(INPLACE_ADD)
    cdef One one = One()
    executor.attribute = one
    with nogil:
        executor.status = (<ag_aclnn_inplace_add>_prepare[INPLACE_ADD])(
            out.handle, other.handle, one.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


# ---- products, the largest elements, and elements by their columns ---------------------------------------------------


def mm(Tensor input not None, Tensor other not None, Tensor out not None):
    """Prepare a product of matrices, in their own precision (KEEP_DTYPE)."""
    cdef Executor executor = Executor(MM)
    with nogil:
        executor.status = (<ag_aclnn_mm>_prepare[MM])(
            input.handle, other.handle, out.handle, 0, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def top_k(Tensor input not None, int64_t k, Tensor values not None, Tensor indices not None):
    """Prepare the k largest elements of a matrix's rows, from the largest down. Equal ones come in any order."""
    cdef Executor executor = Executor(TOP_K)
    with nogil:
        executor.status = (<ag_aclnn_top_k>_prepare[TOP_K])(
            input.handle, k, 1, True, True, values.handle, indices.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def gather(Tensor input not None, Tensor index not None, Tensor out not None):
    """Prepare the elements of a matrix's rows in the columns that `index` has for each row."""
    cdef Executor executor = Executor(GATHER)
    with nogil:
        executor.status = (<ag_aclnn_gather>_prepare[GATHER])(
            input.handle, 1, index.handle, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()


def inplace_scatter_add(Tensor out not None, Tensor index not None, Tensor source not None):
    """Prepare to add elements to a matrix's rows, in the columns that `index` has for each row."""
    cdef Executor executor = Executor(SCATTER_ADD)
    with nogil:
        executor.status = (<ag_aclnn_scatter_add>_prepare[SCATTER_ADD])(
            out.handle, 1, index.handle, source.handle, out.handle, &executor.workspace_size, &executor.handle
        )
    return executor.checked()
