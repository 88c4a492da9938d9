"""Targets of the library: a line for every target, its measured value, and whether it is met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .case import (
    AUTOGRAD,
    BACKWARD,
    FORWARD,
    FRESH,
    GRADIENT,
    IDLE,
    JAX,
    MASKED,
    MASKED_BACKWARD,
    MAX_SUM,
    NARROW_DTYPES,
    OUT,
    PLACES,
    TOP_K,
    WHOLE,
    Case,
)
from .cases import (
    ALL_OPTIONS,
    FIRST,
    FIRST_DIM,
    FREE_OUTPUTS,
    LARGE_SHAPES,
    LAST_DIM,
    MIDDLE_DIM,
    SMALL,
    SMALL_SHAPES,
    Layouts,
)
from .results import ARRAYS, DIRECT, NUMPY, OWN, STREAM, TORCH, Growth, Results, Row, Worst
from .sides import DOT_PRODUCTS
from .tables import DASH, table

#: Least elements of float32 arrays that do not stay in any cache between two calls.
LARGE = 8_000_000
#: Seconds by which a call on tensors may take longer than on arrays.
PRICE = 1.5e-6
#: Least number of classes of a large vocabulary.
LARGE_VOCABULARY = 32000
#: Speed relative to the plain loss from which on an output counts as free. The rest is allowed for noise.
FREE = 0.97

Condition = Callable[[Case], bool]
Ratio = Callable[[Row], float | None]


@dataclass(frozen=True)
class Target:
    """One line of the summary. `met` is None if nothing was measured for it."""

    text: str
    required: str
    measured: str
    met: bool | None


def targets_block(targets: Iterable[Target]) -> str:
    verdicts = {True: "met", False: "**NOT met**", None: "not measured"}
    return table(
        ["target", "required", "measured, at worst", "verdict"],
        ([target.text, target.required, target.measured, verdicts[target.met]] for target in targets),
    )


def ratio_text(ratio: float, unit: str = "×") -> str:
    """Format a ratio for a line of the summary."""
    # Four digits distinguish a target that is just missed from one that is met.
    return f"{100 * ratio:.4g} %" if unit == "%" else f"{ratio:.4g}{unit}"


def against(*sides: str) -> Ratio:
    return lambda row: row.speedup(*sides)


def _by_dtype(case: Case) -> str:
    return f"{case.operator} {case.dtype}, {case.layout}"


def at_least(
    text: str,
    least: float,
    rows: Iterable[Row],
    ratio: Ratio,
    condition: Condition = lambda case: True,
    name: Callable[[Case], str] = lambda case: case.name,
    unit: str = "×",
) -> Target:
    """Compare the smallest ratio of the cases that meet a condition with its target."""
    found = [(value, row.case) for row in rows if condition(row.case) and (value := ratio(row)) is not None]
    required = f"≥ {ratio_text(least, unit)}"
    if not found:
        return Target(text, required, DASH, None)
    value, case = min(found, key=lambda item: item[0])
    below = sum(ratio < least for ratio, _ in found)
    where = f"{ratio_text(value, unit)} ({name(case)})"
    return Target(text, required, f"{where}; {below} of {len(found)} below" if below else where, not below)


def at_most(
    text: str,
    required: str,
    found: Iterable[tuple[float, Any]],
    is_met: Callable[[float], bool],
    describe: Callable[[float, Any], str],
) -> Target:
    """Compare the largest of some values, each given with its origin, with its target."""
    value, origin = max(found, key=lambda item: item[0], default=(0.0, None))
    if origin is None:
        return Target(text, required, DASH, None)
    return Target(text, required, describe(value, origin), is_met(value))


def dispatch_target(rows: Sequence[Row]) -> Target:
    """Compare the largest time that a public call adds to the backend's time with its target."""
    return at_most(
        "dispatch, over calling the CPU backend directly",
        "< 1 µs",
        ((row.own - row.seconds[DIRECT], row.case) for row in rows if DIRECT in row.seconds),
        lambda seconds: seconds < 1e-6,
        lambda seconds, case: f"{1e6 * seconds:.2f} µs ({_by_dtype(case)})",
    )


