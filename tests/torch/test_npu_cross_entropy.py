"""Test the loss of logits on tensors of torch_npu: values of the reference, both derivatives, and no wait."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from cross_entropy_problems import (
    check,
    check_product,
    in_float64,
    product_in_float64,
    random_arguments,
    random_product,
)
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


@pytest.mark.parametrize("seed", range(0, 400, 5))
def test_random_products(seed):
    """Products of the Hessian and a vector on tensors are the reference's."""
    arguments = random_product(seed, targets=(np.int64, np.int32))
    if arguments["vector"].dtype == np.float64:
        arguments["vector"] = arguments["vector"].astype(np.float32)
    product = ag.cross_entropy_hvp(**arguments_on_tensors(arguments))
    assert product.device.type == "npu"
    assert product.is_contiguous()
    check_product(values(product), product_in_float64(arguments), arguments["input"].dtype.type, widened=True)


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
    vector = tensor(np.ones_like(arguments["input"]))
    waits = Waits(torch_npu, device, monkeypatch)
    ag.cross_entropy(**given, **EVERYTHING, outputs=outputs)
    assert waits.counted() == {}
    del given["grad_entropy"]
    for options in ({}, EVERYTHING):
        ag.cross_entropy_hvp(**given, vector=vector, **options)
    assert waits.counted() == {}


@pytest.mark.parametrize("has_vector", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind, has_vector, monkeypatch):
    """At most four matrices of float32 that the call has made exist at the same time, of a product five."""
    alive = most = 0
    made = TensorQueue.empty

    def empty(queue, shape, dtype):
        nonlocal alive, most
        torch.npu.synchronize()  # work that is under way keeps its matrices
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
    vector = tensor(np.ones_like(arguments["input"]))
    monkeypatch.setattr(TensorQueue, "empty", empty)
    if has_vector:
        del given["grad_entropy"]
        result = ag.cross_entropy_hvp(**given, vector=vector, **EVERYTHING)
    else:
        result = ag.cross_entropy(**given, **EVERYTHING, outputs=outputs).input_grad
    assert result.dtype == torch.float16
    assert most <= 4 + has_vector
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


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_double_backward(kind, reduction, options, device):
    """Derivatives of the gradient with respect to the logits and the upstream gradient are those of float64."""
    arguments, _ = problem_of(kind)
    vector = np.random.default_rng(1).standard_normal(arguments["input"].shape)
    upstream = np.linspace(0.5, 1.5, 32).reshape(8, 4) if reduction == "none" else np.array(1.5)
    found = []
    for place, dtype in (("cpu", torch.float64), ("npu", torch.float32)):
        given = {name: tensor(value, place) for name, value in arguments.items() if name != "axis"}
        given["weight"] = given.pop("class_weight").float()
        logits, above = (tensor(each, place).to(dtype).requires_grad_() for each in (arguments["input"], upstream))
        del given["input"]
        loss = agt.cross_entropy(logits, given.pop("target"), **given, **options, reduction=reduction)
        (gradient,) = torch.autograd.grad((loss * above).sum(), logits, create_graph=True)
        device.reset()
        second = torch.autograd.grad((gradient * tensor(vector, place).to(dtype)).sum(), (logits, above))
        assert (device.calls("aclnnSoftmaxBackward") == 1) == (place == "npu")
        assert all(each.device.type == place for each in second)
        found.append([each.detach().cpu().double() for each in (gradient, *second)])
    for right, there in zip(*found):
        torch.testing.assert_close(there, right, rtol=1e-4, atol=1e-5)


