"""Make calls on tensors of torch_npu that return arrays, count waits, and let calls of the runtime fail."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, problem_of
from npu_samples import attempts_with_a_fault
from samples import MASKED, OPERATORS, random_problem

import ascend_grad as ag

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BT, V, H = 13, 130, 6

CASES = [(name, {}) for name in (*OPERATORS, STATISTICS, LOSS)]
CASES += [(GRADIENT, {"mode": mode, "mask": mask}) for mode in ("stored", "recomputed") for mask in ("bool", "bits")]
CASES += [(WHOLE, {"reduction": reduction}) for reduction in ("mean", "sum", "none")]

#: Functions of the runtime that wait or copy.
WAITING = (
    *("aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeDevice", "aclrtMemset"),
    *("aclrtSynchronizeDeviceWithTimeout", "aclrtSynchronizeEvent", "aclrtMemcpy", "aclrtMemcpyAsync"),
)


def tensor(value: Any, device: str = "npu") -> Any:
    """Return an array as a tensor on the device, and any other value unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    value = np.array(value)
    if value.dtype == BFLOAT16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(value).to(device)


def arguments_on_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name with tensors for their arrays. Arrays of float64 become float32, as the device needs."""
    return {
        name: tensor(value.astype(np.float32) if value.dtype == np.float64 else value)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }


def values(result: Any) -> np.ndarray:
    host = result.cpu()
    return host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy()


def results_of(value: Any) -> list[Any]:
    return [each for each in (value if isinstance(value, tuple) else (value,)) if each is not None]


def arguments_of(operator: str, dtype: str = "float16", **how: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    if operator in OPERATORS:
        problem = random_problem(operator, (2, 3, 5, 16) if operator in MASKED else (7, 5, 9), dtype)
        return list(problem.arrays), dict(problem.settings)
    return [], dict(problem_of(operator, (BT, V, H), dtype, **how).arguments)


def on_tensors(operator: str, positional: list, named: dict, place: Callable = tensor, **more: Any) -> list:
    moved = {name: place(each) for name, each in named.items()}
    return results_of(getattr(ag, operator)(*map(place, positional), **moved, **more))


def bound_context() -> int | None:
    context = ctypes.c_void_p()
    ctypes.CDLL("libascendcl.so").aclrtGetCurrentContext(ctypes.byref(context))
    return context.value


def call_of(operator: str, how: dict) -> Callable[[], list]:
    """Return a function that calls an operator on tensors, which are made only once."""
    positional, named = arguments_of(operator, **how)
    given = {id(each): tensor(each) for each in (*positional, *named.values())}
    return lambda: on_tensors(operator, positional, named, lambda each: given[id(each)])


def fails_and_recovers(call: Callable[[], list], functions: Sequence[str], device, torch_npu) -> int:
    """Let each call of these functions fail once, in a separate attempt. Return the number of attempts that raise."""

    def left() -> dict[str, int]:
        for index in (0, 1):
            torch_npu.npu.synchronize(index)
        return {name: device.counter(name) for name in ("tensors", "executors", "streams", "contexts", "in_flight")}

    rights = [values(each) for each in call()]
    before, context, struck = left(), bound_context(), 0
    for function in functions:
        check = partial(assert_clear, function=function)
        for has_raised in attempts_with_a_fault(device, function, 507899, call, check):
            struck += has_raised
            device.reset()
            assert left() == before
            assert (torch_npu.npu.current_device(), bound_context()) == (0, context)
            for result, right in zip(call(), rights, strict=True):
                np.testing.assert_array_equal(values(result), right)
            assert device.violations() == []
    return struck


def assert_clear(error: ag.AclError, function: str) -> None:
    assert error.call == function
    assert "a fault was injected here" in error.runtime_message
    assert (error.code == 507899) or function.startswith("aclCreate")  # these return no code


def chain_arguments() -> list[torch.Tensor]:
    x, w = torch.randn(BT, H).bfloat16(), torch.randn(V, H).bfloat16()
    return [x, w, torch.randint(0, V, (BT,)), torch.randn(BT)]


class Waits:
    """Count waits and copies of the library since the start, without the calls that the double of torch_npu makes."""

    def __init__(self, torch_npu, device, monkeypatch: pytest.MonkeyPatch):
        self._device, self._of_the_double = device, Counter[str]()
        device.reset()
        acl = getattr(torch_npu, "acl", None)
        if acl is not None:
            original = acl.check

            def check(name: str, *arguments) -> None:
                self._of_the_double[name] += 1
                original(name, *arguments)

            monkeypatch.setattr(acl, "check", check)

    def counted(self) -> dict[str, int]:
        counts = {name: self._device.calls(name) - self._of_the_double[name] for name in WAITING}
        return {name: count for name, count in counts.items() if count}
