"""The loss of logits, `cross_entropy`, with its gradient, as each side computes it: this library, NumPy, PyTorch.

A side is a function of a case and its arrays, as in `rowwise`. Its call returns loss and gradient.
"""

from __future__ import annotations

import math
import timeit
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..arrays import IGNORE_INDEX, Operands
from ..case import DENSE, FRESH, Case, compute_dtype
from ..frameworks import Call, tensor
from ..results import OWN
from .rowwise import Sides, numpy_call


def ascend_grad(case: Case, operands: Operands) -> Call:
    (x,), out, arguments = operands
    assert case.dim is not None
    settings = dict(arguments)
    target = settings.pop("target")
    if case.mode != FRESH:
        settings["out"] = out
    return partial(ag.cross_entropy, x, target, case.dim, **settings)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def numpy_formula(case: Case, operands: Operands) -> Call:
    return numpy_call(case, operands, _formula(case, operands), in_place=True)


def _formula(case: Case, operands: Operands):
    """Return a function of logits, their axis and the array of the gradient, as `numpy_call` takes it.

    With the weight w of a row, the gradient is ``softmax * w - s * w / V``, minus the weight of a target at each of
    them. Arrays that depend on shapes alone are prepared. Weights depend on targets, and are computed in each call.
    """
    assert case.dim is not None
    wide, shape, dim, arguments = compute_dtype(case.dtype), case.shape, case.dim, operands.loss
    target, classes = arguments["target"], shape[dim]
    prob, class_weight = arguments.get("target_prob"), arguments.get("class_weight")
    smoothing = arguments.get("label_smoothing", 0.0)
    if case.options == DENSE:
        return _formula_of_dense_targets(case, target)
    is_any_ignored = bool(np.any(target == IGNORE_INDEX))
    row_shape = shape[:dim] + shape[dim + 1 :]
    # An index that removes an axis of length one.
    first: Any = (*(slice(None),) * dim, 0)
    grids: list[Any] = [
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

    def formula(x: np.ndarray, dim: int, out: np.ndarray | None) -> tuple[Any, np.ndarray]:
        at_targets, of_rows = weights()
        # An ignored target has the weight 0, wherever its index points.
        index: Any = (*grids[:dim], np.maximum(target, 0) if is_any_ignored else target, *grids[dim:])
        p = np.subtract(x, x.max(dim, keepdims=True), out=out)
        picked = p[index]
        mean = p.mean(dim) if smoothing else None
        np.exp(p, out=p)
        total = p.sum(dim, keepdims=True)
        loss = np.sum(np.log(total[first]) * of_rows) - np.sum((1 - smoothing) * at_targets * picked)
        of_rows = of_rows if np.ndim(of_rows) == 0 else np.expand_dims(of_rows, dim)
        np.multiply(p, of_rows / total, out=p)
        if mean is not None:
            loss -= smoothing * np.sum(mean * (of_rows if np.ndim(of_rows) == 0 else of_rows[first]))
            np.subtract(p, wide.type(smoothing / classes) * of_rows, out=p)
        p[index] -= wide.type(1 - smoothing) * at_targets
        return loss, p

    return formula


def _formula_of_dense_targets(case: Case, target: np.ndarray):
    """Return the formula for probabilities q of all classes: the gradient of a row is ``softmax * sum(q) - q``."""
    assert case.dim is not None
    wide, rows = compute_dtype(case.dtype), max(1, math.prod(case.shape) // max(1, case.shape[case.dim]))

    def formula(x: np.ndarray, dim: int, out: np.ndarray | None) -> tuple[Any, np.ndarray]:
        q = target.astype(wide, copy=False)
        p = np.subtract(x, x.max(dim, keepdims=True), out=out)
        picked = np.vdot(q, p) if q.flags.c_contiguous and p.flags.c_contiguous else np.sum(q * p)
        np.exp(p, out=p)
        total, of_rows = p.sum(dim, keepdims=True), q.sum(dim, keepdims=True)
        loss = (np.sum(np.log(total) * of_rows) - picked) / rows
        np.multiply(p, of_rows / (total * wide.type(rows)), out=p)
        np.subtract(p, q * wide.type(1 / rows), out=p)
        return loss, p

    return formula


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_autograd(case: Case, operands: Operands) -> Call | None:
    """Prepare PyTorch's loss and its gradient by autograd, which is always a new tensor.

    The tensors require grad, so that the call must not run in inference mode. Sparse targets with probabilities, which
    PyTorch's function does not have, take its log-softmax.
    """
    (array,), out, arguments = operands
    if frameworks.module("torch") is None or array.dtype != out.dtype or not frameworks.can_be_tensors((array, out)):
        return None
    assert case.dim is not None
    settings = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    x, target = tensor(array), settings.pop("target")
    shape, dim, is_dense = x.shape, case.dim, case.options == DENSE
    if dim == x.ndim - 1 and array.flags.c_contiguous:
        # Rows that follow each other are one batch, which is fastest.
        logits, axis = x.view(-1, shape[dim]), 1
        target = target.reshape(-1, *target.shape[x.ndim - 1 :])
    elif 0 < dim and array.flags.c_contiguous:
        # The axes before that of the classes are one batch, and the axes behind it are one axis.
        before, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        logits, axis = x.view(before, shape[dim], behind), 1
        target = target.reshape(logits.shape if is_dense else (before, behind, *target.shape[x.ndim - 1 :]))
    else:
        # The axis of the classes has to be the second one, or the only one.
        axis = min(1, x.ndim - 1)
        logits = x.movedim(dim, axis)
        if dim == 0 and x.ndim > 1:
            as_batch = _autograd_of(x.unsqueeze(0), target.unsqueeze(0), 1, shape, dim, settings)
            moved = target.movedim(dim, axis) if is_dense else target
            return _faster(as_batch, _autograd_of(logits, moved, axis, shape, dim, settings))
        target = target.movedim(dim, axis) if is_dense else target
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
    """Prepare PyTorch's loss of logits whose classes are along `axis`, with a gradient of the shape of the problem.

    PyTorch adds up losses of float16 in float16. If that overflows, the logits are converted, as by autocast.
    """
    import torch

    settings = dict(settings)
    logits = logits.detach().requires_grad_()
    prob = settings.pop("target_prob", None)
    if prob is not None:
        prob, target = (values.reshape(target.shape).movedim(-1, axis) for values in (prob, target))
    elif "class_weight" in settings:
        settings["weight"] = settings.pop("class_weight")
    rows = max(1, logits.numel() // logits.shape[axis])

    def loss_of(x: Any, target: Any, prob: Any, **settings: Any) -> Any:
        if prob is not None:
            return -(torch.log_softmax(x, axis).gather(axis, target) * prob).sum() / rows
        return torch.nn.functional.cross_entropy(x, target, **settings)

    arguments = {"target": target, "prob": prob, **settings}
    converts = False
    if logits.dtype == torch.float16:
        wide = {name: as_float32(value) for name, value in arguments.items()}
        with torch.no_grad():
            found, right = loss_of(logits, **arguments).float(), loss_of(logits.float(), **wide)
        converts = not torch.isclose(found, right, rtol=0.01, atol=0.01)
        arguments = wide if converts else arguments

    def call() -> tuple[Any, Any]:
        loss = loss_of(logits.float() if converts else logits, **arguments)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient.reshape(shape) if logits.ndim != len(shape) else gradient.movedim(axis, dim)

    return call


def as_float32(value: Any) -> Any:
    """Return a tensor of float16 as one of float32, and anything else as it is."""
    torch = frameworks.module("torch")
    assert torch is not None
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value


SIDES: Sides = {OWN: ascend_grad, "numpy": numpy_formula, "torch": torch_autograd}