def test_functions_of_second_derivatives():
    """PyTorch's own products and Hessians, a penalty, and the error of third derivatives."""
    x, vector, target = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([1, -100, 3])
    found = []
    for place, loss in (("cpu", torch.nn.functional.cross_entropy), ("npu", agt.cross_entropy)):
        logits, direction, classes = x.to(place), vector.to(place), target.to(place)

        def function(each, loss=loss, classes=classes):
            return loss(each, classes, label_smoothing=0.1)

        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        (function(leaf) + gradient.square().sum()).backward()
        product = torch.autograd.functional.hvp(function, logits, direction)[1]
        found.append([leaf.grad.cpu(), product.cpu(), torch.autograd.functional.hessian(function, logits).cpu()])
    for right, there in zip(*found):
        torch.testing.assert_close(there, right, rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy: the gradient cannot be differentiated once more"):
        product.sum().backward()


def test_second_derivatives_of_a_layer_are_refused():
    """No device computes the product of the layer's Hessian, and nothing is computed on the CPU instead."""
    x, weight, target = torch.randn(5, 4, device="npu"), torch.randn(3, 4, device="npu"), torch.arange(5) % 3
    weight.requires_grad_()
    loss = agt.linear_cross_entropy(x, weight, target.to("npu"))
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(ag.UnsupportedDeviceError, match="linear_cross_entropy_hvp: the function is not implemented"):
        gradient.sum().backward()


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
    vector = rng.standard_normal((8, 6)).astype(np.float32).T
    for softcap in (None, 2.0):
        product = ag.cross_entropy_hvp(**strided, vector=tensor(vector), **options, softcap=softcap)
        call = {**arguments, **options, "vector": vector, "softcap": softcap}
        check_product(values(product), product_in_float64(call), np.float32)


def test_targets_outside_of_the_classes_make_nan():
    x = torch.zeros(3, 4, device="npu")
    loss, grad = ag.cross_entropy(x, torch.tensor([0, 9, -100], device="npu"), reduction="none")
    assert values(loss)[1:].tolist()[1] == 0
    assert np.isnan(values(loss)[1])
    assert np.isnan(values(grad)[1]).all()
    assert not np.isnan(values(grad)[[0, 2]]).any()
    for softcap in (None, 2.0):
        product = ag.cross_entropy_hvp(x, torch.tensor([0, 9, -100], device="npu"), x + 1, softcap=softcap)
        assert np.isnan(values(product)).all(1).tolist() == [False, True, False]


def test_one_of_several_targets_outside_of_the_classes_makes_nan():
    x = torch.zeros(3, 4, device="npu")
    target = torch.tensor([[0, 1], [3, 9], [2, -100]], device="npu")
    result = ag.cross_entropy(
        x, target, target_prob=torch.ones(3, 2, device="npu"), reduction="none", outputs=("log_prob",)
    )
    assert np.isnan(values(result.loss)).tolist() == [False, True, False]
    assert np.isnan(values(result.log_prob)).tolist() == [[False, False], [False, True], [False, False]]
    assert np.isnan(values(result.input_grad)).any(1).tolist() == [False, True, False]
    for softcap in (None, 2.0):
        product = ag.cross_entropy_hvp(x, target, x + 1, target_prob=torch.ones(3, 2, device="npu"), softcap=softcap)
        assert np.isnan(values(product)).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("target", [np.array(0), np.array(1, np.float32)])
def test_one_logit(target):
    logits = torch.tensor(2.0, device="npu", requires_grad=True)
    agt.cross_entropy(logits, tensor(target)).backward()
    assert (logits.grad.shape, values(logits.grad)) == ((), 0)
    product = ag.cross_entropy_hvp(logits.detach(), tensor(target), logits.detach(), lse_square_scale=0.5)
    assert (product.shape, values(product)) == ((), 2)


def test_no_rows():
    result = ag.cross_entropy(torch.zeros(0, 4, device="npu"), torch.zeros(0, dtype=torch.int64, device="npu"))
    assert np.isnan(values(result.loss))
    assert result.input_grad.shape == (0, 4)
    x = torch.zeros(0, 4, device="npu")
    assert ag.cross_entropy_hvp(x, torch.zeros(0, dtype=torch.int64, device="npu"), x).shape == (0, 4)