def accuracy_targets(accuracy: Sequence[Worst]) -> list[Target]:
    def describe(error: float, worst: Worst) -> str:
        where = f"{worst.operator} {worst.dtype}, {worst.variant}, {worst.values}, n = {worst.length}"
        return f"{error:.2f} ({where})"

    text, found = "accuracy: largest error in units of its bound", ((worst.error, worst) for worst in accuracy)
    return [at_most(text, "≤ 1", found, lambda error: error <= 1, describe)]


# ---- row-wise operators ----------------------------------------------------------------------------------------------


def rowwise_targets(rows: Sequence[Row]) -> list[Target]:
    """Compare the worst case of each group of the row-wise operators with its target for the speed."""
    torch, formula, stream = against("torch"), against("numpy"), against(*STREAM)

    def backward(mode: str, *dtypes: str) -> Condition:
        return lambda c: c.operator in BACKWARD and c.mode == mode and (not dtypes or c.dtype in dtypes)

    def large(layouts: Layouts) -> Condition:
        of_float32 = backward(OUT, "float32")
        return lambda c: of_float32(c) and c.size >= LARGE and (c.shape, c.dim) in layouts

    def is_small(c: Case) -> bool:
        return c.operator in BACKWARD and c.mode != IDLE and (c.shape, c.dim) in SMALL

    main, fresh, others = backward(OUT, *NARROW_DTYPES), backward(FRESH), (*FIRST_DIM, *MIDDLE_DIM)
    million = "with `out=`, from a million elements, against NumPy's formula"
    found: list[tuple[str, float, Ratio, Condition]] = [
        ("with `out=`, every case, against torch", 0.95, torch, main),
        ("large float32, last dim, share of the stream", 0.9, stream, large(LAST_DIM)),
        ("large float32, other dims, share of the stream", 0.55, stream, large(others)),
        (million, 4, formula, lambda c: main(c) and c.size >= 1_000_000),
        ("without `out=`, results of 64 MiB, against torch", 3, torch, lambda c: fresh(c) and c.nbytes == 2**26),
        ("without `out=`, every case, against torch", 0.95, torch, fresh),
        ("small calls, with and without `out=`, every dtype, against torch", 1, torch, is_small),
        ("every call, against NumPy's best form", 1, against(*NUMPY), lambda c: c.mode != IDLE),
        ("one call after 20 ms of idling, against NumPy's formula", 1, formula, lambda c: c.mode == IDLE),
        ("forward twins, against torch", 0.95, torch, lambda c: c.operator in (*FORWARD, MASKED[1])),
        ("float64, against torch", 0.95, torch, lambda c: c.dtype == "float64" and c.mode == OUT),
        ("masked backward, against torch's three calls in turn", 1.5, torch, lambda c: c.operator == MASKED_BACKWARD),
    ]
    targets = [
        at_least(text, least, rows, ratio, condition, _by_dtype, "%" if ratio is stream else "×")
        for text, least, ratio, condition in found
    ]
    mean = _mean("with `out=`, geometric mean, against torch", 1.3, rows, main)
    return [targets[0], mean, *targets[1:], dispatch_target(rows)]


def _mean(text: str, least: float, rows: Sequence[Row], condition: Condition) -> Target:
    ratios = [ratio for row in rows if condition(row.case) and (ratio := row.speedup("torch"))]
    mean = statistics.geometric_mean(ratios) if ratios else None
    measured, met = (DASH, None) if mean is None else (ratio_text(mean), mean >= least)
    return Target(text, f"≥ {ratio_text(least)}", measured, met)


# ---- linear operators ------------------------------------------------------------------------------------------------


