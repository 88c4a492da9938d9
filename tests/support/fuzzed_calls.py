"""Draw random valid calls of the operators, with their expected results.

A call is drawn only from its seed and its number. It can therefore be made again, alone or for another backend, even if
it overwrites its own arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import fuzzed_losses
import fuzzed_sparse
import linear_oracles
import linear_samples
import ml_dtypes
import numpy as np
import oracles
from fuzzed_arrays import LIBRARIES, NUMPY, Draw, Library, disguised, given, random_layout, random_view, sharing_memory
from linear_faults import CALLS
from linear_samples import GRADIENT, LOSS, STATISTICS, TOP_K, WHOLE, LinearProblem, problem_of
from samples import (
    ARRAYS,
    DTYPES,
    MASKED,
    OPERATORS,
    adversarial_problem,
    allocated,
    native_copy,
    random_problem,
)

from ascend_grad.arrays import native
from ascend_grad.operators import table

SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 65, 70, 130, 300)
#: The share of calls with large shapes. Such a call takes several threads by default, and its rows have several splits.
LARGE = 0.003
LARGE_SHAPES = ((40, 5000), (5000, 40), (2, 70001), (100003,), (300, 17, 30), (3, 4, 5, 6, 7, 8, 9, 2))
LARGE_MASKED_SHAPES = ((2, 3, 40, 700), (1, 1, 2, 70001), (4, 4, 2000, 5))
LARGE_LINEAR_SHAPES = ((130, 1500, 70), (700, 300, 40), (5, 20000, 33), (2000, 17, 129))
LINEAR_SIZES = (0, 1, 1, 2, 3, 5, 8, 9, 16, 17, 33, 50)
#: Elements of the weight of a sparse call up to which 4 MiB are enough.
LEAST_OF_SPARSE = 5000
#: Numbers of classes and of features of calls for the whole Hessian, and large shapes, with several blocks of rows.
HESSIAN_SIZES = (0, 1, 1, 2, 3, 4, 5)
LARGE_HESSIAN_SHAPES = ((20_000, 3, 5), (3000, 9, 8))

#: The constant of the bounds on errors if rows are repeated. Each addition in a chain of 1280 terms may err by eps, and
#: the errors of equal terms have the same sign. The constant `ANY` is too small: an error once exceeded it by a sixth.
CHAIN = 1280

#: Short vectors, which may be NumPy's in calls with another library's matrices.
MIXES = (
    *("target", "masked_target", "target_mask", "token_weight", "class_weight", "target_prob", "temperature", "bias"),
    *("lse", "entropy", "grad_lse", "grad_log_prob", "grad_entropy", "vector_bias"),
)


#: Arguments that are one number if they have no axes.
OR_NUMBERS = ("grad_loss", "temperature")


class Place(NamedTuple):
    """Hold an array for a result, the bytes of its memory, and the argument that shares the memory."""

    array: np.ndarray
    memory: np.ndarray
    shared: str | None = None


@dataclass
class Sample:
    """Describe one call and what to check of it.

    `arguments` belong to the public function, `values` are the elements of its arrays, and `outs` receive the results.
    If a finite sum may overflow, only small results are checked.
    """

    operator: str
    case: str
    arguments: dict[str, Any]
    library: Library = NUMPY
    constant: float | None = None
    outs: list[Place | None] = field(default_factory=list)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    is_ordinary: bool = True
    may_overflow: bool = False
    #: The input as a sparse array, and as one with contiguous parts in the same order, if the call has a sparse input.
    sparse: tuple[Any, Any] | None = None
    parts: list[bytes] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays among the arguments, in the order of the function's parameters, except unused ones."""
        described = table.OPERATORS[self.operator]
        names = [name for name in described.parameters if name in described.array_names + described.optional_names]
        if self.case == "stored":
            names = [name for name in names if name not in ("logits_max", "sum_exp_logits")]
        arrays = {name: self.arguments.get(name) for name in names}
        return {
            name: array
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) and (array.ndim or name not in OR_NUMBERS)
        }

    @property
    def is_rowwise(self) -> bool:
        """Return whether the operator is one of the row-wise ones, which have one result and no options."""
        return self.operator in OPERATORS

    @property
    def is_loss(self) -> bool:
        """Return whether the call is one of `fuzzed_losses`."""
        return self.case in fuzzed_losses.OPERATOR_OF

    @property
    def is_of_logits(self) -> bool:
        """Return whether the call is a loss of logits. The other losses are losses of a linear layer."""
        return self.operator in fuzzed_losses.OF_LOGITS

    @property
    def result_of_out(self) -> str:
        """Return the name of the first result that `out` is for."""
        return "input_grad" if self.case == "rows" else table.OPERATORS[self.operator].results[0]

    @property
    def takes_pair(self) -> bool:
        """Return whether `out` is a pair of arrays."""
        return self.operator in (GRADIENT, LOSS)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the problem."""
        return self.values[first_array(self.operator)].dtype


def first_array(operator: str) -> str:
    """Return the name of the argument whose dtype is the dtype of the problem."""
    if operator in OPERATORS:
        return ARRAYS[operator][0]
    return "logits_max" if operator == LOSS else "input"


# ---- values ----------------------------------------------------------------------------------------------------------


def put_special_values(draw: Draw, sample: Sample) -> None:
    """Replace some elements of an array by NaN and infinity, or by the largest and smallest numbers."""
    floats = [name for name, array in sample.arrays.items() if array.size and array.dtype in DTYPES.values()]
    if sample.is_loss:  # other arrays may have to be positive
        floats = [name for name in floats if name in ("input", "weight", "vector", "vector_input")]
    if not floats:
        return
    name = draw.choice(floats)
    array = np.array(sample.arguments[name])
    info = ml_dtypes.finfo(array.dtype)
    finite = (0.0, -0.0, float(info.max), -float(info.max), float(info.smallest_subnormal))
    choices = draw.choice((finite, (np.nan, np.inf, -np.inf)))
    for _ in range(draw.choice((1, 1, 2, 5))):
        array.reshape(-1)[draw.randrange(array.size)] = draw.choice(choices)
    sample.arguments[name] = array
    sample.constant = linear_samples.ANY
    sample.may_overflow = choices is finite


def rowwise_shape(draw: Draw, operator: str) -> tuple[int, ...]:
    if draw.chance(LARGE):
        return draw.choice(LARGE_MASKED_SHAPES if operator in MASKED else LARGE_SHAPES)
    rank = 4 if operator in MASKED else draw.choice((0, 1, 2, 2, 2, 3, 3, 4, 5, 8))
    shape = draw.choices((1, 2, 3, 4), k=rank)
    if rank:
        shape[draw.randrange(rank)] = draw.choice(SIZES)
    return tuple(shape)


def rowwise_sample(draw: Draw, dtype: str) -> Sample:
    operator = draw.choice(OPERATORS)
    shape = rowwise_shape(draw, operator)
    rank = max(len(shape), 1)
    is_ordinary = draw.chance(0.85)
    if not is_ordinary:
        problem = adversarial_problem(operator, draw.choice(SIZES[1:]), dtype)
    else:
        axis = -1 if operator in MASKED else draw.randrange(-rank, rank)
        problem = random_problem(operator, shape, DTYPES[dtype], axis)
    arguments: dict[str, Any] = dict(zip(ARRAYS[operator], problem.arrays, strict=True))
    if operator in MASKED:
        scale = draw.choice((1.0, 0.37, -2.5, 0.0, 3, 1e30, 1e-30, float("nan"), Fraction(1, 3)))
        arguments["scale"] = draw.choice((scale, np.float32(scale), np.array(float(scale))))
        arguments["mask"] = arguments["mask"][: draw.choice((1, None)), : draw.choice((1, None))]
        if draw.chance(0.3):
            arguments["fix_triu_mask"] = draw.choice((False, np.False_))
    elif problem.settings["axis"] != -1 or draw.chance(0.5):
        arguments["axis"] = draw.choice((int, np.int64, np.int8))(problem.settings["axis"])
    if operator.endswith("backward") and draw.chance(0.05):  # two arguments are the same array
        first, second = ARRAYS[operator][:2]
        arguments[second] = arguments[first]
    return Sample(operator, operator, arguments, is_ordinary=is_ordinary)


def gradient_options(draw: Draw, sample: Sample) -> None:
    arguments = sample.arguments
    if draw.chance(0.3):
        pair = draw.choice((True, False)), draw.choice((True, False))
        arguments["output_mask"] = draw.choice((tuple, list, np.array))(pair)
    if draw.chance(0.3):
        arguments["workspace_bytes"] = draw.choice((None, 4 << 20, np.int64(5 << 20), 2**40))
    if draw.chance(0.2):
        arguments["filter_eps"] = draw.choice((0, 0.0, 1e-30, 1e-6, 1e-3, np.float32(0.1), 1e30))


def top_k_options(draw: Draw, sample: Sample) -> None:
    arguments = sample.arguments
    arguments["k"] = draw.choice((int, np.int64, np.uint8))(min(arguments["k"], 128))
    arguments["temperature"] = draw.choice((float, Fraction, np.float64))(arguments["temperature"])
    if draw.chance(0.2):
        arguments["logit_scale"] = draw.choice((1, -1.3, np.float32(0.5)))
    if draw.chance(0.2):
        arguments["softcap"] = draw.choice((None, 2, 0.5, np.float32(30)))
    if draw.chance(0.3):
        arguments["workspace_bytes"] = draw.choice((None, 4 << 20, np.int64(5 << 20), 2**40))


def linear_sample(draw: Draw, dtype: str) -> Sample:
    case = draw.choice(tuple(CALLS))
    operator, how = CALLS[case]
    shape = draw.choices(LINEAR_SIZES, k=3)
    if draw.chance(LARGE):
        shape = list(draw.choice(LARGE_LINEAR_SHAPES))
    if operator in (STATISTICS, TOP_K):
        shape[1] = max(shape[1], 1)
    how = dict(how)
    if operator == LOSS:
        how["logits"] = draw.chance(0.7)
    else:
        how["kind"] = draw.choice(("centred", "centred", *linear_samples.KINDS))
    if operator == GRADIENT:
        how["mask"] = draw.choice(("bool", "bits"))
    if operator == STATISTICS:
        how["return_logits"] = draw.chance(0.5)
    if operator == TOP_K:
        how["k"] = draw.choice((1, 2, 16, 128, draw.randrange(1, shape[1] + 1)))
        how["temperature"] = draw.choice((1.0, 1.0, 0.25, 7.5, 1e-20, 1e20))
    if operator == WHOLE:
        how["reduction"] = draw.choice(("mean", "sum", "none"))
    problem = problem_of(operator, tuple(shape), dtype, **how)
    arguments = dict(problem.arguments)
    is_ordinary = how.get("kind") in (None, "centred", "positive")
    sample = Sample(operator, case, arguments, constant=problem.constant, is_ordinary=is_ordinary)
    for name in ("target", "masked_target"):
        if name in arguments and draw.chance(0.4):
            arguments[name] = arguments[name].astype(np.int32)
    if operator in (GRADIENT, WHOLE):
        gradient_options(draw, sample)
    if operator == TOP_K:
        top_k_options(draw, sample)
    if operator in (GRADIENT, LOSS) and draw.chance(0.2):
        arguments["label_smoothing"] = draw.choice((0, 0.0, -0.0, np.float32(0), Fraction(0)))
    if operator == GRADIENT and arguments["target_mask"].dtype == np.uint8 and draw.chance(0.3):
        more = np.array(draw.choices(range(256), k=3), np.uint8)  # bits behind the last row are ignored
        arguments["target_mask"] = np.concatenate([arguments["target_mask"], more])
    if case == "stored" and draw.chance(0.2):
        arguments |= {"logits_max": draw.choice(("not looked at", np.zeros(7))), "sum_exp_logits": None}
    if operator == WHOLE:
        if how["reduction"] == "none" and draw.chance(0.3):
            with np.errstate(all="ignore"):
                arguments["grad_loss"] = arguments["grad_loss"].astype(DTYPES[draw.choice(tuple(DTYPES))])
        elif draw.chance(0.3):
            arguments["grad_loss"] = draw.choice((None, 1, -0.5, 0.0, np.float16(3), np.array(2.0), float("nan")))
        if draw.chance(0.2):
            arguments["return_grad"] = draw.choice((True, False, np.True_))
    return sample


def loss_sample(draw: Draw, dtype: str) -> Sample:
    case = draw.choice(tuple(fuzzed_losses.OPERATOR_OF))
    operator = fuzzed_losses.OPERATOR_OF[case]
    if operator in fuzzed_losses.OF_LOGITS:
        arguments = fuzzed_losses.draw_rows(draw, dtype, rowwise_shape(draw, operator), operator)
        return Sample(operator, case, arguments)
    if case in fuzzed_losses.SPARSE:
        dtype = draw.choice(("float32", "float64"))
    shape, large = draw.choices(LINEAR_SIZES, k=3), LARGE_LINEAR_SHAPES
    if operator == fuzzed_losses.HESSIAN:
        shape, large = [shape[0], *draw.choices(HESSIAN_SIZES, k=2)], LARGE_HESSIAN_SHAPES
    if draw.chance(LARGE):
        shape = list(draw.choice(large))
    arguments, constant, is_ordinary = fuzzed_losses.draw_linear(draw, dtype, shape, case)
    sample = Sample(operator, case, arguments, constant=constant, is_ordinary=is_ordinary)
    if draw.chance(0.4) and not fuzzed_losses.is_dense(arguments):
        arguments["target"] = arguments["target"].astype(np.int32)
    if operator in (WHOLE, fuzzed_losses.BACKWARD):
        gradient_options(draw, sample)
    if case in fuzzed_losses.SPARSE:
        if tuple(arguments.get("output_mask", ())) == (True, False):  # a sparse input has no gradient
            del arguments["output_mask"]
        if shape[1] * shape[2] > LEAST_OF_SPARSE:
            arguments.pop("workspace_bytes", None)
    return sample


# ---- from values to arguments ----------------------------------------------------------------------------------------


def result_shapes(sample: Sample) -> list[tuple[int, ...] | None]:
    """Return the shapes of the results that `out` may hold, None for a result that is not requested."""
    arguments = sample.arguments
    if sample.is_rowwise:
        return [arguments[first_array(sample.operator)].shape]
    if sample.case == "rows":
        return [arguments["input"].shape] if arguments.get("return_grad", True) else []
    if sample.operator == LOSS:
        logits = arguments.get("vocab_parallel_logits")
        return [arguments["logits_max"].shape, None if logits is None else logits.shape]
    if sample.operator == GRADIENT:
        asked = arguments.get("output_mask", (True, True))
        return [arguments[name].shape if asked[i] else None for i, name in enumerate(("input", "weight"))]
    return []


def lay_out(draw: Draw, sample: Sample) -> None:
    """Give the arrays any layout."""
    paired = ("target_mask", "masked_target")  # valid targets depend on the mask
    for name, array in sample.arrays.items():
        view = random_view(draw, array, sample.library.form, repeats=name not in paired and draw.chance(0.1))
        if 0 in view.strides:
            sample.constant = CHAIN
        sample.arguments[name] = view


def place_results(draw: Draw, sample: Sample) -> None:
    """Make arrays for the results. Some of the arrays share memory with an argument."""
    form = sample.library.form
    floats = [name for name, array in sample.arrays.items() if array.dtype in DTYPES.values()]
    draw.shuffle(floats)
    for shape in result_shapes(sample):
        if shape is None or draw.chance(0.2):
            sample.outs.append(None)
            continue
        dtype = DTYPES[draw.choice(tuple(DTYPES))]
        shared = draw.choice((None, *floats))
        if shared is None or not sample.arguments[shared].dtype.isnative:
            layout = random_layout(draw, len(shape), dtype.itemsize, form)
            sample.outs.append(Place(*allocated(shape, dtype, layout)))
        else:
            floats.remove(shared)
            array = sample.arguments[shared]
            if draw.chance(0.6):
                dtype = array.dtype
            sample.arguments[shared], out, memory = sharing_memory(draw, array, shape, dtype, form)
            sample.outs.append(Place(out, memory, shared))
    entries = tuple(None if place is None else place.array for place in sample.outs)
    if sample.takes_pair:
        sample.arguments["out"] = draw.choice((tuple, list))(entries)
    else:
        (sample.arguments["out"],) = entries


def how_to_compute(draw: Draw, sample: Sample) -> None:
    if draw.chance(0.25):
        sample.arguments["num_threads"] = draw.choice((None, 1, 2, 2, 3, 4, np.int64(2)))


def random_sample(draw: Draw, libraries: tuple[str, ...]) -> Sample:
    """Draw a valid call, with NumPy's arrays in any layout."""
    dtype = draw.choice(tuple(DTYPES))
    sample = draw.choice((rowwise_sample, rowwise_sample, linear_sample, loss_sample, loss_sample))(draw, dtype)
    sample.library = LIBRARIES[draw.choice(libraries)](draw)
    if sample.is_ordinary and draw.chance(0.12):
        put_special_values(draw, sample)
    lay_out(draw, sample)
    if sample.library.takes_out and result_shapes(sample) and draw.chance(0.4):
        place_results(draw, sample)
    how_to_compute(draw, sample)
    sample.values = {name: native_copy(array) for name, array in sample.arrays.items()}
    if sample.case in fuzzed_losses.SPARSE:
        sample.sparse = fuzzed_sparse.drawn(draw, sample.values["input"])
        sample.parts = fuzzed_sparse.parts_of(sample.sparse[0])
    return sample


