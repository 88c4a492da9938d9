"""The operators: parameters, checks in order, results, and what computes them.

The checks themselves are compiled, in `_checks`, `_loss_checks` and `_target_checks`. `_call.Operator` describes the
columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._call import ACCUMULATOR, Check, Operator, Result
from .._checks import (
    AxisInRange,
    Dtype,
    Floating,
    Integer,
    MaskCovers,
    NotNone,
    NoTriuMask,
    Number,
    Rank,
    SameShape,
    Shape,
    TrueOrFalse,
)
from .._loss_checks import (
    AccumulatorOf,
    DenseWith,
    EntropyForItsGradient,
    HessianOfLossAlone,
    KnownOutputs,
    LeadingDimensions,
    LogitsDtypeMatches,
    MaskHasRows,
    NonemptyVocabulary,
    NoneWithout,
    NumberOrRows,
    PositiveValues,
    Reduction,
    SoftmaxOrStatistics,
    SomeUpstreamGradient,
    SomeVector,
    ValidOutputMask,
    VocabularyBounds,
    Workspace,
)
from .._target_checks import (
    Classes,
    NothingOfOneTarget,
    NumberOfEachTarget,
    Targets,
    TargetsInRange,
    TargetsInTheVocabulary,
    ZeroProbabilities,
)
from ..arguments import MAX_INDEX, MAX_RANK
from .options import (
    ARRAYS,
    LAYER_OUTPUTS,
    MAX_TOP_K,
    MIN_WORKSPACE_BYTES,
    NAMES,
    NO_SMOOTHING,
    NOT_NEGATIVE,
    NUMBER,
    NUMBER_OR_PER_ROW,
    OPTIONS,
    OUTPUT_GRADIENTS,
    OUTPUTS,
    PER_CLASS,
    PER_ROW,
    PER_TARGET,
    Output,
)

# ---- row-wise operators ----------------------------------------------------------------------------------------------

SOFTMAX_BACKWARD = Operator(
    "softmax_backward",
    "aclnnSoftmaxBackward",
    "grad_output output axis",
    family="rowwise",
    kernels="softmax_backward",
    operands="grad_output output",
    arrays="grad_output output",
    checks=[
        NotNone(),
        Floating("grad_output", "output"),
        AxisInRange("grad_output"),
        Rank("grad_output", 0, MAX_RANK),
        SameShape("grad_output", "output"),
    ],
    results=[Result("result", like="grad_output")],
)
LOG_SOFTMAX_BACKWARD = Operator(
    "log_softmax_backward",
    "aclnnLogSoftmaxBackward",
    "grad_output output axis",
    family="rowwise",
    kernels="log_softmax_backward",
    operands="grad_output output",
    arrays="grad_output output",
    checks=[
        NotNone(),
        Floating("grad_output", "output"),
        Rank("grad_output", 0, MAX_RANK),
        SameShape("grad_output", "output"),
        AxisInRange("grad_output"),
    ],
    results=[Result("result", like="grad_output")],
)
SCALED_MASKED_SOFTMAX_BACKWARD = Operator(
    "scaled_masked_softmax_backward",
    "aclnnScaledMaskedSoftmaxBackward",
    "grad_output y mask scale fix_triu_mask",
    family="rowwise",
    kernels="scaled_masked_softmax_backward",
    operands="grad_output y",
    mask="mask",
    scale="scale",
    arrays="grad_output y mask",
    checks=[
        NotNone(),
        Floating("grad_output", "y"),
        Dtype("mask", "bool"),
        Number("scale"),
        Rank("grad_output", 4, 4),
        SameShape("grad_output", "y"),
        Rank("mask", 4, 4),
        MaskCovers("grad_output", "mask"),
        NoTriuMask(),
    ],
    results=[Result("result", like="grad_output")],
)
SOFTMAX = Operator(
    "softmax",
    "aclnnSoftmax",
    "input axis",
    family="rowwise",
    kernels="softmax",
    operands="input",
    arrays="input",
    checks=[NotNone(), Floating("input", converts=True), AxisInRange("input"), Rank("input", 0, MAX_RANK)],
    results=[Result("result", like="input")],
)
LOG_SOFTMAX = Operator(
    "log_softmax",
    "aclnnLogSoftmax",
    "input axis",
    family="rowwise",
    kernels="log_softmax",
    operands="input",
    arrays="input",
    checks=[NotNone(), AxisInRange("input"), Floating("input", converts=True), Rank("input", 0, MAX_RANK)],
    results=[Result("result", like="input")],
)
SCALED_MASKED_SOFTMAX = Operator(
    "scaled_masked_softmax",
    "aclnnScaledMaskedSoftmax",
    "x mask scale fix_triu_mask",
    family="rowwise",
    kernels="scaled_masked_softmax",
    operands="x",
    mask="mask",
    scale="scale",
    arrays="x mask",
    checks=[
        NotNone(),
        Floating("x", converts=True),
        Dtype("mask", "bool"),
        Number("scale"),
        Rank("x", 4, 4),
        Rank("mask", 4, 4),
        MaskCovers("x", "mask"),
        NoTriuMask(),
    ],
    results=[Result("result", like="x")],
)

# ---- linear operators of the device's documents ----------------------------------------------------------------------

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
        Dtype("target_mask", "bool", "uint8", note="with eight rows to a byte"),
        Dtype("masked_target", "int32", "int64"),
        Number("label_smoothing", NO_SMOOTHING),
        Shape("grad", "BT"),
        Shape("input", "BT", "H"),
        Shape("weight", "V", "H"),
        MaskHasRows("target_mask"),
        Shape("masked_target", "BT"),
        Shape("logits_max", "BT"),
        Shape("sum_exp_logits", "BT"),
        Shape("softmax", "BT", "V"),
        ValidOutputMask(),
        Workspace(MIN_WORKSPACE_BYTES),
        Number("filter_eps", NOT_NEGATIVE),
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
        Dtype("target", "int32", "int64"),
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
        Dtype("logits_max", "float32", "float64"),
        AccumulatorOf("logits_max", "sum_exp_logits", "predicted_logits"),
        LogitsDtypeMatches("logits_max", "vocab_parallel_logits"),
        Shape("logits_max", "BT"),
        Shape("sum_exp_logits", "BT"),
        Shape("predicted_logits", "BT"),
        Shape("vocab_parallel_logits", "BT", "V"),
        Number("label_smoothing", NO_SMOOTHING),
    ],
    results=[
        Result("loss", like="logits_max"),
        Result("softmax", like="vocab_parallel_logits", dtype=ACCUMULATOR, asked_by=("vocab_parallel_logits",)),
    ],
)

# ---- losses ----------------------------------------------------------------------------------------------------------

#: The options of the loss of a linear layer, in the order of its parameters.
LINEAR_OPTIONS = " ".join(OPTIONS)
#: What the gradient of a loss takes of each row: statistics, and upstream gradients of outputs.
STATISTICS_AND_GRADIENTS = ("lse", "entropy", *OUTPUT_GRADIENTS)


def arrays_among(parameters: str) -> str:
    """Return the options that may be arrays, and the upstream gradients, among names of parameters."""
    also = ("grad_loss", "entropy", *OUTPUT_GRADIENTS)
    return " ".join(
        name for name in parameters.split() if name in also or (name in OPTIONS and OPTIONS[name].kind in ARRAYS)
    )


def checks_of(parameters: str, rows: str = "BT") -> list[Check]:
    """Return the checks of the options among names of parameters. `rows` is the size that the number of rows has."""
    checks: list[Check] = []
    for name in parameters.split():
        kind, allowed, default = OPTIONS[name].kind, OPTIONS[name].range, OPTIONS[name].default
        if kind == NUMBER:
            checks.append(Number(name, allowed, is_optional=default is None))
        elif kind == NUMBER_OR_PER_ROW:
            # The value checks of the loss of logits also look at numbers.
            checks.append(NumberOrRows(name, rows, allowed if rows == "BT" else None))
        elif kind == NAMES:
            checks += [KnownOutputs(LAYER_OUTPUTS if rows == "BT" else OUTPUTS), NothingOfOneTarget()]
        elif kind != PER_TARGET:  # `Targets` checks these
            checks += [Floating(name), Shape(name, rows if kind == PER_ROW else "V")]
    return checks


def rows_among(parameters: str) -> list[str]:
    """Return the arrays among names of parameters that have a number for each row, or, as the temperature, may have."""
    arrays = ["lse", *arrays_among(parameters).split()]
    return [
        name
        for name in parameters.split()
        if name in arrays and (name not in OPTIONS or OPTIONS[name].kind != PER_CLASS)
    ]


def targets_of_layer(
    parameters: str,
    input: str = "input",
    weight: str = "weight",
    target: str = "target",
    *,
    allows_dense: bool = False,
    like_input: tuple[str, ...] = (),
) -> list[Check]:
    """Return the first checks of the loss of a linear layer: its required arrays and the probabilities of targets.

    The rows may have several dimensions, in the input, the target and the arrays of rows among `parameters`. The arrays
    `like_input` have the shape of the input.
    """
    return [
        NotNone(),
        Floating(input, weight, converts=True),
        Classes(target, allows_dense=allows_dense),
        ZeroProbabilities(target),
        LeadingDimensions(input, target, *rows_among(parameters), like_input=like_input),
        Shape(input, "BT", "H"),
        Shape(weight, "V", "H"),
        Targets(target, "target_prob", "BT"),
    ]


def upstream_gradients(names: tuple[str, ...], rows: str = "BT", target: str = "target") -> list[Check]:
    """Return the checks of arrays with a number for each row, or for each target.

    `rows` is the size that the number of rows has.
    """
    of_targets = [f"grad_{output.name}" for output in OUTPUTS.values() if output.is_of_targets]
    return [
        check
        for name in names
        for check in (
            Floating(name),
            NumberOfEachTarget(name, target, rows) if name in of_targets else Shape(name, rows),
        )
    ]


def limits() -> list[Check]:
    """Return the checks of ``output_mask``, ``workspace_bytes`` and ``filter_eps``."""
    return [ValidOutputMask(), Workspace(MIN_WORKSPACE_BYTES), Number("filter_eps", NOT_NEGATIVE)]


def ignored() -> Check:
    """Return the check of ``ignore_index``."""
    return Integer("ignore_index", -MAX_INDEX - 1)


def output_results(outputs: Mapping[str, Output], rows: str) -> list[Result]:
    """Return the results of a loss that ``outputs`` asks for, from all that the loss has."""
    shapes = {
        output.name: "logits" if output.is_of_logits else "targets" if output.is_of_targets else rows
        for output in outputs.values()
    }
    return [
        Result(
            output.name,
            like="input",
            dims=() if output.is_total else (shapes[output.name],),
            dtype=np.dtype(np.int64) if output.is_integer else None if output.is_of_logits else ACCUMULATOR,
            asked_by=(("outputs", output.name),),
        )
        for output in outputs.values()
    ]


_LINEAR_PARAMETERS = (
    "input weight target reduction ignore_index grad_loss vocab_start_index return_grad output_mask workspace_bytes "
    f"filter_eps {LINEAR_OPTIONS}"
)
LINEAR_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    None,
    _LINEAR_PARAMETERS,
    family="linear",
    kernels="loss",
    sparse="input",
    arrays="input weight target",
    mixes=f"target {arrays_among(LINEAR_OPTIONS)}",
    optional=arrays_among(_LINEAR_PARAMETERS),
    out="weight_grad",  # for parts of a sum; the public function has no `out`
    checks=[
        *targets_of_layer(_LINEAR_PARAMETERS, allows_dense=True),
        Reduction("BT"),
        ignored(),
        Integer("vocab_start_index", precedes_entries=True),
        TrueOrFalse("return_grad"),
        *limits(),
        *checks_of(LINEAR_OPTIONS),
    ],
    value_checks=[TargetsInTheVocabulary("vocab_start_index"), PositiveValues("temperature")],
    results=[
        Result("loss", like="input", dims=("BT",), dtype=ACCUMULATOR, reduced_by="reduction"),
        Result("input_grad", like="input", asked_by=("return_grad", ("output_mask", 0))),
        Result("weight_grad", like="weight", asked_by=("return_grad", ("output_mask", 1))),
        Result("bias_grad", like="bias", asked_by=("return_grad", "bias")),
        *output_results(LAYER_OUTPUTS, "BT"),
    ],
)

_BACKWARD_OPTIONS = LINEAR_OPTIONS.removesuffix(" outputs")
_BACKWARD_PARAMETERS = (
    f"input weight target lse entropy reduction ignore_index grad_loss {' '.join(OUTPUT_GRADIENTS)} vocab_start_index "
    f"output_mask workspace_bytes filter_eps {_BACKWARD_OPTIONS}"
)
LINEAR_CROSS_ENTROPY_BACKWARD = Operator(
    "linear_cross_entropy_backward",
    None,
    _BACKWARD_PARAMETERS,
    family="linear",
    kernels="loss_gradient",
    sparse="input",
    arrays="input weight target lse",
    mixes=f"target lse entropy {' '.join(OUTPUT_GRADIENTS)} {arrays_among(_BACKWARD_OPTIONS)}",
    optional=arrays_among(_BACKWARD_PARAMETERS),
    checks=[
        *targets_of_layer(_BACKWARD_PARAMETERS, allows_dense=True),
        *upstream_gradients(STATISTICS_AND_GRADIENTS),
        EntropyForItsGradient(),
        SomeUpstreamGradient(),
        Reduction("BT"),
        ignored(),
        Integer("vocab_start_index", precedes_entries=True),
        *limits(),
        *checks_of(_BACKWARD_OPTIONS),
    ],
    value_checks=[TargetsInTheVocabulary("vocab_start_index"), PositiveValues("temperature")],
    results=[
        Result("input_grad", like="input", asked_by=(("output_mask", 0),)),
        Result("weight_grad", like="weight", asked_by=(("output_mask", 1),)),
        Result("bias_grad", like="bias", asked_by=("bias",)),
    ],
)


_HESSIAN_PARAMETERS = f"reduction ignore_index grad_loss vocab_start_index {_BACKWARD_OPTIONS}"


def hessian_checks(parameters: str, *of_vector: Check, like_input: tuple[str, ...] = ()) -> list[Check]:
    """Return the checks of second derivatives of a layer's loss. `of_vector` checks a vector.

    The arrays `like_input` have the shape of the input.
    """
    return [
        *targets_of_layer(parameters, allows_dense=True, like_input=like_input),
        *of_vector,
        Reduction("BT"),
        ignored(),
        Integer("vocab_start_index", precedes_entries=True),
        *checks_of(_BACKWARD_OPTIONS),
    ]


LINEAR_CROSS_ENTROPY_HVP = Operator(
    "linear_cross_entropy_hvp",
    None,
    f"input weight target vector vector_bias vector_input {_HESSIAN_PARAMETERS}",
    family="linear",
    kernels="hvp",
    sparse="input",
    arrays="input weight target",
    mixes=f"target vector_bias {arrays_among(_HESSIAN_PARAMETERS)}",
    optional=f"vector vector_bias vector_input {arrays_among(_HESSIAN_PARAMETERS)}",
    checks=[
        SomeVector(),
        *hessian_checks(
            _HESSIAN_PARAMETERS,
            DenseWith("input", "vector_input"),
            Floating("vector"),
            Floating("vector_input"),
            SameShape("weight", "vector"),
            SameShape("input", "vector_input"),
            NoneWithout("vector_bias", "bias"),
            Floating("vector_bias"),
            Shape("vector_bias", "V"),
            like_input=("vector_input",),
        ),
    ],
    value_checks=[TargetsInTheVocabulary("vocab_start_index"), PositiveValues("temperature")],
    results=[
        Result("weight_product", like="weight"),
        Result("bias_product", like="bias", asked_by=("bias",)),
        Result("input_product", like="input", asked_by=("vector_input",)),
    ],
)
LINEAR_CROSS_ENTROPY_HESSIAN = Operator(
    "linear_cross_entropy_hessian",
    None,
    f"input weight target {_HESSIAN_PARAMETERS}",
    family="linear",
    kernels="hessian",
    arrays="input weight target",
    mixes=f"target {arrays_among(_HESSIAN_PARAMETERS)}",
    optional=arrays_among(_HESSIAN_PARAMETERS),
    checks=hessian_checks(_HESSIAN_PARAMETERS),
    value_checks=[TargetsInTheVocabulary("vocab_start_index"), PositiveValues("temperature")],
    results=[Result("hessian", like="input", dims=("V", "H with bias", "V", "H with bias"), dtype=ACCUMULATOR)],
)


#: The options of the largest log-probabilities.
TOP_K_OPTIONS = "temperature bias logit_scale softcap"


def top_k_checks(weight: str, *of_k: Check) -> list[Check]:
    """Return the checks of the largest log-probabilities. `of_k` are the checks of their number k."""
    return [
        NotNone(),
        Floating("input", weight, converts=True),
        LeadingDimensions("input", "temperature"),
        Shape("input", "BT", "H"),
        Shape(weight, "V", "H"),
        *of_k,
        *checks_of(TOP_K_OPTIONS),
        Workspace(MIN_WORKSPACE_BYTES),
    ]


LINEAR_TOP_K = Operator(
    "linear_top_k",
    None,
    f"input weight k {TOP_K_OPTIONS} workspace_bytes",
    family="linear",
    kernels="top_k",
    arrays="input weight",
    mixes="temperature bias",
    optional="temperature bias",
    checks=top_k_checks("weight", NonemptyVocabulary("weight"), Integer("k", 1, MAX_TOP_K, counts_entries=True)),
    value_checks=[PositiveValues("temperature")],
    results=[
        Result("log_prob", like="input", dims=("BT", "k"), dtype=ACCUMULATOR),
        Result("index", like="input", dims=("BT", "k"), dtype=np.dtype(np.int64)),
    ],
)

#: The options of the loss of logits, in the order of its parameters.
_OF_LOGITS = " ".join(
    dict.fromkeys(["class_weight", *(each.name for each in OPTIONS.values() if each.of_logits and each.kind != NAMES)])
)
_UPSTREAM = f"grad_loss {' '.join(OUTPUT_GRADIENTS)}"


def logits_and_targets() -> list[Check]:
    """Return the first checks of the loss of logits: its required arrays and the probabilities of targets."""
    return [
        NotNone(),
        Floating("input", converts=True),
        Classes("target", allows_dense=True),
        ZeroProbabilities("target"),
        Floating("target_prob"),
        AxisInRange("input"),
        Rank("input", 0, MAX_RANK),
        Targets("target", "target_prob", "rows"),
        NonemptyVocabulary("input"),
    ]


CROSS_ENTROPY = Operator(
    "cross_entropy",
    None,
    f"input target axis reduction ignore_index {_OF_LOGITS} {_UPSTREAM} outputs return_grad",
    family="losses",
    kernels="cross_entropy",
    arrays="input target",
    optional=arrays_among(f"{_OF_LOGITS} {_UPSTREAM}"),
    mixes=f"target {arrays_among(f'{_OF_LOGITS} {_UPSTREAM}')}",
    out="input_grad",
    checks=[
        *logits_and_targets(),
        Reduction("rows"),
        ignored(),
        *checks_of(_OF_LOGITS, "rows"),
        *upstream_gradients(OUTPUT_GRADIENTS, "rows"),
        *checks_of("outputs", "rows"),
        HessianOfLossAlone(*OUTPUT_GRADIENTS),
        TrueOrFalse("return_grad"),
    ],
    value_checks=[PositiveValues("temperature"), TargetsInTheVocabulary()],
    results=[
        Result("loss", like="input", dims=("rows",), dtype=ACCUMULATOR, reduced_by="reduction"),
        Result("input_grad", like="input", asked_by=("return_grad",)),
        *output_results(OUTPUTS, "rows"),
    ],
)

CROSS_ENTROPY_HVP = Operator(
    "cross_entropy_hvp",
    None,
    f"input target vector axis reduction ignore_index {_OF_LOGITS} grad_loss",
    family="losses",
    kernels="hessian_product",
    arrays="input target vector",
    optional=arrays_among(f"{_OF_LOGITS} grad_loss"),
    mixes=f"target {arrays_among(f'{_OF_LOGITS} grad_loss')}",
    checks=[
        *logits_and_targets(),
        Floating("vector"),
        SameShape("input", "vector"),
        Reduction("rows"),
        ignored(),
        *checks_of(_OF_LOGITS, "rows"),
    ],
    value_checks=[PositiveValues("temperature"), TargetsInTheVocabulary()],
    results=[Result("product", like="input", dims=("logits",))],
)

ROWWISE = (
    SOFTMAX_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    SCALED_MASKED_SOFTMAX_BACKWARD,
    SOFTMAX,
    LOG_SOFTMAX,
    SCALED_MASKED_SOFTMAX,
)
LINEAR = (
    FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD,
    FUSED_LINEAR_ONLINE_MAX_SUM,
    FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_BACKWARD,
    LINEAR_CROSS_ENTROPY_HVP,
    LINEAR_CROSS_ENTROPY_HESSIAN,
    LINEAR_TOP_K,
)
LOSSES = (CROSS_ENTROPY, CROSS_ENTROPY_HVP)

#: All operators by name.
OPERATORS = {operator.name: operator for operator in (*ROWWISE, *LINEAR, *LOSSES)}
