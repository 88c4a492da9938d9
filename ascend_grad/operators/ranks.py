"""Operators over ranks. Each rank checks its own arguments before the ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._call import Check, Operator
from .._checks import Integer, TrueOrFalse
from .._loss_checks import (
    EntropyForItsGradient,
    PositiveValues,
    Reduction,
    SomeUpstreamGradient,
)
from .options import OPTIONS, OUTPUT_GRADIENTS, PER_CLASS, given_options
from .table import (
    LINEAR_OPTIONS,
    STATISTICS_AND_GRADIENTS,
    TOP_K_OPTIONS,
    arrays_among,
    checks_of,
    ignored,
    limits,
    targets_of_layer,
    top_k_checks,
    upstream_gradients,
)

#: The options of functions that compute only gradients: all but the outputs.
_OF_GRADIENTS = LINEAR_OPTIONS.removesuffix(" outputs")
#: Arguments that are arrays with one number for each vocabulary entry of this rank.
OF_ENTRIES = tuple(name for name, option in OPTIONS.items() if option.kind == PER_CLASS)
#: Arguments that are arrays with numbers for each row, or, as the temperature, may be.
OF_ROWS = (
    *(name for name in arrays_among(_OF_GRADIENTS).split() if name not in OF_ENTRIES),
    *STATISTICS_AND_GRADIENTS,
)
#: Arguments of the functions that compute with a part of a vocabulary, beside arrays.
ARGUMENTS_OF_PARTS = ("reduction", "ignore_index", "filter_eps", *_OF_GRADIENTS.split(), *OUTPUT_GRADIENTS)
#: The values of arguments that not every function has.
WITHOUT_ARGUMENT = {"lse": None, "entropy": None, "return_grad": True, "outputs": ()}


def given_over_ranks(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the options and gradients of outputs of a validated call that differ from their defaults."""
    return [*given_options(arguments), *(name for name in OUTPUT_GRADIENTS if arguments[name] is not None)]


def _operator(name: str, arrays: str, parameters: str, checks: list[Check]) -> Operator:
    """Describe a loss or its gradients. The first three arrays are the input, the weight and the target."""
    optional = arrays_among(parameters)
    return Operator(
        f"parallel.{name}",
        None,
        f"{arrays} {parameters}",
        family="linear",
        kernels="loss",
        arrays=arrays,
        mixes=" ".join([*arrays.split()[2:], *(name for name in optional.split() if name != "grad_loss")]),
        optional=optional,
        checks=checks,
        value_checks=[PositiveValues("temperature")],
        results=[],
    )


def _loss(name: str, input: str, weight: str, target: str) -> Operator:
    parameters = (
        "reduction ignore_index grad_loss deterministic return_grad output_mask workspace_bytes filter_eps "
        f"{LINEAR_OPTIONS} {' '.join(OUTPUT_GRADIENTS)}"
    )
    return _operator(
        name,
        f"{input} {weight} {target}",
        parameters,
        [
            *targets_of_layer(parameters, input, weight, target),
            Reduction("BT"),
            ignored(),
            TrueOrFalse("deterministic"),
            TrueOrFalse("return_grad"),
            *limits(),
            *checks_of(LINEAR_OPTIONS),
            *upstream_gradients(OUTPUT_GRADIENTS, target=target),
        ],
    )


VOCABULARY_PARALLEL = _loss("linear_cross_entropy", "input", "weight_shard", "target")
DATA_PARALLEL = _loss("data_parallel_linear_cross_entropy", "input_rows", "weight", "target_rows")
_BACKWARD_PARAMETERS = (
    "entropy reduction ignore_index grad_loss deterministic output_mask workspace_bytes filter_eps "
    f"{' '.join(OUTPUT_GRADIENTS)} {_OF_GRADIENTS}"
)
VOCABULARY_PARALLEL_BACKWARD = _operator(
    "linear_cross_entropy_backward",
    "input weight_shard target lse",
    _BACKWARD_PARAMETERS,
    [
        *targets_of_layer(f"lse {_BACKWARD_PARAMETERS}", "input", "weight_shard", "target"),
        *upstream_gradients(STATISTICS_AND_GRADIENTS),
        EntropyForItsGradient(),
        SomeUpstreamGradient(),
        Reduction("BT"),
        ignored(),
        TrueOrFalse("deterministic"),
        *limits(),
        *checks_of(_OF_GRADIENTS),
    ],
)
#: The arguments beside the first arrays that are neither options nor upstream gradients of outputs.
SETTINGS = tuple(
    name
    for name in dict.fromkeys(VOCABULARY_PARALLEL.parameters[3:] + VOCABULARY_PARALLEL_BACKWARD.parameters[3:])
    if name not in OPTIONS and name not in OUTPUT_GRADIENTS
)
VOCABULARY_PARALLEL_TOP_K = Operator(
    "parallel.linear_top_k",
    None,
    f"input weight_shard k {TOP_K_OPTIONS} workspace_bytes",
    family="linear",
    kernels="top_k",
    arrays="input weight_shard",
    mixes="temperature bias",
    optional="temperature bias",
    checks=top_k_checks("weight_shard", Integer("k", 1)),
    value_checks=[PositiveValues("temperature")],
    results=[],
)
