"""Test the benchmark of the loss that JAX has compiled, on a tiny case. No test depends on speed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_settings import hurry
from benchmark_settings import restored_jax as restored_jax

from ascend_grad.bench import cases, frameworks, measure
from ascend_grad.bench.case import JAX, OTHER_CALLS, Case
from ascend_grad.bench.results import OWN
from ascend_grad.bench.sides import compared

CASE = Case(JAX, "float32", (5, 11, 3), "compiled")


@pytest.mark.parametrize("dtype", cases.TENSOR_DTYPES)
def test_the_compiled_loss_is_measured(dtype, monkeypatch):
    hurry(monkeypatch)
    row = measure.measure(Case(JAX, dtype, CASE.shape, CASE.mode), 1)
    assert set(row.seconds) == {OWN, OTHER_CALLS[JAX]}
    assert all(seconds > 0 for seconds in row.seconds.values())


def test_another_loss_is_refused():
    """The comparison looks at the loss and at both gradients."""
    comparison = compared(CASE, 1)
    own, arrays = (frameworks.as_arrays(call()) for call in comparison.calls.values())
    assert comparison.agree("arrays", arrays, own)
    for part in range(3):
        wrong = tuple(value + np.float32(0.01 if i == part else 0) for i, value in enumerate(own))
        assert not comparison.agree("arrays", arrays, wrong)


def test_jax_takes_part_where_it_is_installed():
    for quick in (False, True):
        assert JAX in {case.operator for case in cases.relative(quick)}
