"""Test behaviour on a double of torch_npu that the real torch_npu shows only by chance, or not at all."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable

import pytest
import torch
from linear_samples import GRADIENT, LOSS, STATISTICS
from npu_tensors import CASES, assert_clear, bound_context, call_of, fails_and_recovers
from torch_npu_stand_in import FRACTAL_NZ, ND
from torch_oracles import assert_close, pending

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime
from ascend_grad.operators.table import OPERATORS as ALL


@pytest.mark.usefixtures("torch_npu")
def test_another_thread_may_drop_its_tensors_late():
    """The end of a test waits for tensors that another thread drops soon, as autograd's does after backward."""
    kept = [torch.ones(3).to("npu")]
    threading.Timer(0.2, kept.clear).start()


def test_private_formats(torch_npu):
    """Tensors of private formats are refused.

    Only the double of torch_npu can make such tensors, as the test double of a device lacks the interface for it.
    """
    x = torch.randn(3, 4)
    there = torch_npu.npu_format_cast(x.to("npu"), FRACTAL_NZ)
    expected = r"expected a tensor of format ND \(2\), got format 29; pass torch_npu.npu_format_cast\(input, 2\)"
    with pytest.raises(ag.ParamTypeError, match=f"softmax: input: {expected}"):
        agt.softmax(there)
    half, target = x.half().to("npu"), torch.tensor([0, 1, 2]).to("npu")
    with pytest.raises(ag.ParamTypeError, match="linear_cross_entropy: linear_weight: expected a tensor of format ND"):
        agt.linear_cross_entropy(half, torch_npu.npu_format_cast(half, FRACTAL_NZ), target)
    with pytest.raises(ag.ParamTypeError, match="x: expected a tensor of format ND"):
        npu.asarray(there)
    with pytest.raises(ag.ParamTypeError, match=f"softmax: input: {expected}"):
        ag.softmax(there)
    with pytest.raises(ag.ParamTypeError, match="softmax: out: expected a tensor of format ND"):
        ag.softmax(x.to("npu"), out=there)
    assert_close(agt.softmax(torch_npu.npu_format_cast(there, ND)).cpu(), torch.softmax(x.double(), -1), torch.float32)


@pytest.mark.usefixtures("slowly")
def test_without_waiting_results_are_wrong(torch_npu, device, monkeypatch: pytest.MonkeyPatch):
    """Without the wait for torch, arrays over tensors give wrong results, which the test double reports.

    The real torch_npu submits its work at times that a test cannot choose.
    """
    monkeypatch.setattr(runtime, "wait_for_torch", lambda device: None)
    y, values = pending()
    result = torch.from_numpy(ag.softmax(npu.asarray(y)).numpy())
    with pytest.raises(AssertionError):
        assert_close(result, torch.softmax(values, -1), torch.float32)
    y, _ = pending()
    assert torch_npu.npu.current_stream(0).npu_stream  # reading `npu_stream` submits the queue
    ag.softmax(npu.asarray(y))
    assert any("work on another stream" in violation for violation in device.violations())
    device.reset()


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_tensors_and_executors_of_the_runtime_fail(operator: str, how: dict, device, torch_npu):
    functions = "aclCreateTensor", "aclDestroyTensor", "aclDestroyAclOpExecutor"
    assert fails_and_recovers(call_of(operator, how), functions, device, torch_npu) >= 2


# ---- faults of the library's own calls -------------------------------------------------------------------------------

FAILED = 507899


