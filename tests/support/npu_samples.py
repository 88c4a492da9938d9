"""Make calls of every operator for the device, and read the device's counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, gradient_problem, problem_of
from samples import MASKED, OPERATORS, random_problem

import ascend_grad as ag
from ascend_grad import npu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)

COPIES = ("copies_h2h", "copies_h2d", "copies_d2h", "copies_d2d")

ALL = (*OPERATORS, GRADIENT, STATISTICS, LOSS, WHOLE)


def counts(device, *names: str) -> dict[str, int]:
    return {name: device.counter(name) for name in names}


def attempts_with_a_fault(
    device,
    function: str,
    code: int,
    attempt: Callable[[], object],
    check: Callable[[ag.AclError], None],
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Let each call of a function of the runtime (any if "*") fail in a separate attempt, and check its error.

    Yield whether the attempt raised. The last attempt makes no call that fails.
    """
    for nth in itertools.count(1):
        prepare()
        device.reset()
        device.fail(function, nth, code)
        has_raised = False
        try:
            attempt()
        except ag.AclError as error:
            check(error)
            has_raised = True
        is_over = device.faults_left()
        yield has_raised
        if is_over:
            return


def problem_for(operator: str):
    if operator in OPERATORS:
        problem = random_problem(operator, (2, 3, 5, 16) if operator in MASKED else (64, 128), BFLOAT16)
        return problem.arrays, dict(problem.settings)
    problem = gradient_problem((9, 130, 16), "bfloat16", "stored") if operator == GRADIENT else None
    problem = problem or problem_of(operator, (9, 130, 16), "bfloat16")
    return (), dict(problem.arguments)


def results_of(value) -> list[np.ndarray]:
    values = value if isinstance(value, tuple) else (value,)
    return [a.numpy() if isinstance(a, npu.DeviceArray) else a for a in values if a is not None]


def to_device(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return (
        tuple(map(npu.asarray, args)),
        {name: npu.asarray(value) if isinstance(value, np.ndarray) else value for name, value in kwargs.items()},
    )


def chain(input, weight, target, grad):
    """Compute statistics, loss and gradients, as a rank with one shard of the vocabulary does."""
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, weight.shape[0])
    loss, _ = ag.fused_cross_entropy_loss_with_max_sum(s.logits_max, s.sum_exp_logits, s.predicted_logits)
    gradients = ag.fused_linear_cross_entropy_loss_grad(
        grad, input, weight, s.target_mask, s.masked_target, logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits
    )
    return loss, *gradients


def chain_arguments(*, zeros: bool = False) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    bt, v, h = 37, 200, 24
    grad = random.standard_normal(bt).astype(np.float32)
    if zeros:
        grad[[0, 1, 2, 7, 36]] = 0
    arrays = (random.standard_normal(shape).astype(BFLOAT16) for shape in ((bt, h), (v, h)))
    return [*arrays, random.integers(0, v, bt), grad]
