"""The loss of logits, `cross_entropy`, with its gradient: arrays, options, and the sides: this library, NumPy, PyTorch.

A side is a function of a problem and its arrays. It returns a call without arguments, which returns loss and gradient.
"""

from __future__ import annotations

import math
import timeit
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..dtypes import compute_dtype, numpy_dtype
from ..frameworks import Call, tensor
from ..rowwise.cases import Case

#: Names of the options, of which a problem has at most one.
CLASS_WEIGHTS, SMOOTHING, IGNORED, SEVERAL_TARGETS = "class weights", "smoothing", "ignored rows", "8 targets"
OPTIONS = (CLASS_WEIGHTS, SMOOTHING, IGNORED, SEVERAL_TARGETS)
#: The share of the loss that smoothing spreads over all classes.
LABEL_SMOOTHING = 0.1
#: Targets of a row in a problem with several.
TARGETS = 8
#: The target of an ignored row, and the share of such rows in a problem with this option.
IGNORE_INDEX, IGNORED_SHARE = -100, 0.5


class LossOperands(NamedTuple):
    """The logits, their targets, the array of the gradient unless that is new, and the arguments of the option."""

    input: np.ndarray
    target: np.ndarray
    out: np.ndarray
    settings: dict[str, Any]


def option(name: str, shape: tuple[int, ...], dim: int, dtype: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Make random targets, and the arguments of an option.

    Parameters
    ----------
    name : str
        One of `OPTIONS`, or "".
    shape, dim, dtype
        The shape, the axis of the classes and the dtype of the logits.

    Returns
    -------
    target : ndarray of int64
        The shape of the logits without the axis; with `SEVERAL_TARGETS` a last axis of `TARGETS` different targets.
    settings : dict
        Arguments of `ascend_grad.cross_entropy`, with arrays of the dtype of the logits, as PyTorch demands.
    """
    random = np.random.default_rng(1)
    classes, rows = shape[dim], shape[:dim] + shape[dim + 1 :]
    target = random.integers(0, classes, rows)
    if name == CLASS_WEIGHTS:
        return target, {"class_weight": random.uniform(0.5, 1.5, classes).astype(numpy_dtype(dtype))}
    if name == SMOOTHING:
        return target, {"label_smoothing": LABEL_SMOOTHING}
    if name == IGNORED:
        return np.where(random.random(rows) < IGNORED_SHARE, IGNORE_INDEX, target), {}
    if name == SEVERAL_TARGETS:
        several = (target[..., None] + np.arange(TARGETS) * (classes // TARGETS)) % classes
        return several, {"target_prob": random.dirichlet(np.ones(TARGETS), rows).astype(numpy_dtype(dtype))}
    return target, {}


def ascend_grad(problem: Case, operands: LossOperands) -> Call:
    x, target, out, settings = operands
    if problem.mode != "fresh":
        settings = settings | {"out": out}
    return partial(ag.cross_entropy, x, target, problem.dim, **settings)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def numpy_formula(problem: Case, operands: LossOperands) -> Call:
    """Prepare NumPy's formula. Arrays of another type or byte order are converted in the call."""
    x, out = operands.input, operands.out
    wide = compute_dtype(problem.dtype)
    formula = _formula(problem.dim, wide, operands)
    if problem.mode == "fresh":
        if x.dtype == wide:
            return lambda: formula(x, None)

        def converted() -> tuple[Any, np.ndarray]:
            copy = x.astype(wide)
            loss, gradient = formula(copy, copy)
            return loss, gradient.astype(out.dtype, copy=False)

        return converted
    if x.dtype == out.dtype == wide:
        return lambda: formula(x, out)
    copy = np.empty_like(x, wide)

    def call() -> tuple[Any, np.ndarray]:
        np.copyto(copy, x)
        loss, gradient = formula(copy, out if out.dtype == wide else copy)
        if gradient is not out:
            np.copyto(out, gradient, casting="unsafe")
        return loss, out

    return call


def _formula(dim: int, wide: np.dtype, operands: LossOperands):
    """Return a function of logits and the array of the gradient, which may be the logits, or None for a new array.

    With the weight w of a row, the gradient is ``softmax * w - s * w / V``, minus the weight of a target at each of
    them. Arrays that depend on shapes alone are prepared. Weights depend on targets, and are computed in each call.
    """
    x, target, _, settings = operands
    classes = x.shape[dim]
    prob, class_weight = settings.get("target_prob"), settings.get("class_weight")
    smoothing = settings.get("label_smoothing", 0.0)
    is_any_ignored = bool(np.any(target == IGNORE_INDEX))
    row_shape = x.shape[:dim] + x.shape[dim + 1 :]
    grids = [
        grid if prob is None else grid[..., None]
        for grid in np.meshgrid(*map(np.arange, row_shape), indexing="ij", sparse=True)
    ]

    def weights() -> tuple[Any, Any]:
        """Return the weights of the targets, and of the rows: numbers, or arrays of their shapes."""
        if prob is not None:
            at_targets = prob.astype(wide) / max(1, np.prod(row_shape, dtype=int))
            return at_targets, at_targets.sum(-1)
        if class_weight is not None:
            w = class_weight.astype(wide)[target]
            w /= w.sum()
        elif is_any_ignored:
            w = (target != IGNORE_INDEX).astype(wide)
            w /= w.sum()
        else:
            w = wide.type(1 / target.size)
        return w, w

    def formula(x: np.ndarray, out: np.ndarray | None) -> tuple[Any, np.ndarray]:
        at_targets, of_rows = weights()
        # An ignored target has the weight 0, wherever its index points.
        index = (*grids[:dim], np.maximum(target, 0) if is_any_ignored else target, *grids[dim:])
        p = np.subtract(x, x.max(dim, keepdims=True), out=out)
        picked = p[index]
        mean = p.mean(dim) if smoothing else None
        np.exp(p, out=p)
        total = p.sum(dim, keepdims=True)
        loss = np.sum(np.log(total[_first(dim)]) * of_rows) - np.sum((1 - smoothing) * at_targets * picked)
        of_rows = of_rows if np.ndim(of_rows) == 0 else np.expand_dims(of_rows, dim)
        np.multiply(p, of_rows / total, out=p)
        if mean is not None:
            loss -= smoothing * np.sum(mean * (of_rows if np.ndim(of_rows) == 0 else of_rows[_first(dim)]))
            np.subtract(p, wide.type(smoothing / classes) * of_rows, out=p)
        p[index] -= wide.type(1 - smoothing) * at_targets
        return loss, p

    return formula


def _first(dim: int) -> tuple[Any, ...]:
    """Return an index that removes an axis of length one."""
    return (*(slice(None),) * dim, 0)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_autograd(problem: Case, operands: LossOperands) -> Call | None:
    """Prepare PyTorch's loss and its gradient by autograd, which is always a new tensor.

    The tensors require grad, so that the call must not run in inference mode. Sparse targets with probabilities, which
    PyTorch's function does not have, take its log-softmax.
    """
    torch = frameworks.module("torch")
    if torch is None:
        return None
    x, target = tensor(operands.input), tensor(operands.target)
    settings = {
        name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in operands.settings.items()
    }
    shape, dim = x.shape, problem.dim
    if dim == x.ndim - 1 and operands.input.flags.c_contiguous:
        # Rows that follow each other are one batch, which is fastest.
        logits, axis = x.view(-1, shape[dim]), 1
        target = target.reshape(-1, *target.shape[x.ndim - 1 :])
    elif 0 < dim and operands.input.flags.c_contiguous:
        # The axes before that of the classes are one batch, and the axes behind it are one axis.
        before, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        logits, axis = x.view(before, shape[dim], behind), 1
        target = target.reshape(before, behind, *target.shape[x.ndim - 1 :])
    else:
        # The axis of the classes has to be the second one, or the only one.
        axis = min(1, x.ndim - 1)
        logits = x.movedim(dim, axis)
        if dim == 0 and x.ndim > 1:
            as_batch = _autograd_of(x.unsqueeze(0), target.unsqueeze(0), 1, shape, dim, settings)
            return _faster(as_batch, _autograd_of(logits, target, axis, shape, dim, settings))
    return _autograd_of(logits, target, axis, shape, dim, settings)


def _faster(*calls: Call) -> Call:
    """Return the call that takes less time: the least time of three counts, after a first one."""

    def least_time(call: Call) -> float:
        call()
        return min(timeit.repeat(call, number=1, repeat=3))

    return min(calls, key=least_time)


def _autograd_of(
    logits: Any, target: Any, axis: int, shape: tuple[int, ...], dim: int, settings: dict[str, Any]
) -> Call:
    """Prepare PyTorch's loss of logits whose classes are along `axis`, with a gradient of the shape of the problem."""
    import torch

    settings = dict(settings)
    logits = logits.detach().requires_grad_()
    prob = settings.pop("target_prob", None)
    if prob is not None:
        prob, target = (values.reshape(target.shape).movedim(-1, axis) for values in (prob, target))
        rows = max(1, logits.numel() // logits.shape[axis])

        def loss_of() -> Any:
            return -(torch.log_softmax(logits, axis).gather(axis, target) * prob).sum() / rows

    else:
        if "class_weight" in settings:
            settings["weight"] = settings.pop("class_weight")
        loss_of = partial(torch.nn.functional.cross_entropy, logits, target, **settings)

    def call() -> tuple[Any, Any]:
        loss = loss_of()
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient.reshape(shape) if logits.ndim != len(shape) else gradient.movedim(axis, dim)

    return call


# ---- agreement -------------------------------------------------------------------------------------------------------


def agree(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], dtype: str, rows: int) -> bool:
    """Return whether two sides' losses and gradients are equal up to rounding to a dtype; see `frameworks.agree`.

    A loss is a mean of terms of magnitude one, and the terms of its gradient are at most one over the number of rows.
    PyTorch rounds the loss to the dtype of the logits.
    """
    wide = compute_dtype(dtype)
    (loss, gradient), (right_loss, right_gradient) = got, expected
    native = right_gradient.dtype.newbyteorder("=")
    return frameworks.agree(loss.astype(wide), right_loss.astype(wide), dtype, 1.0) and frameworks.agree(
        gradient.astype(native, copy=False), right_gradient.astype(native, copy=False), dtype, 1 / max(1, rows)
    )