def in_its_library(draw: Draw, sample: Sample) -> dict[str, Any]:
    """Return the arguments with arrays of the library, or sometimes with another object that converts to an array."""
    library, arrays = sample.library, sample.arrays
    arguments = dict(sample.arguments)
    for name, value in sample.arguments.items():
        if name == "out":
            is_pair = isinstance(value, (tuple, list))
            arguments[name] = type(value)(given(library, each) for each in value) if is_pair else given(library, value)
        elif name == "input" and sample.sparse is not None:
            arguments[name] = sample.sparse[0]
        elif name in arrays and library is not NUMPY and not (name in MIXES and draw.chance(0.2)):
            arguments[name] = given(library, value)
        elif type(value) is np.ndarray and name in arrays and value.ndim and draw.chance(0.04):
            arguments[name] = disguised(draw, value)
    return arguments


def as_plain(sample: Sample) -> dict[str, Any]:
    """Return the arguments of the same call on contiguous arrays and one thread, with results of the same dtypes."""
    arguments = sample.arguments | sample.values | {"num_threads": 1}
    if sample.sparse is not None:
        arguments["input"] = sample.sparse[1]
    if sample.outs:
        outs = tuple(place and np.empty(place.array.shape, native(place.array.dtype)) for place in sample.outs)
        arguments["out"] = outs if sample.takes_pair else outs[0]
    return arguments


