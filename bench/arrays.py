"""The arrays of cases, in their layouts. All sides of a case use the same memory, which NumPy has allocated."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

import ascend_grad as ag

from .case import (
    ALL_STRIDE_0,
    AXES,
    BROADCAST,
    BYTE_SWAPPED,
    C_ORDER,
    CLASS_WEIGHTS,
    COLUMN,
    COLUMN_OF,
    CROSS_ENTROPY,
    DENSE,
    EVERY_SECOND,
    FILTERED,
    FIRST_STRIDE_0,
    FORTRAN_ORDER,
    IGNORED,
    IN_PLACE,
    MASKED,
    MAX_SUM,
    NEGATIVE_STEPS,
    SEVERAL_TARGETS,
    SMOOTHING,
    STEPS_OF,
    TRANSPOSED,
    WHOLE,
    Case,
    kind_of,
    numbers_of,
    numpy_dtype,
)

#: The share of the loss that smoothing spreads over all classes.
LABEL_SMOOTHING = 0.1
#: Targets of a row in a case with several.
TARGETS = 8
#: The target of an ignored row, and the share of such rows in a case with this option.
IGNORE_INDEX, IGNORED_SHARE = -100, 0.5
#: Steps of training, after which the model's loss is lower than the loss of a model of word frequencies.
STEPS = 100


# ---- layouts ---------------------------------------------------------------------------------------------------------

#: Named layouts, as kinds and numbers of strange layouts.
_AS_STRANGE = {EVERY_SECOND: (STEPS_OF, (2,)), COLUMN: (COLUMN_OF, (5,))}


def arranged(values: np.ndarray, layout: str, axis: int) -> np.ndarray:
    """Return the values in another layout. Along a broadcast axis, only the values of one index remain."""
    result = _empty(values, layout, axis)
    # All of the memory is written first, gaps included, so that the system has allocated its pages.
    memory_of(result).fill(0)
    np.copyto(result, values)
    return result


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory. A call reads all of it, as gaps are shorter than a cache line."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def is_dense(array: np.ndarray) -> bool:
    """Return whether the array fills its memory, in any order of its axes."""
    return memory_of(array).nbytes == array.nbytes


def _empty(values: np.ndarray, layout: str, axis: int) -> np.ndarray:
    """Return a view of new memory, which it fills except for a layout's gaps."""
    shape, dtype, order = values.shape, values.dtype, list(range(values.ndim))
    # The axis before the operator's, or the last one.
    other = axis - 1 if axis else values.ndim - 1
    kind, numbers = _AS_STRANGE.get(layout) or (kind_of(layout), numbers_of(layout))
    if kind == STEPS_OF:
        (step,) = numbers
        return np.empty((*shape[:-1], step * shape[-1]), dtype)[..., ::step]
    if kind == COLUMN_OF:
        (columns,) = numbers
        return np.empty((*shape, columns), dtype)[..., columns // 2]
    if layout == NEGATIVE_STEPS:
        return np.empty(shape, dtype)[(slice(None, None, -1),) * values.ndim]
    if kind in (BROADCAST, FIRST_STRIDE_0, ALL_STRIDE_0):
        axes = numbers or (other,)
        memory = np.empty([min(1, length) if i in axes else length for i, length in enumerate(shape)], dtype)
        strides = [0 if i in axes else stride for i, stride in enumerate(memory.strides)]
        # np.broadcast_to would return a read-only array, of which PyTorch warns.
        return np.ndarray(shape, dtype, memory.view(np.uint8), strides=strides)
    if kind == AXES:
        order = list(numbers)
    elif layout == FORTRAN_ORDER:
        order.reverse()
    elif layout == TRANSPOSED:
        order[axis], order[other] = order[other], order[axis]
    dtype = dtype.newbyteorder() if layout == BYTE_SWAPPED else dtype
    return np.empty([shape[i] for i in order], dtype).transpose(np.argsort(order))


# ---- row-wise operators ----------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The arrays of one call: its inputs, the array of its result unless that is new, and arguments of a loss."""

    inputs: tuple[np.ndarray, ...]
    out: np.ndarray
    loss: dict[str, Any]


@functools.lru_cache(maxsize=1)
def values(operator: str, shape: tuple[int, ...], dim: int) -> tuple[np.ndarray, ...]:
    """Make ordinary values in float32: logits, or gradients of magnitude one and (logarithms of) probabilities."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(shape, np.float32)
    if not operator.endswith("_backward"):
        return (logits,)
    logits -= np.log(np.exp(logits).sum(dim, keepdims=True))
    output = logits if operator == "log_softmax_backward" else np.exp(logits, out=logits)
    return random.standard_normal(shape, np.float32), output


def operands(case: Case) -> Operands:
    """Make the arrays of a row-wise case.

    Only the first of two inputs is broadcast, as gradients of sums are, unless the layout says that all are.
    """
    assert case.dim is not None
    dtype, (*layouts, out_layout) = numpy_dtype(case.dtype), _layouts(case)
    found = (a.astype(dtype, copy=False) for a in values(case.operator, case.shape, case.dim))
    inputs = [arranged(a, layout, case.dim) for a, layout in zip(found, layouts)]
    if case.operator in MASKED:
        # The mask is the same for all heads, and masks three of ten positions.
        batch, _, *rest = case.shape
        inputs.append(np.random.default_rng(1).random((batch, 1, *rest)) < 0.3)
    loss = logits_arguments(case) if case.operator == CROSS_ENTROPY else {}
    if case.mode == IN_PLACE:
        return Operands(tuple(inputs), inputs[0], loss)
    empty = np.zeros(case.shape, numpy_dtype(case.out_dtype or case.dtype))
    return Operands(tuple(inputs), arranged(empty, out_layout, case.dim), loss)


def widened(case: Case, operands: Operands) -> Operands:
    """Convert the arrays of a row-wise case to float32, in their layouts, and in native byte order."""
    assert case.dim is not None
    dim, layouts = case.dim, [C_ORDER if layout == BYTE_SWAPPED else layout for layout in _layouts(case)]

    def wide(array: np.ndarray, layout: str) -> np.ndarray:
        return array if array.dtype == bool else arranged(array.astype(np.float32), layout, dim)

    *inputs, out = map(wide, (*operands.inputs, operands.out), (*layouts[: len(operands.inputs)], layouts[-1]))
    return Operands(tuple(inputs), out, operands.loss)


def _layouts(case: Case) -> tuple[str, str, str]:
    """Return the layouts of the first input, of the others and of the result."""
    layout = case.arrangement or C_ORDER
    others = C_ORDER if kind_of(layout) in (BROADCAST, FIRST_STRIDE_0) else layout
    return layout, others, case.out_arrangement or C_ORDER


def logits_arguments(case: Case) -> dict[str, Any]:
    """Make random targets and the arguments of an option of the loss of logits.

    Returns
    -------
    dict
        Arguments of `ascend_grad.cross_entropy`. The target has the shape of the logits without the axis, with
        `SEVERAL_TARGETS` a last axis of `TARGETS` different targets. With `DENSE` it has the shape of the logits. Other
        arrays and dense targets have the dtype of the logits, as PyTorch demands.
    """
    assert case.dim is not None
    random, dtype = np.random.default_rng(1), numpy_dtype(case.dtype)
    classes, rows = case.shape[case.dim], case.shape[: case.dim] + case.shape[case.dim + 1 :]
    target = random.integers(0, classes, rows)
    if case.options == CLASS_WEIGHTS:
        return {"target": target, "class_weight": random.uniform(0.5, 1.5, classes).astype(dtype)}
    if case.options == SMOOTHING:
        return {"target": target, "label_smoothing": LABEL_SMOOTHING}
    if case.options == IGNORED:
        return {"target": np.where(random.random(rows) < IGNORED_SHARE, IGNORE_INDEX, target)}
    if case.options == SEVERAL_TARGETS:
        several = (target[..., None] + np.arange(TARGETS) * (classes // TARGETS)) % classes
        return {"target": several, "target_prob": random.dirichlet(np.ones(TARGETS), rows).astype(dtype)}
    if case.options == DENSE:
        # Positive numbers, divided by their sums, as a softmax or label mixing gives them.
        prob = random.random(case.shape, np.float32)
        prob /= prob.sum(case.dim, keepdims=True)
        return {"target": prob.astype(dtype)}
    return {"target": target}


# ---- linear operators ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _linear_values(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make input, weight and targets in float32, for logits of magnitude one or two."""
    random = np.random.default_rng(0)
    rows, vocabulary, width = shape
    x = random.standard_normal((rows, width), np.float32)
    weight = random.standard_normal((vocabulary, width), np.float32)
    weight *= 1.5 / math.sqrt(width)
    return x, weight, random.integers(0, vocabulary, rows)


@functools.cache
def trained_layer(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train the demo's word model for STEPS steps; return input, weight and targets of its loss on held-out text.

    Most of its probabilities are tiny, which random weights never give.
    """
    from ascend_grad.demo import corpus, tasks, training

    random = np.random.default_rng(0)
    task = tasks.words_task(corpus.read_corpus(corpus.standard_library()), random)
    for _ in training.train(task, STEPS, random):
        pass
    sizes = task.model.sizes
    tokens, following = training.measuring_blocks(task.held_out, rows // sizes.context, sizes)
    task.model.loss_and_gradient(tokens, following)
    return task.model.gradient_calls["linear_cross_entropy"]


def linear_arguments(case: Case) -> dict[str, Any]:
    """Make the array arguments (and vocabulary bounds) of a linear case."""
    dtype, filtered = numpy_dtype(case.dtype), case.mode == FILTERED
    x, weight, target = trained_layer(case.shape[0]) if filtered else _linear_values(case.shape)
    x, weight = x.astype(dtype, copy=False), weight.astype(dtype, copy=False)
    given: dict[str, Any] = {"input": x, "weight": weight}
    if case.operator == MAX_SUM:
        return given | {"target": target, "vocab_start_index": 0, "vocab_end_index": len(weight)}
    if case.operator == WHOLE or not case.has_rivals:
        return given | {"target": target}
    stored = case.mode == "stored"
    found = ag.fused_linear_online_max_sum(x, weight, target, 0, len(weight), return_logits=stored)
    grad = np.full(len(x), 1 if filtered else 1 / len(x), found.logits_max.dtype)
    given = {"grad": grad, **given, "target_mask": np.zeros(len(x), bool), "masked_target": target}
    if not stored:
        return given | {"logits_max": found.logits_max, "sum_exp_logits": found.sum_exp_logits}
    _, softmax = ag.fused_cross_entropy_loss_with_max_sum(*found[:3], vocab_parallel_logits=found[5])
    return given | {"softmax": softmax}


def gradients_like(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Allocate arrays for both gradients, and write them, so that the system has allocated their pages."""
    results = np.empty_like(given["input"]), np.empty_like(given["weight"])
    for result in results:
        result.fill(0)
    return results
