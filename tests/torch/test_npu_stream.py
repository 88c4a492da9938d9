"""Test that calls on tensors of torch_npu follow torch's stream and device, never wait, and report work that fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_npu_real
from acl_client import StatusError
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE
from npu_tensors import BT, CASES, V, Waits, bound_context, call_of, chain_arguments, fails_and_recovers, values
from torch_oracles import assert_close

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.operators.table import OPERATORS as ALL
from ascend_grad.torch.compat import torch_npu as compat

pytestmark = pytest.mark.usefixtures("torch_npu")

# ---- the order of torch's stream -------------------------------------------------------------------------------------


def chain(x, w, target, grad, functions=ag) -> tuple:
    s = functions.fused_linear_online_max_sum(x, w, target, 0, w.shape[0])
    loss, _ = functions.fused_cross_entropy_loss_with_max_sum(s.logits_max, s.sum_exp_logits, s.predicted_logits)
    grads = functions.fused_linear_cross_entropy_loss_grad(
        grad, x, w, s.target_mask, s.masked_target, logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits
    )
    return loss, *grads


def whole(x: torch.Tensor) -> torch.Tensor:
    """Compute a loss by the chain of three operators."""
    weight, target = torch.zeros(V, x.shape[1]).half().to(x.device), torch.arange(len(x)).to(x.device)
    return ag.linear_cross_entropy(x, weight, target).loss


def chain_of_torch_npu(x, w, target, grad, *, stored: bool) -> tuple:
    """Compute loss and gradients with the functions that have torch_npu's names."""
    *statistics, mask, masked, logits = compat.npu_fused_linear_online_max_sum(x, w, target, 0, len(w), stored)
    loss, softmax = compat.npu_fused_cross_entropy_loss_with_max_sum(*statistics, vocab_parallel_logits=logits)
    mode = (None, None, softmax) if stored else statistics[:2]
    return loss, *compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(grad, x, w, mask, masked, 0.0, *mode)


def sum_of_outputs(x, w, target, token_weight) -> torch.Tensor:
    """Return the sum of a loss and its outputs, whose gradients are computed by another call than the loss."""
    found = agt.linear_cross_entropy(x, w, target, token_weight=token_weight, outputs=("lse", "log_prob"))
    return found.loss + found.lse.sum() + found.log_prob.sum()


def test_nothing_waits(torch_npu, device, monkeypatch: pytest.MonkeyPatch):
    arguments = chain_arguments()
    rights = chain(*(each.float() if each.is_floating_point() else each for each in arguments))
    there = [each.to("npu") for each in arguments]
    mask = torch.tensor([True, False] * 6 + [False]).to("npu")
    statistics = torch.zeros(BT).to("npu"), torch.ones(BT).to("npu")
    softmax = torch.zeros(BT, V).to("npu")
    options = {"token_weight": there[3], "class_weight": torch.rand(V).to("npu")}
    waits = Waits(torch_npu, device, monkeypatch)
    results = chain(*there)
    assert waits.counted() == {}
    for call in (
        lambda: ag.linear_cross_entropy(*there[:3]),
        lambda: ag.linear_cross_entropy(*there[:3], reduction="none", grad_loss=there[3]),
        lambda: ag.linear_cross_entropy(*there[:3], **options, outputs=("lse", "log_prob")),
        lambda: ag.linear_cross_entropy(*there[:3], **options, denominator=3.0),
        lambda: ag.linear_cross_entropy_backward(
            *there[:3], lse=statistics[1], grad_loss=1.0, grad_lse=there[3], grad_log_prob=there[3], **options
        ),
        lambda: ag.linear_cross_entropy_backward(*there[:3], lse=statistics[1], grad_log_prob=there[3]),
        lambda: ag.fused_linear_cross_entropy_loss_grad(there[3], *there[:2], mask, there[2], softmax=softmax),
        lambda: ag.fused_linear_cross_entropy_loss_grad(
            there[3], *there[:2], mask, there[2], logits_max=statistics[0], sum_exp_logits=statistics[1]
        ),
        lambda: ag.softmax(there[0], out=there[0]),
        lambda: ag.softmax(there[0][:0]),
        lambda: ag.linear_cross_entropy(there[0][:0], there[1], there[2][:0]),
        lambda: agt.softmax(there[0]),
        lambda: agt.softmax_backward(there[0], there[0]),
        lambda: chain(*there, functions=agt),
        lambda: chain_of_torch_npu(*there, stored=False),
        lambda: chain_of_torch_npu(*there, stored=True),
        lambda: agt.linear_cross_entropy(*(each.requires_grad_() for each in there[:2]), there[2]).backward(),
        lambda: agt.linear_cross_entropy(there[0], there[1].half().bfloat16(), there[2], reduction="sum").backward(),
        lambda: sum_of_outputs(*there).backward(),
    ):
        call()
        assert waits.counted() == {}
    for result, right in zip(results, rights, strict=True):
        torch.testing.assert_close(result.cpu().float(), right, rtol=0.05, atol=0.05)
    assert device.violations() == []


