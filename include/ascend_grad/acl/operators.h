/* The operators (libopapi_nn, libopapi, ...): types of the two calls that each of them takes.
 *
 * Stage 1, aclnn<Name>GetWorkspaceSize, checks the arguments and makes an executor; stage 2, aclnn<Name>, puts the work
 * on a stream and consumes the executor, also where it fails. Tensors have to outlive stage 2, their memory the
 * synchronisation of the stream. A `float` and a `double` travel differently: each type says which one is meant. */
#ifndef ASCEND_GRAD_ACL_OPERATORS_H
#define ASCEND_GRAD_ACL_OPERATORS_H

#include "types.h"

/* What stage 1 returns beside its status, at the end of every argument list. */
#define AG_ACLNN_RESULTS uint64_t *workspace_size, ag_acl_executor **executor

/* aclnnSoftmaxBackward, aclnnLogSoftmaxBackward */
typedef ag_aclnn_status (*ag_aclnn_row_gradient)(const ag_acl_tensor *grad_output, const ag_acl_tensor *output,
                                                 int64_t dim, ag_acl_tensor *out, AG_ACLNN_RESULTS);

/* aclnnSoftmax, aclnnLogSoftmax */
typedef ag_aclnn_status (*ag_aclnn_row)(const ag_acl_tensor *self, int64_t dim, ag_acl_tensor *out, AG_ACLNN_RESULTS);

/* aclnnScaledMaskedSoftmaxBackward */
typedef ag_aclnn_status (*ag_aclnn_masked_gradient)(const ag_acl_tensor *grad_output, const ag_acl_tensor *y,
                                                    const ag_acl_tensor *mask, double scale, bool fix_triu_mask,
                                                    ag_acl_tensor *out, AG_ACLNN_RESULTS);

/* aclnnScaledMaskedSoftmax */
typedef ag_aclnn_status (*ag_aclnn_masked)(const ag_acl_tensor *x, const ag_acl_tensor *mask, double scale,
                                           bool fix_triu_mask, ag_acl_tensor *y, AG_ACLNN_RESULTS);

/* aclnnFusedLinearCrossEntropyLossGrad; the last three inputs are optional, and softmax is OVERWRITTEN. */
typedef ag_aclnn_status (*ag_aclnn_linear_gradient)(const ag_acl_tensor *grad, const ag_acl_tensor *input,
                                                    const ag_acl_tensor *weight, const ag_acl_tensor *target_mask,
                                                    const ag_acl_tensor *masked_target, float label_smoothing,
                                                    const ag_acl_tensor *logits_max,
                                                    const ag_acl_tensor *sum_exp_logits, ag_acl_tensor *softmax,
                                                    ag_acl_tensor *input_grad, ag_acl_tensor *weight_grad,
                                                    AG_ACLNN_RESULTS);

/* aclnnFusedLinearOnlineMaxSum; the last output is optional. */
typedef ag_aclnn_status (*ag_aclnn_online_max_sum)(const ag_acl_tensor *input, const ag_acl_tensor *weight,
                                                   const ag_acl_tensor *target, int64_t vocab_start,
                                                   int64_t vocab_end, ag_acl_tensor *logits_max,
                                                   ag_acl_tensor *sum_exp_logits, ag_acl_tensor *predicted_logits,
                                                   ag_acl_tensor *target_mask, ag_acl_tensor *masked_target,
                                                   ag_acl_tensor *vocab_parallel_logits, AG_ACLNN_RESULTS);

/* aclnnFusedCrossEntropyLossWithMaxSum; input, weight and the logits are optional, and so is the softmax. */
typedef ag_aclnn_status (*ag_aclnn_loss)(const ag_acl_tensor *logits_max, const ag_acl_tensor *sum_exp_logits,
                                         const ag_acl_tensor *predicted_logits, float label_smoothing,
                                         const ag_acl_tensor *input, const ag_acl_tensor *weight,
                                         const ag_acl_tensor *vocab_parallel_logits, ag_acl_tensor *loss,
                                         ag_acl_tensor *softmax, AG_ACLNN_RESULTS);

/* Stage 2 of every operator. */
typedef ag_aclnn_status (*ag_aclnn_launch)(void *workspace, uint64_t workspace_size, ag_acl_executor *executor,
                                           ag_acl_stream stream);

#endif
