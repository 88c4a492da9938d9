"""The sample inputs of torch's own tests, through ours and torch's functions, within its tolerances."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.testing._internal.common_methods_invocations import op_db

import ascend_grad.torch as agt

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def samples(name: str, variant: str, dtype: torch.dtype) -> list:
    (info,) = [each for each in op_db if each.name == name and each.variant_test_name == variant]
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


def assert_same(ours, torchs, inputs: list[torch.Tensor]) -> None:
    """The same value, and the same gradients of it from above."""
    values = [function() for function in (ours, torchs)]
    torch.testing.assert_close(values[0], values[1], equal_nan=True)
    above = torch.ones_like(values[1])
    grads = [torch.autograd.grad(value, inputs, above, allow_unused=True) for value in values]
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name: str, dtype: torch.dtype):
    found = samples(name, "", dtype)
    for sample in found:
        x = sample.input
        arguments = sample.args
        assert_same(
            lambda: getattr(agt, name)(x, *arguments),
            lambda: getattr(torch, name)(x, *arguments),
            [x],  # noqa: B023
        )
    assert len(found) >= 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype: torch.dtype):
    """Logits as the input of a layer whose weight is the identity; their further dimensions are more rows."""
    refused = set()
    found = samples("nn.functional.cross_entropy", "", dtype)
    for sample in found:
        x, (target,), keywords = sample.input, sample.args, sample.kwargs
        one = torch.eye(x.shape[1], dtype=dtype)

        def ours(x=x, one=one, target=target, keywords=keywords):
            probabilities = target.is_floating_point()
            classes = target.movedim(1, -1).flatten(0, -2) if probabilities else target.flatten()
            loss = agt.linear_cross_entropy(x.movedim(1, -1).flatten(0, -2), one, classes, **keywords)
            return loss.reshape(target.shape) if keywords.get("reduction") == "none" else loss

        try:
            assert_same(ours, lambda: F.cross_entropy(x, target, **keywords), [x])  # noqa: B023
        except NotImplementedError as error:
            refused.add(str(error).split(": ")[1])
            assert target.is_floating_point()
    assert refused == {"target"}  # probabilities
    assert len(found) >= 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["", "chunked", "chunked_none"])
def test_linear_cross_entropy(variant: str, dtype: torch.dtype):
    """What is refused: everything with `options`, a bias, probabilities, and losses of several dimensions."""
    refused = set()
    found = samples("nn.functional.linear_cross_entropy", variant, dtype)
    for sample in found:
        x, (w, target), keywords = sample.input, sample.args, sample.kwargs
        try:
            assert_same(
                lambda: agt.linear_cross_entropy(x, w, target, **keywords),  # noqa: B023
                lambda: F.linear_cross_entropy(x, w, target, **keywords),  # noqa: B023
                [x, w],
            )
        except NotImplementedError as error:
            refused.add(str(error).split(": ")[1])
    assert refused == ({"options", "linear_bias"} if variant else {"linear_weight", "target", "linear_bias"})
