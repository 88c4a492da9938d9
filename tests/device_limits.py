"""What a device of the family 910B takes, as the operators' documents say it, written down apart from the library."""

from __future__ import annotations

import numpy as np
from linear_samples import GRADIENT, LOSS, STATISTICS, LinearProblem
from samples import MASKED, Problem


def code_of(problem: Problem | LinearProblem) -> int | None:
    """The status code with which a forced device refuses this valid call; None where it takes it."""
    return _linear(problem) if isinstance(problem, LinearProblem) else _rowwise(problem)


def _rowwise(problem: Problem) -> int | None:
    if problem.dtype.newbyteorder("=") == np.float64:
        return 161002
    if problem.operator in MASKED and problem.shape[-1] > 4096 and 0 not in problem.shape:
        return 161002
    return None


def _linear(problem: LinearProblem) -> int | None:
    arguments = problem.arguments
    if problem.dtype.newbyteorder("=") == np.float64:
        return 161002
    if problem.operator == LOSS:
        return None
    if problem.dtype.newbyteorder("=") == np.float32:
        return 161002
    bt, h = arguments["input"].shape
    v = len(arguments["weight"])
    if 0 in (bt, h, v):
        return None
    if problem.operator != GRADIENT:
        too_many = problem.operator == STATISTICS and arguments["vocab_end_index"] > 2**24
        return 161002 if too_many or h > 65534 or v > 2**24 else None
    if arguments.get("softmax") is not None:
        if v < 128:
            return 161002
        if v > 24560 or bt > 65536:
            return 561103
    return 561103 if h > 65535 else None
