"""Contracts of losses of logits."""

from __future__ import annotations

import numpy as np

from .._call import ACCUMULATOR, Operator, Result
from .._checks import (
    ArrayOfRows,
    ClassWeights,
    DimInRange,
    FiniteNumber,
    Floating,
    FloatingIfGiven,
    Fraction,
    Int32OrInt64,
    IntegerFrom,
    KnownOutputs,
    NoLogProbOfSeveralTargets,
    NoOutputOfSeveralTargets,
    NotNone,
    NumberOrArrayOfRows,
    PositiveElements,
    PositiveNumberIfGiven,
    RankAtMost,
    ReductionOfRows,
    TargetsInTheRow,
    TargetsOfRows,
    TrueOrFalse,
)
from ..arguments import MAX_INDEX, MAX_RANK

CROSS_ENTROPY = Operator(
    "cross_entropy",
    None,
    "input target dim reduction ignore_index class_weight token_weight target_prob label_smoothing lse_square_scale "
    "temperature denominator grad_loss grad_lse grad_log_prob grad_entropy outputs return_grad",
    family="losses",
    kernels="cross_entropy",
    arrays="input target",
    optional="class_weight token_weight target_prob temperature grad_loss grad_lse grad_log_prob grad_entropy",
    mixes="target class_weight token_weight target_prob temperature grad_loss grad_lse grad_log_prob grad_entropy",
    out="input_grad",
    checks=[
        NotNone(),
        Floating("input"),
        Int32OrInt64("target"),
        FloatingIfGiven("target_prob"),
        DimInRange("input"),
        RankAtMost("input", MAX_RANK),
        TargetsOfRows(),
        ReductionOfRows(),
        IntegerFrom("ignore_index", -MAX_INDEX - 1),
        ClassWeights(),
        ArrayOfRows("token_weight"),
        Fraction("label_smoothing"),
        FiniteNumber("lse_square_scale"),
        NumberOrArrayOfRows("temperature"),
        PositiveNumberIfGiven("denominator"),
        *(ArrayOfRows(name) for name in ("grad_lse", "grad_log_prob", "grad_entropy")),
        NoLogProbOfSeveralTargets(),
        KnownOutputs(),
        NoOutputOfSeveralTargets(),
        TrueOrFalse("return_grad"),
    ],
    value_checks=[PositiveElements("temperature"), TargetsInTheRow()],
    results=[
        Result("loss", like="input", dims=("rows",), dtype=ACCUMULATOR, reduced_by="reduction"),
        Result("input_grad", like="input", asked_by=("return_grad",)),
        Result("lse", like="input", dims=("rows",), dtype=ACCUMULATOR, asked_by=(("outputs", "lse"),)),
        Result("log_prob", like="input", dims=("rows",), dtype=ACCUMULATOR, asked_by=(("outputs", "log_prob"),)),
        Result("entropy", like="input", dims=("rows",), dtype=ACCUMULATOR, asked_by=(("outputs", "entropy"),)),
        Result(
            "predicted", like="input", dims=("rows",), dtype=np.dtype(np.int64), asked_by=(("outputs", "predicted"),)
        ),
        Result("correct", like="input", dims=(), dtype=np.dtype(np.int64), asked_by=(("outputs", "correct"),)),
    ],
)

LOSSES = (CROSS_ENTROPY,)
