"""Contracts of the linear operators: products with a vocabulary's weight, losses and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._call import ACCUMULATOR, Check, Operator, Result
from .._checks import (
    AccumulatorOf,
    BitsOrBooleans,
    CountOfEntries,
    EntropyForItsGradient,
    FiniteNumber,
    Float32OrFloat64,
    Floating,
    FloatingIfGiven,
    Fraction,
    Int32OrInt64,
    IntegerFrom,
    KnownOutputs,
    LogitsDtypeMatches,
    MaskHasRows,
    NoLabelSmoothing,
    NoLogProbOfSeveralTargets,
    NonemptyVocabulary,
    NoOutputOfSeveralTargets,
    NotNone,
    NumberOrVector,
    PositiveNumberIfGiven,
    PositiveValues,
    ReductionAndItsGradient,
    Shape,
    SoftmaxOrStatistics,
    SomeUpstreamGradient,
    TargetsInRange,
    TargetsInTheVocabulary,
    TargetsWithProbabilities,
    TrueOrFalse,
    ValidOutputMask,
    VocabularyBounds,
    VocabularyStart,
    Workspace,
    WorkspaceAndFilter,
)
from ..arguments import MAX_INDEX, MAX_TOP_K

#: Minimum of the argument `workspace_bytes`.
MIN_WORKSPACE_BYTES = 4 << 20

FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD = Operator(
    "fused_linear_cross_entropy_loss_grad",
    "aclnnFusedLinearCrossEntropyLossGrad",
    "grad input weight target_mask masked_target label_smoothing logits_max sum_exp_logits softmax output_mask "
    "workspace_bytes filter_eps",
    family="linear",
    kernels="gradient",
    arrays="grad input weight target_mask masked_target",
    optional="logits_max sum_exp_logits softmax",
    mixes="target_mask masked_target",
    checks=[
        SoftmaxOrStatistics(),
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
        ValidOutputMask(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
    ],
    value_checks=[TargetsInRange()],
    results=[
        Result("input_grad", like="input", asked_by=(("output_mask", 0),)),
        Result("weight_grad", like="weight", asked_by=(("output_mask", 1),)),
    ],
)
FUSED_LINEAR_ONLINE_MAX_SUM = Operator(
    "fused_linear_online_max_sum",
    "aclnnFusedLinearOnlineMaxSum",
    "input weight target vocab_start_index vocab_end_index return_logits",
    family="linear",
    kernels="statistics",
    arrays="input weight target",
    mixes="target",
    checks=[
        NotNone(),
        Floating("input", "weight"),
        Int32OrInt64("target"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        NonemptyVocabulary("weight"),
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
    family="linear",
    kernels="loss_of_statistics",
    arrays="logits_max sum_exp_logits predicted_logits",
    optional="vocab_parallel_logits",
    checks=[
        NotNone(),
        Float32OrFloat64("logits_max"),
        AccumulatorOf("logits_max", "sum_exp_logits", "predicted_logits"),
        LogitsDtypeMatches("logits_max", "vocab_parallel_logits"),
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
#: The options of a loss in the order of the parameters, with the values that leave the loss as it is.
LOSS_DEFAULTS = {
    "token_weight": None,
    "class_weight": None,
    "target_prob": None,
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "temperature": 1.0,
    "denominator": None,
    "bias": None,
    "logit_scale": 1.0,
    "softcap": None,
    "outputs": (),
}
#: What the gradient of a loss takes of each row: statistics, and upstream gradients of outputs.
STATISTICS_AND_GRADIENTS = ("lse", "entropy", "grad_lse", "grad_log_prob", "grad_entropy")


def given_options(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options of a validated call that differ from their defaults."""
    return [
        name
        for name, default in LOSS_DEFAULTS.items()
        if (got := arguments.get(name, default)) is not default
        and (default is None or not isinstance(got, type(default)) or got != default)
    ]


def logit_checks() -> list[Check]:
    """Return the checks of the arguments that make logits of products, except the temperature."""
    return [
        FloatingIfGiven("bias"),
        Shape("bias", "V"),
        FiniteNumber("logit_scale"),
        PositiveNumberIfGiven("softcap"),
    ]


def array_checks(input: str = "input", weight: str = "weight", target: str = "target") -> list[Check]:
    """Return the first checks of a loss with options: its required arrays."""
    return [
        NotNone(),
        Floating(input, weight),
        Int32OrInt64(target),
        Shape(input, "BT", "H"),
        Shape(weight, "V", "H"),
        TargetsWithProbabilities(target, "target_prob"),
    ]


def option_checks() -> list[Check]:
    """Return the checks of a loss's options but for its outputs."""
    return [
        FloatingIfGiven("token_weight"),
        Shape("token_weight", "BT"),
        FloatingIfGiven("class_weight"),
        Shape("class_weight", "V"),
        Fraction("label_smoothing"),
        FiniteNumber("lse_square_scale"),
        NumberOrVector("temperature"),
        PositiveNumberIfGiven("denominator"),
        *logit_checks(),
    ]


