"""Calls in programs that do something else before each call: this library with each number of threads, and PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag

from ..arrays import gradients_like, linear_arguments, operands
from ..case import AFTER_NUMPY, AFTER_PAUSE, AFTER_PYTHON, AFTER_TORCH, BACK_TO_BACK, CROSS_ENTROPY, GRADIENT, Case
from ..frameworks import Call, tensor
from ..results import OWN, side_with_threads
from . import cross_entropy, linear, rowwise

#: Rows and columns of the square products, and terms of the sum in Python: each takes about a millisecond.
PRODUCT_SIZE, TERMS = 384, 15000


def calls(case: Case, num_threads: int) -> tuple[dict[str, Call | None], Callable[[], object]]:
    """Prepare the sides of a case on the same arrays. Return them, and a function that fills the results with NaN."""
    torch: Call | None
    outs: tuple[np.ndarray, ...]
    if case.dim is None:
        given = linear_arguments(case)
        outs = gradients = gradients_like(given)
        own = partial(getattr(ag, case.operator), **given, **({"out": outs} if case.operator == GRADIENT else {}))
        torch = linear.torch_formula(case, given, gradients)
    else:
        arrays = operands(case)
        outs = (arrays.out,)
        own = partial(getattr(ag, case.operator), *arrays.inputs, axis=case.dim, **arrays.loss, out=arrays.out)
        torch = (cross_entropy.torch_autograd if case.operator == CROSS_ENTROPY else rowwise.torch_kernels)(
            case, arrays
        )

    def reset() -> None:
        for out in outs:
            out.fill(np.nan)

    explicit = {side_with_threads(count): partial(own, num_threads=count) for count in counts(num_threads)}
    return {OWN: own, **explicit, "torch": torch}, reset


def counts(most: int) -> Iterator[int]:
    """Yield the numbers of threads that are compared: powers of two, and the largest number."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def work_before(place: str) -> Call:
    """Return what a program does before each call."""
    if place == BACK_TO_BACK:
        return lambda: None
    if place == AFTER_PAUSE:
        return partial(time.sleep, 0.02)
    if place == AFTER_PYTHON:
        return lambda: sum(i * i for i in range(TERMS))
    a, b, out = np.ones((3, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    if place == AFTER_NUMPY:
        return partial(np.matmul, a, b, out=out)
    assert place == AFTER_TORCH
    import torch

    product: Callable[..., Any] = partial(torch.mm, tensor(a), tensor(b), out=tensor(out))
    return product
