"""Test arrays on the device, and calls on them."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, gradient_problem
from npu_samples import BFLOAT16, COPIES, X, chain, chain_arguments, counts, problem_for, results_of, to_device
from samples import assert_identical

import ascend_grad as ag
from ascend_grad import npu


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool", ">f4", ">i8"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 4, 5)], ids=str)
def test_there_and_back(dtype, shape, device):
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = npu.asarray(values)
    assert (array.shape, array.ndim, array.size, array.nbytes) == (shape, len(shape), values.size, values.nbytes)
    assert array.dtype == dtype.newbyteorder("=")
    assert array.device == 0
    assert repr(array) == f"DeviceArray(shape={shape}, dtype={array.dtype}, device=0)"
    assert npu.asarray(array) is array
    for _ in range(2):
        back = array.numpy()
        assert_identical(back, values)
        assert back.flags.c_contiguous
        assert back.flags.writeable


def test_what_cannot_be_an_array_on_the_device(device):
    for value in (np.zeros(3), np.zeros(3, complex), "text", np.zeros(3, np.uint16)):
        with pytest.raises(ag.ParamTypeError, match=r"^npu\.asarray: x: expected one of the device's dtypes float32, "):
            npu.asarray(value)
    with pytest.raises(ag.ParamInvalidError, match="rank 0 to 8, got rank 9"):
        npu.asarray(np.zeros((1,) * 9, np.float32))
    with pytest.raises(ag.ParamTypeError, match="x: expected an array, got list, which cannot be converted"):
        npu.asarray([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("name", ["shape", "dtype", "device", "ndim", "size", "nbytes", "anything"])
def test_an_array_on_the_device_cannot_be_changed(name, device):
    with pytest.raises(AttributeError):
        setattr(npu.asarray(X), name, 3)


def test_nothing_is_copied_unasked(device):
    array = npu.asarray(X)
    device.reset()
    for use in (np.asarray, np.exp, lambda a: a + X, lambda a: X + a, bool, float, pickle.dumps):
        with pytest.raises(TypeError):
            use(array)
    assert device.calls() == 0


def test_calls_on_the_device(any_operator, device):
    """Calls on device arrays give the results of host arrays. Only the whole loss copies data over the bus."""
    args, kwargs = problem_for(any_operator)
    if "grad" in kwargs:
        kwargs["grad"] = np.ones_like(kwargs["grad"])  # rows without a gradient would be copied separately
    function = getattr(ag, any_operator)
    expected = results_of(function(*args, **kwargs, backend="npu"))
    card_args, card_kwargs = to_device(args, kwargs)
    before = [a.numpy().tobytes() for a in (*card_args, *card_kwargs.values()) if isinstance(a, npu.DeviceArray)]
    if any_operator == GRADIENT:
        function(*card_args, **card_kwargs)  # targets on masked rows are repaired once
    device.reset()
    assert ag.explain(any_operator, *card_args, **card_kwargs) == ("npu", "its arrays are on device 0")
    results = function(*card_args, **card_kwargs)
    for result in results if isinstance(results, tuple) else (results,):
        assert result is None or isinstance(result, npu.DeviceArray)
    if any_operator != WHOLE:
        within = {"copies_d2d": 1} if any_operator == GRADIENT else {}  # the softmax is copied
        assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0) | within
    for result, right in zip(results_of(results), expected, strict=True):
        assert_identical(result, right)
    after = [a.numpy().tobytes() for a in (*card_args, *card_kwargs.values()) if isinstance(a, npu.DeviceArray)]
    assert after == before


def test_masks_and_targets_go_to_the_device_once(device):
    """Masks of bools are packed, and targets of masked rows repaired, once for each mask."""
    input, weight, target, grad = chain_arguments()
    first, second = np.arange(37) % 3 == 0, np.arange(37) % 4 != 0
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, 200)
    statistics = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
    target[first & second] = 10**6
    everything = (grad, input, weight, first, second, target)
    there = [npu.asarray(array) for array in everything]
    _, on_device = to_device((), statistics)
    for mask, mask_there in [(first, there[3]), (second, there[4]), (first, there[3])]:
        expected = ag.fused_linear_cross_entropy_loss_grad(*everything[:3], mask, target, **statistics)
        for again in (False, True):
            device.reset()
            results = ag.fused_linear_cross_entropy_loss_grad(*there[:3], mask_there, there[5], **on_device)
            assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0) | ({} if again else {"copies_h2d": 1})
            for result, right in zip(results, expected, strict=True):
                assert_identical(result.numpy(), right)
    assert_identical(there[5].numpy(), target)


def test_repaired_targets_last_until_the_call_ends(device):
    """A call keeps its repaired targets, even if another thread's call with another mask replaces them."""
    input, weight, target, grad = chain_arguments()
    masks = [np.arange(37) % 3 == 0, np.arange(37) % 3 != 1]
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, 200)
    statistics = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
    target[masks[0]] = -1
    expected = [
        ag.fused_linear_cross_entropy_loss_grad(grad, input, weight, mask, target, **statistics) for mask in masks
    ]
    there = [npu.asarray(array) for array in (grad, input, weight, target, *masks)]
    _, on_device = to_device((), statistics)

    def call(i: int):
        return ag.fused_linear_cross_entropy_loss_grad(*there[:3], there[4 + i], there[3], **on_device)

    results = {1: call(1), 0: call(0)}
    device.set_delay(400_000)
    launched = device.calls("aclnnFusedLinearCrossEntropyLossGrad")
    thread = threading.Thread(target=lambda: results.update({0: call(0)}))
    thread.start()
    try:
        while device.calls("aclnnFusedLinearCrossEntropyLossGrad") == launched:
            time.sleep(0.001)
        device.set_delay(0)
        results[1] = call(1)
        npu.release()  # memory in the pool goes back to the device
    finally:
        thread.join()
        device.set_delay(200)
    assert device.violations() == []
    for i in range(2):
        for result, right in zip(results[i], expected[i], strict=True):
            assert_identical(result.numpy(), right)


