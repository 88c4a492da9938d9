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


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(requires_grad: bool, compiles: bool):
    """Under autocast the layer has autocast's dtype, whether gradients are needed or not."""
    input, weight, bias = torch.randn(5, 4), torch.randn(9, 4, dtype=torch.float16), torch.randn(9)
    right = agt.linear_top_k(input.bfloat16(), weight.bfloat16(), 3, linear_bias=bias)
    weight.requires_grad_(requires_grad)

    def top_k(input, weight):
        return tuple(agt.linear_top_k(input, weight, 3, linear_bias=bias))

    if compiles:
        torch.compiler.reset()
        top_k = torch.compile(top_k, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, index = top_k(input, weight)
    assert log_prob.dtype == torch.float32
    assert torch.equal(index, right.index)
    torch.testing.assert_close(log_prob, right.log_prob, rtol=1e-5, atol=1e-5)
    assert log_prob.requires_grad == requires_grad
    if requires_grad:
        log_prob.sum().backward()
        assert weight.grad.dtype == torch.float16
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ag.ParamTypeError, match=r"expected torch\.float64, as in"),
    ):
        agt.linear_top_k(input.double(), weight, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert agt.linear_top_k(input.double(), weight.double(), 3).log_prob.dtype == torch.float64


@pytest.mark.parametrize("layer_requires_grad", [False, True])
def test_options_that_require_grad(layer_requires_grad: bool):
    """Options have no gradients, which is said instead of left out."""
    input, weight = torch.randn(5, 4, requires_grad=layer_requires_grad), torch.randn(9, 4)
    for shape in ((), (5,)):
        temperature = torch.ones(shape, requires_grad=True)

        def top_k(temperature):
            return agt.linear_top_k(input, weight, 2, temperature=temperature).log_prob

        refused = r"linear_top_k: temperature: the log-probabilities have no gradient for it; pass .*detach\(\)"
        torch.compiler.reset()
        for function in (top_k, torch.compile(top_k, backend="aot_eager"), torch.func.grad(lambda t: top_k(t).sum())):
            with pytest.raises(NotImplementedError, match=refused):
                function(temperature)
        right = top_k(torch.ones(shape))
        torch.testing.assert_close(top_k(temperature.detach()), right)
        with torch.no_grad():
            torch.testing.assert_close(top_k(temperature), right)
    for name in ("logit_scale", "softcap"):
        number = torch.ones((), requires_grad=True)

        def top_k(number, name=name):
            return agt.linear_top_k(input, weight, 2, **{name: number}).log_prob

        refused = rf"linear_top_k: {name}: expected a real number, .*; pass {name}.detach\(\)$"
        for function in (top_k, torch.compile(top_k, backend="aot_eager")):
            with pytest.raises(ag.ParamTypeError, match=refused):
                function(number)
        top_k(number.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's jvp warns
@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "temperature"])
def test_forward_mode_is_refused(name: str):
    tensors = {"input": torch.randn(5, 4), "linear_weight": torch.randn(9, 4), "linear_bias": torch.randn(9)}
    tensors["temperature"] = torch.ones(5)
    each = tensors.pop(name)
    with pytest.raises(NotImplementedError, match=f"linear_top_k: {name}: forward-mode derivatives are not supported"):
        torch.func.jvp(lambda each: agt.linear_top_k(k=2, **{name: each}, **tensors).log_prob, (each,), (each,))


def test_refusals():
    input, weight = torch.randn(5, 4), torch.randn(9, 4)
    for change, text in (
        ({"k": 10}, r"k: expected at most 128, and at most V = 9, got 10"),
        ({"k": 1.5}, "k: expected an int"),
        ({"linear_weight": weight.T}, r"linear_weight: expected shape \(V, H = 4\), got \(4, 9\)"),
        ({"linear_bias": torch.ones(3)}, r"linear_bias: expected shape"),
        ({"input": input.long()}, r"input: expected dtype float32"),
        ({"softcap": -1.0}, "softcap: expected"),
        (
            {"linear_weight": weight.double()},
            r"linear_weight: expected torch.float32, as input is, got .*; linear_weight.to\(input.dtype\)",
        ),
    ):
        with pytest.raises(ag.ParamInvalidError, match=f"linear_top_k: {text}"):
            agt.linear_top_k(**{"input": input, "linear_weight": weight, "k": 2, **change})