# ---- expected results ------------------------------------------------------------------------------------------------


def linear_expectation(sample: Sample) -> list[oracles.Expected | None]:
    arguments = {name: value for name, value in (sample.arguments | sample.values).items() if name != "out"}
    oracle = linear_oracles._ORACLES[sample.operator]
    known = inspect.signature(oracle).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}
    if sample.case == "stored":
        arguments |= {"logits_max": None, "sum_exp_logits": None}
    if sample.operator == TOP_K:
        arguments["temperature"] = float(arguments["temperature"])
    if sample.operator == WHOLE and arguments.get("grad_loss") is None:
        arguments["grad_loss"] = 1.0
    assert sample.constant is not None
    problem = LinearProblem(sample.operator, arguments, sample.constant)
    expected = list(linear_oracles.expected(problem))
    if sample.operator in (GRADIENT, WHOLE):
        admit_filter(sample, expected)
        asked = sample.arguments.get("output_mask", (True, True))
        expected[-2:] = [each if is_asked else None for each, is_asked in zip(expected[-2:], asked, strict=True)]
    return expected


def admit_filter(sample: Sample, expected: list[oracles.Expected | None]) -> None:
    """Add the error of skipped tiles to the bounds of both gradients."""
    eps = float(sample.arguments.get("filter_eps", 0))
    if not eps:
        return
    with np.errstate(all="ignore"):
        sums = [np.abs(sample.values[name].astype(np.float64)).sum(0) for name in ("weight", "input")]
        for i, total in zip((-2, -1), sums, strict=True):
            gradient = expected[i]
            if gradient is not None:
                bound = gradient.bound + eps * total
                expected[i] = oracles.Expected(gradient.values, np.where(np.isnan(bound), np.inf, bound))