@pytest.mark.parametrize("ignored", [False, True])
def test_losses_of_single_rows(ignored, device):
    """Losses stay on the device, unless the host has to insert the losses of ignored rows."""
    input, weight, target, _ = chain_arguments()
    if ignored:
        target[[3, 4, 36]] = -100
    expected = ag.linear_cross_entropy(input, weight, target, reduction="none", backend="npu")
    there = [npu.asarray(array) for array in (input, weight, target)]
    device.reset()
    results = ag.linear_cross_entropy(*there, reduction="none")
    copies = counts(device, *COPIES)
    runs = copies.pop("copies_d2d")
    if ignored:
        # Targets, upstream gradients and all losses go to the device. Losses of rows that are not ignored come back.
        assert copies == {"copies_h2h": 0, "copies_h2d": 3, "copies_d2h": 1}
        assert runs == 2 * 2  # adjacent rows are copied to a smaller problem and back
    else:
        assert copies == {"copies_h2h": 0, "copies_h2d": 1, "copies_d2h": 0}
        assert device.counter("bytes_h2d") == 4 * target.size  # only the upstream gradients of the losses are copied
        assert runs == 0
    for result, right in zip(results, expected, strict=True):
        assert_identical(result.numpy(), right)


@pytest.mark.parametrize("names", [("grad_lse",), ("grad_log_prob",), ("grad_lse", "grad_log_prob")], ids=str)
def test_gradients_of_outputs(names, device):
    """Gradients stay on the device, unless the host has to add up gradients of the lse and of the log-probabilities."""
    input, weight, target, _ = chain_arguments()
    there = {"input": npu.asarray(input), "weight": npu.asarray(weight), "target": npu.asarray(target)}
    vectors = {name: np.linspace(1, 2, target.size, dtype=np.float32) for name in ("lse", *names)}
    expected = ag.linear_cross_entropy_backward(input, weight, target, **vectors, backend="npu")
    there |= {name: npu.asarray(each) for name, each in vectors.items()}
    device.reset()
    results = ag.linear_cross_entropy_backward(**there)
    assert device.counter("bytes_d2h") == (2 * input.nbytes if len(names) > 1 else 0)
    for result, right in zip(results[:2], expected[:2], strict=True):
        assert_identical(result.numpy(), right)