def test_a_call_returns_before_its_work_is_done(device):
    x = torch.randn(64, 65)
    there = x.to("npu")
    device.set_delay(100_000)
    for function in (ag.log_softmax, agt.log_softmax):
        result = function(there)
        assert device.counter("in_flight") > 0
        torch.testing.assert_close(result.cpu(), torch.log_softmax(x, -1))
    y = torch.softmax(there, -1)  # the device has not computed y yet
    for _ in range(4):
        y = ag.softmax(y)  # the memory of a result is reused while work on the memory is under way
    right = torch.softmax(x, -1)
    for _ in range(4):
        right = torch.softmax(right, -1)
    torch.testing.assert_close(torch.softmax(y, -1).cpu(), torch.softmax(right, -1))
    loss, *grads = chain(*(each.to("npu") for each in chain_arguments()))
    assert all(np.isfinite(values(each)).all() for each in (loss, *grads))
    device.set_delay(200)
    assert device.violations() == []


def test_memory_is_torchs(device):
    """Calls take memory from torch's blocks, and neither allocate memory nor create streams."""
    x = torch.randn(100, 100).to("npu")
    npu.release()
    for _ in range(3):
        device.reset()
        result = ag.softmax(ag.softmax(x))
        counts = [device.counter(name) for name in ("mallocs", "host_mallocs")] + [device.calls("aclrtCreateStream")]
    assert counts == [0, 0, 0]
    del result


# ---- torch's device, and the thread's context ------------------------------------------------------------------------


def bind(device: int) -> None:
    assert ctypes.CDLL("libascendcl.so").aclrtSetDevice(device) == 0


@pytest.mark.parametrize("device_of_torch", [0, 1])
def test_device_and_context_are_as_before(device_of_torch: int, torch_npu, device):
    arguments = [each.to("npu:1") for each in chain_arguments()]
    for bound in (0, 1):
        with torch_npu.npu.device(device_of_torch):
            bind(bound)
            before = bound_context()
            results = chain(*arguments)
            assert (torch_npu.npu.current_device(), bound_context()) == (device_of_torch, before)
            assert all(each.device == torch.device("npu:1") for each in results)
            device.fail("aclnnFusedLinearOnlineMaxSum", 1, 507899)
            with pytest.raises(ag.AclError):
                chain(*arguments)
            device.reset()
            assert (torch_npu.npu.current_device(), bound_context()) == (device_of_torch, before)
    bind(0)


# ---- calls and work that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_either_stage_fails(operator: str, how: dict, device, torch_npu):
    names = [ALL[name].device_name for name in ((STATISTICS, LOSS, GRADIENT) if operator == WHOLE else (operator,))]
    functions = [function for name in names for function in (f"{name}GetWorkspaceSize", name)]
    assert fails_and_recovers(call_of(operator, how), functions, device, torch_npu) == len(functions)


