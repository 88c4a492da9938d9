"""Test `ascend_grad`'s functions on tensors of torch_npu: results, also where values cannot be read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu_real
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, TOP_K, WHOLE, problem_of
from loss_samples import OF_DEVICE, check_on_device, device_gradients, device_losses, unusual_gradients, unusual_losses
from npu_tensors import BFLOAT16, BT, CASES, H, V, Waits, arguments_of, on_tensors, results_of, tensor, values
from samples import OPERATORS

import ascend_grad as ag
from ascend_grad import npu, parallel
from ascend_grad.backends.ascend.tensor_queue import on_current_stream

pytestmark = pytest.mark.usefixtures("torch_npu")

NAN = float("nan")
BACKWARD = "linear_cross_entropy_backward"


def assert_results(results: list, rights: list[np.ndarray]) -> None:
    assert len(results) == len(rights)
    for result, right in zip(results, rights, strict=True):
        assert result.device.type == "npu"
        assert (tuple(result.shape), str(result.dtype)) == (right.shape, f"torch.{right.dtype}")
        step = {"float32": 1e-5, "float16": 2**-9, "bfloat16": 2**-6}.get(str(right.dtype), 0)
        right = right.astype(np.float32) if right.dtype == BFLOAT16 else right
        np.testing.assert_allclose(values(result), right, rtol=step, atol=step * max(np.abs(right).max(initial=0), 1))


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_every_operator(operator: str, how: dict, dtype: str):
    positional, named = arguments_of(operator, dtype, **how)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    before = [tensor(each) for each in (*positional, *named.values())]
    given = {id(each): tensor(each) for each in (*positional, *named.values())}
    results = on_tensors(operator, positional, named, lambda each: given[id(each)])
    assert all(type(each) is torch.Tensor for each in results)
    assert_results(results, rights)
    for each, copy in zip(given.values(), before):
        if isinstance(each, torch.Tensor):
            assert torch.equal(each.cpu().nan_to_num(), copy.cpu().nan_to_num()), "an input was changed"


def strided(value: Any) -> Any:
    """Return the values as a view of a larger tensor, with steps of 2 and its axes in reverse order."""
    there = tensor(value)
    if not isinstance(there, torch.Tensor) or not there.dim():
        return there
    large = torch.zeros([2 * n + 3 for n in reversed(there.shape)], dtype=there.dtype).to("npu")
    view = large.permute(*reversed(range(there.dim())))[tuple(slice(3, 2 * n + 3, 2) for n in there.shape)]
    view.copy_(there)
    return view


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_any_layout(operator: str, how: dict):
    positional, named = arguments_of(operator, **how)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    assert_results(on_tensors(operator, positional, named, strided), rights)


@pytest.mark.parametrize("place", [tensor, strided])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", OF_DEVICE)
@pytest.mark.parametrize(("function", "calls"), [(WHOLE, device_losses), (BACKWARD, device_gradients)])
def test_options_of_losses(function: str, calls: Callable, option: str, dtype: str, place: Callable):
    for arguments in calls(option, dtype):
        check_on_device(function, arguments, place, values)


@pytest.mark.parametrize(("function", "calls"), [(WHOLE, unusual_losses), (BACKWARD, unusual_gradients)])
def test_unusual_options_of_losses(function: str, calls: Callable):
    """Rows of weight 0 add nothing, whatever they hold. The mean over weights of sum 0 is NaN without a gradient."""
    for arguments in calls("float16"):
        check_on_device(function, arguments, tensor, values)


@pytest.mark.parametrize("operator", [name for name in (*OPERATORS, *LINEAR) if name not in (STATISTICS, WHOLE)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("place", [tensor, strided])
def test_out(operator: str, dtype: torch.dtype | None, place: Callable):
    positional, named = arguments_of(operator)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    outs = [place(right) if dtype is None else place(right.astype(np.float32)) for right in rights]
    for out in outs:
        out.zero_()
    versions = [out._version for out in outs]
    results = on_tensors(operator, positional, named, out=outs[0] if len(outs) == 1 else tuple(outs))
    assert all(result is out for result, out in zip(results, outs, strict=True))
    assert all(out._version > version for out, version in zip(outs, versions))
    if dtype is None or operator == LOSS:
        assert_results(outs, rights)
    else:  # linear operators round to the input's dtype, other operators to float32
        for out, right in zip(outs, rights, strict=True):
            np.testing.assert_allclose(values(out), right.astype(np.float32), rtol=2**-10, atol=1e-3)


def test_out_may_be_an_input_or_none():
    g, y = torch.randn(4, 5), torch.softmax(torch.randn(4, 5), -1)
    right = ag.softmax_backward(g, y).clone()
    there = g.to("npu")
    assert ag.softmax_backward(there, y.to("npu"), out=there) is there
    torch.testing.assert_close(there.cpu(), right)
    positional, named = arguments_of(GRADIENT)
    rights = results_of(ag.fused_linear_cross_entropy_loss_grad(**named, backend="npu"))
    weight_grad = tensor(rights[1])
    assert_results(on_tensors(GRADIENT, positional, named, out=(None, weight_grad)), rights)
    assert_results([weight_grad], rights[1:])
    only = on_tensors(GRADIENT, positional, named, output_mask=(False, True))
    assert_results(only, rights[1:])


def test_no_elements_and_no_rank():
    for shape in ((), (0,), (3, 0, 2)):
        x = torch.randn(shape)
        for result in (ag.softmax(x.to("npu")), ag.softmax(x.to("npu"), out=torch.zeros(shape).to("npu"))):
            assert result.device.type == "npu"
            torch.testing.assert_close(result.cpu(), torch.softmax(x, -1))
    for sizes in ((0, V, H), (BT, V, 0), (0, V, 0)):
        for operator in LINEAR:
            problem = problem_of(operator, sizes, "float16").arguments
            rights = results_of(getattr(ag, operator)(**problem, backend="cpu"))
            assert_results(on_tensors(operator, [], problem), rights)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16, "int64", ">f4", "bool"], ids=str)
def test_arrays_of_the_host_are_copied_once(dtype: str | np.dtype, constant: bool):
    """Host arrays of any layout are copied to the device without another copy on the host."""
    array = (np.full(10**6, 1) if constant else np.arange(10**6) % 200).reshape(1000, 1000).astype(dtype)
    strided = array.T, array[::-1, 3:], np.broadcast_to(array[0, 1], (3, 4)), array[0, 1], array[:0]
    with on_current_stream(0) as queue:
        for each in (array, *strided):
            there = queue.from_host(each)
            assert there.dtype == each.dtype.newbyteorder("=")
            found = values(there.tensor)
            np.testing.assert_array_equal(found, each.astype(found.dtype))
        tracemalloc.start()
        queue.from_host(array)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if torch_npu_real.IS_INSTALLED:  # the double of torch_npu copies on the host
        assert peak < 1.5 * array.nbytes


def test_arguments_that_are_no_tensors_stay_as_they_are():
    x = torch.randn(2, 3)
    assert ag.explain("softmax", x.to("npu")) == ("npu", "its arrays are on device 0")
    assert ag.softmax(x.to("npu:1"), dim=0, backend="npu", num_threads=1).device == torch.device("npu:1")
    with pytest.raises(ag.BackendUnavailableError, match=r"'cpu' .* arrays are on device 0 \(copy them to the host"):
        ag.softmax(x.to("npu"), backend="cpu")


@pytest.mark.parametrize("function", ["linear_cross_entropy", "data_parallel_linear_cross_entropy"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_over_ranks(function: str, reduction: str):
    """Functions over ranks return the same losses as the function of one rank.

    These functions wait for the device, since a few numbers of each token pass through the host.
    """
    _, named = arguments_of(WHOLE, reduction=reduction)
    named.pop("vocab_start_index")
    named["target"] = np.where(named["target"] < 0, named["target"], named["target"] - 100)
    rights = results_of(ag.linear_cross_entropy(**named, backend="npu"))
    input, weight, target = (named.pop(name) for name in ("input", "weight", "target"))
    options = {name: tensor(each) for name, each in named.items()}
    results = getattr(parallel, function)(*map(tensor, (input, weight, target)), **options, comm=None)
    assert_results(results_of(results), rights)


# ---- calls that cannot read values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stored", "recomputed"])
def test_rows_without_gradient_hold_anything(mode: str):
    _, named = arguments_of(GRADIENT, "bfloat16", mode=mode)
    absent = named["grad"] == 0
    absent[:3] = True
    named["grad"] = np.where(absent, np.float32(-0.0), named["grad"])
    rights = results_of(ag.fused_linear_cross_entropy_loss_grad(**named, backend="npu"))
    for name in ("input", "softmax", "logits_max", "sum_exp_logits"):
        if name in named:
            named[name] = named[name].copy()
            named[name][absent] = NAN
    results = on_tensors(GRADIENT, [], named)
    assert_results(results, rights)
    assert not values(results[0])[absent].any()
    assert not np.signbit(values(results[0])[absent]).any()
    named["grad"] = np.zeros_like(named["grad"])
    named["weight"] = np.full_like(named["weight"], NAN)
    for result in on_tensors(GRADIENT, [], named):
        assert not values(result).any()


@pytest.mark.parametrize("mask", ["bool", "bits"])
@pytest.mark.parametrize("wrong", [-1, V, 2**40, -(2**63)])
def test_targets_outside_of_the_weight_make_nan(wrong: int, mask: str):
    """An invalid target in a tensor makes its row NaN, since an exception would need a wait for the values.

    No memory outside of the weight is accessed.
    """
    _, named = arguments_of(GRADIENT, mask=mask)
    bits = named["target_mask"] if mask == "bool" else np.unpackbits(named["target_mask"], bitorder="little")[:BT] != 0
    row = int(np.flatnonzero(~bits)[1])
    named["masked_target"] = named["masked_target"].copy()
    named["masked_target"][row] = wrong
    with pytest.raises(ag.ParamInvalidError, match=f"masked_target: expected .*, got {wrong} in row {row}"):
        ag.fused_linear_cross_entropy_loss_grad(**named)
    input_grad, weight_grad = on_tensors(GRADIENT, [], named)
    assert np.isnan(values(input_grad)).all(1).tolist() == (np.arange(BT) == row).tolist()
    assert np.isnan(values(weight_grad)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wrong", [99, 100 + V, 2**40, -(2**63)])
def test_targets_outside_of_the_vocabulary_make_nan(wrong: int, reduction: str):
    _, named = arguments_of(WHOLE, reduction=reduction)
    row = int(np.flatnonzero(named["target"] != -7)[2])
    named["target"] = named["target"].copy()
    named["target"][row] = wrong
    loss, input_grad, weight_grad = on_tensors(WHOLE, [], named)
    assert np.isnan(values(loss)).tolist() == ((np.arange(BT) == row).tolist() if reduction == "none" else True)
    assert np.isnan(values(input_grad)).all(1).tolist() == (np.arange(BT) == row).tolist()
    assert np.isnan(values(weight_grad)).all()
    named["token_weight"] = (np.arange(BT) != row).astype(np.float32)  # the target is wrong in a row of weight 0, too
    named["class_weight"] = np.ones(V, np.float32)
    _, input_grad, weight_grad, lse, log_prob = on_tensors(WHOLE, [], named, outputs=("lse", "log_prob"))
    assert not np.isnan(values(lse)).any()
    assert np.isnan(values(log_prob)).tolist() == (np.arange(BT) == row).tolist()
    named |= {"lse": values(lse), "grad_lse": np.ones(BT, np.float32)}
    for gradients in ((input_grad, weight_grad), on_tensors(BACKWARD, [], named)):
        assert np.isnan(values(gradients[0])).all(1).tolist() == (np.arange(BT) == row).tolist()
        assert np.isnan(values(gradients[1])).all()


@pytest.mark.parametrize("operator", ["cross_entropy", WHOLE, BACKWARD, TOP_K])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_calls_without_rows_do_not_wait(operator: str, reduction: str, torch_npu, device, monkeypatch):
    """No value decides anything if there are no rows, the weights of classes neither."""
    x, w, numbers = np.zeros((0, V), np.float16), np.ones((V, V), np.float16), np.ones(V, np.float32)
    ids, rows = np.zeros(0, int), np.zeros(0, np.float32)
    named = {"input": x, "target": ids, "class_weight": numbers, "token_weight": rows, "reduction": reduction}
    if operator == TOP_K:
        named = {"input": x, "weight": w, "k": 3, "bias": numbers}
    elif operator != "cross_entropy":
        named |= {"weight": w} | ({"lse": rows, "grad_lse": rows} if operator == BACKWARD else {})
    rights = results_of(getattr(ag, operator)(**named))
    there = {name: tensor(each) for name, each in named.items()}
    waits = Waits(torch_npu, device, monkeypatch)
    results = results_of(getattr(ag, operator)(**there, backend="npu"))
    assert waits.counted() == {}
    assert_results(results, [np.asarray(each) for each in rights])


@pytest.mark.parametrize("extents", [(130, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("wrong", [500, -5, -(2**63)])
def test_targets_outside_of_a_weight_without_elements_make_nan(wrong: int, extents: tuple[int, int]):
    extent, hidden = extents
    x, w = np.zeros((3, hidden), np.float16), np.zeros((extent, hidden), np.float16)
    target = np.array([3 if extent else -100, wrong, -100])
    outputs = {"outputs": ("lse", "log_prob"), "class_weight": np.arange(extent, dtype=np.float32)}
    for reduction, isnan in (("none", [False, True, False]), ("sum", True), ("mean", True)):
        loss, *gradients, lse, log_prob = on_tensors(WHOLE, [x, w, target], outputs | {"reduction": reduction})
        assert np.isnan(values(loss)).tolist() == isnan
        assert np.isnan(values(log_prob)).tolist() == [False, True, False]
        assert values(lse)[1] == (np.float32(np.log(extent)) if extent else -np.inf)
        options = {"reduction": reduction, "lse": np.ones(3, np.float32), "grad_lse": np.ones(3, np.float32)}
        for input_grad, weight_grad in (gradients, on_tensors(BACKWARD, [x, w, target], options)):
            assert values(weight_grad).shape == w.shape
            assert np.isnan(values(input_grad)).tolist() == np.full((3, hidden), [[False], [True], [False]]).tolist()
    ones, mask = np.ones(3, np.float32), np.array([not extent, False, True])
    statistics = {"logits_max": ones, "sum_exp_logits": ones}
    input_grad, _ = on_tensors(GRADIENT, [ones, x, w, mask, target], statistics)
    assert np.isnan(values(input_grad)).tolist() == np.full((3, hidden), [[False], [True], [False]]).tolist()


@pytest.mark.parametrize("number", [1e300, 1e-46])
def test_a_gradient_and_a_denominator_beyond_float32(number: float):
    _, named = arguments_of(WHOLE, reduction="mean")
    rights = results_of(ag.linear_cross_entropy(**named | {"grad_loss": 1.0, "denominator": 1.0}, backend="npu"))
    assert_results(on_tensors(WHOLE, [], named | {"grad_loss": number, "denominator": number})[1:], rights[1:])


def test_bits_beyond_the_last_row_are_cleared():
    _, named = arguments_of(STATISTICS)
    named["target"] = np.full_like(named["target"], -5)
    mask = ag.fused_linear_online_max_sum(**{name: tensor(each) for name, each in named.items()}).target_mask
    assert mask.cpu().tolist() == [255, 2 ** (BT - 8) - 1]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_upstream_gradient_may_be_on_the_device(reduction: str, dtype: torch.dtype):
    _, named = arguments_of(WHOLE, reduction=reduction)
    named["grad_loss"] = 0.5
    rights = results_of(ag.linear_cross_entropy(**named, backend="npu"))
    named["grad_loss"] = torch.tensor(0.5, dtype=dtype).to("npu")
    assert_results(on_tensors(WHOLE, [], named), rights)
    there = {name: npu.asarray(each) if isinstance(each, np.ndarray) else each for name, each in named.items()}
    there["grad_loss"] = npu.asarray(np.float32(0.5))
    for result, right in zip(ag.linear_cross_entropy(**there), rights, strict=True):
        np.testing.assert_array_equal(result.numpy(), right)
    with pytest.raises(ag.ParamTypeError, match="grad_loss: expected dtype float32"):
        on_tensors(WHOLE, [], named | {"grad_loss": torch.tensor(1).to("npu")})
    with pytest.raises(ag.ParamTypeError, match=r"grad_loss: expected an array on device 0, like input, got one"):
        on_tensors(WHOLE, [], named | {"grad_loss": torch.tensor(1.0).to("npu:1")})


def test_all_rows_ignored():
    x, w, target = torch.randn(3, 4).half().to("npu"), torch.randn(9, 4).half().to("npu"), torch.full((3,), -100)
    for reduction, right in (("mean", NAN), ("sum", 0.0), ("none", [0.0] * 3)):
        loss, *grads = ag.linear_cross_entropy(x, w, target.to("npu"), reduction=reduction)
        np.testing.assert_array_equal(values(loss), right)
        assert not any(values(grad).any() for grad in grads)
