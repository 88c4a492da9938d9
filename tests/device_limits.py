"""What a device of the family 910B takes, as the operators' documents say it, written down apart from the library."""

from __future__ import annotations

from typing import Any

import numpy as np
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, LinearProblem
from samples import ARRAYS, MASKED, Problem


def code_of(problem: Problem | LinearProblem) -> int | None:
    """The status code with which a forced device refuses this valid call; None where it takes it."""
    if isinstance(problem, LinearProblem):
        return code(problem.operator, problem.arguments)
    return code(problem.operator, dict(zip(ARRAYS[problem.operator], problem.arrays, strict=True)))


def code(operator: str, arguments: dict[str, Any]) -> int | None:
    """The same, of an operator and its arguments by name."""
    return _linear(operator, arguments) if operator in LINEAR else _rowwise(operator, arguments)


def _rowwise(operator: str, arguments: dict[str, Any]) -> int | None:
    first = arguments[ARRAYS[operator][0]]
    if first.dtype.newbyteorder("=") == np.float64:
        return 161002
    if operator in MASKED and first.shape[-1] > 4096 and first.size:
        return 161002
    return None


def _linear(operator: str, arguments: dict[str, Any]) -> int | None:
    dtype = arguments["logits_max" if operator == LOSS else "input"].dtype.newbyteorder("=")
    if dtype == np.float64:
        return 161002
    if operator == LOSS:
        return None
    if dtype == np.float32:
        return 161002
    bt, h = arguments["input"].shape
    v = len(arguments["weight"])
    if 0 in (bt, h, v):
        return None
    if operator != GRADIENT:
        too_many = operator == STATISTICS and arguments["vocab_end_index"] > 2**24
        return 161002 if too_many or h > 65534 or v > 2**24 else None
    if arguments.get("softmax") is not None:
        if v < 128:
            return 161002
        if v > 24560 or bt > 65536:
            return 561103
    return 561103 if h > 65535 else None
