from libc.stdint cimport int64_t

from ascend_grad._views cimport View
from ascend_grad.status cimport Status


cdef enum LinearOperator:
    GRADIENT
    STATISTICS
    TOP_K


cdef enum:  # arguments of all operators: inputs, then results
    INPUT
    WEIGHT
    TARGET
    SOFTMAX
    GRAD
    TARGET_MASK
    LOGITS_MAX
    SUM_EXP_LOGITS
    BIAS
    TEMPERATURES
    WORKSPACE
    INPUT_GRAD
    WEIGHT_GRAD
    NEW_LOGITS_MAX
    NEW_SUM_EXP_LOGITS
    PREDICTED_LOGITS
    NEW_TARGET_MASK
    MASKED_TARGET
    LOG_PROB
    INDEX
    ARGUMENTS


ctypedef struct Arguments:
    # The arguments of a call. A view has no data if the argument is None, or is none of the operator's.
    LinearOperator operator
    View[ARGUMENTS] views
    int64_t start, end                # targets of the first row of weight, and after the last; only for STATISTICS
    # Of TOP_K, beside BIAS and TEMPERATURES:
    Py_ssize_t top_k                  # columns of LOG_PROB and INDEX
    double temperature                # of all rows without TEMPERATURES
    double logit_scale
    double softcap                    # 0: none


cdef Py_ssize_t workspace_of(const Arguments *a) noexcept nogil
cdef Status compute(const Arguments *a, int num_threads) noexcept nogil
