"""Test that operators on tensors are deterministic if torch's algorithms have to be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from linear_samples import GRADIENT, WHOLE
from npu_tensors import CASES, arguments_of, tensor

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import _acl, npu

pytestmark = pytest.mark.usefixtures("torch_npu")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # torch then launches no fills
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def softmax_and_gradient(x: torch.Tensor, above: torch.Tensor) -> None:
    x.requires_grad_()
    torch.autograd.grad(agt.softmax(x, -1), x, above)


def test_torch_decides_for_its_tensors(torch_npu, device, deterministic) -> None:
    x = torch.randn(3, 4)
    there, above, shared = (x.to("npu") for _ in range(3))
    torch_npu.npu.synchronize(0)
    device.reset()
    softmax_and_gradient(there, above)
    assert device.counter("deterministic_launches") == device.counter("launches") == 2
    ag.softmax(npu.asarray(shared))
    assert device.counter("deterministic_launches") == device.counter("launches") == 3
    ag.softmax(npu.asarray(x.numpy()))
    ag.softmax(x.numpy(), backend="npu")
    assert device.counter("deterministic_launches") == 3
    torch.use_deterministic_algorithms(False)
    softmax_and_gradient(there, above)
    assert device.counter("deterministic_launches") == 3
    assert device.violations() == []


def test_the_librarys_own_choice_holds_for_tensors(torch_npu, device) -> None:
    there = torch.randn(3, 4).to("npu")
    torch_npu.npu.synchronize(0)
    device.reset()
    with npu.use_deterministic():
        agt.softmax(there, -1)
    agt.softmax(there, -1)
    assert (device.counter("deterministic_launches"), device.counter("launches")) == (1, 2)


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
@pytest.mark.parametrize(
    "place", [tensor, lambda each: npu.asarray(tensor(each)) if isinstance(each, np.ndarray) else each]
)
def test_the_first_stages_are_asked_as_in_the_call(operator: str, how: dict, place, torch_npu, device, deterministic):
    """`workspace_size` sets the option as the call does, since deterministic operators may request other sizes."""
    positional, named = arguments_of(operator, **how)
    there, named = [place(each) for each in positional], {name: place(each) for name, each in named.items()}
    torch_npu.npu.synchronize(0)
    device.reset()
    ag.workspace_size(operator, *there, **named)
    assert device.counter("deterministic_plans") == (3 if operator == WHOLE else 1)
    torch.use_deterministic_algorithms(False)
    ag.workspace_size(operator, *there, **named)
    assert device.counter("deterministic_plans") == (3 if operator == WHOLE else 1)
    assert device.violations() == []


@pytest.mark.parametrize("operator", [GRADIENT, WHOLE])
def test_all_operators_of_a_call_are_deterministic(operator: str, torch_npu, device, deterministic):
    """All operators of a call are deterministic, also on compacted rows and on intermediate results."""
    _, named = arguments_of(operator)
    there = {name: npu.asarray(tensor(each)) if isinstance(each, np.ndarray) else each for name, each in named.items()}
    torch_npu.npu.synchronize(0)
    device.reset()
    getattr(ag, operator)(**there)
    assert device.counter("deterministic_launches") == device.counter("launches") == (3 if operator == WHOLE else 1)


def test_either_switch_is_enough(torch_npu, device, deterministic):
    """`use_deterministic(False)` ends the library's own choice, and leaves torch's setting unchanged."""
    x = torch.randn(3, 4).to("npu")
    torch_npu.npu.synchronize(0)
    device.reset()
    with npu.use_deterministic(False):
        ag.workspace_size("softmax", x)
        assert device.counter("deterministic_plans") == 1
        ag.workspace_size("softmax", x.cpu(), backend="npu")
    assert device.counter("deterministic_plans") == 1


def test_a_runtime_without_the_option(monkeypatch: pytest.MonkeyPatch, deterministic):
    monkeypatch.setattr(_acl, "lacks_determinism", lambda: "the runtime library lacks it")
    x = torch.randn(3, 4)
    for place in (tensor, npu.asarray):
        with pytest.raises(
            ag.BackendUnavailableError, match="softmax: deterministic results were requested, but the ru"
        ):
            ag.explain("softmax", place(x.to("npu")))
    assert ag.explain("softmax", x.numpy()).backend == "npu"


@pytest.mark.parametrize("place", [lambda x: x, npu.asarray])
@pytest.mark.parametrize("call", [ag.log_softmax, lambda x: ag.workspace_size("log_softmax", x)])
def test_torchs_own_work_is_submitted_before_the_option_is_set(call, place, device, monkeypatch: pytest.MonkeyPatch):
    """Torch's queue is submitted before the library sets the option, since torch's own thread also sets the option."""
    x = torch.randn(64, 65).to("npu")
    there = place(x)
    torch.softmax(x, -1).cpu()
    submitted: list[int] = []

    class Guard(_acl.DeterministicGuard):
        def __enter__(self):
            submitted.append(device.calls("aclnnSoftmax"))
            return super().__enter__()

    monkeypatch.setattr(_acl, "DeterministicGuard", Guard)
    for _ in range(3):
        device.reset()
        held = [torch.softmax(x, -1) for _ in range(50)]
        with npu.use_deterministic():
            call(there)
        del held
    assert submitted == [50] * 3
