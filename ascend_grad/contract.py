"""The contract of every operator, in one place: what it takes, in which order that is checked, what it returns.

Every backend receives calls that passed these checks, so that a bad call fails the same way everywhere. The checks
themselves are in `_call`.
"""

from __future__ import annotations

import numpy as np

from ._call import (
    ACCUMULATOR,
    AccumulatorOf,
    AVocabulary,
    BitsOrBooleans,
    Boolean,
    ChosenResults,
    DimInRange,
    Float32OrFloat64,
    Floating,
    Int32OrInt64,
    IntegerFrom,
    LogitsBeside,
    MaskCovers,
    MaskHasRows,
    NoLabelSmoothing,
    NotNone,
    NoTriuMask,
    OneMode,
    Operator,
    RankAtMost,
    RankExactly,
    RealNumber,
    ReductionAndItsGradient,
    Result,
    SameShape,
    Shape,
    TargetsInRange,
    TargetsInTheVocabulary,
    TrueOrFalse,
    VocabularyBounds,
    WorkspaceAndFilter,
)
from .arguments import MAX_INDEX, MAX_RANK

#: The least that a linear call can be told to work in.
MIN_WORKSPACE_BYTES = 4 << 20

# ---- row-wise --------------------------------------------------------------------------------------------------------

SOFTMAX_BACKWARD = Operator(
    "softmax_backward",
    "aclnnSoftmaxBackward",
    "grad_output output dim",
    arrays="grad_output output",
    checks=[
        NotNone(),
        Floating("grad_output", "output"),
        DimInRange("grad_output"),
        RankAtMost("grad_output", MAX_RANK),
        SameShape("grad_output", "output"),
    ],
    results=[Result("result", like="grad_output")],
)
LOG_SOFTMAX_BACKWARD = Operator(
    "log_softmax_backward",
    "aclnnLogSoftmaxBackward",
    "grad_output output dim",
    arrays="grad_output output",
    checks=[
        NotNone(),
        Floating("grad_output", "output"),
        RankAtMost("grad_output", MAX_RANK),
        SameShape("grad_output", "output"),
        DimInRange("grad_output"),
    ],
    results=[Result("result", like="grad_output")],
)
SCALED_MASKED_SOFTMAX_BACKWARD = Operator(
    "scaled_masked_softmax_backward",
    "aclnnScaledMaskedSoftmaxBackward",
    "grad_output y mask scale fix_triu_mask",
    arrays="grad_output y mask",
    checks=[
        NotNone(),
        Floating("grad_output", "y"),
        Boolean("mask"),
        RealNumber("scale"),
        RankExactly("grad_output", 4),
        SameShape("grad_output", "y"),
        RankExactly("mask", 4),
        MaskCovers("grad_output", "mask"),
        NoTriuMask(),
    ],
    results=[Result("result", like="grad_output")],
)
SOFTMAX = Operator(
    "softmax",
    "aclnnSoftmax",
    "input dim",
    arrays="input",
    checks=[NotNone(), Floating("input"), DimInRange("input"), RankAtMost("input", MAX_RANK)],
    results=[Result("result", like="input")],
)
LOG_SOFTMAX = Operator(
    "log_softmax",
    "aclnnLogSoftmax",
    "input dim",
    arrays="input",
    checks=[NotNone(), DimInRange("input"), Floating("input"), RankAtMost("input", MAX_RANK)],
    results=[Result("result", like="input")],
)
SCALED_MASKED_SOFTMAX = Operator(
    "scaled_masked_softmax",
    "aclnnScaledMaskedSoftmax",
    "x mask scale fix_triu_mask",
    arrays="x mask",
    checks=[
        NotNone(),
        Floating("x"),
        Boolean("mask"),
        RealNumber("scale"),
        RankExactly("x", 4),
        RankExactly("mask", 4),
        MaskCovers("x", "mask"),
        NoTriuMask(),
    ],
    results=[Result("result", like="x")],
)

ROWWISE = (
    SOFTMAX_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    SCALED_MASKED_SOFTMAX_BACKWARD,
    SOFTMAX,
    LOG_SOFTMAX,
    SCALED_MASKED_SOFTMAX,
)

# ---- linear ----------------------------------------------------------------------------------------------------------

FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD = Operator(
    "fused_linear_cross_entropy_loss_grad",
    "aclnnFusedLinearCrossEntropyLossGrad",
    "grad input weight target_mask masked_target label_smoothing logits_max sum_exp_logits softmax output_mask "
    "workspace_bytes filter_eps",
    arrays="grad input weight target_mask masked_target",
    optional="logits_max sum_exp_logits softmax",
    checks=[
        OneMode(),
        NotNone(),
        Floating("input", "weight"),
        AccumulatorOf("input", "grad", "logits_max", "sum_exp_logits", "softmax"),
        BitsOrBooleans("target_mask"),
        Int32OrInt64("masked_target"),
        NoLabelSmoothing(),
        Shape("grad", "BT"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        MaskHasRows("target_mask"),
        Shape("masked_target", "BT"),
        Shape("logits_max", "BT"),
        Shape("sum_exp_logits", "BT"),
        Shape("softmax", "BT", "V"),
        ChosenResults(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        TargetsInRange(),
    ],
    results=[
        Result("input_grad", like="input", asked_by=(("output_mask", 0),)),
        Result("weight_grad", like="weight", asked_by=(("output_mask", 1),)),
    ],
)
FUSED_LINEAR_ONLINE_MAX_SUM = Operator(
    "fused_linear_online_max_sum",
    "aclnnFusedLinearOnlineMaxSum",
    "input weight target vocab_start_index vocab_end_index return_logits",
    arrays="input weight target",
    checks=[
        NotNone(),
        Floating("input", "weight"),
        Int32OrInt64("target"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        AVocabulary("weight"),
        Shape("target", "BT"),
        VocabularyBounds(),
        TrueOrFalse("return_logits"),
    ],
    results=[
        Result("logits_max", like="input", dims=("BT",), dtype=ACCUMULATOR),
        Result("sum_exp_logits", like="input", dims=("BT",), dtype=ACCUMULATOR),
        Result("predicted_logits", like="input", dims=("BT",), dtype=ACCUMULATOR),
        Result("target_mask", like="target", dims=("bits of BT",), dtype=np.dtype(np.uint8)),
        Result("masked_target", like="target"),
        Result("vocab_parallel_logits", like="input", dims=("BT", "V"), asked_by=("return_logits",)),
    ],
)
FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM = Operator(
    "fused_cross_entropy_loss_with_max_sum",
    "aclnnFusedCrossEntropyLossWithMaxSum",
    "logits_max sum_exp_logits predicted_logits label_smoothing vocab_parallel_logits",
    arrays="logits_max sum_exp_logits predicted_logits",
    optional="vocab_parallel_logits",
    checks=[
        NotNone(),
        Float32OrFloat64("logits_max"),
        AccumulatorOf("logits_max", "sum_exp_logits", "predicted_logits"),
        LogitsBeside("logits_max", "vocab_parallel_logits"),
        Shape("logits_max", "BT"),
        Shape("sum_exp_logits", "BT"),
        Shape("predicted_logits", "BT"),
        Shape("vocab_parallel_logits", "BT", "V"),
        NoLabelSmoothing(),
    ],
    results=[
        Result("loss", like="logits_max"),
        Result("softmax", like="vocab_parallel_logits", dtype=ACCUMULATOR, asked_by=("vocab_parallel_logits",)),
    ],
)
LINEAR_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    None,
    "input weight target reduction ignore_index grad_loss vocab_start_index return_grad output_mask workspace_bytes "
    "filter_eps",
    arrays="input weight target",
    optional="grad_loss",
    checks=[
        NotNone(),
        Floating("input", "weight"),
        Int32OrInt64("target"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        Shape("target", "BT"),
        ReductionAndItsGradient(),
        IntegerFrom("ignore_index", -MAX_INDEX - 1),
        IntegerFrom("vocab_start_index", 0),
        TrueOrFalse("return_grad"),
        ChosenResults(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        TargetsInTheVocabulary(),
    ],
    results=[
        Result("loss", like="input", dims=("BT",), dtype=ACCUMULATOR, reduced_by="reduction"),
        Result("input_grad", like="input", asked_by=("return_grad", ("output_mask", 0))),
        Result("weight_grad", like="weight", asked_by=("return_grad", ("output_mask", 1))),
    ],
)

LINEAR = (
    FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD,
    FUSED_LINEAR_ONLINE_MAX_SUM,
    FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    LINEAR_CROSS_ENTROPY,
)

OPERATORS = {operator.name: operator for operator in (*ROWWISE, *LINEAR)}