@pytest.mark.parametrize("zeros", [False, True], ids=["every row", "rows without a gradient"])
def test_a_chain_stays_on_the_device(zeros, device):
    arguments = chain_arguments(zeros=zeros)
    expected = chain(*arguments)
    there = [npu.asarray(array) for array in arguments]
    chain(*there)
    device.reset()
    results = chain(*there)
    copies = counts(device, *COPIES)
    assert counts(device, "mallocs", "host_mallocs") == {"mallocs": 0, "host_mallocs": 0}
    assert copies["copies_h2h"] == 0
    if zeros:  # the host removes the bits of these rows from the mask
        assert (copies["copies_h2d"], copies["copies_d2h"]) == (1, 1)
        assert device.counter("bytes_d2h") == 5
    else:
        assert copies == dict.fromkeys(COPIES, 0)
    for result, right in zip(results, expected, strict=True):
        assert_identical(result.numpy(), right)
    if zeros:
        rows = arguments[-1] == 0
        assert not np.any(results[1].numpy()[rows].view(np.uint16))


def test_a_softmax_on_the_device_survives(device):
    """The library passes a copy of the softmax, made on the device, since the operator overwrites this argument."""
    problem = gradient_problem((9, 130, 16), "bfloat16", "stored")
    # Targets of masked rows are also valid, so that no target needs a repair.
    target = np.clip(problem.arguments["masked_target"], 0, 129)
    arguments = problem.arguments | {"grad": np.ones(9, np.float32), "masked_target": target}
    _, there = to_device((), arguments)
    softmax = there["softmax"]
    bits = np.packbits(arguments["target_mask"], bitorder="little")
    there["target_mask"] = npu.asarray(bits if arguments["target_mask"].dtype == bool else arguments["target_mask"])
    device.reset()
    ag.fused_linear_cross_entropy_loss_grad(**there)
    assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": 0, "copies_d2h": 0, "copies_d2d": 1}
    assert_identical(softmax.numpy(), arguments["softmax"])


def test_pad_bits_are_zero(device):
    input, weight, target, _ = chain_arguments()
    target[:] = 10**6  # all targets lie in other shards
    for place in (lambda a: a, npu.asarray):
        mask = ag.fused_linear_online_max_sum(*map(place, (input, weight, target)), 0, 200).target_mask
        mask = mask.numpy() if isinstance(mask, npu.DeviceArray) else mask
        assert_identical(mask, np.packbits(np.ones(37, bool), bitorder="little"))


def test_foreign_targets_are_checked(device):
    input, weight, target, grad = chain_arguments()
    s = ag.fused_linear_online_max_sum(*map(npu.asarray, (input, weight, target)), 0, 200)
    wrong = target.copy()
    wrong[5] = 200
    arguments = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
    rest = npu.asarray(grad), npu.asarray(input), npu.asarray(weight)
    with pytest.raises(ag.ParamInvalidError, match=r"masked_target: .*, got 200 in row 5"):
        ag.fused_linear_cross_entropy_loss_grad(*rest, s.target_mask, npu.asarray(wrong), **arguments)
    # Targets that were valid for a larger shard are refused for a smaller one.
    smaller = npu.asarray(weight[:150])
    with pytest.raises(ag.ParamInvalidError, match="masked_target"):
        ag.fused_linear_cross_entropy_loss_grad(*rest[:2], smaller, s.target_mask, s.masked_target, **arguments)


