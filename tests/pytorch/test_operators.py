"""The operators as torch's own machinery sees them: schema, tracing, gradients."""

from __future__ import annotations

import pytest
import torch

import ascend_grad.torch  # noqa: F401 - registers the operators

OPS = torch.ops.ascend_grad


def softmax_cases():
    for shape in [(), (5,), (3, 4), (2, 0, 3)]:
        x, y = torch.randn(shape), torch.rand(shape)
        yield pytest.param(OPS.softmax, (x, -1), id=f"softmax {shape}")
        yield pytest.param(OPS.log_softmax, (x, 0), id=f"log_softmax {shape}")
        yield pytest.param(OPS.softmax_backward, (x, y, 0), id=f"softmax_backward {shape}")
        yield pytest.param(OPS.log_softmax_backward, (x, y, -1), id=f"log_softmax_backward {shape}")
    x, mask = torch.randn(2, 3, 5, 4).transpose(2, 3), torch.rand(1, 3, 4, 5) < 0.5
    yield pytest.param(OPS.scaled_masked_softmax, (x, mask, 0.5), id="scaled_masked_softmax")
    yield pytest.param(OPS.scaled_masked_softmax_backward, (x, x.exp(), mask, 0.5), id="scaled_masked_softmax_backward")
    yield pytest.param(OPS.softmax, (torch.randn(4, 3, dtype=torch.bfloat16).T, 0), id="softmax bfloat16")


def linear_cases():
    target = torch.tensor([1, 2, -100, 6])
    for dtype in (torch.float64, torch.float16):
        x, w = torch.randn(4, 3).to(dtype), torch.randn(7, 3).to(dtype)
        for reduction in ("mean", "sum", "none"):
            for wanted in [(True, True), (False, True), (True, False), (False, False)]:
                arguments = (x, w, target, None, reduction, -100, *wanted, 0.0, None, None)
                yield pytest.param(OPS.linear_cross_entropy, arguments, id=f"{dtype} {reduction} {wanted}")
    above = torch.randn(4, dtype=torch.float64)
    arguments = (x.double(), w.double(), target, above, "none", -100, True, True, 0.0, 1, None)
    yield pytest.param(OPS.linear_cross_entropy, arguments, id="with a gradient from above")


@pytest.mark.parametrize(("operator", "arguments"), [*softmax_cases(), *linear_cases()])
def test_operators_keep_the_rules(operator, arguments: tuple):
    torch.library.opcheck(operator.default, arguments)
