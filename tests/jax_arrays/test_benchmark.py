"""Test the benchmark of the loss that JAX has compiled, on a tiny case. No test depends on speed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ascend_grad.bench import frameworks
from ascend_grad.bench import measure as timing
from ascend_grad.bench.linear import measure as linear_measure
from ascend_grad.bench.losses import cases, measure, rivals
from ascend_grad.bench.losses.cases import ARRAYS, COMPILED, JAX, RelativeCase
from ascend_grad.bench.results import OWN

CASE = RelativeCase(JAX, COMPILED, "float32", (5, 11, 3))


@pytest.fixture(autouse=True)
def _restored_settings():
    """Restore the settings of JAX, which the benchmark changes for the whole process."""
    names = "jax_platforms", "jax_enable_x64"
    before = {name: getattr(jax.config, name) for name in names}
    frameworks.module.cache_clear()
    yield
    frameworks.module.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("dtype", cases.COMPILED_DTYPES)
def test_the_compiled_loss_is_measured(dtype, monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP", 1e-6)
    for name in ("LOOP", "PAUSE"):
        monkeypatch.setattr(linear_measure, name, 1e-6)
    row = measure.measure(RelativeCase(JAX, COMPILED, dtype, CASE.shape), 1)
    assert set(row.seconds) == {OWN, ARRAYS}
    assert all(seconds > 0 for seconds in row.seconds.values())


def test_another_loss_is_refused():
    """The comparison looks at the loss and at both gradients."""
    prepared = rivals.pair(CASE)
    own, arrays = prepared.own(), prepared.other()
    assert prepared.agree(own, arrays)
    for part in range(3):
        wrong = [np.asarray(value) + (0.01 if i == part else 0) for i, value in enumerate(own)]
        assert not prepared.agree(wrong, arrays)


def test_jax_takes_part_where_it_is_installed():
    for chosen in (cases.linear(), cases.quick_linear()):
        assert JAX in {case.operator for case in chosen}
