"""Test the loss of a linear layer by blocks on tensors of torch_npu: values of the reference, gradients, no wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_block_problems import BACKWARD, LOSS, backward_of, check, in_float64, random_arguments
from npu_tensors import Waits, arguments_on_tensors, values

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import linear_blocks

pytestmark = pytest.mark.usefixtures("torch_npu", "ascend_950")

SOC = "Ascend950PR_9589"


@pytest.fixture
def ascend_950(device, monkeypatch):
    """Let the device be one that lacks the fused operators."""
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(soc=SOC))
    device.set_soc(SOC)
    yield device
    device.set_soc("Ascend910B2")


@pytest.fixture
def small_blocks(monkeypatch):
    """Let blocks have 3 rows and 14 columns."""
    monkeypatch.setattr(linear_blocks, "LOGIT_BYTES", 1_500_000)


def as_arrays(result) -> tuple:
    return result._make([None if each is None else values(each) for each in result])


@pytest.mark.parametrize("seed", range(0, 300, 4))
def test_random_problems(seed, request):
    if seed % 8:
        request.getfixturevalue("small_blocks")
    arguments = random_arguments(seed)
    for function, given in ((LOSS, arguments), (BACKWARD, backward_of(arguments, seed))):
        result = getattr(ag, function)(**arguments_on_tensors(given))
        assert all(each is None or each.device.type == "npu" for each in result)
        check(as_arrays(result), in_float64(function, given), given, widened=True)


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (40, 5)))
    target = torch.randint(0, 40, (7,), generator=generator)
    target[2] = -100
    return x, w, target, torch.randn(40, generator=generator)


@pytest.mark.parametrize("is_later", [False, True])
def test_nothing_waits(is_later, torch_npu, device, monkeypatch, small_blocks):
    x, w, target, bias = (each.to("npu") for each in problem(torch.float16))
    options = {
        "bias": bias,
        "class_weight": bias,
        "label_smoothing": 0.1,
        "lse_square_scale": 0.1,
        "temperature": torch.full((7,), 2.0, device="npu"),
    }
    lse = ag.linear_cross_entropy(x, w, target, **options, outputs=("lse",)).lse
    waits = Waits(torch_npu, device, monkeypatch)
    if is_later:
        ag.linear_cross_entropy_backward(x, w, target, **options, lse=lse, grad_loss=1.0, grad_lse=lse)
    else:
        ag.linear_cross_entropy(x, w, target, **options, outputs=("lse", "log_prob"))
    assert waits.counted() == {}


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd(dtype, is_scaled, small_blocks):
    """Gradients of the loss and of outputs are as on the CPU, including the gradients of the bias."""
    found = []
    for place in ("cpu", "npu"):
        x, w, target, bias = (each.to(place) for each in problem(dtype))
        leaves = [each.requires_grad_() for each in (x, w, bias)]
        result = agt.linear_cross_entropy(
            x, w, target, linear_bias=bias, label_smoothing=0.1, temperature=0.7, outputs=("lse", "log_prob")
        )
        loss = 3 * result.loss + result.lse.sum() - result.log_prob[:3].sum() if is_scaled else result.loss
        loss.backward()
        found.append([loss.detach().cpu().float(), *(each.grad.cpu().float() for each in leaves)])
    for host, there in zip(*found, strict=True):
        torch.testing.assert_close(there, host, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=2e-6)


def test_tensors_with_strides():
    x, w, target, bias = problem()
    strided = [torch.stack([each, each], -1).to("npu")[..., 0] for each in (x, w, target, bias)]
    assert not strided[0].is_contiguous()
    result = ag.linear_cross_entropy(*strided[:3], bias=strided[3], label_smoothing=0.2)
    arguments = {"input": x.numpy(), "weight": w.numpy(), "target": target.numpy(), "bias": bias.numpy()}
    arguments["label_smoothing"] = 0.2
    check(as_arrays(result), in_float64(LOSS, arguments), arguments)


def test_targets_outside_of_the_weight_make_nan():
    x, w, target, _ = problem()
    target[4] = 99
    result = ag.linear_cross_entropy(*(each.to("npu") for each in (x, w, target)), reduction="none")
    expected = [False, False, False, False, True, False, False]
    assert np.isnan(values(result.loss)).tolist() == expected
    assert np.isnan(values(result.input_grad)).all(axis=1).tolist() == expected
    assert values(result.loss)[2] == 0


def test_rows_that_are_ignored_may_hold_anything(small_blocks):
    x, w, target, bias = problem()
    right = ag.linear_cross_entropy(x, w, target, bias=bias)
    x[2] = float("nan")
    result = ag.linear_cross_entropy(*(each.to("npu") for each in (x, w, target)), bias=bias.to("npu"))
    for got, expected in zip(result, right, strict=True):
        np.testing.assert_allclose(values(got), expected, rtol=1e-4, atol=1e-6)


def test_all_rows_are_ignored():
    x, w, target, bias = (each.to("npu") for each in problem())
    result = ag.linear_cross_entropy(x, w, torch.full_like(target, -100), bias=bias)
    assert np.isnan(values(result.loss))
    for each in result[1:]:
        assert not values(each).any()


def test_no_rows():
    x, w, target, _ = (each.to("npu") for each in problem())
    result = ag.linear_cross_entropy(x[:0], w, target[:0])
    assert np.isnan(values(result.loss))
    assert not values(result.weight_grad).any()
