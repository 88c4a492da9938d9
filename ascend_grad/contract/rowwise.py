"""Contracts of the row-wise operators."""

from __future__ import annotations

from .._call import Operator, Result
from .._checks import (
    Boolean,
    DimInRange,
    Floating,
    MaskCovers,
    NotNone,
    NoTriuMask,
    RankAtMost,
    RankExactly,
    RealNumber,
    SameShape,
)
from ..arguments import MAX_RANK

SOFTMAX_BACKWARD = Operator(
    "softmax_backward",
    "aclnnSoftmaxBackward",
    "grad_output output dim",
    family="rowwise",
    kernels="softmax_backward",
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
    family="rowwise",
    kernels="log_softmax_backward",
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
    family="rowwise",
    kernels="scaled_masked_softmax_backward",
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
    family="rowwise",
    kernels="softmax",
    arrays="input",
    checks=[NotNone(), Floating("input"), DimInRange("input"), RankAtMost("input", MAX_RANK)],
    results=[Result("result", like="input")],
)
LOG_SOFTMAX = Operator(
    "log_softmax",
    "aclnnLogSoftmax",
    "input dim",
    family="rowwise",
    kernels="log_softmax",
    arrays="input",
    checks=[NotNone(), DimInRange("input"), Floating("input"), RankAtMost("input", MAX_RANK)],
    results=[Result("result", like="input")],
)
SCALED_MASKED_SOFTMAX = Operator(
    "scaled_masked_softmax",
    "aclnnScaledMaskedSoftmax",
    "x mask scale fix_triu_mask",
    family="rowwise",
    kernels="scaled_masked_softmax",
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
