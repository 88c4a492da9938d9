"""Test process groups of Ascend NPUs: two processes with one device each, on test doubles of hccl and of devices."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hccl_fork
import pytest
import tensor_ranks
import torch
import torch_npu_real
from hccl_ranks import BACKENDS, LARGE, REDUCTIONS, array_cases, option_values
from parallel_samples import of_tokens, of_vocabulary, tokens_rank
from samples import assert_identical
from stand_in import build
from torch_npu_stand_in import IS_POSSIBLE
from torch_oracles import assert_close, linear_cross_entropy, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import parallel
from ascend_grad.parallel import device_sums

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="this torch knows no backends that are written in Python")


def in_processes(folder: Path, backend: str, what: str) -> list[dict[Any, Any]]:
    """Run two processes and return their outcomes."""
    home = build(torch_npu_real.VARIANT)
    done = subprocess.run(
        [sys.executable, "-W", "error", hccl_fork.__file__, folder, home, backend, what],
        env={"PATH": "/usr/bin:/bin", "ASCEND_HOME_PATH": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def arrays(backend: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(tmp_path_factory.mktemp("arrays"), backend, "arrays")


@pytest.fixture(scope="module")
def tensors(backend: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(tmp_path_factory.mktemp("tensors"), backend, "tensors")


def results_of(outcomes: list[dict[Any, Any]], name: Any) -> list[Any]:
    results = [rank[name] for rank in outcomes]
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays(device_engine, default_engine, arrays, backend):
    for name, (problem, work, _, options) in array_cases(backend).items():
        results = results_of(arrays, name)
        shared = ["loss"]
        if work is tokens_rank:
            share = options.get("reduce_weight_grad", True)
            reduction = problem.arguments["reduction"]
            whole_results = of_tokens(results, reduction, share)
            shared = [*(["loss"] if reduction != "none" else []), *(["weight_grad"] if share is True else [])]
        else:
            share = options.get("reduce_input_grad", True)
            whole_results = of_vocabulary(results, share)
            shared = ["loss", "input_grad"] if share is True else ["loss"]
            if share is False and "put" in options:  # the test adds up parts that the device has rounded
                whole_results = [
                    each._replace(input_grad=each.input_grad.astype(problem.dtype)) for each in whole_results
                ]
        for each in whole_results:
            (device_engine if "put" in options else default_engine).assert_solved(problem, each)
        if options.get("deterministic"):
            for field in shared:
                assert_identical(*(getattr(each, field) for each in results))


def test_matrices_stay_on_their_devices(arrays, backend):
    tokens, _, features = LARGE
    for rank in arrays:
        if backend == "gloo":
            assert min(rank["copied"]) >= tokens * features
        else:
            assert max(rank["copied"]) <= 2 * tokens  # vectors have up to two numbers for each token


def test_arguments_that_are_refused(arrays, backend):
    first, second = (rank["bad argument"] for rank in arrays)
    assert isinstance(second, ag.ParamInvalidError)
    assert isinstance(first, parallel.RankError)
    assert "filter_eps" in str(first)
    for rank in arrays:
        assert type(rank["dtype"]) is ag.ParamTypeError
        assert "input: expected dtype float16 or bfloat16 on a device, got float32" in str(rank["dtype"])
    first, second = (rank["memory"] for rank in arrays)
    if backend == "hccl":
        text = "input: expected an array on torch's current device, 0, as the process group has no CPU"
        assert type(first) is ag.ParamTypeError
        assert text in str(first)
        assert text in str(second)
        for name, got in (("host", "on the host"), ("host, tokens", "on the host"), ("another device", "on device 0")):
            assert type(arrays[1][name]) is ag.ParamTypeError
            assert "expected an array on torch's current device, 1" in str(arrays[1][name])
            assert f"got one {got}" in str(arrays[1][name])
    else:
        text = "memory of input: expected the same on every rank, got on the host on rank 0 and on a device on rank 1"
        assert text in str(first)
        assert str(first) == str(second)
        for name in {"host", "host, tokens", "another device"}.intersection(arrays[0]):
            results_of(arrays, name)


def test_tensors_are_added_in_order():
    parts, out = torch.tensor([[1e8], [1.0], [-1e8]]), torch.zeros(1)
    device_sums._TensorSum._add(None, parts, out)
    assert out.item() == 0


def test_a_device_that_fails(arrays):
    """The failed rank raises its own error, and the other rank raises an error that names the failed rank."""
    failed = 0
    for name in (name for name in arrays[0] if isinstance(name, tuple)):
        first, second = (rank[name] for rank in arrays)
        if isinstance(second, BaseException):
            failed += 1
            assert isinstance(second, ag.AclError), second
            assert type(first) is parallel.RankError, first
            assert first.rank == 1
        else:
            assert not isinstance(first, BaseException), first
    assert failed > 10
    results_of(arrays, "afterwards")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def right_values(dtype: torch.dtype, reduction: str) -> list[torch.Tensor]:
    x, w, target, above = tensor_ranks.problem(dtype, reduction)

    def right(x, w):
        return linear_cross_entropy(x, w, target, reduction=reduction)

    return value_and_gradients(right, [x.double(), w.double()], above.double())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_and_gradients(tensors, dtype, reduction):
    loss, input_grad, weight_grad = right_values(dtype, reduction)
    results = results_of(tensors, (dtype, reduction))
    for value, first, _, second, _ in results:
        assert value.dtype == dtype
        assert_close(value, loss, dtype)
        for grad in (first, second):
            assert_close(grad, input_grad, dtype, steps=8)  # each device has rounded its part
    for backward in (2, 4):
        assert_close(torch.cat([each[backward] for each in results]), weight_grad, dtype, steps=8)


def test_frozen_layers(tensors):
    dtype = torch.bfloat16
    _, input_grad, weight_grad = right_values(dtype, "mean")
    above = tensor_ranks.problem(dtype, "mean")[3].double()
    weights = []
    for (none, weight), (grad, missing) in zip(results_of(tensors, ("frozen", 0)), results_of(tensors, ("frozen", 1))):
        assert none is None
        assert missing is None
        assert_close(grad, input_grad / above, dtype, steps=8)
        weights.append(weight)
    assert_close(torch.cat(weights), weight_grad / above, dtype, steps=8)


def test_losses_alone(tensors):
    x, w, target, _ = tensor_ranks.problem(torch.bfloat16, "mean")
    right = linear_cross_entropy(x.double(), w.double(), target)
    row = linear_cross_entropy(x[0].double(), w.double(), target[0])
    x, w, target, _ = tensor_ranks.problem(torch.float32, "mean")
    lower = linear_cross_entropy(x.bfloat16().double(), w.bfloat16().double(), target)
    for found in results_of(tensors, "losses"):
        assert found[2].dtype == torch.float32
        for loss, expected in zip(found, (right, row, lower), strict=True):
            assert_close(loss, expected, torch.bfloat16)


def test_options(tensors):
    """The device computes options over ranks, and gradients of outputs."""
    dtype = torch.bfloat16
    x, w, target, _ = tensor_ranks.problem(dtype, "mean")
    classes, tokens, of_lse, of_log_prob = (each.double() for each in option_values())
    x, w = (each.double().requires_grad_() for each in (x, w))
    right = agt.linear_cross_entropy(x, w, target, weight=classes, token_weight=tokens, outputs=("log_prob", "lse"))
    total = right.loss + (right.lse * of_lse).sum() + (right.log_prob * of_log_prob).sum()
    input_grad, weight_grad = torch.autograd.grad(total, (x, w))
    results = results_of(tensors, "options")
    for loss, lse, log_prob, grad, _ in results:
        for value, expected in ((loss, right.loss), (lse, right.lse), (log_prob, right.log_prob)):
            assert_close(value, expected.detach(), dtype)
        assert_close(grad, input_grad, dtype, steps=8)  # each device has rounded its part
    assert_close(torch.cat([each[4] for each in results]), weight_grad, dtype, steps=8)


def test_what_the_device_lacks(tensors):
    for rank in tensors:
        assert type(rank["refused"]) is ag.ParamTypeError
        assert "expected dtype float16 or bfloat16 on a device, got float32" in str(rank["refused"])
