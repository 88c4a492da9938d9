"""What torch_npu itself cannot show over the test double of a device, or only by chance, shown on a double of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from acl_client import StatusError
from npu_tensors import CASES, assert_clear, bound_context, fails_and_recovers
from torch_npu_stand_in import FRACTAL_NZ, ND
from torch_oracles import assert_close, pending

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime


def test_private_formats(torch_npu):
    """They come from an older interface of operators, which the test double of a device does not have."""
    x = torch.randn(3, 4)
    there = torch_npu.npu_format_cast(x.to("npu"), FRACTAL_NZ)
    expected = r"expected a tensor of format ND \(2; torch_npu.npu_format_cast\(input, 2\) makes one\), got format 29"
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
    """Of arrays over tensors, which are used on another stream: so the test double notices.

    torch_npu itself hands its work over at a time of its own.
    """
    monkeypatch.setattr(runtime, "wait_for_torch", lambda device: None)
    y, values = pending()
    result = torch.from_numpy(ag.softmax(npu.asarray(y)).numpy())
    with pytest.raises(AssertionError):
        assert_close(result, torch.softmax(values, -1), torch.float32)
    y, _ = pending()
    assert torch_npu.npu.current_stream(0).npu_stream  # what was kept back goes to the stream
    ag.softmax(npu.asarray(y))
    assert any("work on another stream" in violation for violation in device.violations())
    device.reset()


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_every_call_of_the_runtime_fails(operator: str, how: dict, device, torch_npu):
    """torch_npu calls these functions as well, and does not outlive a failure of all of them."""
    functions = "aclCreateTensor", "aclDestroyTensor", "aclDestroyAclOpExecutor"
    assert fails_and_recovers(operator, how, functions, device, torch_npu) >= 2


# ---- faults of the library's own calls -------------------------------------------------------------------------------


@pytest.fixture
def unharmed(torch_npu, device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults strike the library alone: the double's own calls are made again. (Those of the wheel end the process.)"""
    original = torch_npu.acl.check

    def check(name: str, *arguments) -> None:
        try:
            original(name, *arguments)
        except StatusError:
            original(name, *arguments)

    monkeypatch.setattr(torch_npu.acl, "check", check)


# Tensors are kept in names: where an exception drops one, the double's own function for that cannot run.


def rowwise(x: torch.Tensor) -> list[torch.Tensor]:
    y = agt.softmax(x)
    z = ag.softmax(y)
    return [y, z]


def linear(x: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, 130 * x.shape[1], device="cpu").reshape(130, -1).half().to(x.device)
    half, target = x.half(), torch.arange(x.shape[0]).to(x.device)
    return list(ag.linear_cross_entropy(half, weight, target))


def shared(x: torch.Tensor) -> list[torch.Tensor]:
    """By arrays over tensors, on a stream of the library, and tensors over its arrays."""
    view = x[1:, ::2]
    array = npu.asarray(view)
    result = ag.softmax(array)
    return [torch.from_dlpack(result)]


def asked(x: torch.Tensor) -> list[torch.Tensor]:
    with npu.use_deterministic():
        assert ag.workspace_size("softmax", x) > 0
        return [ag.softmax(x)]


@pytest.mark.parametrize("function", ["aclrtGetCurrentContext", "aclrtSetDevice"])
@pytest.mark.parametrize("call", [rowwise, linear, shared, asked])
@pytest.mark.parametrize("current", [0, 1])
def test_contexts_that_cannot_be_had(current: int, call, function: str, torch_npu, device, unharmed) -> None:
    """Nothing is left, torch's device, its streams and the context of the thread are as before, the next call works."""
    x = torch.randn(4, 6).to("npu:1")

    def left() -> dict[str, int]:
        npu.release()
        for index in (0, 1):
            torch_npu.npu.synchronize(index)
        return {name: device.counter(name) for name in ("tensors", "executors", "streams", "contexts", "in_flight")}

    def state() -> tuple[int, int | None, int, int]:
        streams = (torch_npu.npu.current_stream(index).npu_stream for index in (0, 1))
        return torch_npu.npu.current_device(), bound_context(), *streams

    with torch_npu.npu.device(current):
        torch.ones(3, device="npu")  # binds the thread to torch's current device
        rights = [each.cpu() for each in call(x)]
        before, unchanged, struck = left(), state(), 0
        for nth in itertools.count(1):
            device.reset()
            device.fail(function, nth, 507899)
            try:
                results = call(x)
            except ag.AclError as error:
                assert_clear(error, function)
                struck += 1
            else:
                assert all(torch.equal(each.cpu(), right) for each, right in zip(results, rights, strict=True))
                del results
            is_over = device.faults_left()
            device.reset()
            assert state() == unchanged
            assert left() == before
            assert all(torch.equal(each.cpu(), right) for each, right in zip(call(x), rights, strict=True))
            assert device.violations() == []
            if is_over:
                break
        assert nth > 3
        assert struck or function == "aclrtGetCurrentContext" or current == 1