def linear_targets(rows: Sequence[Row], variant: str) -> list[Target]:
    """Compare the worst case of each group of the linear operators with its target for the speed."""
    torch, chunked = against("torch"), against("torch chunked")

    def rate(row: Row) -> float | None:
        return row.of_yardstick

    def large(dtype: str, mode: str = "recomputed", variant: str = "") -> Condition:
        return lambda c: (
            (c.operator, c.mode, c.dtype, c.variant) == (GRADIENT, mode, dtype, variant) and c.shape in LARGE_SHAPES
        )

    def first(operator: str, dtype: str) -> Condition:
        return lambda c: (c.operator, c.dtype, c.shape) == (operator, dtype, FIRST)

    def stored(c: Case) -> bool:
        return any(large(dtype, "stored")(c) for dtype in ("float32", "bfloat16"))

    small = "small problems, every dtype, against NumPy's formula and torch"
    all_logits = "whole loss, against torch with all logits"
    # Variants without dot products of bfloat16 convert it to float32 on loading, as they do with float16.
    by_widening = ("gradient, bfloat16 by widening, rate of sgemm", 0.93, rate, large("bfloat16"))
    found: list[tuple[str, float, Ratio, Condition]] = [
        ("gradient, float32, rate of sgemm", 1, rate, large("float32")),
        ("gradient, bfloat16, rate of sgemm", 2, rate, large("bfloat16")),
        *([by_widening] if variant != DOT_PRODUCTS else []),
        ("gradient, float16, rate of sgemm", 0.93, rate, large("float16")),
        ("gradient, float32, AVX2 forced, rate of sgemm", 0.9, rate, large("float32", variant="avx2")),
        ("gradient, float64, rate of dgemm", 0.9, rate, large("float64")),
        ("online max sum, float32, rate of sgemm", 0.9, rate, first(MAX_SUM, "float32")),
        ("online max sum, bfloat16, rate of sgemm", 1.8, rate, first(MAX_SUM, "bfloat16")),
        ("gradient, float32, against torch", 1.3, torch, large("float32")),
        ("gradient, bfloat16, against torch", 1.3, torch, large("bfloat16")),
        ("gradient from a stored softmax, against torch", 1.1, torch, stored),
        (small, 1, against("numpy", "torch"), lambda c: c.shape in SMALL_SHAPES),
        ("whole loss, float32, against chunked torch", 2.3, chunked, first(WHOLE, "float32")),
        ("whole loss, bfloat16, against chunked torch", 8, chunked, first(WHOLE, "bfloat16")),
        (all_logits, 1, torch, lambda c: c.operator == WHOLE and not c.variant),
    ]
    targets = []
    for text, least, ratio, condition in found:
        # No other variant can be faster than sgemm.
        if ratio is rate and least > 1 and variant != DOT_PRODUCTS:
            measured = f"needs {DOT_PRODUCTS}, this is {variant}"
            targets.append(Target(text, f"≥ {ratio_text(least)}", measured, None))
        else:
            name = lambda c: f"{c.mode}, {c.dtype}, {c.layout}"  # noqa: E731
            targets.append(at_least(text, least, rows, ratio, condition, name))
    return [*targets, dispatch_target(rows)]


def memory_targets(memory: Sequence[Growth]) -> list[Target]:
    """Compare the memory of calls with the promised bound, and with the memory of PyTorch's chunked loss."""
    own = [growth for growth in memory if growth.side == OWN]
    chunked = {growth.case: growth.bytes for growth in memory if growth.side == "torch chunked"}
    of_chunked = [
        (growth.bytes / max(chunked[growth.case], 1), growth.case) for growth in own if growth.case in chunked
    ]

    def most(text: str, found: Sequence[tuple[float, Case]], name: Callable[[Case], str]) -> Target:
        described = lambda share, case: f"{ratio_text(share)} ({name(case)})"  # noqa: E731
        return at_most(text, "≤ 1×", found, lambda share: share <= 1, described)

    promised = [(growth.bytes / growth.promise, growth.case) for growth in own]
    targets = [most("memory beyond the results, of what is promised", promised, _by_dtype)]
    if of_chunked:
        text = "the same, of what chunked torch takes"
        targets.append(most(text, of_chunked, lambda case: f"{case.dtype}, {case.layout}"))
    return targets


# ---- tensors ---------------------------------------------------------------------------------------------------------


