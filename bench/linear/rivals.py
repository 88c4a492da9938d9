"""The linear operators as others compute them: NumPy's formula, PyTorch with all logits in memory, PyTorch in chunks.

A side is a function of a case, its arguments and its results' arrays. It returns a call without arguments, or None if
it does not take part in the case. The call returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu

from .. import frameworks
from ..dtypes import compute_dtype
from ..results import OWN
from .cases import FILTER_EPS, GRADIENT, MAX_SUM, SMALL_SHAPES, WHOLE, LinearCase

Call = Callable[[], Sequence[Any]]
Outs = tuple[np.ndarray, np.ndarray]

#: Name of a large square product in BLAS, in the type of the accumulators, which shows the rate of the machine.
YARDSTICK = "gemm"
#: Rows and columns of that product.
YARDSTICK_SIZE = 2048
#: Floating-point operations that take PyTorch's slowest products a fraction of a second.
FEW_OPERATIONS = 2**28
#: Name of the side that is this library without the filter.
UNFILTERED = "unfiltered"


def yardstick(case: LinearCase, size: int) -> Call:
    a, b, out = np.random.default_rng(0).standard_normal((3, size, size)).astype(compute_dtype(case.dtype))
    return lambda: (np.matmul(a, b, out=out),)


# ---- this library ----------------------------------------------------------------------------------------------------


def ascend_grad(case: LinearCase, given: dict[str, Any], outs: Outs, filter_eps: float | None = None) -> Call:
    if case.operator == WHOLE:
        call: Call = lambda: ag.linear_cross_entropy(**given)  # noqa: E731
    elif case.operator == MAX_SUM:
        call = lambda: ag.fused_linear_online_max_sum(**given)[:3]  # noqa: E731
    else:
        if filter_eps is None:
            filter_eps = FILTER_EPS if case.mode == "filtered" else 0.0
        call = lambda: ag.fused_linear_cross_entropy_loss_grad(**given, filter_eps=filter_eps, out=outs)  # noqa: E731
    if not case.variant:
        return call

    def with_variant() -> Sequence[Any]:
        before = _cpu.variant()
        _cpu.force_variant(case.variant)
        try:
            return call()
        finally:
            _cpu.force_variant(before)

    return with_variant


def direct(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare a direct call of the backend in the smallest problem, as the time of dispatch is the same at any size."""
    if case.operator != GRADIENT or case.shape != SMALL_SHAPES[-1]:
        return None
    return frameworks.backend_alone(case.operator, **given, out=outs)


