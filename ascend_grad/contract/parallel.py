"""Checks that each rank makes of its own arguments, before the ranks compare their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._call import Operator
from .._checks import (
    FloatingIfGiven,
    IntegerFrom,
    KnownOutputs,
    NoLogProbOfSeveralTargets,
    NoOutputOfSeveralTargets,
    PositiveValues,
    ReductionAndItsGradient,
    Shape,
    TrueOrFalse,
    ValidOutputMask,
    WorkspaceAndFilter,
)
from ..arguments import MAX_INDEX
from .linear import LOSS_DEFAULTS, MIN_WORKSPACE_BYTES, array_checks, given_options, option_checks

#: Arguments with upstream gradients of outputs.
OUTPUT_GRADIENTS = ("grad_lse", "grad_log_prob", "grad_entropy")


def given_over_ranks(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options and gradients of outputs of a validated call that differ from their defaults."""
    return [*given_options(arguments), *(name for name in OUTPUT_GRADIENTS if arguments[name] is not None)]


def _operator(name: str, input: str, weight: str, target: str) -> Operator:
    return Operator(
        f"parallel.{name}",
        None,
        f"{input} {weight} {target} reduction ignore_index grad_loss deterministic return_grad output_mask "
        f"workspace_bytes filter_eps {' '.join((*LOSS_DEFAULTS, *OUTPUT_GRADIENTS))}",
        family="linear",
        kernels="loss",
        arrays=f"{input} {weight} {target}",
        mixes=f"{target} token_weight class_weight target_prob temperature bias {' '.join(OUTPUT_GRADIENTS)}",
        optional=f"grad_loss token_weight class_weight target_prob temperature bias {' '.join(OUTPUT_GRADIENTS)}",
        checks=[
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
            *(check for name in OUTPUT_GRADIENTS for check in (FloatingIfGiven(name), Shape(name, "BT"))),
            NoLogProbOfSeveralTargets(),
        ],
        value_checks=[PositiveValues("temperature")],
        results=[],
    )


VOCABULARY_PARALLEL = _operator("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _operator("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
