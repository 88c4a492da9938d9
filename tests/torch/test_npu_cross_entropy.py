"""Test the loss of logits on tensors of torch_npu: values of the reference, gradients, and no wait."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cross_entropy_problems import check, in_float64, random_arguments
from npu_tensors import Waits, arguments_on_tensors, tensor, values

import ascend_grad as ag
import ascend_grad.torch as agt

pytestmark = pytest.mark.usefixtures("torch_npu")


def as_arrays(result) -> tuple:
    return result._make([None if each is None else values(each) for each in result])


@pytest.mark.parametrize("seed", range(0, 400, 5))
def test_random_problems(seed):
    arguments, _ = random_arguments(seed, targets=(np.int64, np.int32))
    given = arguments_on_tensors(arguments)
    result = ag.cross_entropy(**given)
    assert all(each is None or each.device.type == "npu" for each in result)
    check(as_arrays(result), in_float64(arguments), arguments["input"].dtype.type, widened=True)


@pytest.mark.parametrize("is_dense", [False, True])
def test_nothing_waits(is_dense, torch_npu, device, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 50, 4)).astype(np.float16)
    target = rng.random(x.shape, np.float32) if is_dense else rng.integers(0, 50, (8, 4))
    given = arguments_on_tensors({"input": x, "target": target, "class_weight": rng.random(50)})
    waits = Waits(torch_npu, device, monkeypatch)
    ag.cross_entropy(**given, axis=1, label_smoothing=0.1, lse_square_scale=0.1, outputs=("lse",))
    assert waits.counted() == {}


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd(is_dense, dtype):
    rng = np.random.default_rng(0)
    x, q = rng.standard_normal((6, 9, 3)).astype(np.float32), rng.random((6, 9, 3)).astype(np.float32)
    ids = rng.integers(0, 9, (6, 3))
    ids[0, 0] = -100
    gradients = []
    for place in ("cpu", "npu"):
        logits = torch.from_numpy(x).to(dtype).to(place).requires_grad_()
        target = torch.from_numpy(q if is_dense else ids).to(place)
        loss = agt.cross_entropy(logits, target, label_smoothing=0.1)
        (3 * loss).backward()
        gradients.append((loss.detach().cpu().float(), logits.grad.cpu().float()))
    for host, there in zip(*gradients):
        torch.testing.assert_close(there, host, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_dense", [False, True])
def test_tensors_with_strides(is_dense, label_smoothing):
    rng = np.random.default_rng(0)
    x, token_weight = rng.random((6, 8), np.float32), rng.random(6, np.float32)
    target = rng.random((6, 8), np.float32) if is_dense else rng.integers(0, 8, 6)
    arguments = {"input": x, "target": target, "token_weight": token_weight}
    if label_smoothing:
        arguments["class_weight"] = rng.random(8, np.float32)
    options = {"label_smoothing": label_smoothing, "lse_square_scale": 0.1}
    strided = {name: tensor(np.repeat(value, 2, axis=-1))[..., ::2] for name, value in arguments.items()}
    result = ag.cross_entropy(**strided, **options)
    check(as_arrays(result), in_float64({**arguments, **options}), np.float32)


def test_targets_outside_of_the_classes_make_nan():
    x = torch.zeros(3, 4, device="npu")
    loss, grad = ag.cross_entropy(x, torch.tensor([0, 9, -100], device="npu"), reduction="none")
    assert values(loss)[1:].tolist()[1] == 0
    assert np.isnan(values(loss)[1])
    assert np.isnan(values(grad)[1]).all()
    assert not np.isnan(values(grad)[[0, 2]]).any()


@pytest.mark.parametrize("target", [np.array(0), np.array(1, np.float32)])
def test_one_logit(target):
    logits = torch.tensor(2.0, device="npu", requires_grad=True)
    agt.cross_entropy(logits, tensor(target)).backward()
    assert (logits.grad.shape, values(logits.grad)) == ((), 0)


def test_no_rows():
    result = ag.cross_entropy(torch.zeros(0, 4, device="npu"), torch.zeros(0, dtype=torch.int64, device="npu"))
    assert np.isnan(values(result.loss))
    assert result.input_grad.shape == (0, 4)
