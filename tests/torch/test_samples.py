"""Compare the library's functions with torch's on the sample inputs of torch's tests, within torch's tolerances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db

import ascend_grad.torch as agt

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def samples(name: str, variant: str, dtype: torch.dtype) -> list:
    (info,) = [each for each in op_db if each.name == name and each.variant_test_name == variant]
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


def assert_same(ours: Callable, torchs: Callable, sample) -> None:
    """Check that the value and the gradients of a sample agree with torch's results in float64."""
    arguments, keywords = (sample.input, *sample.args), sample.kwargs
    value, *grads = _results(ours, arguments, keywords)
    # torch's options choose how a loss is computed. torch refuses options for 16 bits with float64.
    formula = {name: each for name, each in keywords.items() if name != "options"}
    right, *right_grads = _results(torchs, [_wide(each) for each in arguments], pytree.tree_map(_wide, formula))
    assert value.dtype == keywords.get("dtype", sample.input.dtype)
    assert [each.dtype for each in grads] == [sample.input.dtype] * len(grads)
    for each, expected in zip((value, *grads), (right, *right_grads), strict=True):
        rtol, atol = torch.testing._comparison.default_tolerances(each)
        # A small difference of large terms has the error of the terms, which are of the order of the largest element.
        atol = max(atol, rtol) * max(1.0, expected.abs().nan_to_num(0.0).max().item() if expected.numel() else 0.0)
        torch.testing.assert_close(each.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def _wide(value: object) -> object:
    """Return a floating-point tensor as float64, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def _results(function: Callable, arguments: Sequence, keywords: dict) -> tuple[torch.Tensor, ...]:
    inputs = [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]
    value = function(*arguments, **keywords)
    above = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64).reshape(value.shape).to(value.dtype)
    return value.detach(), *torch.autograd.grad(value, inputs, above)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["", "with_dtype"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name: str, variant: str, dtype: torch.dtype):
    found = samples(name, variant, dtype)
    for sample in found:
        assert_same(getattr(agt, name), getattr(torch, name), sample)
    assert len(found) >= 5


def by_the_identity(logits: torch.Tensor, target: torch.Tensor, **keywords) -> torch.Tensor:
    """Compute `cross_entropy` by `linear_cross_entropy` with the identity matrix as weight.

    Dimensions after the classes become further rows.
    """
    rows = logits.movedim(1, -1).flatten(0, -2)
    classes = target.movedim(1, -1).flatten(0, -2) if target.is_floating_point() else target.flatten()
    loss = agt.linear_cross_entropy(rows, torch.eye(logits.shape[1], dtype=logits.dtype), classes, **keywords)
    return loss.reshape(target.shape) if keywords.get("reduction") == "none" else loss


#: Functions and variants of torch's tests. All samples have to agree, except those with probabilities as targets.
LOSSES = [("cross_entropy", "")]
if hasattr(F, "linear_cross_entropy"):
    LOSSES += [("linear_cross_entropy", variant) for variant in ("", "chunked", "chunked_none")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "variant"), LOSSES)
def test_losses(name: str, variant: str, dtype: torch.dtype):
    ours = by_the_identity if name == "cross_entropy" else agt.linear_cross_entropy
    refused = set()
    found = samples(f"nn.functional.{name}", variant, dtype)
    for sample in found:
        try:
            assert_same(ours, getattr(F, name), sample)
        except NotImplementedError as error:
            refused.add(str(error).split(": ")[1])
    assert refused == {"target"}
    assert len(found) >= 8