def tensors_targets(results: Results) -> list[Target]:
    """Compare the worst cases of calls on tensors with their targets."""
    rows, torch = results["speed"], against("torch")
    price = at_most(
        "tensors, over NumPy arrays, 8 × 8",
        f"≤ {1e6 * PRICE:g} µs",
        (
            (row.own - row.seconds[ARRAYS], row.case)
            for row in rows
            if ARRAYS in row.seconds and (row.case.shape, row.case.dim) == SMALL[0]
        ),
        lambda seconds: seconds <= PRICE,
        lambda seconds, case: f"{1e6 * seconds:.2f} µs ({case.name})",
    )
    kernel = "64 × 128 without gradients, against torch's kernel"
    targets = [
        price,
        at_least(kernel, 1, rows, torch, lambda c: c.mode != AUTOGRAD and (c.shape, c.dim) == SMALL[1]),
        at_least("forward and backward, against torch", 1, rows, torch, lambda c: c.mode == AUTOGRAD),
        at_least("the same with torch's threads awake", 1, rows, lambda row: row.awake_ratio),
    ]
    for dtype, least in (("float32", 2.0), ("bfloat16", 3.0)):
        ratios = [ratio for row in results["linear"] if row.case.dtype == dtype and (ratio := row.speedup(TORCH[1]))]
        text = f"loss and gradients, {dtype}, against torch's in chunks"
        measured = ratio_text(min(ratios)) if ratios else DASH
        targets.append(Target(text, f"≥ {ratio_text(least)}", measured, min(ratios) >= least if ratios else None))
    return targets


# ---- programs --------------------------------------------------------------------------------------------------------


def programs_targets(rows: Sequence[Row]) -> list[Target]:
    """Compare the default number of threads with the best explicit one, and with PyTorch, in every place."""
    torch = against("torch")

    def explicit(row: Row) -> float | None:
        return row.speedup(*(side for side in row.seconds if side.startswith(f"{OWN},")))

    return [
        at_least("default number of threads, speed of the best explicit one: a tenth slower", 1 / 1.1, rows, explicit),
        at_least("the same at worst", 1 / 1.3, rows, explicit),
        at_least("every call, against torch in the same place", 0.9, rows, torch),
        *(_mean(f"geometric mean {place}, against torch", 1.3, rows, _in_place(place)) for place in PLACES),
    ]


def _in_place(place: str) -> Condition:
    return lambda case: case.place == place


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses_targets(results: Results) -> list[Target]:
    """Compare the worst case of each group of the losses with its target for the speed."""
    logits, drawn, torch = results["logits"], results["drawn"], against(*TORCH)
    both = [*logits, *drawn]
    large = [row for row in both if row.case.shape[row.case.dim] >= LARGE_VOCABULARY]

    def relative(text: str, least: float, operator: str, *modes: str) -> Target:
        def condition(c: Case) -> bool:
            is_first = (c.operator, c.dtype, c.shape) == (operator, "float32", FIRST)
            return is_first and (not modes or c.mode in modes)

        return at_least(text, least, results["linear"], lambda row: row.speedup(row.case.other), condition)

    all_options = "linear loss with scale, cap, smoothing, z-loss and entropy, speed of the plain loss"
    return [
        at_least("`cross_entropy`, named cases, against torch's forward and backward", 1, logits, torch),
        at_least("random problems, against torch's forward and backward", 1, drawn, torch),
        at_least(f"named and random, from {LARGE_VOCABULARY:,} classes, against torch", 3, large, torch),
        at_least("named and random, against NumPy's best form", 1, both, against(*NUMPY)),
        relative(all_options, 0.9, WHOLE, ALL_OPTIONS),
        relative("lse, log-probability or predicted, speed of the plain loss", FREE, WHOLE, *FREE_OUTPUTS),
        relative("the 16 largest log-probabilities, speed of the statistics", 0.85, TOP_K, "k = 16"),
        relative("linear loss compiled by JAX, speed of the call of arrays", 0.95, JAX),
    ]
