"""Checks that each rank makes of its own arguments, before the ranks compare their arguments."""

from __future__ import annotations

from .._call import Operator
from .._checks import (
    IntegerFrom,
    KnownOutputs,
    NoOutputOfSeveralTargets,
    PositiveValues,
    ReductionAndItsGradient,
    TrueOrFalse,
    ValidOutputMask,
    WorkspaceAndFilter,
)
from ..arguments import MAX_INDEX
from .linear import LOSS_DEFAULTS, MIN_WORKSPACE_BYTES, array_checks, option_checks


def _operator(name: str, input: str, weight: str, target: str) -> Operator:
    return Operator(
        f"parallel.{name}",
        None,
        f"{input} {weight} {target} reduction ignore_index grad_loss deterministic return_grad output_mask "
        f"workspace_bytes filter_eps {' '.join(LOSS_DEFAULTS)}",
        family="linear",
        kernels="loss",
        arrays=f"{input} {weight} {target}",
        mixes=f"{target} token_weight class_weight target_prob temperature bias",
        optional="grad_loss token_weight class_weight target_prob temperature bias",
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
        ],
        value_checks=[PositiveValues("temperature")],
        results=[],
    )


VOCABULARY_PARALLEL = _operator("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _operator("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