def loss_expectation(sample: Sample, results: dict[str, np.ndarray]) -> list[oracles.Expected | None]:
    """Return the expected results of a loss. Where ties allow several results, the given ones are expected."""
    arguments = {name: value for name, value in (sample.arguments | sample.values).items() if name != "out"}
    if arguments.get("grad_loss") is None:
        arguments["grad_loss"] = 0.0 if sample.operator == fuzzed_losses.BACKWARD else 1.0
    with np.errstate(all="ignore"):
        if sample.is_of_logits:
            found = fuzzed_losses.expected_of_rows(arguments, results)
        else:
            assert sample.constant is not None
            found = fuzzed_losses.expected_of_layer(sample.operator, arguments, sample.constant, results)
    if sample.sparse is not None:
        found.pop("input_grad", None)
    return [found.get(name) for name in result_names(sample)]


def result_names(sample: Sample) -> tuple[str, ...]:
    """Return the names of the results in order."""
    if sample.is_loss:
        return fuzzed_losses.names_of_results(sample.arguments, sample.operator)
    return table.OPERATORS[sample.operator].results[: len(result_dtypes(sample))]


def expectation(sample: Sample) -> Callable[[tuple[np.ndarray | None, ...], str], None]:
    """Return a function that checks results of the call, by backend."""
    names = result_names(sample)
    expected = [] if sample.is_rowwise or sample.is_loss else linear_expectation(sample)
    rowwise = functools.cache(functools.partial(rowwise_expectation, sample))

    def check(results: tuple[np.ndarray | None, ...], backend: str) -> None:
        rights = expected
        if sample.is_loss:
            rights = loss_expectation(
                sample, {name: result for name, result in zip(names, results, strict=True) if result is not None}
            )
        for i, (name, result) in enumerate(zip(names, results, strict=True)):
            if sample.is_rowwise:
                assert result is not None
                right = rowwise(native(result.dtype))
            else:
                linear = rights[i]
                assert (result is None) == (linear is None), f"{name}: is it asked for?"
                if result is None or linear is None:
                    continue
                if backend == "reference" and sample.dtype == np.float64:
                    # The reference adds float64 with NumPy, which promises less accuracy.
                    linear = oracles.Expected(linear.values, 32 * linear.bound)
                right = linear_oracles.for_result(linear, sample.dtype, result)
            is_large = ~(np.abs(right.values) < oracles.precision_of(sample.dtype).largest / 4)
            unknown = np.isnan(right.bound) | (sample.may_overflow & is_large)
            right = right._replace(bound=np.where(unknown, np.inf, right.bound))
            assert result.shape == right.values.shape, f"{name} has shape {result.shape}, expected {right.values.shape}"
            assert_within(f"{name} of {backend}", result, right)
        if sample.operator == TOP_K:
            problem = LinearProblem(TOP_K, sample.arguments | sample.values, CHAIN)
            linear_oracles.assert_top_k(results, *linear_oracles.logits_of_problem(problem))

    return check


