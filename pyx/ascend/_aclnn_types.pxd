"""Function types of the operators' two stages (see `_aclnn`)."""

from libc.stdint cimport int8_t, int64_t, uint64_t

from ascend_grad._acl cimport (
    ag_acl_executor,
    ag_acl_integers,
    ag_acl_scalar,
    ag_acl_stream,
    ag_acl_tensor,
    ag_aclnn_status,
)

cdef extern from "ascend_grad/acl/types.h" nogil:
    ctypedef bint c_bool "bool"

# Function types of stage 1, written from the public documentation. They have to tell `float` from `double`, which are
# passed differently.

# aclnnSoftmaxBackward, aclnnLogSoftmaxBackward
ctypedef ag_aclnn_status (*ag_aclnn_row_gradient)(
    const ag_acl_tensor *grad_output, const ag_acl_tensor *output, int64_t dim, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnSoftmax, aclnnLogSoftmax
ctypedef ag_aclnn_status (*ag_aclnn_row)(
    const ag_acl_tensor *self, int64_t dim, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnScaledMaskedSoftmaxBackward
ctypedef ag_aclnn_status (*ag_aclnn_masked_gradient)(
    const ag_acl_tensor *grad_output, const ag_acl_tensor *y, const ag_acl_tensor *mask, double scale,
    c_bool fix_triu_mask, ag_acl_tensor *out, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnScaledMaskedSoftmax
ctypedef ag_aclnn_status (*ag_aclnn_masked)(
    const ag_acl_tensor *x, const ag_acl_tensor *mask, double scale, c_bool fix_triu_mask, ag_acl_tensor *y,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnFusedLinearCrossEntropyLossGrad; the last three inputs are optional, and softmax is OVERWRITTEN.
ctypedef ag_aclnn_status (*ag_aclnn_linear_gradient)(
    const ag_acl_tensor *grad, const ag_acl_tensor *input, const ag_acl_tensor *weight,
    const ag_acl_tensor *target_mask, const ag_acl_tensor *masked_target, float label_smoothing,
    const ag_acl_tensor *logits_max, const ag_acl_tensor *sum_exp_logits, ag_acl_tensor *softmax,
    ag_acl_tensor *input_grad, ag_acl_tensor *weight_grad, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnFusedLinearOnlineMaxSum; the last output is optional.
ctypedef ag_aclnn_status (*ag_aclnn_online_max_sum)(
    const ag_acl_tensor *input, const ag_acl_tensor *weight, const ag_acl_tensor *target, int64_t vocab_start,
    int64_t vocab_end, ag_acl_tensor *logits_max, ag_acl_tensor *sum_exp_logits, ag_acl_tensor *predicted_logits,
    ag_acl_tensor *target_mask, ag_acl_tensor *masked_target, ag_acl_tensor *vocab_parallel_logits,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnFusedCrossEntropyLossWithMaxSum; input, weight and the logits are optional, and so is the softmax.
ctypedef ag_aclnn_status (*ag_aclnn_loss)(
    const ag_acl_tensor *logits_max, const ag_acl_tensor *sum_exp_logits, const ag_acl_tensor *predicted_logits,
    float label_smoothing, const ag_acl_tensor *input, const ag_acl_tensor *weight,
    const ag_acl_tensor *vocab_parallel_logits, ag_acl_tensor *loss, ag_acl_tensor *softmax,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnCrossEntropyLoss; class_weight is optional. zloss and lse_for_zloss have to be passed, and are not written.
ctypedef ag_aclnn_status (*ag_aclnn_cross_entropy)(
    const ag_acl_tensor *input, const ag_acl_tensor *target, const ag_acl_tensor *class_weight, char *reduction,
    int64_t ignore_index, double label_smoothing, double zloss_scale, c_bool return_zloss, ag_acl_tensor *loss,
    ag_acl_tensor *log_prob, ag_acl_tensor *zloss, ag_acl_tensor *lse_for_zloss, uint64_t *workspace_size,
    ag_acl_executor **executor
) noexcept nogil

# aclnnCrossEntropyLossGrad; class_weight, grad_zloss and lse_for_zloss are optional.
ctypedef ag_aclnn_status (*ag_aclnn_cross_entropy_gradient)(
    const ag_acl_tensor *grad_loss, const ag_acl_tensor *log_prob, const ag_acl_tensor *target,
    const ag_acl_tensor *class_weight, const ag_acl_tensor *grad_zloss, const ag_acl_tensor *lse_for_zloss,
    char *reduction, int64_t ignore_index, double label_smoothing, double zloss_scale, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnSoftmaxCrossEntropyWithLogits
ctypedef ag_aclnn_status (*ag_aclnn_dense_cross_entropy)(
    const ag_acl_tensor *features, const ag_acl_tensor *labels, ag_acl_tensor *loss, ag_acl_tensor *backprop,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnLogSumExp
ctypedef ag_aclnn_status (*ag_aclnn_log_sum_exp)(
    const ag_acl_tensor *self, const ag_acl_integers *dims, c_bool keeps_dims, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnReduceSum
ctypedef ag_aclnn_status (*ag_aclnn_sum)(
    const ag_acl_tensor *self, const ag_acl_integers *dims, c_bool keeps_dims, int dtype, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnTopk
ctypedef ag_aclnn_status (*ag_aclnn_top_k)(
    const ag_acl_tensor *self, int64_t k, int64_t dim, c_bool largest, c_bool is_sorted, ag_acl_tensor *values,
    ag_acl_tensor *indices, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnGather
ctypedef ag_aclnn_status (*ag_aclnn_gather)(
    const ag_acl_tensor *self, int64_t dim, const ag_acl_tensor *index, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnScatterAdd
ctypedef ag_aclnn_status (*ag_aclnn_scatter_add)(
    const ag_acl_tensor *self, int64_t dim, const ag_acl_tensor *index, const ag_acl_tensor *src, ag_acl_tensor *out,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnMm
ctypedef ag_aclnn_status (*ag_aclnn_mm)(
    const ag_acl_tensor *self, const ag_acl_tensor *mat2, ag_acl_tensor *out, int8_t cube_math_type,
    uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnInplaceTanh
ctypedef ag_aclnn_status (*ag_aclnn_inplace_unary)(
    ag_acl_tensor *self, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnExp; aclnnInplaceCopy and aclnnInplaceMul, whose first argument is the result; aclnnCast, with a dtype between
ctypedef ag_aclnn_status (*ag_aclnn_unary)(
    const ag_acl_tensor *first, const ag_acl_tensor *second, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil
ctypedef ag_aclnn_status (*ag_aclnn_cast)(
    const ag_acl_tensor *self, int dtype, ag_acl_tensor *out, uint64_t *workspace_size, ag_acl_executor **executor
) noexcept nogil

# aclnnMul, aclnnEqTensor, aclnnMaximum
ctypedef ag_aclnn_status (*ag_aclnn_binary)(
    const ag_acl_tensor *self, const ag_acl_tensor *other, ag_acl_tensor *out, uint64_t *workspace_size,
    ag_acl_executor **executor
) noexcept nogil

# aclnnInplaceAdd: self + alpha * other
ctypedef ag_aclnn_status (*ag_aclnn_inplace_add)(
    ag_acl_tensor *self, const ag_acl_tensor *other, const ag_acl_scalar *alpha, uint64_t *workspace_size,
    ag_acl_executor **executor
) noexcept nogil

# The function type of stage 2, the same for every operator.
ctypedef ag_aclnn_status (*ag_aclnn_launch)(
    void *workspace, uint64_t workspace_size, ag_acl_executor *executor, ag_acl_stream stream
) noexcept nogil
