"""Test the largest log-probabilities of tensors of torch_npu: values of the reference, ties, gradients, and no wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from npu_tensors import Waits, arguments_on_tensors, tensor, values
from top_k_problems import check, in_rows, random_arguments

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import top_k

pytestmark = pytest.mark.usefixtures("torch_npu")


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_random_problems(seed, monkeypatch):
    if seed % 8:
        monkeypatch.setattr(top_k, "LOGIT_BYTES", 1 << 16)  # blocks of some rows and columns
    arguments = in_rows(random_arguments(seed))
    results = ag.linear_top_k(**arguments_on_tensors(arguments))
    assert all(each.device.type == "npu" for each in results)
    check([values(each) for each in results], arguments)


def test_strided_tensors():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-1, 2, (3, 6)).astype(np.float32), rng.integers(-1, 2, (3, 400)).astype(np.float32)
    given = tensor(x)[:, ::2], tensor(w).t()
    results = ag.linear_top_k(*given, 9)
    arguments = {"input": x[:, ::2], "weight": w.T, "k": 9}
    check([values(each) for each in results], arguments)


def test_arrays_over_strided_tensors():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-1, 2, (3, 6)).astype(np.float32), rng.integers(-1, 2, (3, 400)).astype(np.float32)
    results = ag.linear_top_k(npu.asarray(tensor(x)[:, ::2]), npu.asarray(tensor(w).t()), 9)
    check(results, {"input": x[:, ::2], "weight": w.T, "k": 9})


def test_nothing_waits(torch_npu, device, monkeypatch):
    rng = np.random.default_rng(0)
    arguments = {
        "input": rng.integers(-1, 2, (8, 4)).astype(np.float16),
        "weight": rng.integers(-1, 2, (50, 4)).astype(np.float16),
        "temperature": np.ones(8, np.float32),
        "bias": np.ones(50, np.float32),
    }
    given = arguments_on_tensors(arguments)
    waits = Waits(torch_npu, device, monkeypatch)
    ag.linear_top_k(**given, k=3, logit_scale=2.0, softcap=3.0)
    assert waits.counted() == {}


def test_no_rows():
    log_prob, index = ag.linear_top_k(torch.zeros(0, 4, device="npu"), torch.zeros(5, 4, device="npu"), 2)
    assert log_prob.shape == index.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_function_of_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in ((6, 3), (300, 3)))
    log_prob, index = agt.linear_top_k(x.to("npu"), w.to("npu"), 7, temperature=0.5)
    right = agt.linear_top_k(x, w, 7, temperature=0.5)
    assert torch.equal(index.cpu(), right.index)
    torch.testing.assert_close(log_prob.cpu(), right.log_prob, rtol=1e-5, atol=1e-5)


def test_gradients_are_refused():
    x, w = torch.ones(2, 3, device="npu", requires_grad=True), torch.ones(5, 3, device="npu")
    with pytest.raises(NotImplementedError, match="linear_top_k: gradients are not supported on an Ascend NPU"):
        agt.linear_top_k(x, w, 2)
    with torch.no_grad():
        assert agt.linear_top_k(x, w, 2).index.tolist() == [[0, 1]] * 2
