"""Prepare the comparison of a case: the calls of all sides on the same arrays, and the limits that the machine sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_grad import _cpu, _rowwise_python

from .. import frameworks, results
from ..arrays import gradients_like, linear_arguments, memory_of, operands, widened
from ..case import (
    AUTOGRAD,
    BACKWARD,
    CROSS_ENTROPY,
    DTYPES_OF_16_BITS,
    FRESH,
    GRADIENT,
    IN_PLACE,
    MASKED_BACKWARD,
    MAX_SUM,
    NAMED,
    OUT,
    PROGRAMS,
    RANDOM,
    SECOND_ORDER,
    TENSORS,
    WEIGHT_GRADIENT,
    WHOLE,
    Case,
    compute_dtype,
)
from ..cases import variants
from ..frameworks import TOLERANCES, Call
from ..results import DIRECT, GRADIENT_CALL, NUMPY, OWN, PRODUCTS, STREAM, UNFILTERED, WIDENED, YARDSTICK, side_of
from . import cross_entropy, linear, programs, rowwise, second_order, sparse

#: Bytes of arrays that do not stay in a core's own cache. Smaller ones have no limit by memory.
SMALLEST_STREAM = 2**20
#: Rows and columns of the square product whose rate limits random linear problems.
PRODUCT_SIZE = 1024
#: The variant with dot products of bfloat16, which have twice the rate of float32.
DOT_PRODUCTS = "avx512_bf16"

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Comparison:
    """A case, ready to be measured.

    Attributes
    ----------
    calls : dict
        The call of each side.
    agree : callable
        Returns whether a side's results equal ours up to rounding, from its name, its results and ours.
    reset : callable
        Restores the shared arrays, or fills them with NaN, so that no side finds the results of another.
    limits : dict
        Calls that are timed and not compared, with factors of their seconds: limits of the machine and the backend.
    before_timing : callable
        Called before times are taken, after all checks.
    autograd : bool
        Whether PyTorch has to record operations for a backward pass.
    given : dict
        The arguments of a linear operator.
    estimated_ns : float, optional
        The estimate of our call's time.
    """

    calls: dict[str, Call]
    agree: Callable[[str, Arrays, Arrays], bool]
    reset: Callable[[], object] = lambda: None
    limits: dict[str, tuple[Call, float]] = field(default_factory=dict)
    before_timing: Callable[[], object] = lambda: None
    autograd: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    estimated_ns: float | None = None


def compared(case: Case, num_threads: int) -> Comparison:
    """Prepare the sides of a case, all on the same arrays."""
    if case.suite == PROGRAMS:
        return _in_program(case, num_threads)
    if case.operator in SECOND_ORDER:
        return _second_order(case)
    if case.is_sparse:
        return _sparse(case)
    if case.dim is not None:
        return _rowwise(case, num_threads)
    return _linear(case, num_threads) if case.has_rivals else _relative(case)


def _present(calls: dict[str, Call | None]) -> dict[str, Call]:
    return {name: call for name, call in calls.items() if call is not None}


# ---- row-wise operators ----------------------------------------------------------------------------------------------


def _rowwise(case: Case, num_threads: int) -> Comparison:
    arrays = operands(case)
    first, is_loss = arrays.inputs[0], case.operator == CROSS_ENTROPY
    sides = cross_entropy.SIDES if is_loss else rowwise.TENSOR_SIDES if case.suite == TENSORS else rowwise.SIDES
    calls = {name: prepare(case, arrays) for name, prepare in sides.items()}
    if case.suite == RANDOM and case.dtype in DTYPES_OF_16_BITS:
        # Calls in place would change the converted copies.
        wide_case = replace(case, dtype="float32", out_dtype="float32", mode=FRESH if case.mode == FRESH else OUT)
        wide = widened(case, arrays)
        calls |= {side: sides[name](wide_case, wide) for name, side in zip(NUMPY, WIDENED) if name in sides}
    limits = {}
    if case.suite == RANDOM or (case.suite, case.mode) == (NAMED, OUT):
        traffic = sum(memory_of(a).nbytes for a in (*arrays.inputs, arrays.out) if a.dtype != bool)
        limits = _streams(case, traffic, num_threads)
    if case.suite != TENSORS and not is_loss and (direct := rowwise.direct(case, arrays)) is not None:
        limits[DIRECT] = direct, 1.0

    def before_timing() -> None:
        # Repeated calls in place would shrink a gradient to subnormal numbers, with which some CPUs are slow.
        if case.mode == IN_PLACE and not is_loss and case.operator.endswith("_backward"):
            first.fill(0)

    return Comparison(
        _present(calls),
        _agreement_of_rows(case, first),
        partial(np.copyto, first, first.copy()) if case.mode == IN_PLACE else partial(arrays.out.fill, np.nan),
        limits,
        before_timing,
        autograd=is_loss or case.suite == TENSORS,
        estimated_ns=rowwise.estimated_ns(case, arrays) if case.suite == RANDOM else None,
    )


def _agreement_of_rows(case: Case, first: np.ndarray) -> Callable[[str, Arrays, Arrays], bool]:
    """Return the comparison of results up to rounding to the less precise dtype of the inputs and the result."""
    dtype = max(case.dtype, case.out_dtype or case.dtype, key=TOLERANCES.__getitem__)
    wide, is_loss = compute_dtype(dtype), case.operator == CROSS_ENTROPY
    # Results may be differences of larger terms. Along a dim of length one, they are differences of equal numbers.
    terms = 0.0
    if is_loss:
        # The terms of the gradient are at most one over the number of rows.
        terms = 1 / case.rows
    elif case.suite == RANDOM:
        terms = float(np.abs(first.astype(np.float64)).max())
    elif case.mode == AUTOGRAD:
        # The gradient of a 16-bit softmax is a difference of rounded numbers of magnitude one.
        terms = 1.0

    def agree(side: str, got: Arrays, expected: Arrays) -> bool:
        native = expected[-1].dtype.newbyteorder("=")
        result, right = (found[-1].astype(native, copy=False) for found in (got, expected))
        # A loss is a mean of terms of magnitude one. PyTorch rounds it to the dtype of the logits.
        return frameworks.agree(result, right, dtype, terms) and (
            not is_loss or frameworks.agree(got[0].astype(wide), expected[0].astype(wide), dtype, 1.0)
        )

    return agree


# ---- linear operators ------------------------------------------------------------------------------------------------


def _linear(case: Case, num_threads: int) -> Comparison:
    given = linear_arguments(case)
    outs = gradients_like(given)
    sides = linear.TENSOR_SIDES if case.suite == TENSORS else linear.SIDES
    calls = {name: prepare(case, given, outs) for name, prepare in sides.items()}
    terms: tuple[float, ...] = (0.0, 0.0, 0.0)
    if case.suite == RANDOM:
        if case.dtype in DTYPES_OF_16_BITS:
            calls |= {
                side_of(variant): linear.ascend_grad(replace(case, variant=variant), given, outs)
                for variant in variants()
            }
            wide = given | {name: given[name].astype(np.float32) for name in ("input", "weight")}
            calls[WIDENED[0]] = linear.numpy_formula(case, wide, gradients_like(wide))
        terms = _terms(case, given)
        arrays = (*given.values(), *(() if case.operator == MAX_SUM else outs))
        traffic = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        limits = _streams(case, traffic, num_threads) | {PRODUCTS: _products(case)}
    else:
        limits = {YARDSTICK: (linear.square_product(case, results.YARDSTICK_SIZE), 1.0)}
        if (direct := linear.direct(case, given, outs)) is not None:
            limits[DIRECT] = direct, 1.0

    def agree(side: str, got: Arrays, expected: Arrays) -> bool:
        # The unfiltered side is not compared, as its difference is more than rounding.
        return side == UNFILTERED or linear.agree(got, expected, case.dtype, terms)

    def reset() -> None:
        for out in outs:
            out.fill(np.nan)

    return Comparison(_present(calls), agree, reset, limits, given=given)


def _terms(case: Case, given: dict[str, Any]) -> tuple[float, ...]:
    """Return the magnitudes of the terms whose differences the results are.

    With few vocabulary entries the differences are hardly more than rounding.
    """
    if case.operator == MAX_SUM:
        return 1.0, 1.0, 1.0
    x, weight = (float(np.abs(given[name].astype(np.float32)).max()) for name in ("input", "weight"))
    # The upstream gradient of every row is 1 / BT.
    gradients = weight / case.shape[0], x
    if case.mode == WEIGHT_GRADIENT:
        return 1.0, x
    return (1.0, *gradients) if case.operator == WHOLE else gradients


def _second_order(case: Case) -> Comparison:
    arrays = second_order.arrays_of(case)
    calls = {name: prepare(arrays) for name, prepare in second_order.SIDES.items()}
    # The terms of a product of logits are elements of the vector, which have magnitude one, over the number of rows.
    # Those of a layer are its products with the vector times probabilities and elements of the input.
    term = 1 / arrays.rows if arrays.weight is None else math.sqrt(case.shape[2]) / case.shape[1]

    def agree(side: str, got: Arrays, expected: Arrays) -> bool:
        if arrays.weight is None:
            return frameworks.agree(got[0].astype(expected[0].dtype), expected[0], case.dtype, term)
        return linear.agree(got, expected, case.dtype, (term,))

    limits = {GRADIENT_CALL: (second_order.gradient(arrays), 1.0)}
    return Comparison(_present(calls), agree, limits=limits, autograd=True)


def _sparse(case: Case) -> Comparison:
    arrays = sparse.arrays_of(case)
    calls = {name: prepare(arrays) for name, prepare in sparse.SIDES.items()}
    terms = 1.0, float(np.abs(arrays.x.data).max(initial=0))
    return Comparison(_present(calls), lambda side, got, own: linear.agree(got, own, case.dtype, terms))


def _relative(case: Case) -> Comparison:
    calls = linear.pair(case, linear_arguments(case))
    return Comparison(calls, lambda side, got, own: side == OWN or linear.calls_agree(case, own, got))


def _in_program(case: Case, num_threads: int) -> Comparison:
    calls, reset = programs.calls(case, num_threads)

    def agree(side: str, got: Arrays, expected: Arrays) -> bool:
        return all(frameworks.agree(a, b, case.dtype, 1.0) for a, b in zip(got, expected))

    return Comparison(_present(calls), agree, reset, autograd=case.operator in (CROSS_ENTROPY, WHOLE))


# ---- limits ----------------------------------------------------------------------------------------------------------


def _streams(case: Case, traffic: int, num_threads: int) -> dict[str, tuple[Call, float]]:
    """Return additions with the memory traffic of a case (as in STREAM), or none if its arrays fit a core's own cache.

    A backward call reads two arrays and writes one, a forward call reads one and writes one. So does ``out = a + b``,
    with ``b`` the same memory as ``a`` for forward calls (the second read hits the cache). The faster of ordinary and
    non-temporal stores counts. The traffic of a mask is not counted.
    """
    if traffic < SMALLEST_STREAM:
        return {}
    two_inputs = case.operator in (*BACKWARD, MASKED_BACKWARD)
    a = np.ones(traffic // (12 if two_inputs else 8), np.float32)
    b = np.zeros_like(a) if two_inputs else a
    out = a if two_inputs and case.mode == IN_PLACE else None if case.mode == FRESH else np.ones_like(a)

    def add(non_temporal: bool) -> None:
        _rowwise_python.stream_add(a, b, np.empty_like(a) if out is None else out, non_temporal, num_threads)

    return {name: (partial(add, non_temporal), 1.0) for name, non_temporal in zip(STREAM, (False, True))}


def _products(case: Case) -> tuple[Call, float]:
    """Return a square product in BLAS, and its factor. Dot products of bfloat16, if the CPU has them, count double."""
    doubled = case.dtype == "bfloat16" and _cpu.variant() == DOT_PRODUCTS
    operations = 2 * PRODUCT_SIZE**3 * (2 if doubled else 1)
    return linear.square_product(case, PRODUCT_SIZE), case.operations / operations


def call_small_first() -> None:
    """Call all sides with a small problem to start their threads, whose stacks are not memory of a measured call."""
    for call in _linear(Case(GRADIENT, "float32", (64, 256, 64), "recomputed"), 1).calls.values():
        call()
