"""List the functions of `ascend_grad.torch` with small arguments, for tests of torch's transformations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_oracles import value_and_gradients

import ascend_grad.torch as agt
from ascend_grad.torch.loss_operators import LINEAR, NUMBERS

MASK = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
TARGET = torch.tensor([1, 2, -100, 6])
CLASS_WEIGHT = torch.arange(7.0)


def loss_arguments(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, **given: object) -> list:
    """Return the arguments of the operator `linear_cross_entropy`: without options, except for those that are given."""
    settings = {"reduction": "mean", "ignore_index": -100, **dict.fromkeys(LINEAR.wanted, False), "outputs": []}
    return LINEAR.arguments({**NUMBERS, "input": x, "weight": w, "target": target, **settings, **given})


def changed(arguments: list, **values: object) -> list:
    """Return the arguments of the operator `linear_cross_entropy` with other values."""
    return LINEAR.arguments({**LINEAR.problem(arguments), **values})


def loss(**keywords) -> Callable[..., torch.Tensor]:
    return lambda x, w, target: 3 * agt.linear_cross_entropy(x, w, target, **keywords)


def a_weight_for_each_class(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.linear_cross_entropy(x, w, target, weight=CLASS_WEIGHT.to(x.device))


def all_options(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    found = agt.linear_cross_entropy(
        x, w, target, linear_bias=bias, weight=CLASS_WEIGHT.to(x.device), label_smoothing=0.1, lse_square_scale=0.1,
        token_weight=torch.ones_like(target, dtype=torch.float32), temperature=2.0, logit_scale=0.5, softcap=3.0,
        outputs=("lse", "entropy", "predicted", "correct"),
    )  # fmt: skip
    return found.loss + 0 * found.correct


def several_targets(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prob = torch.full((len(target), 2), 0.5, device=x.device)
    classes = torch.stack([target, torch.zeros_like(target)], -1)
    return agt.linear_cross_entropy(x, w, classes, target_prob=prob, reduction="none")


def one_row(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.linear_cross_entropy(x[0], w, target[0])


def shifted(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.compat.cce.linear_cross_entropy(x[None], w, target[None], shift=1)


def with_lse(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss, lse = agt.compat.cce.linear_cross_entropy(x, w, target, softcap=2.0, return_lse=True)
    return loss + lse.square().sum()


def verl(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_prob, entropy = agt.compat.verl.linear_cross_entropy(x, w, target, 0.5)
    return log_prob - 2 * entropy


def under_autocast(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return agt.linear_cross_entropy(x, w, target, num_threads=1)


def liger(weight: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        here = None if weight is None else weight.to(x.device)
        return agt.compat.liger.LigerFusedLinearCrossEntropyLoss(here)(w, x, target)

    return call


#: For each case, a function, the shapes of its differentiable tensors, and its other tensors.
CASES = {
    "softmax": (lambda x: agt.softmax(2 * x, 0), [(4, 3)], []),
    "log_softmax": (lambda x: agt.log_softmax(2 * x), [(4, 3)], []),
    "scaled_masked_softmax": (lambda x, mask: agt.scaled_masked_softmax(x, mask, 0.5), [(2, 3, 4, 5)], [MASK]),
    "softmax_backward": (lambda g, y: agt.softmax_backward(g, y, 0), [(4, 3), (4, 3)], []),
    "log_softmax_backward": (lambda g, y: agt.log_softmax_backward(g, y), [(4, 3), (4, 3)], []),
    "scaled_masked_softmax_backward": (
        lambda g, y, mask: agt.scaled_masked_softmax_backward(g, y, mask, 0.5),
        [(2, 3, 4, 5), (2, 3, 4, 5)],
        [MASK],
    ),
    **{name: (loss(reduction=name), [(4, 3), (7, 3)], [TARGET]) for name in ("mean", "sum", "none")},
    "a weight for each class": (a_weight_for_each_class, [(4, 3), (7, 3)], [TARGET]),
    "all options": (all_options, [(4, 3), (7, 3), (7,)], [TARGET]),
    "several targets": (several_targets, [(4, 3), (7, 3)], [TARGET]),
    "one row": (one_row, [(4, 3), (7, 3)], [TARGET]),
    "autocast": (under_autocast, [(4, 3), (7, 3)], [TARGET]),
    "cut cross-entropy": (shifted, [(4, 3), (7, 3)], [TARGET]),
    "cut cross-entropy with lse": (with_lse, [(4, 3), (7, 3)], [TARGET]),
    "verl": (verl, [(4, 3), (7, 3)], [TARGET]),
    "Liger": (liger(None), [(4, 3), (7, 3)], [TARGET]),
    "Liger, a weight for each class": (liger(CLASS_WEIGHT), [(4, 3), (7, 3)], [TARGET]),
}


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    """Return a function, values of its differentiable tensors, and its other tensors."""
    function, shapes, others = CASES[name]
    return function, [torch.randn(shape).to(dtype) for shape in shapes], others


def step(function: Callable, leaves: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the function's value, and its gradients for an upstream gradient of ones."""
    return value_and_gradients(
        lambda *leaves: function(*leaves, *others), leaves, torch.ones_like(function(*leaves, *others))
    )
