"""Targets of the linear operators, and the comparison of measured values with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..results import OWN, Row
from ..targets import Target, dispatch_target, ratio_text, worst_target
from .cases import FIRST, GRADIENT, LARGE_SHAPES, MAX_SUM, SMALL_SHAPES, WHOLE, LinearCase
from .measure import Growth
from .rivals import YARDSTICK, YARDSTICK_SIZE

#: The variant with dot products of bfloat16, which have twice the rate of float32.
DOT_PRODUCTS = "avx512_bf16"

Condition = Callable[[LinearCase], bool]
Ratio = Callable[[Row[LinearCase]], float | None]


def of_yardstick(row: Row[LinearCase]) -> float | None:
    """Return the rate of a call relative to the rate of a large square product in BLAS."""
    if YARDSTICK not in row.seconds:
        return None
    return row.case.operations / row.own / (2 * YARDSTICK_SIZE**3 / row.seconds[YARDSTICK])


def speed_targets(rows: Sequence[Row[LinearCase]], variant: str) -> list[Target]:
    """Compare the worst case of each group with its target for the speed."""

    def worst(text: str, least: float, ratio: Ratio, condition: Condition, needs: str = "") -> Target:
        if needs and variant != needs:
            return Target(text, f"≥ {ratio_text(least)}", f"needs {needs}, this is {variant}", None)
        found = [(value, row.case) for row in rows if condition(row.case) and (value := ratio(row)) is not None]
        return worst_target(text, least, found, lambda case: f"{case.mode}, {case.dtype}, {case.layout}")

    def large(dtype: str, mode: str = "recomputed", variant: str = "") -> Condition:
        return lambda c: (
            (c.operator, c.mode, c.dtype, c.variant) == (GRADIENT, mode, dtype, variant) and c.shape in LARGE_SHAPES
        )

    def first(operator: str, dtype: str) -> Condition:
        return lambda c: (c.operator, c.dtype, c.shape) == (operator, dtype, FIRST)

    chunked = "torch chunked"

    def against(*sides: str) -> Ratio:
        return lambda row: row.speedup(*sides)

    # Variants without dot products of bfloat16 convert it to float32 on loading, as they do with float16.
    by_widening = "gradient, bfloat16 by widening, rate of sgemm"
    widened = [worst(by_widening, 0.93, of_yardstick, large("bfloat16"))] if variant != DOT_PRODUCTS else []
    return [
        worst("gradient, float32, rate of sgemm", 1, of_yardstick, large("float32")),
        worst("gradient, bfloat16, rate of sgemm", 2, of_yardstick, large("bfloat16"), DOT_PRODUCTS),
        *widened,
        worst("gradient, float16, rate of sgemm", 0.93, of_yardstick, large("float16")),
        worst("gradient, float32, AVX2 forced, rate of sgemm", 0.9, of_yardstick, large("float32", variant="avx2")),
        worst("gradient, float64, rate of dgemm", 0.9, of_yardstick, large("float64")),
        worst("online max sum, float32, rate of sgemm", 0.9, of_yardstick, first(MAX_SUM, "float32")),
        worst("online max sum, bfloat16, rate of sgemm", 1.8, of_yardstick, first(MAX_SUM, "bfloat16"), DOT_PRODUCTS),
        worst("gradient, float32, against torch", 1.3, against("torch"), large("float32")),
        worst("gradient, bfloat16, against torch", 1.3, against("torch"), large("bfloat16")),
        worst(
            "gradient from a stored softmax, against torch",
            1.1,
            against("torch"),
            lambda c: large("float32", "stored")(c) or large("bfloat16", "stored")(c),
        ),
        worst(
            "small problems, every dtype, against NumPy's formula and torch",
            1,
            against("numpy", "torch"),
            lambda c: c.shape in SMALL_SHAPES,
        ),
        worst("whole loss, float32, against chunked torch", 2.3, against(chunked), first(WHOLE, "float32")),
        worst("whole loss, bfloat16, against chunked torch", 8, against(chunked), first(WHOLE, "bfloat16")),
        worst(
            "whole loss, against torch with all logits",
            1,
            against("torch"),
            lambda c: c.operator == WHOLE and not c.variant,
        ),
        dispatch_target(rows),
    ]


def memory_targets(memory: Sequence[Growth]) -> list[Target]:
    """Compare the memory of calls with the promised bound, and with the memory of PyTorch's chunked loss."""
    own = [growth for growth in memory if growth.side == OWN]
    if not own:
        return [Target("memory beyond the results, of what is promised", "≤ 1×", "–", None)]
    share, worst = max(((growth.bytes / growth.promise, growth) for growth in own), key=lambda item: item[0])
    text = f"{ratio_text(share)} ({worst.case.operator} {worst.case.dtype}, {worst.case.layout})"
    targets = [Target("memory beyond the results, of what is promised", "≤ 1×", text, share <= 1)]
    chunked = {growth.case: growth.bytes for growth in memory if growth.side == "torch chunked"}
    pairs = [(growth.bytes / max(chunked[growth.case], 1), growth) for growth in own if growth.case in chunked]
    if pairs:
        share, worst = max(pairs, key=lambda item: item[0])
        text = f"{ratio_text(share)} ({worst.case.dtype}, {worst.case.layout})"
        targets.append(Target("the same, of what chunked torch takes", "≤ 1×", text, share <= 1))
    return targets