def test_arrays_do_not_mix(device):
    there = npu.asarray(X)
    with pytest.raises(ag.ParamTypeError, match=r"output: expected an array on device 0, like grad_output, got one "):
        ag.softmax_backward(there, X)
    with pytest.raises(ag.ParamTypeError, match=r"grad_output: expected an array on device 0"):
        ag.softmax_backward(X, there)
    with pytest.raises(ag.ParamTypeError, match="out: expected None"):
        ag.softmax(there, out=np.empty_like(X))
    with pytest.raises(ag.ParamTypeError, match="out: expected None"):
        ag.softmax(there, out=there)
    for name in ("cpu", "reference"):
        with pytest.raises(ag.BackendUnavailableError, match="its arrays are on device 0"):
            ag.softmax(there, backend=name)
    npu.set_device(1)
    try:
        other = npu.asarray(X)
        with pytest.raises(ag.ParamTypeError, match="expected an array on device 0, like grad_output, got one on "):
            ag.softmax_backward(there, other)
        # A call runs on the device of its arrays, whatever this thread's device is.
        assert ag.softmax(there).device == 0
        assert ag.softmax(other).device == 1
    finally:
        npu.set_device(0)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (GRADIENT, "softmax"),
        (GRADIENT, "target_mask"),
        (LOSS, "vocab_parallel_logits"),
        (WHOLE, "grad_loss"),
        (STATISTICS, "target"),
    ],
)
def test_arrays_of_the_linear_operators_do_not_mix(operator, name, device):
    _, arguments = problem_for(operator)
    if name == "grad_loss":
        arguments |= {"grad_loss": np.ones(9, np.float32), "reduction": "none"}
    _, there = to_device((), arguments)
    device.reset()
    for kwargs in (there | {name: arguments[name]}, arguments | {name: there[name]}):
        with pytest.raises(ag.ParamTypeError, match=r"expected an array on device 0, .* got one on the host"):
            getattr(ag, operator)(**kwargs)
    assert device.calls() == 0


def test_what_does_not_mix_is_refused_before_values_are_read(device):
    """Calls that mix arrays of host and device are refused before any copy to the host, since a copy would wait."""
    x, w, t = (np.zeros(shape, dtype) for shape, dtype in (((9, 16), BFLOAT16), ((130, 16), BFLOAT16), (9, np.int64)))
    there = [npu.asarray(each) for each in (x, w, t)]
    *_, mask, target, _ = ag.fused_linear_online_max_sum(*there, 0, 130)
    grad, vectors, bad = np.ones(9, np.float32), {"softmax": np.ones((9, 130), np.float32)}, np.full(9, 130)
    vectors_there = {name: npu.asarray(each) for name, each in vectors.items()}
    bits, out = np.zeros(2, np.uint8), np.zeros((9, 16), BFLOAT16)
    one = npu.asarray(np.float32(1))
    arguments = npu.asarray(grad), *there[:2], npu.asarray(bits), target
    for call in (
        lambda: ag.linear_cross_entropy(x, w, target),
        lambda: ag.linear_cross_entropy(*there[:2], bad),
        lambda: ag.linear_cross_entropy(x, w, bad, grad_loss=one),
        lambda: ag.fused_linear_cross_entropy_loss_grad(grad, x, w, mask, bad, **vectors),
        lambda: ag.fused_linear_cross_entropy_loss_grad(grad, x, w, bits, target, **vectors),
        lambda: ag.fused_linear_cross_entropy_loss_grad(grad, *there[:2], mask, bad, **vectors_there),
    ):
        device.reset()
        with pytest.raises(ag.ParamTypeError, match=r"expected an array on device 0, .* got one on the host"):
            call()
        assert (device.counter("copies_d2h"), device.counter("synchronizations")) == (0, 0)
    with pytest.raises(ag.ParamTypeError, match="out: expected None, as calls on arrays of a device return new arrays"):
        ag.fused_linear_cross_entropy_loss_grad(*arguments, **vectors_there, out=(out, None))
    assert (device.counter("copies_d2h"), device.counter("synchronizations")) == (0, 0)


def test_arrays_without_elements(device):
    for shape in ((0,), (3, 0), (0, 4)):
        result = ag.softmax(npu.asarray(np.zeros(shape, np.float16)))
        assert isinstance(result, npu.DeviceArray)
        assert_identical(result.numpy(), np.zeros(shape, np.float16))
    assert device.calls("aclnnSoftmax") == 0


def test_matrices_beside_nothing_stay_on_the_device(device):
    x, w, t = (
        npu.asarray(np.zeros((0, 8), np.float16)),
        npu.asarray(np.ones((300, 8), np.float16)),
        npu.asarray(np.zeros(0, int)),
    )
    device.reset()
    results = ag.linear_cross_entropy(x, w, t, reduction="none")
    assert_identical(results.weight_grad.numpy(), np.zeros((300, 8), np.float16))
    assert device.counter("bytes_d2h") == results.weight_grad.nbytes
