"""Named cases of the linear operators, and their arrays."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu

from ..dtypes import DTYPES, DTYPES_OF_16_BITS, NARROW_DTYPES, numpy_dtype

GRADIENT = "fused_linear_cross_entropy_loss_grad"
MAX_SUM = "fused_linear_online_max_sum"
WHOLE = "linear_cross_entropy"

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
#: Filter for the trained model: tiles whose softmax entries are all at most this are skipped. It is less than the
#: rounding of bfloat16 near 1.
FILTER_EPS = 2.0**-12

#: Sources of the gradient's softmax.
MODES = ("recomputed", "stored")
#: Calls that are measured on every variant.
CALLS_BY_VARIANT = ((GRADIENT, "recomputed"), (MAX_SUM, "forward"), (WHOLE, "loss and gradients"))
#: Floating-point operations for each BT*V*H, by operator and mode.
OPERATIONS = {
    (GRADIENT, "recomputed"): 6,
    (GRADIENT, "stored"): 4,
    (GRADIENT, "filtered"): 6,
    (MAX_SUM, "forward"): 2,
    (WHOLE, "loss and gradients"): 6,
}


@dataclass(frozen=True)
class LinearCase:
    """One measured call.

    Attributes
    ----------
    operator : str
        The public function.
    mode : str
        For the gradient: the softmax is "recomputed" or "stored", or recomputed and "filtered" for a trained model.
    dtype : str
        The dtype of input and weight.
    shape : tuple of int
        (BT, V, H).
    variant : str
        The CPU variant that is forced, or "" for the best one.
    """

    operator: str
    mode: str
    dtype: str
    shape: tuple[int, int, int]
    variant: str = ""

    @property
    def layout(self) -> str:
        return " × ".join(map(str, self.shape))

    @property
    def name(self) -> str:
        words = (self.operator, self.mode, self.dtype, self.layout, self.variant)
        return " ".join(word for word in words if word)

    @property
    def operations(self) -> int:
        """Return the number of floating-point operations of the formula."""
        return OPERATIONS[self.operator, self.mode] * math.prod(self.shape)


def variants() -> list[str]:
    """Return the names of the CPU variants that this machine can run."""
    return [name for name in _cpu.VARIANTS if _cpu.unsupported_reason(name) is None]


def by_variant() -> list[LinearCase]:
    """Return the cases of 16-bit dtypes on every variant of this machine."""
    return [
        LinearCase(operator, mode, dtype, VARIANTS_SHAPE, variant)
        for operator, mode in CALLS_BY_VARIANT
        for dtype in DTYPES_OF_16_BITS
        for variant in variants()
    ]


def full() -> list[LinearCase]:
    """Return all cases. Those by variant depend on the machine."""
    return [
        *(LinearCase(GRADIENT, "recomputed", dtype, shape) for shape in LARGE_SHAPES for dtype in NARROW_DTYPES),
        LinearCase(GRADIENT, "recomputed", "float32", FIRST, "avx2"),
        LinearCase(GRADIENT, "recomputed", "float64", FIRST),
        *(LinearCase(GRADIENT, "stored", dtype, LARGE_SHAPES[i]) for i in (0, 2) for dtype in NARROW_DTYPES[:2]),
        *(LinearCase(MAX_SUM, "forward", dtype, FIRST) for dtype in NARROW_DTYPES[:2]),
        *(LinearCase(WHOLE, "loss and gradients", dtype, FIRST) for dtype in NARROW_DTYPES[:2]),
        *(LinearCase(GRADIENT, mode, dtype, shape) for shape in SMALL_SHAPES for dtype in DTYPES for mode in MODES),
        LinearCase(GRADIENT, "filtered", "bfloat16", TRAINED_SHAPE),
        *by_variant(),
    ]


def memory() -> list[LinearCase]:
    """Return the cases whose memory is measured: the gradient with `out`, and the whole loss with new results."""
    return [
        *(LinearCase(GRADIENT, "recomputed", dtype, MEMORY_SHAPE) for dtype in ("float32", "bfloat16")),
        LinearCase(WHOLE, "loss and gradients", "float32", MEMORY_SHAPE),
    ]


def quick() -> list[LinearCase]:
    """Return a choice of cases that takes about half a minute."""
    return [
        *(LinearCase(GRADIENT, "recomputed", dtype, FIRST) for dtype in NARROW_DTYPES[:2]),
        *(LinearCase(GRADIENT, "recomputed", dtype, shape) for shape in SMALL_SHAPES for dtype in DTYPES),
    ]


# ---- arrays ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _values(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make input, weight and targets in float32, for logits of magnitude one or two."""
    random = np.random.default_rng(0)
    rows, vocabulary, width = shape
    x = random.standard_normal((rows, width), np.float32)
    weight = random.standard_normal((vocabulary, width), np.float32)
    weight *= 1.5 / math.sqrt(width)
    return x, weight, random.integers(0, vocabulary, rows)


def arguments(case: LinearCase) -> dict[str, Any]:
    """Make the array arguments (and vocabulary bounds) of the call."""
    dtype = numpy_dtype(case.dtype)
    if case.mode == "filtered":
        from .trained import last_layer

        x, weight, target = last_layer(case.shape[0])
    else:
        x, weight, target = _values(case.shape)
    x, weight = x.astype(dtype, copy=False), weight.astype(dtype, copy=False)
    if case.operator == WHOLE:
        return {"input": x, "weight": weight, "target": target}
    if case.operator == MAX_SUM:
        return {
            "input": x,
            "weight": weight,
            "target": target,
            "vocab_start_index": 0,
            "vocab_end_index": len(weight),
        }
    stored = case.mode == "stored"
    found = ag.fused_linear_online_max_sum(x, weight, target, 0, len(weight), return_logits=stored)
    softmax = None
    if stored:
        _, softmax = ag.fused_cross_entropy_loss_with_max_sum(*found[:3], vocab_parallel_logits=found[5])
    statistics = (
        {"softmax": softmax} if stored else {"logits_max": found.logits_max, "sum_exp_logits": found.sum_exp_logits}
    )
    grad = np.full(len(x), 1 if case.mode == "filtered" else 1 / len(x), found.logits_max.dtype)
    return {
        "grad": grad,
        "input": x,
        "weight": weight,
        "target_mask": np.zeros(len(x), bool),
        "masked_target": target,
    } | statistics


def outs(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Allocate arrays for both gradients, and write them, so that the system has allocated their pages."""
    results = np.empty_like(given["input"]), np.empty_like(given["weight"])
    for result in results:
        result.fill(0)
    return results
