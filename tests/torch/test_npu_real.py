"""Test the wheel of torch_npu over the test double of a device, for behaviour that no double of torch_npu shows."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.torch.compat import torch_npu as compat

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_backward_over_both_devices() -> None:
    """Autograd's threads compute the right gradients of a function that uses both devices."""
    x = torch.randn(4, 5)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return agt.log_softmax(agt.softmax(x.to("npu:1")).to("npu:0")).cpu()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(torch.softmax(x, -1), -1)

    results = value_and_gradients(ours, [x], torch.ones(4, 5))
    rights = value_and_gradients(plain, [x.double()], torch.ones(4, 5, dtype=torch.float64))
    for each, expected in zip(results, rights, strict=True):
        assert_close(each, expected, torch.float32, steps=8)


def test_the_queue_of_another_device_is_not_handed_over() -> None:
    """The library waits for work on another device. Reading ``npu_stream`` submits only the current device's queue."""
    x = torch.randn(64, 65)
    for _ in range(20):
        there = x.to("npu:1")
        assert_close(
            agt.softmax(there.clone() * 2 - there).cpu(), torch.softmax(x.double(), -1), torch.float32, steps=4
        )


def test_a_thread_that_is_bound_to_another_device_fails_once(device) -> None:
    """If a thread's context cannot be restored, the call fails, and later calls work."""
    x = torch.randn(4, 6)
    there = x.to("npu:1")
    calls = (lambda: agt.softmax(there).cpu(), lambda: torch.from_numpy(ag.softmax(npu.asarray(there.T)).numpy().T))
    failed = 0
    for call, dim in zip(calls, (-1, 0), strict=True):
        for nth in range(1, 6):
            npu.release()
            device.fail("aclrtSetCurrentContext", nth)
            try:
                call()
            except ag.AscendGradError:
                failed += 1
            device.reset()  # `reset` clears the recorded violations
            assert_close(call(), torch.softmax(x.double(), dim), torch.float32, steps=4)
    assert failed  # calls on the array fail, as they run on the library's stream


# ---- the fused operators of torch_npu itself -------------------------------------------------------------------------


def schema_of(name: str) -> list[tuple]:
    """Return name, default, and "keyword only" of each argument of one of torch_npu's operators."""
    arguments = getattr(torch.ops.npu, name).default._schema.arguments
    nothing = inspect.Parameter.empty
    return [
        (each.name, each.default_value if each.has_default_value() else nothing, each.kwarg_only) for each in arguments
    ]


@pytest.mark.parametrize("name", compat.__all__)
def test_signatures_are_those_of_the_wheel(name: str, torch_npu) -> None:
    assert hasattr(torch_npu, name)
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    found = [(each.name, each.default, each.kind is inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    assert found == schema_of(name)
    results = len(getattr(torch.ops.npu, name).default._schema.returns)
    annotation = inspect.signature(getattr(compat, name)).return_annotation
    assert len(re.findall("Tensor", annotation)) == results


def chain(module, x, w, target, grad, *, start: int, stored: bool) -> tuple:
    """Return all results of the three functions of one module, for a shard that begins at `start`."""
    found = module.npu_fused_linear_online_max_sum(x, w, target, start, start + len(w), stored)
    *statistics, mask, masked_target, logits = found
    loss, softmax = module.npu_fused_cross_entropy_loss_with_max_sum(*statistics, vocab_parallel_logits=logits)
    kept = None if softmax is None else softmax.clone()  # torch_npu overwrites the softmax
    mode = (None, None, softmax) if stored else tuple(statistics[:2])
    gradients = module.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        grad, x, w, mask, masked_target, 0.0, *mode
    )
    return *statistics, mask, masked_target, logits, loss, kept, *gradients


@pytest.mark.parametrize("place", ["npu:0", "npu:1"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_same_chain_through_both(dtype, index, stored: bool, place: str, torch_npu) -> None:
    """Results of both modules are equal bit for bit, except for mask bits beyond the last row."""
    rows, entries, start = 13, 130, 40
    x, w = torch.randn(rows, 6).to(dtype), torch.randn(entries, 6).to(dtype)
    target, grad = torch.randint(0, 200, (rows,)).to(index), torch.arange(rows) + 1.0
    target[:3] = torch.tensor([start, start + entries - 1, start + entries])
    there = [each.to(place) for each in (x, w, target, grad)]
    with torch.npu.device(place):
        rights = chain(torch_npu, *there, start=start, stored=stored)
        results = chain(compat, *there, start=start, stored=stored)
    for number, (each, right) in enumerate(zip(results, rights, strict=True)):
        assert (each is None) == (right is None)
        if each is None:
            continue
        assert (each.device, each.dtype, each.shape) == (right.device, right.dtype, right.shape)
        each, right = each.cpu(), right.cpu()
        if number == 3:
            bits = (target < start) | (target >= start + entries)
            for mask in (each, right):
                assert [bool(mask[row // 8] >> row % 8 & 1) for row in range(rows)] == bits.tolist()
        else:
            assert torch.equal(each, right)


def test_each_takes_the_results_of_the_other(torch_npu) -> None:
    x, w, target, grad = torch.randn(13, 6).half(), torch.randn(130, 6).half(), torch.arange(13) * 11, torch.ones(13)
    x, w, target, grad = (each.to("npu") for each in (x, w, target, grad))
    for first, second in ((torch_npu, compat), (compat, torch_npu)):
        statistics = first.npu_fused_linear_online_max_sum(x, w, target, 0, 130)
        loss, _ = second.npu_fused_cross_entropy_loss_with_max_sum(*statistics[:3])
        gradients = second.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad, x, w, *statistics[3:5], 0.0, *statistics[:2]
        )
        rights = chain(second, x, w, target, grad, start=0, stored=False)
        for each, right in zip((loss, *gradients), (rights[6], *rights[8:]), strict=True):
            assert torch.equal(each.cpu(), right.cpu())


def test_torch_npu_leaves_gradients_out(torch_npu) -> None:
    """torch_npu's function has no gradient and warns. The function of `compat.torch_npu` raises."""
    x, w, target = torch.randn(13, 6).half(), torch.randn(130, 6).half(), torch.arange(13)
    x, w, target = x.to("npu").requires_grad_(), w.to("npu"), target.to("npu")
    result = torch_npu.npu_fused_linear_online_max_sum(x, w, target, 0, 130)[0]
    result.sum().backward()  # torch warns on stderr
    assert x.grad is None
    with pytest.raises(NotImplementedError, match="the operator has no gradient for autograd"):
        compat.npu_fused_linear_online_max_sum(x, w, target, 0, 130)[0].sum().backward()
