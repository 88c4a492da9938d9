"""Test the largest log-probabilities of a linear layer, with gradients."""

from __future__ import annotations

import pytest
import torch

import ascend_grad as ag
import ascend_grad.torch as agt


def log_prob(input, weight, bias, temperature, logit_scale, softcap):
    """Compute all log-probabilities by torch's functions."""
    logits = logit_scale * (input @ weight.T + bias)
    return torch.log_softmax(softcap * torch.tanh(logits / softcap) / temperature, -1)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_values_and_gradients(leading: tuple[int, ...]):
    tensors = [torch.randn(*leading, 4), torch.randn(9, 4), torch.randn(9)]
    tensors = [each.double().requires_grad_() for each in tensors]
    temperature = torch.rand(leading, dtype=torch.float64) + 0.5
    options = {"temperature": temperature, "logit_scale": 0.5, "softcap": 3.0}
    result = agt.linear_top_k(tensors[0], tensors[1], 3, linear_bias=tensors[2], **options)
    per_row = temperature[..., None]
    right, index = log_prob(*tensors, per_row, 0.5, 3.0).topk(3)
    assert torch.equal(result.index, index)
    torch.testing.assert_close(result.log_prob, right)
    above = torch.randn_like(right)
    grads = torch.autograd.grad(result.log_prob, tensors, above)
    torch.testing.assert_close(grads, torch.autograd.grad(right, tensors, above))
    with torch.no_grad():
        again = agt.linear_top_k(tensors[0], tensors[1], 3, linear_bias=tensors[2], **options)
    torch.testing.assert_close(again.log_prob, right)


def test_transforms():
    input, weight = torch.randn(3, 5, 4), torch.randn(9, 4)
    right = (input @ weight.T).log_softmax(-1).topk(2)
    batched = torch.vmap(lambda x: tuple(agt.linear_top_k(x, weight, 2)))(input)
    compiled = torch.compile(lambda x: tuple(agt.linear_top_k(x, weight, 2)), fullgraph=True, backend="aot_eager")(
        input[0]
    )
    torch.testing.assert_close(batched[0], right.values)
    torch.testing.assert_close(compiled[0], right.values[0])
    assert torch.equal(batched[1], right.indices)
    for numbers in (None, torch.tensor([0.5, 2.0], dtype=torch.float64)):  # the temperature and the scale of logits
        torch.library.opcheck(
            torch.ops.ascend_grad.linear_top_k.default, (input, weight, None, None, numbers, 2, 1.0, 1.0, None, None)
        )


def test_refusals():
    input, weight = torch.randn(5, 4), torch.randn(9, 4)
    for change, text in (
        ({"k": 10}, r"k: expected at most 128, and at most V = 9, got 10"),
        ({"k": 1.5}, "k: expected an int"),
        ({"linear_weight": weight.T}, r"linear_weight: expected shape \(V, H = 4\), got \(4, 9\)"),
        ({"linear_bias": torch.ones(3)}, r"linear_bias: expected shape"),
        ({"input": input.long()}, r"input: expected dtype float32"),
        ({"softcap": -1.0}, "softcap: expected"),
    ):
        with pytest.raises(ag.ParamInvalidError, match=f"linear_top_k: {text}"):
            agt.linear_top_k(**{"input": input, "linear_weight": weight, "k": 2, **change})