@pytest.fixture
def unharmed(torch_npu, device, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Let faults hit only the library: the double of torch_npu repeats its own failed calls, except calls that release.

    Return the numbers of the calls of torch_npu's double, as the test double of the device counts them. This needs the
    double, since the wheel of torch_npu ends the process if some of the wheel's calls fail.
    """
    numbers: set[int] = set()

    def repeated(name: str, function: Callable) -> Callable:
        def call(*arguments):
            result = function(*arguments)
            numbers.add(device.calls())
            if result == FAILED:
                return 0 if RELEASING.match(name) else function(*arguments)
            return function(*arguments) if result is None and name.startswith("aclCreate") else result

        return call

    for name, function in list(vars(torch_npu.acl).items()):
        if name.startswith("acl") and name not in ("aclrtGetSocName", "aclGetRecentErrMsg"):
            monkeypatch.setattr(torch_npu.acl, name, repeated(name, function))
    return numbers


#: Functions that release an object even if they report a failure.
RELEASING = re.compile("acl(rt)?(Destroy|Free)")

# The functions below keep tensors in variables: the double could not release a tensor that an exception drops.


def rowwise(x: torch.Tensor) -> list[torch.Tensor]:
    y = agt.softmax(x)
    z = ag.softmax(y)
    return [y, z]


def shard(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1, 1, 130 * x.shape[1], device="cpu").reshape(130, -1).half().to(x.device)
    half, target = x.half(), torch.arange(x.shape[0]).to(x.device)
    return half, weight, target


def linear(x: torch.Tensor) -> list[torch.Tensor]:
    tensors = shard(x)
    return list(ag.linear_cross_entropy(*tensors))


def fused(x: torch.Tensor) -> list[torch.Tensor]:
    half, weight, target = shard(x)
    grad = torch.linspace(1, 2, len(half), device="cpu").to(x.device)
    found = agt.fused_linear_online_max_sum(half, weight, target, 0, 130, return_logits=True)
    loss, softmax = agt.fused_cross_entropy_loss_with_max_sum(*found[:3], vocab_parallel_logits=found[5])
    gradients = agt.fused_linear_cross_entropy_loss_grad(grad, half, weight, *found[3:5], softmax=softmax)
    return [loss, *gradients]


def backward(x: torch.Tensor) -> list[torch.Tensor]:
    """Compute gradients of a softmax and of a loss, on this thread."""
    half, weight, target = shard(x)
    leaf, states = x.clone().requires_grad_(), half.clone().requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):
        value = agt.softmax(leaf)
        (grad,) = torch.autograd.grad(value, leaf, x)
        loss = agt.linear_cross_entropy(states, weight, target)
        (of_states,) = torch.autograd.grad(loss, states)
    return [value.detach(), grad, loss.detach(), of_states]


def second(x: torch.Tensor) -> list[torch.Tensor]:
    """Differentiate the gradient of a loss of logits, on this thread."""
    leaf, target = x.clone().requires_grad_(), torch.arange(x.shape[0]).to(x.device)
    with torch.autograd.set_multithreading_enabled(False):
        loss = agt.cross_entropy(leaf, target)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (product,) = torch.autograd.grad(grad, leaf, x)
    return [loss.detach(), grad.detach(), product]


def outs(x: torch.Tensor) -> list[torch.Tensor]:
    """Write results into tensors of the same dtype, of another dtype, and with gaps in memory."""
    same, other, wide = torch.zeros_like(x), torch.zeros_like(x).half(), torch.zeros(8, 12).to(x.device)
    gaps = wide[::2, ::2]
    for out in (same, other, gaps):
        ag.log_softmax(x, out=out)
    return [same, other, wide]


def shared(x: torch.Tensor) -> list[torch.Tensor]:
    """Compute on arrays over tensors, on a stream of the library, and make tensors over its arrays."""
    view = x[1:, ::2]
    array = npu.asarray(view)
    result = ag.softmax(array)
    lent = torch.from_dlpack(result)
    again = ag.softmax(result)  # this call waits, as torch may write into the array
    copy = torch.from_numpy(again.numpy())
    return [lent, copy]


def asked(x: torch.Tensor) -> list[torch.Tensor]:
    with npu.use_deterministic():
        assert ag.workspace_size("softmax", x) > 0
        return [ag.softmax(x)]


STAGES = {"aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax", "aclCreateTensor"}
STAGES_OF_LOSS = {"aclnnCrossEntropyLoss", "aclnnCrossEntropyLossGrad", "aclCreateTensor"}
SESSION = {"aclrtGetCurrentContext", "aclrtSetDevice", "aclrtCreateStream", "aclrtSynchronizeStream", "aclrtMalloc"}

#: Each call maps to functions of the runtime. The call raises an error if one of these functions fails.
CALLS: dict[Callable[[torch.Tensor], list[torch.Tensor]], set[str]] = {
    rowwise: STAGES,
    linear: {ALL[name].device_name for name in (STATISTICS, LOSS, GRADIENT)},
    fused: {f"{ALL[name].device_name}GetWorkspaceSize" for name in (STATISTICS, LOSS, GRADIENT)},
    backward: STAGES | {"aclnnSoftmaxBackwardGetWorkspaceSize", "aclnnSoftmaxBackward"},
    second: STAGES_OF_LOSS | {"aclnnSoftmaxBackwardGetWorkspaceSize", "aclnnSoftmaxBackward"},
    outs: {"aclnnLogSoftmaxGetWorkspaceSize", "aclnnLogSoftmax"},
    shared: STAGES | SESSION | {"aclrtMemcpyAsync", "aclrtMallocHost"},
    asked: STAGES | {"aclrtCtxGetSysParamOpt", "aclrtCtxSetSysParamOpt"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("current", [0, 1])
def test_every_call_of_the_runtime_fails_once(current: int, call, torch_npu, device, unharmed, caplog) -> None:
    """A failure leaks nothing, restores torch's device and streams and the thread's context, and the next call works.

    The context or the context's option differs only if the call that restores it fails, which logs a warning.
    """
    x = torch.randn(4, 6).to("npu:1")

    def left() -> dict[str, int]:
        npu.release()
        for index in (0, 1):
            torch_npu.npu.synchronize(index)
        torch_npu.npu.empty_cache()
        names = ("tensors", "executors", "streams", "contexts", "in_flight", "device_allocations", "host_allocations")
        return {name: device.counter(name) for name in names}

    def state() -> tuple[int, int | None, int, int]:
        streams = (torch_npu.npu.current_stream(index).npu_stream for index in (0, 1))
        return torch_npu.npu.current_device(), bound_context(), *streams

    def option() -> int:
        value = ctypes.c_int64()
        with torch_npu.on(1):
            code = torch_npu.acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value))
        return 0 if code else value.value

    with torch_npu.npu.device(current):
        torch.ones(3, device="npu")  # this call binds the thread to torch's current device
        rights = [each.cpu() for each in call(x)]
        before, unchanged, struck = left(), state(), set()

        def assert_works() -> None:
            """Check that the call works and leaks nothing, and record the double's own calls for the next attempt."""
            device.reset()
            unharmed.clear()
            assert all(torch.equal(each.cpu(), right) for each, right in zip(call(x), rights, strict=True))
            assert device.violations() == []
            assert left() == before

        assert_works()
        for nth in itertools.count(1):
            if nth in unharmed:
                continue
            device.reset()
            caplog.clear()
            device.fail("*", nth, FAILED)
            try:
                results = call(x)
            except ag.AclError as error:
                struck.add(error.call)
                assert_clear(error, error.call)
            else:
                assert all(torch.equal(each.cpu(), right) for each, right in zip(results, rights, strict=True))
                del results
            is_over = device.faults_left()
            device.reset()
            if "aclrtSetCurrentContext failed" in caplog.text:
                torch_npu.rebind()
            assert option() == ("aclrtCtxSetSysParamOpt failed" in caplog.text)
            with torch_npu.on(1):
                torch_npu.acl.check("aclrtCtxSetSysParamOpt", 0, 0)
            assert state() == unchanged
            assert left() == before
            assert_works()
            if is_over:
                break
        # A thread that is bound to the device needs no aclrtSetDevice.
        assert struck >= CALLS[call] - ({"aclrtSetDevice"} if current == 1 else set())
