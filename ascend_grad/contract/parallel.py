"""Checks that each rank makes of its own arguments, before the ranks compare their arguments."""

from __future__ import annotations

from .._call import Operator
from .._checks import (
    Floating,
    Int32OrInt64,
    IntegerFrom,
    NotNone,
    ReductionAndItsGradient,
    Shape,
    TrueOrFalse,
    ValidOutputMask,
    WorkspaceAndFilter,
)
from ..arguments import MAX_INDEX
from .linear import MIN_WORKSPACE_BYTES


def _operator(name: str, input: str, weight: str, target: str) -> Operator:
    return Operator(
        f"parallel.{name}",
        None,
        f"{input} {weight} {target} reduction ignore_index grad_loss deterministic return_grad output_mask "
        "workspace_bytes filter_eps",
        family="linear",
        kernels="loss",
        arrays=f"{input} {weight} {target}",
        mixes=target,
        optional="grad_loss",
        checks=[
            NotNone(),
            Floating(input, weight),
            Int32OrInt64(target),
            Shape(input, "BT", "H"),
            Shape(weight, "V", "H"),
            Shape(target, "BT"),
            ReductionAndItsGradient(),
            IntegerFrom("ignore_index", -MAX_INDEX - 1),
            TrueOrFalse("deterministic"),
            TrueOrFalse("return_grad"),
            ValidOutputMask(),
            WorkspaceAndFilter(MIN_WORKSPACE_BYTES),
        ],
        results=[],
    )


VOCABULARY_PARALLEL = _operator("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _operator("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
