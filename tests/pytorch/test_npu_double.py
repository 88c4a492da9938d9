"""What torch_npu itself cannot show over the test double of a device, or only by chance, shown on a double of it."""

from __future__ import annotations

import pytest
import torch
from npu_tensors import CASES, fails_and_recovers
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
