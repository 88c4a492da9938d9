"""Products of the Hessian and a vector, as each side computes them: this library, NumPy's formula, PyTorch.

A side is a function of the arrays of a problem. Its call returns the product. The limits have our gradient on the same
arrays, whose time is the measure of a product's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..arrays import arranged, linear_arguments, operands
from ..case import C_ORDER, CROSS_ENTROPY, ROWS_HVP, WHOLE, Case, compute_dtype, numpy_dtype
from ..frameworks import Call, tensor
from ..results import OWN
from .cross_entropy import as_float32


class Arrays(NamedTuple):
    """The arrays of one problem. `weight` is None for logits, which the axis `dim` has the classes of."""

    x: np.ndarray
    weight: np.ndarray | None
    target: np.ndarray
    vector: np.ndarray
    dim: int
    wide: np.dtype

    @property
    def rows(self) -> int:
        return max(1, self.target.size)


def arrays_of(case: Case) -> Arrays:
    """Make the arrays of a problem, with a vector of numbers of magnitude one."""
    random, dtype = np.random.default_rng(2), numpy_dtype(case.dtype)
    wide = compute_dtype(case.dtype)
    if case.operator != ROWS_HVP:
        given = linear_arguments(replace(case, operator=WHOLE))
        vector = random.standard_normal(given["weight"].shape, np.float32).astype(dtype)
        return Arrays(given["input"], given["weight"], given["target"], vector, -1, wide)
    assert case.dim is not None
    (x,), _, settings = operands(replace(case, operator=CROSS_ENTROPY))
    vector = arranged(random.standard_normal(case.shape, np.float32).astype(dtype), C_ORDER, case.dim)
    return Arrays(x, None, settings["target"], vector, case.dim, wide)


def ascend_grad(a: Arrays) -> Call:
    if a.weight is None:
        return partial(ag.cross_entropy_hvp, a.x, a.target, a.vector, a.dim)
    call = partial(ag.linear_cross_entropy_hvp, a.x, a.weight, a.target, a.vector)
    return lambda: call().weight_product


def gradient(a: Arrays) -> Call:
    """Prepare our loss with the gradient that the product differentiates."""
    if a.weight is None:
        return partial(ag.cross_entropy, a.x, a.target, a.dim)
    return partial(ag.linear_cross_entropy, a.x, a.weight, a.target, output_mask=(False, True))


def numpy_formula(a: Arrays) -> Call:
    """Prepare NumPy's formula, with all logits in memory. 16-bit arrays are converted to float32."""
    dtype = (a.x if a.weight is None else a.weight).dtype.newbyteorder("=")

    def of_rows(z: np.ndarray, v: np.ndarray, dim: int) -> np.ndarray:
        """Compute the product with respect to the logits in the memory of the logits."""
        p = np.subtract(z, z.max(dim, keepdims=True), out=z)
        np.exp(p, out=p)
        p /= p.sum(dim, keepdims=True)
        moved = v - (p * v).sum(dim, keepdims=True)
        np.multiply(p, moved, out=p)
        p /= a.rows
        return p

    def call() -> np.ndarray:
        if a.weight is None:
            result = of_rows(a.x.astype(a.wide), a.vector.astype(a.wide, copy=False), a.dim)
        else:
            x, w, v = (each.astype(a.wide, copy=False) for each in (a.x, a.weight, a.vector))
            result = of_rows(x @ w.T, x @ v.T, 1).T @ x
        return result.astype(dtype, copy=False)

    return call


def torch_twice(a: Arrays) -> Call | None:
    """Prepare PyTorch's gradient, and its derivative along the vector, by autograd twice.

    Logits of float16 are converted, as autocast converts them: their gradients would be subnormal numbers.
    """
    torch = frameworks.module("torch")
    if torch is None or not frameworks.can_be_tensors((a.x,)):
        return None
    x, target, vector = tensor(a.x).detach(), tensor(a.target), tensor(a.vector)
    loss = torch.nn.functional.cross_entropy
    if a.weight is None:
        inputs, classes = x, x.shape[a.dim]
        if a.dim == x.ndim - 1:  # rows that follow one another are one batch
            loss_of: Callable[[Any], Any] = lambda z: loss(as_float32(z).reshape(-1, classes), target.reshape(-1))  # noqa: E731
        elif a.dim:
            loss_of = lambda z: loss(as_float32(z).movedim(a.dim, 1), target)  # noqa: E731
        else:
            loss_of = lambda z: loss(as_float32(z).unsqueeze(0), target.unsqueeze(0))  # noqa: E731
    else:
        inputs, loss_of = tensor(a.weight).detach(), lambda w: loss(as_float32(x @ w.T), target)

    def call() -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            variable = inputs.detach().requires_grad_()
            (first,) = torch.autograd.grad(loss_of(variable), variable, create_graph=True)
            (product,) = torch.autograd.grad(first, variable, vector)
        return product

    return call


SIDES: dict[str, Callable[[Arrays], Call | None]] = {OWN: ascend_grad, "numpy": numpy_formula, "torch": torch_twice}
