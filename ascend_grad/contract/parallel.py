"""Checks that each rank makes of its own arguments, before the ranks compare their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._call import Check, Operator
from .._checks import (
    EntropyForItsGradient,
    Floating,
    FloatingIfGiven,
    IntegerFrom,
    KnownOutputs,
    NoLogProbOfSeveralTargets,
    NoOutputOfSeveralTargets,
    NotNone,
    NumberOrVector,
    PositiveValues,
    ReductionAndItsGradient,
    Shape,
    SomeUpstreamGradient,
    TrueOrFalse,
    ValidOutputMask,
    Workspace,
    WorkspaceAndFilter,
)
from ..arguments import MAX_INDEX
from .linear import (
    LOSS_DEFAULTS,
    MIN_WORKSPACE_BYTES,
    STATISTICS_AND_GRADIENTS,
    array_checks,
    given_options,
    logit_checks,
    option_checks,
)

#: Arguments with upstream gradients of outputs.
OUTPUT_GRADIENTS = ("grad_lse", "grad_log_prob", "grad_entropy")
#: Arguments that are arrays with numbers for each row, or, as the temperature, may be.
OF_ROWS = ("token_weight", "target_prob", "temperature", *STATISTICS_AND_GRADIENTS)
#: Arguments that are arrays with one number for each vocabulary entry of this rank.
OF_ENTRIES = ("bias", "class_weight")
#: The options of the gradients alone: all but the outputs.
_OF_GRADIENTS = tuple(name for name in LOSS_DEFAULTS if name != "outputs")
#: Arguments of the functions that compute with a part of a vocabulary, beside arrays.
ARGUMENTS_OF_PARTS = ("reduction", "ignore_index", "filter_eps", *_OF_GRADIENTS, *OUTPUT_GRADIENTS)
#: The values of arguments that not every function has.
WITHOUT_ARGUMENT = {"lse": None, "entropy": None, "return_grad": True, "outputs": ()}


def given_over_ranks(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options and gradients of outputs of a validated call that differ from their defaults."""
    return [*given_options(arguments), *(name for name in OUTPUT_GRADIENTS if arguments[name] is not None)]


def _vectors(*names: str) -> list[Check]:
    return [check for name in names for check in (FloatingIfGiven(name), Shape(name, "BT"))]


def _operator(name: str, arrays: str, parameters: str, vectors: tuple[str, ...], checks: list[Check]) -> Operator:
    """Describe a loss or its gradients. The first three arrays are the input, the weight and the target."""
    target = arrays.split()[2]
    optional = f"token_weight class_weight target_prob temperature bias {' '.join(vectors)}"
    return Operator(
        f"parallel.{name}",
        None,
        f"{arrays} {parameters}",
        family="linear",
        kernels="loss",
        arrays=arrays,
        mixes=" ".join([target, *arrays.split()[3:], optional]),
        optional=f"grad_loss {optional}",
        checks=checks,
        value_checks=[PositiveValues("temperature")],
        results=[],
    )


def _loss(name: str, input: str, weight: str, target: str) -> Operator:
    return _operator(
        name,
        f"{input} {weight} {target}",
        "reduction ignore_index grad_loss deterministic return_grad output_mask workspace_bytes filter_eps "
        f"{' '.join((*LOSS_DEFAULTS, *OUTPUT_GRADIENTS))}",
        OUTPUT_GRADIENTS,
        [
            *array_checks(input, weight, target),
            ReductionAndItsGradient(),
            IntegerFrom("ignore_index", -MAX_INDEX - 1),
            TrueOrFalse("deterministic"),
            TrueOrFalse("return_grad"),
            ValidOutputMask(),
            WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
            *option_checks(),
            KnownOutputs(),
            NoOutputOfSeveralTargets(),
            *_vectors(*OUTPUT_GRADIENTS),
            NoLogProbOfSeveralTargets(),
        ],
    )


VOCABULARY_PARALLEL = _loss("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _loss("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
VOCABULARY_PARALLEL_BACKWARD = _operator(
    "linear_cross_entropy_backward",
    "input weight_shard target lse",
    "entropy reduction ignore_index grad_loss deterministic output_mask workspace_bytes filter_eps "
    f"{' '.join((*OUTPUT_GRADIENTS, *_OF_GRADIENTS))}",
    ("entropy", *OUTPUT_GRADIENTS),
    [
        *array_checks("input", "weight_shard", "target"),
        *_vectors(*STATISTICS_AND_GRADIENTS),
        EntropyForItsGradient(),
        NoLogProbOfSeveralTargets(),
        SomeUpstreamGradient(),
        ReductionAndItsGradient(),
        IntegerFrom("ignore_index", -MAX_INDEX - 1),
        TrueOrFalse("deterministic"),
        ValidOutputMask(),
        WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        *option_checks(),
    ],
)
VOCABULARY_PARALLEL_TOP_K = Operator(
    "parallel.linear_top_k",
    None,
    "input weight_shard k temperature bias logit_scale softcap workspace_bytes",
    family="linear",
    kernels="top_k",
    arrays="input weight_shard",
    mixes="temperature bias",
    optional="temperature bias",
    checks=[
        NotNone(),
        Floating("input", "weight_shard"),
        Shape("input", "BT", "H"),
        Shape("weight_shard", "V", "H"),
        IntegerFrom("k", 1),
        NumberOrVector("temperature"),
        *logit_checks(),
        Workspace(MIN_WORKSPACE_BYTES),
    ],
    value_checks=[PositiveValues("temperature")],
    results=[],
)