LINEAR_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    None,
    "input weight target reduction ignore_index grad_loss vocab_start_index return_grad output_mask workspace_bytes "
    f"filter_eps {' '.join(LOSS_DEFAULTS)}",
    family="linear",
    kernels="loss",
    arrays="input weight target",
    mixes="target token_weight class_weight target_prob temperature bias",
    optional="grad_loss token_weight class_weight target_prob temperature bias",
    out="weight_grad",  # for parts of a sum; the public function has no `out`
    checks=[
        *array_checks(),
        ReductionAndItsGradient(),
        IntegerFrom("ignore_index", -MAX_INDEX - 1),
        VocabularyStart(),
        TrueOrFalse("return_grad"),
        ValidOutputMask(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        *option_checks(),
        KnownOutputs(),
        NoOutputOfSeveralTargets(),
    ],
    value_checks=[TargetsInTheVocabulary(), PositiveValues("temperature")],
    results=[
        Result("loss", like="input", dims=("BT",), dtype=ACCUMULATOR, reduced_by="reduction"),
        Result("input_grad", like="input", asked_by=("return_grad", ("output_mask", 0))),
        Result("weight_grad", like="weight", asked_by=("return_grad", ("output_mask", 1))),
        Result("bias_grad", like="bias", asked_by=("return_grad", "bias")),
        Result("lse", like="input", dims=("BT",), dtype=ACCUMULATOR, asked_by=(("outputs", "lse"),)),
        Result("log_prob", like="input", dims=("BT",), dtype=ACCUMULATOR, asked_by=(("outputs", "log_prob"),)),
        Result("entropy", like="input", dims=("BT",), dtype=ACCUMULATOR, asked_by=(("outputs", "entropy"),)),
        Result("predicted", like="input", dims=("BT",), dtype=np.dtype(np.int64), asked_by=(("outputs", "predicted"),)),
        Result("correct", like="input", dims=(), dtype=np.dtype(np.int64), asked_by=(("outputs", "correct"),)),
    ],
)

LINEAR_TOP_K = Operator(
    "linear_top_k",
    None,
    "input weight k temperature bias logit_scale softcap workspace_bytes",
    family="linear",
    kernels="top_k",
    arrays="input weight",
    mixes="temperature bias",
    optional="temperature bias",
    checks=[
        NotNone(),
        Floating("input", "weight"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        NonemptyVocabulary("weight"),
        CountOfEntries("k", MAX_TOP_K),
        NumberOrVector("temperature"),
        *logit_checks(),
        Workspace(MIN_WORKSPACE_BYTES),
    ],
    value_checks=[PositiveValues("temperature")],
    results=[
        Result("log_prob", like="input", dims=("BT", "k"), dtype=ACCUMULATOR),
        Result("index", like="input", dims=("BT", "k"), dtype=np.dtype(np.int64)),
    ],
)

LINEAR_CROSS_ENTROPY_BACKWARD = Operator(
    "linear_cross_entropy_backward",
    None,
    "input weight target lse entropy reduction ignore_index grad_loss grad_lse grad_log_prob grad_entropy "
    f"vocab_start_index output_mask workspace_bytes filter_eps {' '.join(LOSS_DEFAULTS)}".removesuffix(" outputs"),
    family="linear",
    kernels="loss_gradient",
    arrays="input weight target lse",
    mixes="target lse entropy grad_lse grad_log_prob grad_entropy token_weight class_weight target_prob temperature "
    "bias",
    optional="grad_loss entropy grad_lse grad_log_prob grad_entropy token_weight class_weight target_prob temperature "
    "bias",
    checks=[
        *array_checks(),
        *(check for name in STATISTICS_AND_GRADIENTS for check in (FloatingIfGiven(name), Shape(name, "BT"))),
        EntropyForItsGradient(),
        NoLogProbOfSeveralTargets(),
        SomeUpstreamGradient(),
        ReductionAndItsGradient(),
        IntegerFrom("ignore_index", -MAX_INDEX - 1),
        VocabularyStart(),
        ValidOutputMask(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        *option_checks(),
    ],
    value_checks=[TargetsInTheVocabulary(), PositiveValues("temperature")],
    results=[
        Result("input_grad", like="input", asked_by=(("output_mask", 0),)),
        Result("weight_grad", like="weight", asked_by=(("output_mask", 1),)),
        Result("bias_grad", like="bias", asked_by=("bias",)),
    ],
)

LINEAR = (
    FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD,
    FUSED_LINEAR_ONLINE_MAX_SUM,
    FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_BACKWARD,
    LINEAR_TOP_K,
)
