"""The sides of a problem of the grid, their arrays, and the limits that the machine sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_grad import _cpu

from .. import frameworks, stream
from ..dtypes import DTYPES_OF_16_BITS, compute_dtype, numpy_dtype
from ..frameworks import Call
from ..linear import cases as linear_cases
from ..linear import rivals as linear_rivals
from ..linear.cases import LinearCase
from ..linear.targets import DOT_PRODUCTS
from ..measure import Agree
from ..results import OWN
from ..rowwise import cases
from ..rowwise import rivals as rowwise_rivals
from ..rowwise.cases import BACKWARD, FORWARD, MASKED, Operands
from . import losses
from .layouts import BROADCAST, C_ORDER, arranged, memory_of
from .losses import LossOperands
from .problems import CROSS_ENTROPY, IN_PLACE, Problem, RowwiseProblem

#: NumPy's sides: with the conversions of 16-bit arrays to float32 and back, and on arrays converted beforehand.
NUMPY = ("numpy", "numpy dot")
WIDENED = ("numpy widened", "numpy dot widened")
SCIPY = ("scipy",)
TORCH = ("torch", "torch chunked")

#: Name of the limit that is the time of a linear problem's products at the rate of a square product in BLAS.
PRODUCTS = "products"
#: Rows and columns of that square product.
PRODUCT_SIZE = 1024
#: Groups of limits. The fastest limit of each group counts, and a call is subject to all groups.
LIMITS = ((stream.ORDINARY, stream.NON_TEMPORAL), (PRODUCTS,))


@dataclass(frozen=True)
class Comparison:
    """One problem, ready to be measured.

    Attributes
    ----------
    calls : dict
        The call of each side.
    limits : dict
        Calls that run at a limit of the machine, and the factors from their seconds to the traffic, or the
        operations, of the problem.
    reset : callable
        Restores the shared arrays, or fills them with NaN, so that no side finds the results of another.
    before_timing : callable
        Called before times are taken, after all checks.
    agree : callable
        Returns whether two results are equal up to rounding.
    autograd : bool
        Whether PyTorch has to record operations for a backward pass.
    """

    calls: dict[str, Call]
    limits: dict[str, tuple[Call, float]]
    reset: Callable[[], object]
    before_timing: Callable[[], object]
    agree: Agree
    autograd: bool = False


def compared(problem: Problem, num_threads: int) -> Comparison:
    """Prepare the sides of a problem, all on the same arrays."""
    if isinstance(problem, LinearCase):
        return _linear(problem, num_threads)
    return _loss(problem, num_threads) if problem.operator == CROSS_ENTROPY else _rowwise(problem, num_threads)


# ---- row-wise operators ----------------------------------------------------------------------------------------------


def operands(problem: RowwiseProblem) -> Operands:
    """Make the arrays in their layouts. Only the first of two inputs is broadcast, as gradients of sums are."""
    dtype, dim = numpy_dtype(problem.dtype), problem.dim
    first, *others = (
        array.astype(dtype, copy=False) for array in cases.values(problem.operator, problem.shape, problem.dim)
    )
    arrangement_of_others = C_ORDER if problem.arrangement == BROADCAST else problem.arrangement
    inputs = [
        arranged(first, problem.arrangement, dim),
        *(arranged(other, arrangement_of_others, dim) for other in others),
    ]
    if problem.operator in MASKED:
        inputs.append(cases.mask(problem.shape))
    if problem.mode == IN_PLACE:
        return Operands(tuple(inputs), inputs[0])
    empty = np.zeros(problem.shape, numpy_dtype(problem.out_dtype))
    return Operands(tuple(inputs), arranged(empty, problem.out_arrangement, dim))


def _rowwise(problem: RowwiseProblem, num_threads: int) -> Comparison:
    arrays = operands(problem)
    first = arrays.inputs[0]
    # The terms have the magnitude of the first input. Along a dim of length one, results are differences of equal
    # numbers.
    terms = float(np.abs(first.astype(np.float64)).max())

    def before_timing() -> None:
        # Repeated calls in place would shrink a gradient to subnormal numbers, with which some CPUs are slow.
        if problem.mode == IN_PLACE and problem.operator.endswith("_backward"):
            first.fill(0)

    def agree(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> bool:
        dtype = expected[0].dtype.newbyteorder("=")
        return frameworks.agree(
            got[0].astype(dtype, copy=False), expected[0].astype(dtype, copy=False), _loosest_dtype(problem), terms
        )

    sides = {
        OWN: rowwise_rivals.ascend_grad(problem, arrays),
        "numpy": rowwise_rivals.numpy_formula(problem, arrays),
        "numpy dot": rowwise_rivals.numpy_dot(problem, arrays),
        "scipy": _scipy(problem, arrays),
        "torch": rowwise_rivals.torch_kernels(problem, arrays) if _torch_can_express(arrays) else None,
    }
    if problem.dtype in DTYPES_OF_16_BITS:
        sides |= dict(zip(WIDENED, _numpy_widened(problem, arrays)))
    calls = {name: call for name, call in sides.items() if call is not None}
    traffic = sum(memory_of(array).nbytes for array in (*arrays.inputs, arrays.out))
    limits = _streams(traffic, problem, num_threads)
    return Comparison(calls, limits, _reset(problem, arrays), before_timing, agree)


def _reset(problem: RowwiseProblem, arrays: Operands) -> Callable[[], object]:
    """Return the function that restores the first input of a problem in place, or fills the result with NaN."""
    if problem.mode != IN_PLACE:
        return lambda: arrays.out.fill(np.nan)
    first, original = arrays.inputs[0], arrays.inputs[0].copy()
    return lambda: np.copyto(first, original)


def _loosest_dtype(problem: RowwiseProblem) -> str:
    """Return the less precise dtype of the inputs' and the result's."""
    return max(problem.dtype, problem.out_dtype, key=frameworks.TOLERANCES.__getitem__)


def _numpy_widened(problem: RowwiseProblem, arrays: Operands) -> tuple[Call, Call | None]:
    """Prepare NumPy's calls on arrays that are converted beforehand, without rounding the result."""
    # The mode "in place" becomes "out", as calls should not change the converted copies.
    mode = "fresh" if problem.mode == "fresh" else "out"
    problem = replace(problem, dtype="float32", out_dtype="float32", mode=mode)
    inputs = tuple(a if a.dtype == bool else a.astype(np.float32) for a in arrays.inputs)
    widened = Operands(inputs, arrays.out.astype(np.float32))
    return rowwise_rivals.numpy_formula(problem, widened), rowwise_rivals.numpy_dot(problem, widened)


