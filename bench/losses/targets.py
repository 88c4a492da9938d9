"""Targets of the losses, and the comparison of measured values with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..grid.rivals import NUMPY, TORCH
from ..linear.cases import FIRST, WHOLE
from ..results import Row
from ..targets import Target, worst_target
from .cases import ALL_OPTIONS, FREE_OUTPUTS, JAX, TOP_K, RelativeCase
from .results import LossResults

#: Least number of classes of a large vocabulary.
LARGE_VOCABULARY = 32000
#: Speed relative to the plain loss from which on an output counts as free. The rest is allowed for noise.
FREE = 0.97


def speed_targets(results: LossResults) -> list[Target]:
    """Compare the worst case of each group with its target for the speed."""
    both = [*results.logits, *results.drawn]
    large = [row for row in both if row.case.shape[row.case.dim] >= LARGE_VOCABULARY]

    def linear(operator: str, *modes: str, dtype: str = "float32") -> Callable[[RelativeCase], bool]:
        return lambda c: (c.operator, c.dtype, c.shape) == (operator, dtype, FIRST) and (not modes or c.mode in modes)

    def relative(text: str, least: float, condition: Callable[[RelativeCase], bool]) -> Target:
        rows = [row for row in results.linear if condition(row.case)]
        return _worst(text, least, rows, lambda row: row.speedup(row.case.other))

    return [
        _worst("`cross_entropy`, named cases, against torch's forward and backward", 1, results.logits, _torch),
        _worst("random problems, against torch's forward and backward", 1, results.drawn, _torch),
        _worst(f"named and random, from {LARGE_VOCABULARY:,} classes, against torch", 3, large, _torch),
        _worst("named and random, against NumPy's best form", 1, both, lambda row: row.speedup(*NUMPY)),
        relative(
            "linear loss with scale, cap, smoothing, z-loss and entropy, speed of the plain loss",
            0.9,
            linear(WHOLE, ALL_OPTIONS),
        ),
        relative("lse, log-probability or predicted, speed of the plain loss", FREE, linear(WHOLE, *FREE_OUTPUTS)),
        relative("the 16 largest log-probabilities, speed of the statistics", 0.85, linear(TOP_K, "k = 16")),
        relative("linear loss compiled by JAX, speed of the call of arrays", 0.95, linear(JAX)),
    ]


def _torch(row: Row) -> float | None:
    return row.speedup(*TORCH)


def _worst(text: str, least: float, rows: Sequence[Row], ratio: Callable[[Row], float | None]) -> Target:
    found = [(value, row.case) for row in rows if (value := ratio(row)) is not None]
    return worst_target(text, least, found, lambda case: case.name)
