"""The cases of every benchmark: named ones, and random problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ascend_grad import _cpu

from . import frameworks
from .case import (
    AFTER_TORCH,
    AUTOGRAD,
    AXES,
    BACKWARD,
    BROADCAST,
    C_ORDER,
    COLUMN_OF,
    CROSS_ENTROPY,
    DENSE,
    DTYPES,
    DTYPES_OF_16_BITS,
    FILTERED,
    FORTRAN_ORDER,
    FORWARD,
    FRESH,
    GRADIENT,
    HVP,
    IDLE,
    IN_PLACE,
    JAX,
    LAYOUTS,
    LINEAR,
    LINEAR_MODES,
    LOGITS_OPTIONS,
    MASKED,
    MAX_SUM,
    NARROW_DTYPES,
    OUT,
    PLACES,
    PRODUCT,
    PROGRAMS,
    RANDOM,
    ROWS_HVP,
    SPARSE,
    STEPS_OF,
    STRANGE,
    TENSORS,
    TOP_K,
    WEIGHT_GRADIENT,
    WHOLE,
    WRITABLE_STRANGE,
    Case,
    kind_of,
)

#: Shapes and dims of row-wise cases.
Layouts = tuple[tuple[tuple[int, ...], int], ...]


def _layouts(dim: int, *shapes: tuple[int, ...]) -> Layouts:
    return tuple((shape, dim) for shape in shapes)


# ---- row-wise operators ----------------------------------------------------------------------------------------------

SMALL = _layouts(1, (8, 8), (64, 128))
LAST_DIM = _layouts(1, (1024, 1024), (4096, 4096), (2048, 32768), (65536, 64), (1000000, 3), (1, 2**24), (3, 2**22))
FIRST_DIM = _layouts(0, (4096, 4096), (84, 43682), (1000000, 10))
MIDDLE_DIM = _layouts(1, (64, 1000, 128), (32, 81, 8732))
ROWWISE_LAYOUTS = (*SMALL, *LAST_DIM, *FIRST_DIM, *MIDDLE_DIM)
QUICK = _layouts(1, (64, 128), (1024, 1024), (4096, 4096), (64, 1000, 128))
MASKED_LAYOUTS = _layouts(3, (2, 4, 32, 32), (32, 12, 128, 128), (8, 16, 512, 512))
IDLE_LAYOUTS = (*SMALL, *_layouts(1, (512, 512), (1024, 1024), (4096, 4096)))


def _rowwise(
    operators: Sequence[str], dtypes: Sequence[str], layouts: Layouts, *modes: str, **fields: str
) -> list[Case]:
    # Cases with the same values are adjacent, as `arrays.values` caches the last ones.
    return [
        Case(operator, dtype, shape, mode, dim, **fields)
        for shape, dim in layouts
        for operator in operators
        for dtype in dtypes
        for mode in modes
    ]


def speed(quick: bool = False) -> list[Case]:
    """Return the cases of the row-wise operators; a quick choice takes about half a minute."""
    if quick:
        return [
            *_rowwise(BACKWARD, ("float32",), QUICK, OUT, FRESH),
            *_rowwise(BACKWARD, ("bfloat16",), QUICK, OUT),
            *_rowwise(FORWARD, ("float32",), QUICK[:2], OUT),
            *_rowwise(MASKED, ("float32",), MASKED_LAYOUTS[1:2], OUT),
            *_rowwise(BACKWARD, ("float32",), SMALL[1:], IDLE),
        ]
    return [
        *_rowwise(BACKWARD, DTYPES, ROWWISE_LAYOUTS, OUT, FRESH),
        *_rowwise(FORWARD, DTYPES, ROWWISE_LAYOUTS, OUT),
        *_rowwise(MASKED, DTYPES, MASKED_LAYOUTS, OUT),
        *_rowwise(BACKWARD, ("float32",), IDLE_LAYOUTS, IDLE),
    ]


# ---- linear operators ------------------------------------------------------------------------------------------------

#: Shapes (BT, V, H): tokens, vocabulary entries, features.
FIRST = (1024, 32768, 1024)
LARGE_SHAPES = (FIRST, (512, 151936, 1024), (4096, 32000, 512))
SMALL_SHAPES = ((128, 1024, 256), (3, 256, 17))
#: Shape of the calls that are measured on every variant, of which the slowest takes seconds.
VARIANTS_SHAPE = (1024, 8192, 512)
#: Shape of the calls whose memory is measured.
MEMORY_SHAPE = (128, 151936, 1024)
#: Shape of the last layer of the demo's model.
TRAINED_SHAPE = (1024, 30000, 128)


def variants() -> list[str]:
    """Return the names of the CPU variants that this machine can run."""
    return [name for name in _cpu.VARIANTS if _cpu.unsupported_reason(name) is None]


def _gradients(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], *modes: str) -> list[Case]:
    return [Case(GRADIENT, dtype, shape, mode) for shape in shapes for dtype in dtypes for mode in modes]


def linear(quick: bool = False) -> list[Case]:
    """Return the cases of the linear operators. Those by variant depend on the machine."""
    two = NARROW_DTYPES[:2]
    if quick:
        return [*_gradients([FIRST], two, "recomputed"), *_gradients(SMALL_SHAPES, DTYPES, "recomputed")]
    return [
        *_gradients(LARGE_SHAPES, NARROW_DTYPES, "recomputed"),
        Case(GRADIENT, "float32", FIRST, "recomputed", variant="avx2"),
        Case(GRADIENT, "float64", FIRST, "recomputed"),
        *_gradients(LARGE_SHAPES[::2], two, "stored"),
        *(Case(operator, dtype, FIRST, LINEAR_MODES[operator][0]) for operator in (MAX_SUM, WHOLE) for dtype in two),
        *_gradients(SMALL_SHAPES, DTYPES, "recomputed", "stored"),
        Case(GRADIENT, "bfloat16", TRAINED_SHAPE, FILTERED),
        *(
            Case(operator, dtype, VARIANTS_SHAPE, modes[0], variant=variant)
            for operator, modes in LINEAR_MODES.items()
            for dtype in DTYPES_OF_16_BITS
            for variant in variants()
        ),
    ]


def linear_memory() -> list[Case]:
    """Return the cases whose memory is measured: the gradient with `out`, and the whole loss with new results."""
    return [
        *_gradients([MEMORY_SHAPE], NARROW_DTYPES[:2], "recomputed"),
        Case(WHOLE, "float32", MEMORY_SHAPE, "loss and gradients"),
    ]


# ---- calls on PyTorch's tensors --------------------------------------------------------------------------------------

TENSOR_DTYPES = NARROW_DTYPES[:2]


def tensors(quick: bool = False) -> list[Case]:
    """Return the cases of calls on tensors: calls without gradients, then forward and backward together."""
    operators, dtypes = (BACKWARD[:1], ("float32",)) if quick else (BACKWARD, TENSOR_DTYPES)
    return [
        *_rowwise(operators, dtypes, SMALL, OUT, FRESH, suite=TENSORS),
        *_rowwise(FORWARD, TENSOR_DTYPES, ROWWISE_LAYOUTS[: 3 if quick else None], AUTOGRAD, suite=TENSORS),
        *([] if quick else _losses_of_tensors(FIRST)),
    ]


def tensors_memory() -> list[Case]:
    """Return the cases on tensors whose memory is measured."""
    return _losses_of_tensors(MEMORY_SHAPE)


def _losses_of_tensors(shape: tuple[int, ...]) -> list[Case]:
    return [Case(WHOLE, dtype, shape, "loss and gradients", suite=TENSORS) for dtype in TENSOR_DTYPES]


# ---- losses ----------------------------------------------------------------------------------------------------------

#: Shapes of logits and axes of the classes: a small batch, image classification, segmentation, language models.
LOGITS_LAYOUTS = _layouts(
    1, (64, 128), (4096, 1000), (16, 21, 64, 64), (16, 2, 64, 64), (1024, 32000), (512, 50257), (256, 128256)
)
#: Layouts of the cases with an option.
OPTION_LAYOUTS = (LOGITS_LAYOUTS[1], LOGITS_LAYOUTS[2], LOGITS_LAYOUTS[4])
#: Number and seed of the random problems of the loss of logits.
DRAWN, SEED = 100, 1

#: The mode of a call with these options at once: logit scale, softcap, smoothing, z-loss and entropy.
ALL_OPTIONS = "scale + cap + smoothing + z-loss + entropy"
#: Modes that only add an output. The results of the plain loss are the same.
FREE_OUTPUTS = ("lse", "log_prob", "predicted")
OUTPUTS = (*FREE_OUTPUTS, "entropy")
#: Modes of the loss of a linear layer, in addition to `OUTPUTS`: one option, or `ALL_OPTIONS`.
OPTION_MODES = (
    ALL_OPTIONS,
    *("bias", "scale and cap", "smoothing", "z-loss", "temperatures", "class weights", "8 targets"),
)
#: The modes of the top-k, with the values of k.
TOP_K_MODES = {"k = 16": 16, "k = 128": 128}
#: Shape (BT, V, H) of a short call, which shows the cost of a call.
SHORT = (64, 1024, 256)


def logits(quick: bool = False) -> list[Case]:
    """Return the named cases of the loss of logits: new gradients, gradients at hand, and options."""
    if quick:
        return [_of_logits("float32", *layout) for layout in LOGITS_LAYOUTS[:4]]
    return [
        *(_of_logits(dtype, *layout) for layout in LOGITS_LAYOUTS for dtype in DTYPES),
        *(_of_logits("float32", *layout, mode=OUT) for layout in LOGITS_LAYOUTS[:5]),
        *(_of_logits("float32", *layout, option) for layout in OPTION_LAYOUTS for option in LOGITS_OPTIONS),
        *(_of_logits(dtype, *layout, DENSE) for layout in LOGITS_LAYOUTS[:4] for dtype in DTYPES_OF_16_BITS),
    ]


def _of_logits(dtype: str, shape: tuple[int, ...], dim: int, option: str = "", mode: str = FRESH) -> Case:
    return Case(CROSS_ENTROPY, dtype, shape, mode, dim, C_ORDER, C_ORDER, dtype, option, suite=RANDOM)


def drawn(quick: bool = False) -> list[Case]:
    """Return the random problems of the loss of logits, every other one also with dense targets."""
    problems = [] if quick else draw(DRAWN, SEED, (CROSS_ENTROPY,))
    return problems + [replace(problem, options=DENSE) for problem in problems[::2]]


def relative(quick: bool = False) -> list[Case]:
    """Return the calls for linear layers that are compared with other calls. Cases of JAX need its package."""
    compiled = [
        Case(JAX, dtype, shape, "compiled")
        for shape in ((SHORT,) if quick else (FIRST, SHORT))
        for dtype in TENSOR_DTYPES
        if frameworks.module("jax") is not None
    ]
    if quick:
        return [Case(WHOLE, "float32", SHORT, ALL_OPTIONS), Case(TOP_K, "float32", SHORT, "k = 16"), *compiled]
    return [
        *(Case(WHOLE, "float32", FIRST, mode) for mode in (*OPTION_MODES, *OUTPUTS)),
        *(Case(WHOLE, "bfloat16", FIRST, mode) for mode in (ALL_OPTIONS, "predicted")),
        *(Case(TOP_K, "float32", FIRST, mode) for mode in TOP_K_MODES),
        Case(TOP_K, "bfloat16", FIRST, "k = 16"),
        *compiled,
    ]


#: Number of the random problems of each kind whose second derivatives are timed, and of sparse inputs.
DRAWN_SECOND_ORDER, DRAWN_SPARSE = 15, 30
#: Bounds of the rows, the classes, the features and the stored elements of a row of sparse inputs.
SPARSE_CLASSIFIERS = (3_000, 200_000), (2, 200), (300, 100_000), (4, 200)
#: Most stored elements of a sparse input.
MAX_STORED = 2**23


def second_order(quick: bool = False) -> list[Case]:
    """Return random products of the Hessian: of classifiers, of any linear layers, and of logits."""
    count = 1 if quick else DRAWN_SECOND_ORDER
    layers = [*few_classes(count, SEED), *draw(count, SEED, (WHOLE,))]
    rows = draw(count, SEED, (CROSS_ENTROPY,), layouts=PLAIN_LAYOUTS)
    return [
        *(Case(HVP, case.dtype, case.shape, PRODUCT, suite=RANDOM) for case in layers),
        *(Case(ROWS_HVP, c.dtype, c.shape, FRESH, c.dim, c.arrangement, C_ORDER, c.dtype, suite=RANDOM) for c in rows),
    ]


def sparse(quick: bool = False) -> list[Case]:
    """Return random losses of classifiers with a sparse input, if SciPy is installed, and their weight gradients."""
    if frameworks.module("scipy.sparse") is None:
        return []
    problems = []
    for index in range(2 if quick else DRAWN_SPARSE):
        random = np.random.default_rng((SEED, index))
        dtype = str(random.choice(("float32", "float64")))
        rows, classes, features, of_row = (
            round(low * (high / low) ** random.random()) for low, high in SPARSE_CLASSIFIERS
        )
        mode = f"{min(rows * of_row, MAX_STORED)} {SPARSE}"
        problems.append(Case(WHOLE, dtype, (rows, classes, features), mode, suite=RANDOM))
    return problems


# ---- calls in programs -----------------------------------------------------------------------------------------------

#: Shapes and dims of row-wise calls, and shapes (BT, V, H) of linear ones: from microseconds to some milliseconds.
PROGRAM_LAYOUTS = _layouts(1, (64, 128), (300, 2000), (512, 4096), (2048, 2048))
PROGRAM_LOGITS = _layouts(1, (512, 1000), (4096, 1000))
PROGRAM_SHAPES = ((64, 1024, 256), (1145, 19, 459))


def programs(quick: bool = False) -> list[Case]:
    """Return calls in programs that do something else before each call."""
    layouts = PROGRAM_LAYOUTS[1:2] if quick else PROGRAM_LAYOUTS
    calls = _rowwise((BACKWARD[0], FORWARD[0]), ("float32",), layouts, OUT, suite=PROGRAMS)
    if not quick:
        calls += _rowwise((CROSS_ENTROPY,), ("float32",), PROGRAM_LOGITS, OUT, suite=PROGRAMS)
        calls += [
            Case(operator, "float32", shape, LINEAR_MODES[operator][0], suite=PROGRAMS)
            for operator in (GRADIENT, WHOLE)
            for shape in PROGRAM_SHAPES
        ]
    places = [place for place in PLACES if place != AFTER_TORCH or frameworks.module("torch") is not None]
    return [replace(call, place=place) for call in calls for place in places]


# ---- random problems -------------------------------------------------------------------------------------------------

#: The operators, in the order in which the problems of a grid take them.
OPERATORS = (*BACKWARD, GRADIENT, *MASKED, MAX_SUM, *FORWARD, WHOLE, CROSS_ENTROPY)
#: Most elements of a row-wise problem, by default.
MAX_ELEMENTS = 2**22
#: The choices of layouts of row-wise problems, and the largest step between adjacent elements of a strange one: a
#: cache line holds eight elements of eight bytes.
PLAIN_LAYOUTS, STRANGE_LAYOUTS = "plain", "strange"
MAX_STEP = 8
#: Largest value of each of BT, V and H.
MAX_LENGTH = 2**18
#: Largest product BT*V*H, which takes some tens of milliseconds on two cores.
MAX_PRODUCT = 2**29
#: Most elements of any matrix of a linear problem, the logits included.
MAX_MATRIX = 2**27


def draw(
    count: int,
    seed: int,
    operators: Sequence[str] = OPERATORS,
    max_elements: int | None = None,
    layouts: str | None = None,
    max_rows: int | None = None,
) -> list[Case]:
    """Draw `count` problems, whose operators alternate. With all operators, three of ten problems are linear.

    A seed always gives the same problems, and a longer list begins with all of a shorter one.

    Parameters
    ----------
    max_elements : int, optional
        Most elements of a row-wise problem.
    layouts : {"plain", "strange"}, optional
        The layouts of row-wise problems: of `LAYOUTS`, or of `STRANGE`. By default half of the problems have each.
    max_rows : int, optional
        Most rows of a linear problem, or most classes, by turns of chance.
    """
    problems = []
    for index in range(count):
        random = np.random.default_rng((seed, index))
        operator = operators[index % len(operators)]
        is_linear = operator in LINEAR
        problems.append(
            _draw_linear(operator, random, max_rows)
            if is_linear
            else _draw_rowwise(operator, random, max_elements or MAX_ELEMENTS, layouts)
        )
    return problems


#: Bounds of the rows, the classes and the features of classifiers.
FEW_CLASSES = (3_000, 200_000), (2, 64), (4, 400)


def few_classes(count: int, seed: int) -> list[Case]:
    """Draw the losses of classifiers with their weight gradients: many rows, few classes, inputs without a gradient."""
    problems = []
    for index in range(count):
        random = np.random.default_rng((seed, index))
        dtype = str(random.choice(("float32", "float64")))
        shape = tuple(round(low * (high / low) ** random.random()) for low, high in FEW_CLASSES)
        problems.append(Case(WHOLE, dtype, shape, WEIGHT_GRADIENT, suite=RANDOM))
    return problems


def _draw_rowwise(operator: str, random: np.random.Generator, max_elements: int, layouts: str | None) -> Case:
    dtype = str(random.choice(DTYPES))
    size = math.exp(random.uniform(math.log(4), math.log(max_elements)))
    shape: tuple[int, ...]
    if operator in MASKED:
        # The last two dims have equal lengths, as in attention.
        length = round(size ** random.uniform(0.1, 0.5))
        first, second = _lengths(size / length**2, 2, random)
        shape, dim = (first, second, length, length), 3
    else:
        # Ranks 6 to 8 are rare in practice, and drawn for one problem in ten.
        rank = int(random.integers(1, 6) if random.random() < 0.9 else random.integers(6, 9))
        shape = _lengths(size, rank, random)
        dim = int(random.integers(rank))
    arrangement = str(random.choice(LAYOUTS))
    mode = str(random.choice((FRESH, OUT) if arrangement == BROADCAST else (FRESH, OUT, OUT, IN_PLACE)))
    out_arrangement, out_dtype = arrangement if mode == IN_PLACE else C_ORDER, dtype
    if mode == OUT and arrangement != BROADCAST and random.random() < 0.5:
        out_arrangement = arrangement
    if mode == OUT and random.random() < 0.25:
        out_dtype = str(random.choice([other for other in DTYPES if other != dtype]))
    case = Case(operator, dtype, shape, mode, dim, arrangement, out_arrangement, out_dtype, suite=RANDOM)
    is_strange = random.random() < 0.5 if layouts is None else layouts == STRANGE_LAYOUTS
    return _with_strange_layouts(case, random) if is_strange else case


def _with_strange_layouts(case: Case, random: np.random.Generator) -> Case:
    rank = len(case.shape)
    arrangement = _draw_layout(WRITABLE_STRANGE if case.mode == IN_PLACE else STRANGE, rank, random)
    out_arrangement = arrangement if case.mode == IN_PLACE else C_ORDER
    if case.mode == OUT:
        own = arrangement if kind_of(arrangement) in WRITABLE_STRANGE else C_ORDER
        out_arrangement = str(
            random.choice((C_ORDER, FORTRAN_ORDER, own, _draw_layout(WRITABLE_STRANGE, rank, random)))
        )
    return replace(case, arrangement=arrangement, out_arrangement=out_arrangement)


def _draw_layout(kinds: Sequence[str], rank: int, random: np.random.Generator) -> str:
    kind = str(random.choice(kinds))
    if kind in (STEPS_OF, COLUMN_OF):
        numbers = [int(random.integers(2, MAX_STEP + 1))]
    elif kind == AXES:
        numbers = random.permutation(rank).tolist()
    else:
        numbers = sorted(random.choice(rank, random.integers(1, rank + 1), replace=False).tolist())
    return " ".join((kind, *map(str, numbers)))


def _lengths(size: float, rank: int, random: np.random.Generator) -> tuple[int, ...]:
    """Draw lengths whose product is approximately the size."""
    parts = random.dirichlet(np.ones(rank))
    return tuple(max(1, round(size**part)) for part in parts)


def _draw_linear(operator: str, random: np.random.Generator, max_rows: int | None) -> Case:
    dtype = str(random.choice(DTYPES))
    mode = str(random.choice(LINEAR_MODES[operator]))
    while True:
        rows, vocabulary, width = (round(MAX_LENGTH ** random.random()) for _ in range(3))
        if max_rows:
            short = round(max_rows ** random.random())
            rows, vocabulary = (short, vocabulary) if random.random() < 0.5 else (rows, short)
        largest_matrix = max(rows * vocabulary, vocabulary * width, rows * width)
        if rows * vocabulary * width <= MAX_PRODUCT and largest_matrix <= MAX_MATRIX:
            return Case(operator, dtype, (rows, vocabulary, width), mode, suite=RANDOM)
