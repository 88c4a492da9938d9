"""The grid of ``ascend-grad check``: for every operator, cases that differ in shape, axis, layout, mask and mode."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._call import Operator
from .._dispatch import run
from ..arrays import FLOATING_DTYPES, accumulator_dtype
from ..backends import reference
from ..operators.options import LAYER_OUTPUTS, NUMBER, OPTIONS, OUTPUT_GRADIENTS
from ..operators.table import OPERATORS, ROWWISE, SOFTMAX


@dataclass(frozen=True)
class Case:
    """One call: the operator, the dtype of its data, a label, and the arguments by name."""

    operator: str
    dtype: str
    label: str
    arguments: dict[str, Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(value.nbytes for value in self.arguments.values() if isinstance(value, np.ndarray))


def cases() -> Iterator[Case]:
    """Yield all cases, ordered by operator and dtype."""
    makers = {
        **{each.name: _row_cases for each in ROWWISE if "axis" in each.parameters},
        **{each.name: _masked_cases for each in ROWWISE if "mask" in each.parameters},
        "fused_linear_cross_entropy_loss_grad": _gradient_cases,
        "fused_linear_online_max_sum": _statistics_cases,
        "fused_cross_entropy_loss_with_max_sum": _loss_cases,
        "linear_cross_entropy": _linear_cross_entropy_cases,
        "linear_cross_entropy_backward": _backward_cases,
        "linear_top_k": _top_k_cases,
        "cross_entropy": _cross_entropy_cases,
        "cross_entropy_hvp": _product_cases,
        "linear_cross_entropy_hvp": _layer_product_cases,
        "linear_cross_entropy_hessian": _layer_hessian_cases,
    }
    for operator, maker in makers.items():
        for dtype in FLOATING_DTYPES:
            for label, arguments in maker(operator, dtype, np.random.default_rng(zlib.crc32(operator.encode()))):
                yield Case(operator, str(dtype), label, arguments)


Labelled = Iterator[tuple[str, dict[str, Any]]]

#: Shape and axis of the row-wise cases: SIMD edges, long rows, one row, strided axes, rank 0 and high ranks.
ROWS = (
    ((), 0), ((1,), 0), ((1000,), -1), ((7, 1), -1), ((5, 31), -1), ((64, 128), -1), ((33, 1000), -1), ((4, 30000), -1),
    ((128, 65), 0), ((6, 77, 10), 1), ((2, 3, 4, 5, 6), 2),
)  # fmt: skip

MASKED = (((1, 1, 1, 1), 1), ((2, 3, 16, 128), 1), ((2, 3, 7, 100), 3), ((1, 2, 5, 4096), 2))

SCALES = (1.0, -0.37)

#: BT, V, H of the linear cases.
LINEAR = ((1, 128, 16), (9, 130, 17), (64, 1000, 32), (130, 512, 64))

#: BT, V, H of cases with all second derivatives with respect to the weight.
FEW = ((9, 3, 4), (300, 6, 10))

#: BT, V, H of more cases with logits: sizes near multiples of a device's tile sizes.
LOGITS = ((7, 129, 16), (33, 257, 40), (64, 4097, 24), (257, 1031, 72))

#: Values of the options that add terms to a loss: smoothing and the squared lse.
ADDED_TERMS = {option.name: 0.01 for option in OPTIONS.values() if option.kind == NUMBER and option.default == 0}


def _logits(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray:
    return 2 * random.standard_normal(shape)


def _log_sum_exp(logits: NDArray) -> NDArray:
    largest = np.max(logits, axis=-1)
    return largest + np.log(np.sum(np.exp(logits - largest[:, None]), axis=-1))


def _turned(array: NDArray) -> NDArray:
    """Return a copy whose last axis runs backwards in memory, with a gap between its elements."""
    memory = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = memory[..., ::-2]
    view[...] = array
    return view


def _reference(operator: Operator, *values: Any) -> NDArray:
    return run(operator, list(values), None, reference.NAME, None)


def _operands(
    operator: str, dtype: np.dtype, random: np.random.Generator, logits: NDArray, *settings: Any
) -> dict[str, NDArray]:
    """Return the arrays but for a mask: the logits, or a gradient and the result of the forward operator."""
    values = [logits]
    if operator.endswith("_backward"):
        forward = OPERATORS[operator.removesuffix("_backward")]
        values = [random.standard_normal(logits.shape), _reference(forward, logits, *settings)]
    return {name: np.asarray(each).astype(dtype) for name, each in zip(OPERATORS[operator].array_names, values)}


def _row_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for shape, dim in ROWS:
        inputs = _operands(operator, dtype, random, np.asarray(_logits(random, shape)), dim)
        yield f"{shape} dim {dim}", {**inputs, "dim": dim}
        if len(shape) == 2:
            turned = {name: _turned(array) for name, array in inputs.items()}
            yield f"{shape} dim {dim} strided", {**turned, "dim": dim}


def _masked_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for shape, heads in MASKED:
        logits = _logits(random, shape)
        mask = random.random((shape[0], heads, *shape[2:])) < 0.3
        # The gradient has the masked elements in its sums, so that they are not 0 here.
        inputs = _operands(operator, dtype, random, logits, np.zeros_like(mask), 1.0, False)
        if not operator.endswith("_backward"):
            mask[0, 0, 0] = True  # a completely masked row
        for scale in SCALES:
            yield f"{shape} scale {scale}", {**inputs, "mask": mask, "scale": scale}


@dataclass(frozen=True)
class _Problem:
    """Hidden states, a vocabulary shard, and targets, some of them in another shard."""

    input: NDArray
    weight: NDArray
    target: NDArray
    logits: NDArray
    elsewhere: NDArray

    @property
    def number(self) -> np.dtype:
        """Dtype of arrays with one number for each row."""
        return accumulator_dtype(self.input.dtype)

    @property
    def logits_max(self) -> NDArray:
        return np.max(self.logits, axis=-1).astype(self.number)

    @property
    def sum_exp_logits(self) -> NDArray:
        return np.sum(np.exp(self.logits - self.logits_max[:, None]), axis=-1).astype(self.number)


def _problem(
    random: np.random.Generator, bt: int, v: int, h: int, dtype: np.dtype, elsewhere: NDArray | None = None
) -> _Problem:
    input = random.standard_normal((bt, h)).astype(dtype)
    weight = (2 * random.standard_normal((v, h)) / np.sqrt(h)).astype(dtype)
    logits = input.astype(np.float64) @ weight.astype(np.float64).T
    if elsewhere is None:
        elsewhere = random.random(bt) < 0.2
    return _Problem(input, weight, random.integers(0, v, bt), logits, elsewhere)


#: A mask that reveals in which order a device reads its bits: row 0 of each eight, and row 2.
ASYMMETRIC = np.arange(61) % 8 == 0
ASYMMETRIC[2] = True


def _asymmetric_problem(random: np.random.Generator, dtype: np.dtype) -> _Problem:
    return _problem(random, ASYMMETRIC.size, 200, 24, dtype, ASYMMETRIC)


def _gradient_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    problems = [(f"BT {bt} V {v} H {h}", _problem(random, bt, v, h, dtype)) for bt, v, h in LINEAR]
    for name, p in (*problems, ("asymmetric mask,", _asymmetric_problem(random, dtype))):
        bt = p.elsewhere.size
        grad = random.standard_normal(bt).astype(p.number)
        grad[1::5] = 0
        bits = np.packbits(p.elsewhere, bitorder="little")
        statistics = {"logits_max": p.logits_max, "sum_exp_logits": p.sum_exp_logits}
        stored = {"softmax": _reference(SOFTMAX, p.logits, -1).astype(p.number)}
        for label, mask, index, mode in (
            ("recomputed, bits, int64", bits, np.int64, statistics),
            ("stored, bools, int32", p.elsewhere, np.int32, stored),
        ):
            target = np.where(p.elsewhere, 0, p.target).astype(index)
            inputs = {"grad": grad, "input": p.input, "weight": p.weight, "target_mask": mask, "masked_target": target}
            yield f"{name} {label}", {**inputs, **mode}


def _statistics_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    problems = [(f"BT {bt} V {v} H {h}", _problem(random, bt, v, h, dtype)) for bt, v, h in (*LINEAR, *LOGITS)]
    for name, p in (*problems, ("asymmetric mask", _asymmetric_problem(random, dtype))):
        start, end = 100, 100 + len(p.weight)
        target = np.where(p.elsewhere, end + p.target, start + p.target)
        for index, logits in ((np.int64, True), (np.int32, False)):
            arguments: dict[str, Any] = {"input": p.input, "weight": p.weight, "target": target.astype(index)}
            arguments |= {"vocab_start_index": start, "vocab_end_index": end, "return_logits": logits}
            yield f"{name} {np.dtype(index)}{', logits' if logits else ''}", arguments


def _loss_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for bt, v, h in LINEAR:
        p = _problem(random, bt, v, h, dtype)
        rows = np.arange(bt)
        predicted = np.where(p.elsewhere, 0, p.logits[rows, p.target] - p.logits_max).astype(p.number)
        arguments = {"logits_max": p.logits_max, "sum_exp_logits": p.sum_exp_logits, "predicted_logits": predicted}
        yield f"BT {bt} V {v}", {**arguments, "vocab_parallel_logits": p.logits.astype(dtype)}
        yield f"BT {bt} V {v} loss alone", arguments


def _options(random: np.random.Generator, rows: tuple[int, ...], v: int, *, is_linear: bool) -> Labelled:
    """Yield options and outputs of a loss with one target in each row."""
    each = {"token_weight": random.random(rows), "class_weight": 0.5 + random.random(v)}
    yield "token weights", {"token_weight": each["token_weight"], "outputs": ("lse", "log_prob")}
    yield "class weights", {"class_weight": each["class_weight"], "denominator": 3.0}
    yield (
        "smoothing, z-loss, all outputs of rows",
        {
            **each,
            **ADDED_TERMS,
            "outputs": tuple(LAYER_OUTPUTS),
        },
    )
    yield "temperatures", {"temperature": 0.5 + random.random(rows), "outputs": ("entropy",)}
    if is_linear:
        yield "bias, scale and cap", {"bias": random.standard_normal(v), "logit_scale": 0.5, "softcap": 5.0}
    else:
        yield "outputs of logits", {**each, **ADDED_TERMS, "outputs": ("prob", "hessian_diag")}


def _several_targets(
    random: np.random.Generator, rows: tuple[int, ...], v: int, number: np.dtype
) -> dict[str, NDArray]:
    """Return three targets for each row, some of which are ignored, with their probabilities."""
    target = random.integers(0, v, (*rows, 3))
    target[random.random(target.shape) < 0.2] = -100
    return {"target": target, "target_prob": random.random(target.shape).astype(number)}


def _linear_cross_entropy_cases(
    operator: str, dtype: np.dtype, random: np.random.Generator, sizes: Iterable[tuple[int, int, int]] = LINEAR
) -> Labelled:
    for bt, v, h in sizes:
        p = _problem(random, bt, v, h, dtype)
        target = np.where(p.elsewhere, -100, p.target)
        for reduction in ("mean", "sum", "none"):
            # The gradient of a mean has a factor of 1 / BT. An upstream gradient of BT cancels it.
            arguments = {"input": p.input, "weight": p.weight, "target": target, "reduction": reduction}
            yield (
                f"BT {bt} V {v} H {h} {reduction}",
                {**arguments, "grad_loss": float(bt if reduction == "mean" else 1)},
            )
        name = f"BT {bt} V {v} H {h}"
        plain = {"input": p.input, "weight": p.weight, "target": target, "reduction": "sum"}
        for label, options in _options(random, (bt,), v, is_linear=True):
            yield f"{name} {label}", {**plain, **options}
        yield f"{name} several targets", {**plain, **_several_targets(random, (bt,), v, p.number)}


def _layer_hessian_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for label, arguments in _linear_cross_entropy_cases("linear_cross_entropy", dtype, random, FEW):
        yield label, {name: each for name, each in arguments.items() if name != "outputs"}


def _layer_product_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for label, arguments in _linear_cross_entropy_cases("linear_cross_entropy", dtype, random, (*FEW, *LINEAR)):
        vector = {"vector": random.standard_normal(arguments["weight"].shape).astype(dtype)}
        if "bias" in arguments:
            vector["vector_bias"] = random.standard_normal(len(arguments["weight"])).astype(dtype)
        of_loss = {name: each for name, each in arguments.items() if name != "outputs"}
        yield label, {**of_loss, **vector}
        if len(arguments["weight"]) <= FEW[-1][1]:  # the terms of larger products cancel one another more
            vector["vector_input"] = random.standard_normal(arguments["input"].shape).astype(dtype)
            yield f"{label}, of the input, too", {**of_loss, **vector}


def _backward_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for bt, v, h in LINEAR:
        p = _problem(random, bt, v, h, dtype)
        name, bias, temperature = f"BT {bt} V {v} H {h}", random.standard_normal(v), 0.5 + random.random(bt)
        arguments: dict[str, Any] = {
            "input": p.input,
            "weight": p.weight,
            "target": np.where(p.elsewhere, -100, p.target),
        }
        lse, entropy = _log_sum_exp(p.logits).astype(p.number), random.random(bt).astype(p.number)
        plain = {**arguments, "reduction": "sum", "lse": lse, "entropy": entropy}
        yield f"{name} loss", {**plain, "grad_loss": 1.0}
        upstream = {each: random.standard_normal(bt) for each in OUTPUT_GRADIENTS}
        yield f"{name} outputs", {**plain, **upstream}
        weights = {"token_weight": random.random(bt), "class_weight": 0.5 + random.random(v), "grad_loss": 1.0}
        del upstream["grad_entropy"]
        yield f"{name} loss, lse, log-probabilities", {**plain, **weights, **upstream}
        options = {**ADDED_TERMS, "token_weight": random.random(bt), "bias": bias}
        options |= {"class_weight": 0.5 + random.random(v), "temperature": temperature, "grad_loss": 1.0}
        lse = _log_sum_exp((p.logits + bias) / temperature[:, None]).astype(p.number)
        yield f"{name} options", {**plain, **options, "lse": lse}


def _top_k_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for bt, v, h in LINEAR:
        p = _problem(random, bt, v, h, dtype)
        for k, temperature in ((1, 1.0), (16, 0.7), (128, 1.0)):
            label = f"BT {bt} V {v} H {h} k {k} temperature {temperature}"
            yield label, {"input": p.input, "weight": p.weight, "k": k, "temperature": temperature}


def _cross_entropy_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for shape, dim in ROWS:
        rows, v = (np.delete(shape, dim).tolist(), shape[dim]) if shape else ([], 1)
        logits = np.asarray(_logits(random, shape)).astype(dtype)
        target = np.asarray(random.integers(0, v, rows))
        target[random.random(rows) < 0.2] = -100
        arguments: dict[str, Any] = {"input": logits, "target": target, "dim": dim}
        for reduction in ("mean", "none"):
            number = target.size if reduction == "mean" else 1
            yield f"{shape} dim {dim} {reduction}", {**arguments, "reduction": reduction, "grad_loss": float(number)}
        arguments["reduction"] = "sum"
        for label, options in _options(random, tuple(rows), v, is_linear=False):
            yield f"{shape} dim {dim} {label}", {**arguments, **options}
        several = _several_targets(random, tuple(rows), v, accumulator_dtype(dtype))
        yield f"{shape} dim {dim} several targets", {**arguments, **several}


def _product_cases(operator: str, dtype: np.dtype, random: np.random.Generator) -> Labelled:
    for label, arguments in _cross_entropy_cases("cross_entropy", dtype, random):
        if "outputs" in arguments and "logits" not in label:
            continue  # the same problem without outputs has a case
        vector = random.standard_normal(arguments["input"].shape).astype(dtype)
        given = {name: each for name, each in arguments.items() if name != "outputs"}
        yield label.replace("outputs of logits", "options"), {**given, "vector": vector}