def backward_of_softmax() -> Callable[[], list]:
    x, above = (torch.randn(4, 6).to("npu:1") for _ in range(2))

    def call() -> list:
        leaf = x.clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED):  # the double has no threads
            value = agt.softmax(leaf)
            (grad,) = torch.autograd.grad(value, leaf, above)
        return [value.detach(), grad]

    return call


def backward_of(function: Callable) -> Callable[[], list]:
    """Return a call of a loss and its gradients."""
    x, w, target, token_weight = (each.to("npu:1") for each in chain_arguments())

    def call() -> list:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED):
            loss = function(*leaves, target, token_weight)
            gradients = torch.autograd.grad(loss, leaves)
        return [loss.detach(), *gradients]

    return call


def backward_of_the_loss() -> Callable[[], list]:
    """Return a call whose gradients are computed together with the loss, and scaled in backward."""
    return backward_of(lambda x, w, target, _: agt.linear_cross_entropy(x, w, target))


def backward_of_outputs() -> Callable[[], list]:
    """Return a call whose gradients are computed with the loss, and again in backward."""
    return backward_of(sum_of_outputs)


def outs() -> Callable[[], list]:
    """Return a function that calls softmax with `out` tensors of the same dtype, of another dtype, and with gaps."""
    x = torch.randn(4, 6).to("npu:1")
    given = torch.zeros_like(x), torch.zeros_like(x).half(), torch.zeros(8, 12).to("npu:1")[::2, ::2]
    return lambda: [ag.softmax(x, out=out) for out in given]


def _stages(*names: str) -> list[str]:
    return [function for name in names for function in (f"{name}GetWorkspaceSize", name)]


@pytest.mark.parametrize(
    ("make", "functions", "failures"),
    [
        (backward_of_softmax, _stages("aclnnSoftmax", "aclnnSoftmaxBackward"), 4),
        (backward_of_the_loss, _stages(*(ALL[name].device_name for name in (STATISTICS, LOSS, GRADIENT))), 6),
        (backward_of_outputs, _stages(*(ALL[name].device_name for name in (STATISTICS, LOSS, GRADIENT))), 8),
        (outs, _stages("aclnnSoftmax"), 6),
    ],
)
def test_either_stage_fails_in_backward_and_with_out(make, functions, failures: int, device, torch_npu):
    assert fails_and_recovers(make(), functions, device, torch_npu) == failures


@pytest.mark.parametrize("place", ["npu:0", "npu:1"])
@pytest.mark.parametrize("wait", ["cpu", "synchronize"])
@pytest.mark.parametrize(
    ("function", "nth"),
    [
        (ag.softmax, 1),
        (agt.softmax, 1),
        # The double of torch_npu waits within the call, as it computes torch's operators on the host.
        *((whole, nth) for nth in range(1, 6) if torch_npu_real.IS_INSTALLED),
    ],
)
def test_work_that_fails_is_an_error_where_torch_waits(function, nth: int, wait: str, place: str, device, torch_npu):
    """Failed work raises in torch's next wait, not in the call. Later calls on arrays and tensors work."""
    x = torch.randn(9, 6).half()
    right = torch.softmax(x.double(), -1)
    there = x.to(place)
    array, before = npu.asarray(x.numpy()), torch_npu.npu.current_device()
    torch_npu.npu.synchronize(there.device.index)
    device.set_delay(200_000)
    device.fail_work(nth, 507015)
    result = function(there)
    assert device.counter("in_flight")
    waiting = result.cpu if wait == "cpu" else lambda: torch_npu.npu.synchronize(there.device.index)
    with pytest.raises((RuntimeError, StatusError), match="507015"):
        waiting()
    assert device.faults_left() == 0
    device.set_delay(200)
    assert torch_npu.npu.current_device() == before
    for found in (ag.softmax(array).numpy(), ag.softmax(x.numpy(), backend="npu"), values(ag.softmax(there))):
        assert_close(torch.from_numpy(found), right, torch.float16)
    assert device.violations() == []