def _scipy(problem: RowwiseProblem, arrays: Operands) -> Call | None:
    """Prepare SciPy's function, which always makes a new array."""
    special = frameworks.module("scipy.special")
    if special is None or problem.operator not in FORWARD:
        return None
    function, wide, dim = getattr(special, problem.operator), compute_dtype(problem.dtype), problem.dim
    (x,), out = arrays
    if problem.mode == "fresh":
        return lambda: function(x.astype(wide, copy=False), dim).astype(out.dtype, copy=False)

    def call() -> np.ndarray:
        np.copyto(out, function(x.astype(wide, copy=False), dim), casting="unsafe")
        return out

    return call


def _torch_can_express(arrays: Operands) -> bool:
    """Return whether tensors can be views of the arrays, and one call of torch computes the problem."""
    return arrays.out.dtype == arrays.inputs[0].dtype and all(
        a.dtype.isnative and all(stride >= 0 for stride in a.strides) for a in (*arrays.inputs, arrays.out)
    )


# ---- the loss of logits ----------------------------------------------------------------------------------------------


def _loss(problem: RowwiseProblem, num_threads: int) -> Comparison:
    arrays = operands(problem)
    (x,) = arrays.inputs
    target, settings = losses.option(problem.options, problem.shape, problem.dim, problem.dtype)
    loss_operands = LossOperands(x, target, arrays.out, settings)
    sides = {
        OWN: losses.ascend_grad(problem, loss_operands),
        "numpy": losses.numpy_formula(problem, loss_operands),
        "torch": losses.torch_autograd(problem, loss_operands) if _torch_can_express(arrays) else None,
    }
    if problem.dtype in DTYPES_OF_16_BITS:
        widened = LossOperands(x.astype(np.float32), target, arrays.out.astype(np.float32), settings)
        mode = "fresh" if problem.mode == "fresh" else "out"
        sides[WIDENED[0]] = losses.numpy_formula(
            replace(problem, dtype="float32", out_dtype="float32", mode=mode), widened
        )
    calls = {name: call for name, call in sides.items() if call is not None}
    rows = problem.size // max(1, problem.shape[problem.dim])

    def agree(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> bool:
        return losses.agree(got, expected, _loosest_dtype(problem), rows)

    traffic = memory_of(x).nbytes + memory_of(arrays.out).nbytes
    limits = _streams(traffic, problem, num_threads)
    return Comparison(calls, limits, _reset(problem, arrays), lambda: None, agree, autograd=True)


# ---- linear operators ------------------------------------------------------------------------------------------------


def side_of(variant: str) -> str:
    """Return the name of the side that is this library on a forced variant."""
    return f"{OWN} {variant}"


def _linear(case: LinearCase, num_threads: int) -> Comparison:
    given = linear_cases.arguments(case)
    outs = linear_cases.outs(given)
    sides = {name: prepare(case, given, outs) for name, prepare in linear_rivals.SIDES.items()}
    if case.dtype in DTYPES_OF_16_BITS:
        sides |= {
            side_of(variant): linear_rivals.ascend_grad(replace(case, variant=variant), given, outs)
            for variant in linear_cases.variants()
        }
        wide = given | {name: given[name].astype(np.float32) for name in ("input", "weight")}
        sides[WIDENED[0]] = linear_rivals.numpy_formula(case, wide, linear_cases.outs(wide))
    calls = {name: call for name, call in sides.items() if call is not None}

    def reset() -> None:
        for out in outs:
            out.fill(np.nan)

    def agree(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> bool:
        return linear_rivals.agree(got, expected, case.dtype, terms)

    terms = _terms(case, given)
    results = () if case.operator == linear_cases.MAX_SUM else outs
    traffic = sum(array.nbytes for array in (*given.values(), *results) if isinstance(array, np.ndarray))
    limits = _streams(traffic, case, num_threads) | {PRODUCTS: _products(case)}
    return Comparison(calls, limits, reset, lambda: None, agree)


def _terms(case: LinearCase, given: dict[str, Any]) -> tuple[float, ...]:
    """Return the magnitudes of the terms whose differences the results are.

    With few vocabulary entries the differences are hardly more than rounding.
    """
    if case.operator == linear_cases.MAX_SUM:
        return 1.0, 1.0, 1.0
    x, weight = (float(np.abs(given[name].astype(np.float32)).max()) for name in ("input", "weight"))
    # The upstream gradient of every row is 1 / BT.
    gradients = weight / case.shape[0], x
    return (1.0, *gradients) if case.operator == linear_cases.WHOLE else gradients


# ---- limits ----------------------------------------------------------------------------------------------------------


def _streams(traffic: int, problem: Problem, num_threads: int) -> dict[str, tuple[Call, float]]:
    """Return additions with the same memory traffic as the problem, or none if its arrays fit a core's own cache."""
    if traffic < stream.SMALLEST:
        return {}
    two_inputs = problem.operator in (*BACKWARD, cases.MASKED_BACKWARD)
    a = np.ones(traffic // (12 if two_inputs else 8), np.float32)
    b = np.zeros_like(a) if two_inputs else a
    if problem.mode == "fresh":
        calls = stream.both(a, b, lambda: np.empty_like(a), num_threads)
    else:
        out = a if two_inputs and problem.mode == IN_PLACE else np.ones_like(a)
        calls = stream.both(a, b, lambda: out, num_threads)
    return {name: (call, 1.0) for name, call in calls.items()}


def _products(case: LinearCase) -> tuple[Call, float]:
    """Return a square product in BLAS, and its factor. Dot products of bfloat16, if the CPU has them, count double."""
    doubled = case.dtype == "bfloat16" and _cpu.variant() == DOT_PRODUCTS
    operations = 2 * PRODUCT_SIZE**3 * (2 if doubled else 1)
    return linear_rivals.yardstick(case, PRODUCT_SIZE), case.operations / operations
