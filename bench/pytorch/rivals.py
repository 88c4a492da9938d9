"""Sides of calls on tensors: this library on tensors and on NumPy arrays; PyTorch's kernels, autograd and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..frameworks import Call, tensor
from ..linear.cases import LinearCase
from ..linear.rivals import Outs, Sides, torch_chunked, torch_formula, whole_by_autograd
from ..results import OWN
from ..rowwise.cases import Case, Operands, values
from ..rowwise.rivals import ascend_grad as on_arrays
from ..rowwise.rivals import torch_kernels
from .cases import AUTOGRAD

#: Name of the side that is this library on arrays over the same memory.
ARRAYS = "arrays"
TORCH = "torch"


def calls(case: Case, operands: Operands) -> dict[str, Call]:
    """Prepare the sides of a row-wise case."""
    return _with_gradient(case, operands) if case.mode == AUTOGRAD else _without_gradient(case, operands)


def _without_gradient(case: Case, operands: Operands) -> dict[str, Call]:
    function, dim = getattr(ag, case.operator), case.dim
    g, y = map(tensor, operands.inputs)
    out = tensor(operands.out)
    own: Call = (lambda: function(g, y, dim)) if case.mode == "fresh" else (lambda: function(g, y, dim, out=out))
    kernels = torch_kernels(case, operands)
    assert kernels is not None
    return {OWN: own, ARRAYS: on_arrays(case, operands), TORCH: kernels}


def _with_gradient(case: Case, operands: Operands) -> dict[str, Call]:
    import torch

    import ascend_grad.torch as agt

    (x,) = map(tensor, operands.inputs)
    x.requires_grad_()
    # The upstream gradient may have any values; the backward case uses these, too.
    grad = tensor(values(f"{case.operator}_backward", case.shape, case.dim)[0].astype(operands.out.dtype))
    dim = case.dim

    def differentiated(function: Callable[..., Any]) -> Call:
        return lambda: torch.autograd.grad(function(x, dim), x, grad)

    return {OWN: differentiated(getattr(agt, case.operator)), TORCH: differentiated(getattr(torch, case.operator))}


def linear_cross_entropy(case: LinearCase, given: dict[str, Any], outs: Outs) -> Call:
    import ascend_grad.torch as agt

    return whole_by_autograd(agt.linear_cross_entropy, given)


#: Sides of the loss, of the same form as the sides in `linear.rivals`.
LINEAR_SIDES: Sides = {
    OWN: linear_cross_entropy,
    "torch": torch_formula,
    "torch chunked": torch_chunked,
}


def parallel_loop(num_threads: int) -> Call:
    """Prepare an elementwise operation by all of PyTorch's threads, which leaves them awake."""
    import torch

    x = torch.ones(num_threads << 18)
    out = torch.empty_like(x)
    return lambda: torch.exp(x, out=out)


def agree(case: Case) -> Callable[[tuple[np.ndarray, ...], tuple[np.ndarray, ...]], bool]:
    """Return a function that tells whether two sides' results are equal up to rounding."""
    # The gradient of a 16-bit softmax is a difference of rounded numbers of magnitude one.
    terms = 1.0 if case.mode == AUTOGRAD else 0.0
    return lambda got, expected: frameworks.agree(got[0], expected[0], case.dtype, terms)