def rowwise_expectation(sample: Sample, dtype: np.dtype) -> oracles.Expected:
    """Return values and bounds of a result of this dtype."""
    arrays = [sample.values[name] for name in ARRAYS[sample.operator]]
    settings: dict[str, Any] = {}
    if sample.operator in MASKED:
        settings["scale"] = float(sample.arguments["scale"])
    else:
        settings["axis"] = int(sample.arguments.get("axis", -1))
    return oracles.expected(sample.operator, arrays, **settings, out_dtype=dtype)


def assert_within(name: str, result: np.ndarray, right: oracles.Expected) -> None:
    errors = oracles.errors(result, right)
    worst = float(np.max(errors, initial=0))
    if worst > 1:
        where = np.unravel_index(np.argmax(errors), errors.shape)
        raise AssertionError(
            f"{name}{list(map(int, where))}: expected {right.values[where]} up to {right.bound[where]}, got "
            f"{result[where]}, an error of {worst:.3g} times the bound; {np.sum(errors > 1)} of {errors.size} are wrong"
        )


def result_dtypes(sample: Sample) -> list[np.dtype]:
    """Return the dtypes that the contract demands of newly allocated results."""
    if sample.is_rowwise:
        return [sample.dtype]
    if sample.is_loss:
        return [fuzzed_losses.dtype_of_result(name, sample.values) for name in result_names(sample)]
    accumulator = linear_samples.accumulator(sample.dtype)
    if sample.operator == LOSS:
        return [accumulator] * 2
    if sample.operator == GRADIENT:
        return [sample.dtype] * 2
    if sample.operator == TOP_K:
        return [accumulator, np.dtype(np.int64)]
    if sample.operator == WHOLE:
        return [accumulator, sample.dtype, sample.dtype]
    return [*[accumulator] * 3, np.dtype(np.uint8), sample.values["target"].dtype, sample.dtype]
