"""Test torch's and torch_npu's own losses over the test double of a device, with the wheel of torch_npu."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
import vendor_cases
from aclnn_losses import assert_near, right_gradient, right_loss, scale_of_gradient, scale_of_loss
from torch_oracles import assert_close
from vendor_cases import DTYPES, Gradient, Loss, arrays_of, shown, values

from ascend_grad.torch.compat import torch_npu as compat

pytestmark = pytest.mark.usefixtures("torch_npu")


def sample(dtype: torch.dtype, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    target = torch.randint(0, 5, (7,))
    target[2] = -100
    return torch.randn(7, 5).to(dtype), target, torch.rand(5) if weighted else None


def expected(x, target, weight, upstream, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and its gradient in float64."""
    x = x.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, target, weight if weight is None else weight.double(), **settings)
    loss.backward(upstream.double().reshape(loss.shape))
    return loss.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_of_torch_npu(torch_npu, device, dtype, reduction, weighted) -> None:
    """torch_npu calls the operators of the loss and of its gradient, with empty tensors for the z-loss."""
    x, target, weight = sample(dtype, weighted)
    there = x.to("npu").requires_grad_()
    arguments = target.to("npu"), None if weight is None else weight.to("npu"), reduction
    loss, log_prob, z_loss, lse = torch_npu.npu_cross_entropy_loss(there, *arguments)
    upstream = torch.rand(loss.shape).to(dtype)
    loss.backward(upstream.to("npu"))
    right, gradient = expected(x, target, weight, upstream, reduction=reduction)
    assert_close(loss.detach().cpu(), right.reshape(loss.shape), dtype, steps=8)
    assert_close(log_prob.detach().cpu(), torch.log_softmax(x.double(), -1), dtype, steps=8)
    assert_close(there.grad.cpu(), gradient, dtype, steps=32)
    assert z_loss.numel() == lse.numel() == 0
    assert device.calls("aclnnCrossEntropyLoss") == device.calls("aclnnCrossEntropyLossGrad") == 1


def test_label_smoothing_of_torch_npu(torch_npu) -> None:
    x, target, weight = sample(torch.float32, True)
    loss = torch_npu.npu_cross_entropy_loss(
        x.to("npu"), target.to("npu"), weight.to("npu"), label_smoothing=0.1, ignore_index=-100
    )[0]
    right, _ = expected(x, target, weight, torch.ones(()), label_smoothing=0.1)
    assert_close(loss.cpu(), right.reshape(1), torch.float32, steps=8)


