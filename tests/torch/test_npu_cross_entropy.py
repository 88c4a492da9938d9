"""Test the loss of logits on tensors of torch_npu: values of the reference, gradients, and no wait."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from cross_entropy_problems import check, in_float64, random_arguments
from npu_tensors import Waits, arguments_on_tensors, tensor, values

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad.backends.ascend.tensor_queue import TensorQueue

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


KINDS = ("one target", "several targets", "all classes")


def problem_of(kind: str) -> tuple[dict, tuple[str, ...]]:
    """Return the arguments of a call, and all outputs that it has."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 50, 4)).astype(np.float16)
    arguments = {"input": x, "axis": 1, "target": rng.integers(0, 50, (8, 4)), "class_weight": rng.random(50)}
    outputs = ("lse", "entropy", "predicted")
    if kind == "all classes":
        return arguments | {"target": rng.random(x.shape, np.float32)}, outputs
    if kind == "one target":
        return arguments, (*outputs, "log_prob", "correct")
    several = {"target": rng.integers(0, 50, (8, 4, 3)), "target_prob": rng.random((8, 4, 3), np.float32)}
    return arguments | several, (*outputs, "log_prob")


EVERYTHING = {"softcap": 3.0, "temperature": 2.0, "label_smoothing": 0.1, "lse_square_scale": 0.1}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits(kind, torch_npu, device, monkeypatch):
    arguments, outputs = problem_of(kind)
    given = arguments_on_tensors(arguments | {"grad_entropy": np.ones((8, 4))})
    waits = Waits(torch_npu, device, monkeypatch)
    ag.cross_entropy(**given, **EVERYTHING, outputs=outputs)
    assert waits.counted() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind, monkeypatch):
    """At most four matrices of float32 that the call has made exist at the same time."""
    alive = most = 0
    made = TensorQueue.empty

    def empty(queue, shape, dtype):
        nonlocal alive, most
        result = made(queue, shape, dtype)
        if result.size == 8 * 50 * 4 and dtype == np.float32:
            alive += 1
            most = max(most, alive)
            weakref.finalize(result.tensor, dropped)
        return result

    def dropped():
        nonlocal alive
        alive -= 1

    arguments, outputs = problem_of(kind)
    given = arguments_on_tensors(arguments | {"grad_entropy": np.ones((8, 4))})
    monkeypatch.setattr(TensorQueue, "empty", empty)
    result = ag.cross_entropy(**given, **EVERYTHING, outputs=outputs)
    assert result.input_grad.dtype == torch.float16
    assert most <= 4
    assert alive == 0


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


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_outputs(kind):
    arguments, outputs = problem_of(kind)
    gradients = []
    for place in ("cpu", "npu"):
        given = {name: tensor(value, place) for name, value in arguments.items() if name != "axis"}
        given["weight"] = given.pop("class_weight").float()
        logits = given.pop("input").float().requires_grad_()
        results = agt.cross_entropy(logits, given.pop("target"), **given, **EVERYTHING, outputs=outputs)
        kept = [name for name in outputs if name not in ("predicted", "correct")]
        total = results.loss + sum(((i + 1) * getattr(results, name)).sum() for i, name in enumerate(kept))
        total.backward()
        gradients.append((total.detach().cpu().double(), logits.grad.cpu().double()))
    for host, there in zip(*gradients):
        torch.testing.assert_close(there, host, rtol=1e-4, atol=1e-5)


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


def test_one_of_several_targets_outside_of_the_classes_makes_nan():
    x = torch.zeros(3, 4, device="npu")
    target = torch.tensor([[0, 1], [3, 9], [2, -100]], device="npu")
    result = ag.cross_entropy(
        x, target, target_prob=torch.ones(3, 2, device="npu"), reduction="none", outputs=("log_prob",)
    )
    assert np.isnan(values(result.loss)).tolist() == [False, True, False]
    assert np.isnan(values(result.log_prob)).tolist() == [[False, False], [False, True], [False, False]]
    assert np.isnan(values(result.input_grad)).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("target", [np.array(0), np.array(1, np.float32)])
def test_one_logit(target):
    logits = torch.tensor(2.0, device="npu", requires_grad=True)
    agt.cross_entropy(logits, tensor(target)).backward()
    assert (logits.grad.shape, values(logits.grad)) == ((), 0)


def test_no_rows():
    result = ag.cross_entropy(torch.zeros(0, 4, device="npu"), torch.zeros(0, dtype=torch.int64, device="npu"))
    assert np.isnan(values(result.loss))
    assert result.input_grad.shape == (0, 4)
