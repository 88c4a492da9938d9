"""Settings for tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ascend_grad.bench import frameworks, measure, results, sides
from ascend_grad.bench.measure import Repeats
from ascend_grad.bench.sides import onednn, programs


def hurry(monkeypatch) -> None:
    """Make turns a few microseconds long, and products small. Leave out oneDNN, whose driver takes a compiler."""
    for name in ("WARM_UP", "TURN", "LOOP", "PAUSE", "IDLE_SECONDS"):
        monkeypatch.setattr(measure, name, 1e-6)
    for name in ("IDLE_CALLS", "AWAKE_CALLS", "PROGRAM_CALLS"):
        monkeypatch.setattr(measure, name, 2)
    monkeypatch.setattr(measure, "FIRST_CALLS", 1)
    monkeypatch.setattr(programs, "PRODUCT_SIZE", 8)
    monkeypatch.setattr(onednn, "driver", lambda: None)
    for name in ("NAMED_REPEATS", "RANDOM_REPEATS"):
        monkeypatch.setattr(measure, name, Repeats(2, 1, 1))
    monkeypatch.setattr(measure, "seconds_of_others", lambda: 0.0)
    monkeypatch.setattr(results, "YARDSTICK_SIZE", 8)
    monkeypatch.setattr(sides, "PRODUCT_SIZE", 8)


@pytest.fixture(autouse=True)
def restored_jax() -> Iterator[None]:
    """Restore the settings of JAX, which the benchmark changes for the whole process."""
    try:
        import jax
    except ImportError:
        yield
        return
    before = {name: getattr(jax.config, name) for name in ("jax_platforms", "jax_enable_x64")}
    module = frameworks.module
    module.cache_clear()
    yield
    module.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)