def unfiltered(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call | None:
    return ascend_grad(case, given, outs, 0.0) if case.mode == "filtered" else None


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def numpy_formula(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare NumPy's formula with all logits in memory. 16-bit arrays are converted to float32."""
    if case.variant or case.mode == "filtered":
        return None
    wide = compute_dtype(case.dtype)
    rows = np.arange(len(given["input"]))

    def call() -> Sequence[Any]:
        x, weight = given["input"].astype(wide, copy=False), given["weight"].astype(wide, copy=False)
        if case.operator == GRADIENT:
            target, grad = given["masked_target"], given["grad"]
            if case.mode == "stored":
                p = given["softmax"].copy()
            else:
                p = x @ weight.T
                p -= given["logits_max"][:, None]
                np.exp(p, out=p)
                p /= given["sum_exp_logits"][:, None]
        else:
            target, grad = given["target"], wide.type(1 / len(x))
            p = x @ weight.T
            logits_max = p.max(axis=1)
            p -= logits_max[:, None]
            predicted = p[rows, target]
            np.exp(p, out=p)
            total = p.sum(axis=1)
            if case.operator == MAX_SUM:
                return logits_max, total, predicted
            p /= total[:, None]
        p[rows, target] -= 1
        p *= grad if np.ndim(grad) == 0 else grad[:, None]
        if case.operator == WHOLE:
            loss = np.mean(np.log(total) - predicted, dtype=wide)
            return loss, *(value.astype(outs[0].dtype, copy=False) for value in (p @ weight, p.T @ x))
        if outs[0].dtype == wide:
            return np.matmul(p, weight, out=outs[0]), np.matmul(p.T, x, out=outs[1])
        for out, value in zip(outs, (p @ weight, p.T @ x)):
            out[...] = value
        return outs

    return call


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _takes_part(case: LinearCase) -> bool:
    # PyTorch's float16 products reach a few GFLOP/s, so that one call of a large case takes minutes.
    slow = case.dtype == "float16" and case.operations > FEW_OPERATIONS
    return _is_compared(case) and not (slow or case.mode == "filtered")


def _is_compared(case: LinearCase) -> bool:
    """Return whether PyTorch is compared with the case's variant: with any in bfloat16, otherwise with the default."""
    return not case.variant or case.dtype == "bfloat16"


def torch_formula(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare PyTorch's formula with all logits in memory; for the whole loss, its own function and ``backward()``."""
    torch = frameworks.module("torch")
    if torch is None or not _takes_part(case):
        return None
    if case.operator == WHOLE:
        return _torch_whole(given, None)
    tensors = {
        name: frameworks.tensor(value) if isinstance(value, np.ndarray) else value for name, value in given.items()
    }
    x, weight = tensors["input"], tensors["weight"]
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    rows = torch.arange(len(x))
    if case.operator == MAX_SUM:

        def statistics() -> Sequence[Any]:
            logits = (x @ weight.T).to(wide)
            logits_max = logits.amax(dim=1)
            logits -= logits_max[:, None]
            predicted = logits[rows, tensors["target"]]
            return logits_max, logits.exp_().sum(dim=1), predicted

        return statistics
    target, grad = tensors["masked_target"], tensors["grad"]
    results = tuple(frameworks.tensor(out) for out in outs)

    def gradients() -> Sequence[Any]:
        if case.mode == "stored":
            p = tensors["softmax"].clone()
        else:
            p = (x @ weight.T).to(wide).sub_(tensors["logits_max"][:, None]).exp_()
            p /= tensors["sum_exp_logits"][:, None]
        p[rows, target] -= 1
        p *= grad[:, None]
        p = p.to(x.dtype)
        return torch.mm(p, weight, out=results[0]), torch.mm(p.T, x, out=results[1])

    return gradients


def torch_chunked(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call | None:
    """Prepare PyTorch's own loss in chunks, without all logits in memory, if this version of PyTorch has it."""
    torch = frameworks.module("torch")
    if torch is None or case.operator != WHOLE or not _is_compared(case):
        return None
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return _torch_whole(given, torch.nn.LinearCrossEntropyOptions())


def _torch_whole(given: dict[str, Any], options: Any) -> Call | None:
    torch = frameworks.module("torch")
    assert torch is not None
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    return None if function is None else whole_by_autograd(partial(function, options=options), given)


def whole_by_autograd(function: Callable[..., Any], given: dict[str, Any]) -> Call:
    """Prepare a call of a loss on tensors, and of its ``backward()``."""
    torch = frameworks.module("torch")
    assert torch is not None

    def call() -> Sequence[Any]:
        with torch.inference_mode(False), torch.enable_grad():
            x, weight, target = (frameworks.tensor(given[name]) for name in ("input", "weight", "target"))
            x.requires_grad_()
            weight.requires_grad_()
            loss = function(x, weight, target)
            loss.backward()
        return loss.detach(), x.grad, weight.grad

    return call


Sides = dict[str, Callable[[LinearCase, dict[str, Any], Outs], Call | None]]

SIDES: Sides = {
    OWN: ascend_grad,
    UNFILTERED: unfiltered,
    "numpy": numpy_formula,
    "torch": torch_formula,
    "torch chunked": torch_chunked,
}


def agree(got: Sequence[Any], expected: Sequence[Any], dtype: str, terms: Sequence[float] = (0.0, 0.0, 0.0)) -> bool:
    """Return whether two sides' results are equal up to rounding; ``terms`` is as in `frameworks.agree`, per result."""
    wide = compute_dtype(dtype)
    pairs = [(frameworks.as_array(a).astype(wide), frameworks.as_array(b).astype(wide)) for a, b in zip(got, expected)]
    # A side that rounds logits to 16 bits changes probabilities by a few units in the last place.
    tolerance = {"bfloat16": 2.0**-4, "float16": 2.0**-7}.get(dtype, frameworks.TOLERANCES[dtype])
    return len(got) == len(expected) and all(
        a.shape == b.shape and bool(np.all(np.abs(a - b) <= tolerance * (np.abs(b) + np.abs(b).max(initial=term))))
        for (a, b), term in zip(pairs, terms)
    )