def loss_and_gradients(module, x, target, weight, reduction: str, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a module's loss, its gradient by autograd, and the gradient by its function."""
    x = x.detach().requires_grad_()
    results = module.npu_cross_entropy_loss(x, target, weight, reduction)
    results[0].backward(upstream)
    gradient = module.npu_cross_entropy_loss_backward(upstream, results[1], target, weight, reduction=reduction)
    return [each.detach() for each in (*results, x.grad, gradient)]


@pytest.mark.parametrize("place", ["npu:0", "npu:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_of_the_compat_module(torch_npu, device, dtype, reduction, weighted, place) -> None:
    """The function of the module calls torch_npu's. Results of tensors on the CPU differ in the last bit at most."""
    here = sample(dtype, weighted)
    upstream = torch.rand(7 if reduction == "none" else 1).to(dtype)
    x, target, weight = (each if each is None else each.to(place) for each in here)
    rights = loss_and_gradients(torch_npu, x, target, weight, reduction, upstream.to(place))
    found = loss_and_gradients(compat, x, target, weight, reduction, upstream.to(place))
    torch.npu.synchronize(place)
    assert device.calls("aclnnCrossEntropyLoss") == 2
    assert device.calls("aclnnCrossEntropyLossGrad") == 4
    of_cpu = loss_and_gradients(compat, *here, reduction, upstream)
    for each, right, on_cpu in zip(found, rights, of_cpu, strict=True):
        assert (each.device, each.dtype, each.shape) == (right.device, right.dtype, right.shape)
        assert (each.dtype, each.shape) == (on_cpu.dtype, on_cpu.shape)
        assert torch.equal(each.cpu(), right.cpu())
        assert_close(on_cpu, each.cpu().double(), dtype, steps=2)


def test_the_compat_module_copies_tensors_that_are_not_contiguous(torch_npu) -> None:
    """The kernels read only contiguous tensors. torch_npu passes others on, such as the upstream gradient of a sum."""
    x, target, weight = sample(torch.float32, True)
    x, target, weight = x.to("npu").T.contiguous().T, target.to("npu"), weight.to("npu")
    right = loss_and_gradients(torch_npu, x.contiguous(), target, weight, "none", torch.ones(7, device="npu"))
    x = x.detach().requires_grad_()
    loss = compat.npu_cross_entropy_loss(x, target, weight, "none")[0]
    loss.sum().backward()
    assert torch.equal(loss.detach().cpu(), right[0].cpu())
    assert torch.equal(x.grad.cpu(), right[4].cpu())


def test_label_smoothing_of_the_compat_module(torch_npu) -> None:
    """The loss is torch_npu's. If the logits require grad, the call is an error, as torch_npu has no such gradient."""
    x, target, weight = (each.to("npu") for each in sample(torch.float32, True))
    right = torch_npu.npu_cross_entropy_loss(x, target, weight, label_smoothing=0.1)[0]
    assert torch.equal(compat.npu_cross_entropy_loss(x, target, weight, label_smoothing=0.1)[0].cpu(), right.cpu())
    with pytest.raises(NotImplementedError, match="npu_cross_entropy_loss: label_smoothing: not supported"):
        compat.npu_cross_entropy_loss(x.requires_grad_(), target, weight, label_smoothing=0.1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_of_torch(device, reduction, weighted) -> None:
    """torch's loss calls the operators of log-softmax and of the negative log-likelihood."""
    x, target, weight = sample(torch.float32, weighted)
    there = x.to("npu").requires_grad_()
    arguments = target.to("npu"), None if weight is None else weight.to("npu")
    loss = torch.nn.functional.cross_entropy(there, *arguments, reduction=reduction)
    upstream = torch.rand(loss.shape)
    loss.backward(upstream.to("npu"))
    right, gradient = expected(x, target, weight, upstream, reduction=reduction)
    assert_close(loss.detach().cpu(), right, torch.float32, steps=8)
    assert_close(there.grad.cpu(), gradient, torch.float32, steps=32)
    assert device.calls("aclnnNLLLoss") == device.calls("aclnnNLLLossBackward") == 1
    assert device.calls("aclnnCrossEntropyLoss") == 0


def test_top_k_and_log_sum_exp_of_torch(device) -> None:
    x = torch.randn(4, 6)
    values, indices = torch.topk(x.to("npu"), 3)
    assert torch.equal(values.cpu(), torch.topk(x, 3).values)
    assert torch.equal(indices.cpu(), torch.topk(x, 3).indices)
    assert_close(torch.logsumexp(x.to("npu"), -1).cpu(), torch.logsumexp(x.double(), -1), torch.float32, steps=4)
    assert device.calls("aclnnTopk") == device.calls("aclnnLogSumExp") == 1


def on_device(*arrays: np.ndarray | None) -> list[torch.Tensor | None]:
    """Copy arrays to the device. bfloat16 passes through float32."""
    dtypes = {np.dtype(each): getattr(torch, name) for name, each in DTYPES.items()} | {np.dtype(int): torch.int64}
    return [
        None
        if each is None
        else torch.tensor(each.astype(np.float32 if each.dtype.kind not in "iu" else int)).to("npu", dtypes[each.dtype])
        for each in arrays
    ]


def on_host(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.cpu().float().numpy().astype(DTYPES[dtype])


def taken(cases: Iterable) -> list:
    """Return the cases that the device's operators take."""
    return [case for case in cases if not case.refused]


@pytest.mark.parametrize("case", taken(vendor_cases.losses()), ids=shown)
def test_losses_that_the_vendor_tests(case: Loss, torch_npu, device) -> None:
    x, target, weight = arrays_of(np.random.default_rng(1), case, case.logits)
    settings = case.reduction, case.ignored, case.smoothing
    loss, log_prob, _, _ = compat.npu_cross_entropy_loss(*on_device(x, target, weight), *settings)
    right, right_log_prob = right_loss(x, target, weight, *settings)
    assert_near(on_host(log_prob, case.dtype), right_log_prob, np.abs(x[np.isfinite(x)].astype(float)).max(initial=0))
    assert_near(on_host(loss, case.dtype), right, scale_of_loss(x, target, weight, *settings))


@pytest.mark.parametrize("case", taken(vendor_cases.gradients()), ids=shown)
def test_gradients_that_the_vendor_tests(case: Gradient, torch_npu, device) -> None:
    rng = np.random.default_rng(1)
    log_prob, target, weight = arrays_of(rng, case, case.log_prob)
    grad = values(rng, case.upstream, (case.rows,) if case.reduction == "none" else (), log_prob.dtype.type)
    arguments = grad, log_prob, target, weight
    settings = {"reduction": case.reduction, "ignore_index": case.ignored}
    found = compat.npu_cross_entropy_loss_backward(*on_device(*arguments), **settings)
    right = right_gradient(*arguments, *settings.values())
    assert_near(on_host(found, case.dtype), right, scale_of_gradient(*arguments, *settings.values()))
