"""Checks that each rank makes of its own arguments, before the ranks compare their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._call import Operator
from .._checks import TrueOrFalse
from .._loss_checks import NothingOfOneTarget, PositiveValues, Reduction
from .options import OUTPUT_GRADIENTS, given_options
from .table import LINEAR_OPTIONS, arrays_among, checks_of, ignored, limits, targets_of_layer, upstream_gradients


def given_over_ranks(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options and gradients of outputs of a validated call that differ from their defaults."""
    return [*given_options(arguments), *(name for name in OUTPUT_GRADIENTS if arguments[name] is not None)]


def _operator(name: str, input: str, weight: str, target: str) -> Operator:
    options = f"{LINEAR_OPTIONS} {' '.join(OUTPUT_GRADIENTS)}"
    return Operator(
        f"parallel.{name}",
        None,
        f"{input} {weight} {target} reduction ignore_index grad_loss deterministic return_grad output_mask "
        f"workspace_bytes filter_eps {options}",
        family="linear",
        kernels="loss",
        arrays=f"{input} {weight} {target}",
        mixes=f"{target} {arrays_among(options)}",
        optional=arrays_among(f"grad_loss {options}"),
        checks=[
            *targets_of_layer(input, weight, target),
            Reduction("BT"),
            ignored(),
            TrueOrFalse("deterministic"),
            TrueOrFalse("return_grad"),
            *limits(),
            *checks_of(LINEAR_OPTIONS),
            *upstream_gradients(OUTPUT_GRADIENTS),
            NothingOfOneTarget("grad_log_prob"),
        ],
        value_checks=[PositiveValues("temperature")],
        results=[],
    )


VOCABULARY_PARALLEL = _operator("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _operator("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
