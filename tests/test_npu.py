"""The NPU backend over a test double: who computes, what is copied, arrays on the card, threads, processes."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from faults import Noted
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, gradient_problem, problem_of
from samples import MASKED, OPERATORS, assert_identical, random_problem
from stand_in import VARIANTS, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import limits, runtime, session
from ascend_grad.inspection import bound_call

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
COPIES = ("copies_h2h", "copies_h2d", "copies_d2h", "copies_d2d")


def counts(device, *names: str) -> dict[str, int]:
    return {name: device.counter(name) for name in names}


def problem_for(operator: str):
    if operator in OPERATORS:
        problem = random_problem(operator, (2, 3, 5, 16) if operator in MASKED else (64, 128), BFLOAT16)
        return problem.arrays, dict(problem.settings)
    problem = gradient_problem((9, 130, 16), "bfloat16", "stored") if operator == GRADIENT else None
    problem = problem or problem_of(operator, (9, 130, 16), "bfloat16")
    return (), dict(problem.arguments)


ALL = (*OPERATORS, GRADIENT, STATISTICS, LOSS, WHOLE)


@pytest.fixture(params=ALL)
def any_operator(request) -> str:
    return request.param


def results_of(value) -> list[np.ndarray]:
    values = value if isinstance(value, tuple) else (value,)
    return [a.numpy() if isinstance(a, npu.DeviceArray) else a for a in values if a is not None]


def on_the_card(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return (
        tuple(map(npu.asarray, args)),
        {name: npu.asarray(value) if isinstance(value, np.ndarray) else value for name, value in kwargs.items()},
    )


# ---- who computes ----------------------------------------------------------------------------------------------------


def test_automatic_choice(device):
    assert ag.backends()["npu"] == (True, "2 cards, Ascend910B2")
    assert ag.explain("softmax", X) == ("npu", "automatic choice")
    assert ag.explain("softmax", X, backend="npu") == ("npu", "asked for by the backend argument")
    assert ag.explain("softmax", X, backend="cpu").backend == "cpu"
    wide = X.astype(np.float64)
    reason = "input: the device takes dtype float32 or float16 or bfloat16, got float64"
    assert ag.explain("softmax", wide) == ("cpu", f"automatic choice; not npu: {reason}")
    with ag.use_backend("npu"):
        assert ag.explain("softmax", X) == ("npu", "asked for by use_backend")
        with pytest.raises(ag.ParamTypeError, match=reason) as info:
            ag.softmax(wide)
    assert info.value.code == 161002
    assert device.calls("aclnnSoftmax") == 0
    ag.softmax(X)
    assert device.calls("aclnnSoftmax") == 1
    ag.softmax(wide)
    ag.softmax(X, backend="cpu")
    assert device.calls("aclnnSoftmax") == 1


def test_what_the_device_takes_goes_there_without_being_asked(any_operator, device):
    args, kwargs = problem_for(any_operator)
    assert ag.explain(any_operator, *args, **kwargs).backend == "npu"
    automatic = getattr(ag, any_operator)(*args, **kwargs)
    assert device.counter("launches") == (3 if any_operator == WHOLE else 1)
    for result, forced in zip(
        results_of(automatic), results_of(getattr(ag, any_operator)(*args, **kwargs)), strict=True
    ):
        assert_identical(result, forced)


@pytest.mark.parametrize(
    ("soc", "here"),
    [
        ("Ascend910B2", {*ALL}),
        ("Ascend910_9391", {*ALL}),
        ("Ascend310P3", {*OPERATORS} - {"scaled_masked_softmax"}),
        ("Ascend950PR", {*OPERATORS, LOSS}),
        ("Ascend910A", {*OPERATORS} - {*MASKED}),
        ("Ascend910B", {*OPERATORS} - {*MASKED}),
        ("Ascend310B4", {"softmax"}),
    ],
)
def test_systems(soc, here, any_operator, run_script):
    """Which operators there are on which system; those with bfloat16 data only where the system has it."""
    script = f"""
        import pickle
        import ascend_grad as ag
        args, kwargs = pickle.loads(bytes.fromhex({problem_bytes(any_operator)!r}))
        name = {any_operator!r}
        print(ag.explain(name, *args, **kwargs).backend)
        try:
            getattr(ag, name)(*args, **kwargs, backend="npu")
        except ag.AscendGradError as error:
            print(type(error).__name__, error.code)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_SOC=soc)
    if any_operator in here:
        assert result.stdout == "npu\n"
    else:
        assert result.stdout == "cpu\nUnsupportedDeviceError 361001\n"


def problem_bytes(operator: str) -> str:
    """The arguments in float16, which every system has, for another process."""
    args, kwargs = problem_for(operator)

    def halved(value):
        return value.astype(np.float16) if isinstance(value, np.ndarray) and value.dtype == BFLOAT16 else value

    return pickle.dumps((tuple(map(halved, args)), {name: halved(value) for name, value in kwargs.items()})).hex()


def test_bfloat16_where_the_system_has_none(run_script):
    script = """
        import ascend_grad as ag, numpy as np, ml_dtypes
        x = np.zeros((2, 3), ml_dtypes.bfloat16)
        print(ag.explain("softmax", x))
        print(ag.explain("softmax", x.astype(np.float16)).backend)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_SOC="Ascend310P3")
    assert "'cpu'" in result.stdout
    assert "the device takes dtype float32 or float16, got bfloat16" in result.stdout
    assert result.stdout.endswith("npu\n")


def test_codes_from_inside_the_device_are_passed_on(device):
    """Beyond these limits the device is asked if it is forced, and what it says is raised."""
    problem = gradient_problem((1, 24568, 1), "float16", "stored")
    explanation = ag.explain(GRADIENT, **problem.arguments)
    assert explanation == (
        "cpu",
        "automatic choice; not npu: the device takes V, with softmax given, up to 24560, got 24568",
    )
    with pytest.raises(ag.AclError) as info:
        ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend="npu")
    error = info.value
    assert (error.code, error.name) == (561103, "ACLNN_ERR_INNER_NULLPTR")
    assert error.call == "aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize"
    assert "too large with softmax" in error.runtime_message
    assert str(error).startswith(f"{GRADIENT}: {error.call} failed: {error.runtime_message}")
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.code, twin.call, twin.runtime_message) == (
        str(error),
        error.code,
        error.call,
        error.runtime_message,
    )


def test_bad_calls_do_not_reach_the_device(device):
    with pytest.raises(ag.ParamInvalidError, match="dim"):
        ag.softmax(X, 2, backend="npu")
    assert device.calls() == 0


# ---- copies and allocations ------------------------------------------------------------------------------------------


def test_steady_state(any_operator, device):
    """From the second call on: no allocation, each input copied once to the device, each result once back, one wait."""
    args, kwargs = problem_for(any_operator)
    function = getattr(ag, any_operator)
    if "grad" in kwargs:
        kwargs["grad"] = np.ones_like(kwargs["grad"])  # rows without a gradient are copied apart
    results = results_of(function(*args, **kwargs))
    function(*args, **kwargs)
    device.reset()
    function(*args, **kwargs)
    assert counts(device, "mallocs", "host_mallocs") == {"mallocs": 0, "host_mallocs": 0}
    assert device.calls("aclrtCreateStream") == device.calls("aclrtSetDevice") == 0
    inputs = [*args, *(value for value in kwargs.values() if isinstance(value, np.ndarray))]
    expected = {"copies_h2h": 0, "copies_h2d": len(inputs), "copies_d2h": len(results), "copies_d2d": 0}
    if any_operator == WHOLE:
        # Up: the rows that are not ignored, the words, the targets, what arrives at each loss; back: losses, gradients.
        assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": 4, "copies_d2h": 3, "copies_d2d": 2}
    else:
        assert counts(device, *COPIES) == expected
        assert device.counter("bytes_d2h") == sum(result.nbytes for result in results)
        assert device.counter("synchronizations") == 1


def test_large_arrays_go_in_pieces(device):
    """More than the staging memory, in any layout, both ways."""
    x = np.random.default_rng(0).standard_normal((3001, 3000), np.float32)
    expected = ag.softmax(x, backend="reference")
    device.reset()
    np.testing.assert_allclose(ag.softmax(x, backend="npu"), expected, rtol=1e-6)
    pieces = -(-x.nbytes // (1 << 20))
    assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": pieces, "copies_d2h": pieces, "copies_d2d": 0}
    assert device.counter("bytes_h2d") == device.counter("bytes_d2h") == x.nbytes
    # The host fills one piece while others are on their way: it waits for free staging memory, not for each piece.
    assert device.counter("synchronizations") <= 2 * -(-x.nbytes // session.STAGING_BYTES) + 1
    turned = np.asarray(x[::-1].T[::-1], order="F").astype(">f4")
    out = np.empty((3001, 3000), np.float16)[::-1]
    assert ag.softmax(turned, 0, out=out.T, backend="npu") is not None
    np.testing.assert_allclose(out[::-1, ::-1], expected, rtol=2e-3, atol=1e-7)


def test_memory_of_another_thread_is_taken_when_the_card_is_full(device):
    x = np.zeros((256, 1024), np.float32)
    done, go_on = threading.Event(), threading.Event()

    def fill_a_pool():
        ag.softmax(x, backend="npu")
        done.set()
        go_on.wait(60)

    npu.release()
    thread = threading.Thread(target=fill_a_pool)
    thread.start()
    try:
        assert done.wait(60)
        device.set_memory(3 * x.nbytes)
        with ag.use_backend("npu"):
            assert_identical(ag.softmax(x), ag.softmax(x))
    finally:
        device.set_memory(4 << 30)
        go_on.set()
        thread.join()


def test_the_pool_is_bounded(device, monkeypatch):
    npu.release()
    before = device.live().get("device_bytes", 0)
    monkeypatch.setattr(session, "POOL_BLOCKS", 3)
    for size in 2 ** np.arange(10, 20):
        ag.softmax(np.zeros(size, np.float32), backend="npu")
        assert device.live()["device_allocations"] <= 3
    monkeypatch.setattr(session, "POOL_BLOCKS", 100)
    monkeypatch.setattr(session, "POOL_BYTES", 1 << 20)
    for size in 2 ** np.arange(10, 20):
        ag.softmax(np.zeros(size, np.float32), backend="npu")
        assert device.live().get("device_bytes", 0) - before <= 1 << 20


def test_release_and_the_end_of_a_thread(device):
    npu.release()
    before = device.live()

    def work():
        ag.softmax(X, backend="npu")
        assert device.live()["streams"] == before.get("streams", 0) + 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert device.live() == before
    ag.softmax(X, backend="npu")
    assert device.live() != before
    npu.release()
    assert device.live() == before


# ---- arrays on the card ----------------------------------------------------------------------------------------------


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


def test_what_cannot_be_an_array_on_the_card(device):
    for value in (np.zeros(3), np.zeros(3, complex), "text", np.zeros(3, np.uint16)):
        with pytest.raises(ag.ParamTypeError, match="x: expected one of the device's dtypes float32, "):
            npu.asarray(value)
    with pytest.raises(ag.ParamInvalidError, match="rank 0 to 8, got rank 9"):
        npu.asarray(np.zeros((1,) * 9, np.float32))
    with pytest.raises(ag.ParamTypeError, match="x: expected an array, got list, which does not convert"):
        npu.asarray([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("name", ["shape", "dtype", "device", "ndim", "size", "nbytes", "anything"])
def test_an_array_on_the_card_cannot_be_changed(name, device):
    with pytest.raises(AttributeError):
        setattr(npu.asarray(X), name, 3)


def test_nothing_is_copied_unasked(device):
    array = npu.asarray(X)
    device.reset()
    for use in (np.asarray, np.exp, lambda a: a + X, lambda a: X + a, bool, float, pickle.dumps):
        with pytest.raises(TypeError):
            use(array)
    assert device.calls() == 0


def test_calls_on_the_card(any_operator, device):
    """The same results as with arrays of the host, and, but for the whole loss, nothing goes over the bus."""
    args, kwargs = problem_for(any_operator)
    if "grad" in kwargs:
        kwargs["grad"] = np.ones_like(kwargs["grad"])  # rows without a gradient are copied apart
    function = getattr(ag, any_operator)
    expected = results_of(function(*args, **kwargs, backend="npu"))
    card_args, card_kwargs = on_the_card(args, kwargs)
    before = [a.numpy().tobytes() for a in (*card_args, *card_kwargs.values()) if isinstance(a, npu.DeviceArray)]
    if any_operator == GRADIENT:
        function(*card_args, **card_kwargs)  # targets on masked rows are repaired once
    device.reset()
    assert ag.explain(any_operator, *card_args, **card_kwargs) == ("npu", "its arrays are on device 0")
    results = function(*card_args, **card_kwargs)
    for result in results if isinstance(results, tuple) else (results,):
        assert result is None or isinstance(result, npu.DeviceArray)
    if any_operator != WHOLE:
        within = {"copies_d2d": 1} if any_operator == GRADIENT else {}  # the softmax, which the device destroys
        assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0) | within
    for result, right in zip(results_of(results), expected, strict=True):
        assert_identical(result, right)
    after = [a.numpy().tobytes() for a in (*card_args, *card_kwargs.values()) if isinstance(a, npu.DeviceArray)]
    assert after == before


def chain(input, weight, target, grad):
    """Statistics, loss and gradients, as for one shard of the vocabulary."""
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, weight.shape[0])
    loss, _ = ag.fused_cross_entropy_loss_with_max_sum(s.logits_max, s.sum_exp_logits, s.predicted_logits)
    gradients = ag.fused_linear_cross_entropy_loss_grad(
        grad, input, weight, s.target_mask, s.masked_target, logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits
    )
    return loss, *gradients


def chain_arguments(*, zeros: bool = False) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    bt, v, h = 37, 200, 24
    grad = random.standard_normal(bt).astype(np.float32)
    if zeros:
        grad[[0, 1, 2, 7, 36]] = 0
    arrays = (random.standard_normal(shape).astype(BFLOAT16) for shape in ((bt, h), (v, h)))
    return [*arrays, random.integers(0, v, bt), grad]


def test_masks_and_targets_go_to_the_card_once(device):
    """Bools become bits, and targets on masked rows become what the device can read: for a mask once."""
    input, weight, target, grad = chain_arguments()
    first, second = np.arange(37) % 3 == 0, np.arange(37) % 4 != 0
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, 200)
    statistics = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
    target[first & second] = 10**6
    everything = (grad, input, weight, first, second, target)
    there = [npu.asarray(array) for array in everything]
    _, on_card = on_the_card((), statistics)
    for mask, mask_there in [(first, there[3]), (second, there[4]), (first, there[3])]:
        expected = ag.fused_linear_cross_entropy_loss_grad(*everything[:3], mask, target, **statistics)
        for again in (False, True):
            device.reset()
            results = ag.fused_linear_cross_entropy_loss_grad(*there[:3], mask_there, there[5], **on_card)
            assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0) | ({} if again else {"copies_h2d": 1})
            for result, right in zip(results, expected, strict=True):
                assert_identical(result.numpy(), right)
    assert_identical(there[5].numpy(), target)


def test_repaired_targets_last_until_the_call_ends(device):
    """Another thread's call with another mask makes the arrays of this one forget them, while they are in use."""
    input, weight, target, grad = chain_arguments()
    masks = [np.arange(37) % 3 == 0, np.arange(37) % 3 != 1]
    s = ag.fused_linear_online_max_sum(input, weight, target, 0, 200)
    statistics = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
    target[masks[0]] = -1
    expected = [
        ag.fused_linear_cross_entropy_loss_grad(grad, input, weight, mask, target, **statistics) for mask in masks
    ]
    there = [npu.asarray(array) for array in (grad, input, weight, target, *masks)]
    _, on_card = on_the_card((), statistics)

    def call(i: int):
        return ag.fused_linear_cross_entropy_loss_grad(*there[:3], there[4 + i], there[3], **on_card)

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
    """They stay on the card, unless those of ignored rows have to be put in between."""
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
        # Up: the targets and what arrives at each loss that counts, then all losses; back: those that count.
        assert copies == {"copies_h2h": 0, "copies_h2d": 3, "copies_d2h": 1}
        assert runs == 2 * 2  # of rows, to a problem of their own and back
    else:
        assert copies == {"copies_h2h": 0, "copies_h2d": 1, "copies_d2h": 0}
        assert device.counter("bytes_h2d") == 4 * target.size  # what arrives at each loss
        assert runs == 0
    for result, right in zip(results, expected, strict=True):
        assert_identical(result.numpy(), right)


@pytest.mark.parametrize("zeros", [False, True], ids=["every row", "rows without a gradient"])
def test_a_chain_stays_on_the_card(zeros, device):
    arguments = chain_arguments(zeros=zeros)
    expected = chain(*arguments)
    there = [npu.asarray(array) for array in arguments]
    chain(*there)
    device.reset()
    results = chain(*there)
    copies = counts(device, *COPIES)
    assert counts(device, "mallocs", "host_mallocs") == {"mallocs": 0, "host_mallocs": 0}
    assert copies["copies_h2h"] == 0
    if zeros:  # their bits are taken out of the mask, on the host
        assert (copies["copies_h2d"], copies["copies_d2h"]) == (1, 1)
        assert device.counter("bytes_d2h") == 5
    else:
        assert copies == dict.fromkeys(COPIES, 0)
    for result, right in zip(results, expected, strict=True):
        assert_identical(result.numpy(), right)
    if zeros:
        rows = arguments[-1] == 0
        assert not np.any(results[1].numpy()[rows].view(np.uint16))


def test_a_softmax_on_the_card_survives(device):
    """The device destroys it: it gets a copy, made on the card."""
    problem = gradient_problem((9, 130, 16), "bfloat16", "stored")
    target = np.clip(problem.arguments["masked_target"], 0, 129)  # on masked rows, too: those need a repair
    arguments = problem.arguments | {"grad": np.ones(9, np.float32), "masked_target": target}
    _, there = on_the_card((), arguments)
    softmax = there["softmax"]
    bits = np.packbits(arguments["target_mask"], bitorder="little")
    there["target_mask"] = npu.asarray(bits if arguments["target_mask"].dtype == bool else arguments["target_mask"])
    device.reset()
    ag.fused_linear_cross_entropy_loss_grad(**there)
    assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": 0, "copies_d2h": 0, "copies_d2d": 1}
    assert_identical(softmax.numpy(), arguments["softmax"])


def test_pad_bits_are_zero(device):
    input, weight, target, _ = chain_arguments()
    target[:] = 10**6  # in another shard, all of them
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
    # The targets of a larger shard are no good for a smaller one, whoever made them.
    smaller = npu.asarray(weight[:150])
    with pytest.raises(ag.ParamInvalidError, match="masked_target"):
        ag.fused_linear_cross_entropy_loss_grad(*rest[:2], smaller, s.target_mask, s.masked_target, **arguments)


def test_workspace_is_of_the_host(any_operator, device):
    args, kwargs = problem_for(any_operator)
    assert ag.workspace_size(any_operator, *args, **kwargs) >= 0
    args, kwargs = on_the_card(args, kwargs)
    with pytest.raises(ag.ParamTypeError, match=f"{any_operator}: expected arrays on the host, .* on device 0"):
        ag.workspace_size(any_operator, *args, **kwargs)


def test_arrays_do_not_mix(device):
    there = npu.asarray(X)
    with pytest.raises(
        ag.ParamTypeError, match=r"output: expected an array on device 0, as grad_output is one, got an "
    ):
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
        with pytest.raises(
            ag.ParamTypeError, match="expected an array on device 0, as grad_output is one, got one on "
        ):
            ag.softmax_backward(there, other)
        # A call goes where its arrays are, whatever this thread's card is.
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
    _, there = on_the_card((), arguments)
    device.reset()
    for kwargs in (there | {name: arguments[name]}, arguments | {name: there[name]}):
        with pytest.raises(ag.ParamTypeError, match=r"expected an array on device 0, .* got an array on the host"):
            getattr(ag, operator)(**kwargs)
    assert device.calls() == 0


def test_dtypes_that_no_device_takes_stay_on_the_host(any_operator, device):
    halves_alone = any_operator in (GRADIENT, STATISTICS, WHOLE)
    for dtype in ("float64", "float32") if halves_alone else ("float64",):
        if any_operator in OPERATORS:
            problem = random_problem(any_operator, (2, 3, 5, 16), np.dtype(dtype))
            args, kwargs = problem.arrays, dict(problem.settings)
        else:
            args, kwargs = (), dict(problem_of(any_operator, (9, 130, 16), dtype).arguments)
            kwargs.pop("out", None)
        call, *_ = bound_call(any_operator, args, kwargs)
        for soc in limits.FAMILIES:
            assert limits.unsupported_reason(call, runtime.State((True, ""), 1, soc)) is not None
        device.reset()
        getattr(ag, any_operator)(*args, **kwargs)
        assert device.calls() == 0


def test_calls_that_the_device_does_not_take_stay_there(device):
    x, w = (npu.asarray(np.zeros(shape, np.float32)) for shape in ((3, 4), (5, 4)))
    t = npu.asarray(np.zeros(3, np.int64))
    for backend in (None, "auto", "npu"):
        with pytest.raises(ag.ParamTypeError, match="input: the device takes dtype float16 or bfloat16, got float32"):
            ag.linear_cross_entropy(x, w, t, backend=backend)
    with pytest.raises(ag.ParamInvalidError, match="dim"):
        ag.softmax(x, 2)


def test_arrays_without_elements(device):
    for shape in ((0,), (3, 0), (0, 4)):
        result = ag.softmax(npu.asarray(np.zeros(shape, np.float16)))
        assert isinstance(result, npu.DeviceArray)
        assert_identical(result.numpy(), np.zeros(shape, np.float16))
    assert device.calls("aclnnSoftmax") == 0


def test_matrices_beside_nothing_stay_on_the_card(device):
    x, w, t = (
        npu.asarray(np.zeros((0, 8), np.float16)),
        npu.asarray(np.ones((300, 8), np.float16)),
        npu.asarray(np.zeros(0, int)),
    )
    device.reset()
    results = ag.linear_cross_entropy(x, w, t, reduction="none")
    assert_identical(results.weight_grad.numpy(), np.zeros((300, 8), np.float16))
    assert device.counter("bytes_d2h") == results.weight_grad.nbytes


def test_forgotten_arrays_are_used_again(device):
    array = npu.asarray(X)
    del array
    gc.collect()
    device.reset()
    array = npu.asarray(X)
    assert device.counter("mallocs") == 0
    before = device.live()["device_allocations"]
    thread = threading.Thread(target=lambda arrays: arrays.clear(), args=([array],))
    del array
    thread.start()
    thread.join()
    npu.release()
    assert device.live().get("device_allocations", 0) < before


# ---- cards, threads, processes ---------------------------------------------------------------------------------------


def test_cards(device):
    assert npu.device_count() == 2
    assert npu.get_device() == 0
    seen = []
    npu.set_device(1)
    try:
        assert npu.asarray(X).device == 1
        thread = threading.Thread(target=lambda: seen.append(npu.get_device()))
        thread.start()
        thread.join()
        assert_identical(ag.softmax(X, backend="npu"), ag.softmax(npu.asarray(X)).numpy())
    finally:
        npu.set_device(0)
    assert seen == [0]
    for wrong in (-1, 2):
        with pytest.raises(ag.ParamInvalidError, match=r"device: expected an int in \[0, 1\]"):
            npu.set_device(wrong)
    for wrong in ("0", True, np.True_, 0.0, np.ma.array(0)):
        with pytest.raises(ag.ParamTypeError, match="device: expected an int, got "):
            npu.set_device(wrong)
    npu.set_device(np.int64(0))
    with pytest.raises(ag.ParamTypeError, match=r"x: expected an array that computes as numpy\.ndarray does"):
        npu.asarray(np.ma.array(X))


def test_the_environments_card(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        print(ag.npu.get_device(), ag.npu.asarray(np.zeros(3, np.float32)).device)
    """
    home = str(build("split"))
    assert run_script(script, ASCEND_HOME_PATH=home, ASCEND_GRAD_DEVICE="1").stdout == "1 1\n"


def test_a_card_beyond_those_that_there_are(run_script):
    """Whoever forces the device, in whatever way, gets an error; the automatic choice computes on the CPU and warns."""
    script = """
        import ascend_grad as ag, numpy as np
        x = np.zeros(4, np.float32)
        if ag.explain("softmax", x, backend="auto").backend == "cpu" and FORCED is None:
            print(*[ag.softmax(x).tolist() for _ in range(3)], ag.backends()["npu"].usable)
        try:
            if FORCED == "use_backend":
                ag.use_backend("npu")
            ag.softmax(x, backend="npu" if FORCED == "argument" else None)
        except ag.BackendUnavailableError as error:
            print(error)
    """
    reason = "ASCEND_GRAD_DEVICE is 2, the devices are 0 to 1 (2 cards)"
    settings = {"ASCEND_HOME_PATH": str(build("split")), "ASCEND_GRAD_DEVICE": "2"}
    automatic = run_script("FORCED = None" + script.replace("\n        ", "\n"), **settings)
    assert automatic.stdout == "[0.25, 0.25, 0.25, 0.25] " * 3 + "False\n"
    assert automatic.stderr == f"the Ascend NPU cannot be used: {reason}\n"
    for forced, more in (
        ("argument", {}),
        ("use_backend", {}),
        ("environment", {"ASCEND_GRAD_BACKEND": "npu"}),
    ):
        result = run_script(f"FORCED = {forced!r}" + script.replace("\n        ", "\n"), **settings, **more)
        assert reason in result.stdout, forced


def test_the_environments_backend(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        print(ag.explain("softmax", np.zeros(3, np.float32)), ag.softmax(np.zeros(2, np.float32)))
        for call in ag.softmax, ag.explain:
            try:
                call(*["softmax"] * (call is ag.explain), np.zeros(3))
            except ag.ParamTypeError as error:
                print(error.code)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), ASCEND_GRAD_BACKEND="npu")
    said = "Explanation(backend='npu', reason='asked for by ASCEND_GRAD_BACKEND') [0.5 0.5]"
    assert result.stdout.splitlines() == [said, "161002", "161002"]


def test_a_runtime_that_does_not_end_is_left_to_itself(run_script):
    """What fails at the end of the process is nobody's error any more."""
    script = """
        import sys
        sys.path.insert(0, {tests!r})
        import numpy as np, ascend_grad as ag
        from pathlib import Path
        from stand_in import StandIn
        device = StandIn(Path({home!r}))
        ag.softmax(np.zeros(2, np.float32))
        device.fail("aclFinalizeReference")
    """
    home = str(build("split"))
    tests = str(Path(__file__).parent)
    result = run_script(script.format(home=home, tests=tests), ASCEND_HOME_PATH=home)
    assert result.stderr == ""


def test_four_threads(device):
    """Each with its own data, half of them on the other card, host arrays and device arrays in turn."""
    errors = []
    arguments = chain_arguments()
    expected = [result.numpy() if isinstance(result, npu.DeviceArray) else result for result in chain(*arguments)]

    def work(number: int) -> None:
        try:
            npu.set_device(number % 2)
            random = np.random.default_rng(number)
            for round_ in range(12):
                x = random.standard_normal((50 + number, 300)).astype(np.float32)
                g = random.standard_normal(x.shape).astype(np.float32)
                y = ag.softmax(npu.asarray(x) if round_ % 2 else x)
                result = ag.softmax_backward(npu.asarray(g) if round_ % 2 else g, y)
                result = result.numpy() if round_ % 2 else result
                right = ag.softmax_backward(g, ag.softmax(x, backend="cpu"), backend="cpu")
                np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-7)
                results = chain(*map(npu.asarray, arguments) if round_ % 2 else arguments)
                for result, right in zip(results_of(results), expected, strict=True):
                    assert_identical(result, right)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_threads_own_context_is_given_back(device):
    """Another library of the process may have bound the thread to another card."""
    import ctypes

    runtime = ctypes.CDLL(str(build("split") / "lib64" / "libascendcl.so"))
    assert runtime.aclrtSetDevice(1) == 0
    number = ctypes.c_int32(-1)
    for _ in range(2):
        ag.softmax(X, backend="npu")
        assert runtime.aclrtGetDevice(ctypes.byref(number)) == 0
        assert number.value == 1
    assert runtime.aclrtSetDevice(0) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(run_script, tmp_path):
    script = """
        import os, numpy as np, ascend_grad as ag
        from ascend_grad import npu
        x = np.zeros((3, 4), np.float32)
        array = npu.asarray(x)
        ag.softmax(x, backend="npu")
        child = os.fork()
        if not child:
            assert ag.softmax(x).sum() == 3
            assert ag.explain("softmax", x).backend == "cpu"
            assert "forked" in ag.explain("softmax", x).reason
            for call in (lambda: ag.softmax(x, backend="npu"), lambda: ag.softmax(array), array.numpy,
                         lambda: npu.asarray(x), lambda: npu.set_device(0)):
                try:
                    call()
                except ag.BackendUnavailableError as error:
                    assert "forked" in str(error), error
                else:
                    raise SystemExit("no error")
            assert npu.device_count() == 0
            npu.release()
            del array
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert ag.softmax(array).numpy().sum() == 3
    """
    report = tmp_path / "report"
    run_script(
        "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        + __import__("textwrap").dedent(script),
        ASCEND_HOME_PATH=str(build("split")),
        CANN_STAND_IN_REPORT=str(report),
    )
    assert_nothing_left(report)


def test_a_fork_before_the_first_call(run_script):
    script = """
        import os, numpy as np, ascend_grad as ag
        child = os.fork()
        ag.softmax(np.zeros(3, np.float32), backend="npu")
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run_script(script, ASCEND_HOME_PATH=str(build("split")))


def assert_nothing_left(report) -> None:
    lines = dict(line.split(None, 1) for line in report.read_text().splitlines())
    assert "violation" not in lines, lines["violation"]
    left = {name: lines[name] for name in ("tensors", "executors", "streams", "device_allocations", "initialisations")}
    assert set(left.values()) == {"0"}, left


def test_everything_is_given_back_at_exit(run_script, tmp_path):
    """Arrays that are still alive, other threads' sessions, our initialisation."""
    script = """
        import threading, numpy as np, ascend_grad as ag
        x = np.zeros((3, 4), np.float32)
        array = ag.npu.asarray(x)
        results = [ag.softmax(array), ag.softmax(x)]
        go = threading.Event()
        threading.Thread(target=lambda: (results.append(ag.softmax(x)), go.wait(5)), daemon=True).start()
        while len(results) < 3:
            pass
    """
    report = tmp_path / "report"
    run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_REPORT=str(report))
    assert_nothing_left(report)


# ---- installations ---------------------------------------------------------------------------------------------------

PROBE = """
    import logging, sys
    import numpy as np
    import ascend_grad as ag
    with open("/proc/self/maps") as file:
        maps = file.read()
    assert "libascendcl" not in maps and "cann_stand_in" not in maps, "opened at import"
    x = np.zeros(4, np.float32)
    for _ in range(3):
        ag.softmax(x)
    print(ag.explain("softmax", x).backend)
    status = ag.backends()["npu"]
    print(status.usable, status.reason)
    try:
        ag.softmax(x, backend="npu")
    except ag.AscendGradError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("name", ["split", "aggregate", "train_infer", "split_without_math"])
def test_installations(name, run_script):
    result = run_script(PROBE, ASCEND_HOME_PATH=str(build(name)))
    assert result.stdout == "npu\nTrue 2 cards, Ascend910B2\n"
    assert result.stderr == ""
    elsewhere = run_script(PROBE, ASCEND_HOME_PATH="/nowhere", ASCEND_TOOLKIT_HOME=str(build(name)))
    assert elsewhere.stdout == result.stdout
    by_the_loader = run_script(PROBE, LD_LIBRARY_PATH=str(build(name) / "lib64"))
    assert by_the_loader.stdout == result.stdout


@pytest.mark.parametrize(
    ("name", "reason", "warned"),
    [
        ("link_time_stub", "the runtime library is a stub to link against, not a runtime", False),
        ("no_device", "the runtime counts no device", False),
        ("no_driver", "aclrtGetDeviceCount failed", True),
        ("device_lost", "aclrtGetDeviceCount failed", False),
        ("init_fails", "aclInit failed: 500000 ACL_ERROR_INTERNAL_ERROR, ", True),
        ("without_copies", "the runtime library lacks aclrtMemcpyAsync", True),
        ("without_operators", "no operator library: none of libopapi_math.so, libopapi_nn.so, libopapi.so, ", True),
    ],
)
def test_installations_without_a_usable_device(name, reason, warned, run_script):
    """The CPU computes; what is broken is said once, what is merely not there is not."""
    result = run_script(PROBE, ASCEND_HOME_PATH=str(build(name)))
    first, status, error = result.stdout.splitlines()
    assert first == "cpu"
    assert status.startswith(f"False {reason}")
    assert error == "BackendUnavailableError"
    if warned:
        assert result.stderr.startswith(f"the Ascend NPU cannot be used: {reason}")
        assert result.stderr.count("\n") == 1
    else:
        assert result.stderr == ""


def test_no_installation(run_script):
    result = run_script(PROBE, ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME="", LD_LIBRARY_PATH="")
    assert result.stdout.startswith(
        "cpu\nFalse no runtime library: none of libascendcl.so, libacl_rt.so in $ASCEND_HOME"
    )
    assert result.stderr == ""


def test_a_library_that_does_not_load(run_script, tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").write_text("not a library")
    result = run_script(PROBE, ASCEND_HOME_PATH=str(tmp_path))
    assert result.stdout.startswith(f"cpu\nFalse {tmp_path}/lib64/libascendcl.so does not load: ")
    assert result.stderr.count("the Ascend NPU cannot be used") == 1


def test_operators_that_an_older_toolkit_lacks(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        x, w, t = np.ones((2, 3), np.float16), np.ones((5, 3), np.float16), np.zeros(2, int)
        print(ag.backends()["npu"].reason)
        print(ag.explain("softmax", x).backend, ag.softmax(x[:, :2]).tolist())
        print(*ag.explain("fused_linear_online_max_sum", x, w, t, 0, 5))
        print(*ag.explain("linear_cross_entropy", x, w, t))
        ag.linear_cross_entropy(x, w, t)
        try:
            ag.linear_cross_entropy(x, w, t, backend="npu")
        except ag.BackendUnavailableError as error:
            print(error)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("older")))
    lacks = "this toolkit's operator library lacks aclnnFusedLinearOnlineMaxSumGetWorkspaceSize"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("2 cards, Ascend910B2; this toolkit lacks aclnnFusedLinearCrossEntropyLossGrad, ")
    assert lines[1:] == [
        "npu [[0.5, 0.5], [0.5, 0.5]]",
        f"cpu automatic choice; not npu: {lacks}",
        f"cpu automatic choice; not npu: {lacks}",
        f"linear_cross_entropy: {lacks}",
    ]


def test_the_loss_alone_needs_no_gradient(device, monkeypatch):
    x, w, t = np.ones((2, 3), np.float16), np.ones((5, 3), np.float16), np.zeros(2, int)
    absent = {"aclnnFusedLinearCrossEntropyLossGrad": "its symbol"}
    monkeypatch.setitem(runtime.found, "state", runtime.state()._replace(absent=absent))
    assert ag.explain("linear_cross_entropy", x, w, t).backend == "cpu"
    assert ag.explain("linear_cross_entropy", x, w, t, return_grad=False).backend == "npu"
    device.reset()
    assert ag.linear_cross_entropy(x, w, t, return_grad=False)[0] == pytest.approx(np.log(5), rel=1e-3)
    assert device.calls("aclnnFusedLinearOnlineMaxSum") == 1


def test_somebody_else_has_initialised_the_runtime(run_script):
    script = """
        import ctypes, os, numpy as np, ascend_grad as ag
        runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
        assert runtime.aclInit(None) == 0
        print(ag.explain("softmax", np.zeros(3, np.float32)).backend, ag.softmax(np.zeros(2, np.float32)))
    """
    assert run_script(script, ASCEND_HOME_PATH=str(build("split"))).stdout == "npu [0.5 0.5]\n"


def test_decisions_are_logged(device, caplog):
    with caplog.at_level("DEBUG", logger="ascend_grad"):
        ag.softmax(X)
        ag.softmax(X.tolist())  # float64
        ag.softmax(X.astype(np.float64))
    first, *others = (record.getMessage() for record in caplog.records)
    assert first == "softmax of float32(3, 4): npu, automatic choice"
    assert len(others) == 2
    for message in others:
        assert message.startswith(
            "softmax of float64(3, 4): cpu, automatic choice; not npu: input: the device takes dtype "
        )


def test_check_command(device, capsys, tmp_path):
    from ascend_grad.cli.main import main

    assert main(["check", "--backend", "npu", "--json", str(tmp_path / "check.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("backend npu: 2 cards, Ascend910B2\n")
    for operator in ALL:
        assert any(line.split() == [operator, "pass"] for line in text.splitlines())
    assert text.count("float64         0 not here\n    not taken: ") == len(ALL)
    assert os.path.getsize(tmp_path / "check.json") > 1000


def test_every_variant_is_used():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_npu*.py"))
    assert all(f'"{name}"' in text for name in VARIANTS)


# ---- interrupts, and the end of the process --------------------------------------------------------------------------


def test_a_signal_handler_may_ask_while_the_device_is_looked_for(run_script):
    script = f"""
        import os
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import signal
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import _acl

        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(ag.backends()["npu"]))
        count = _acl.device_count

        def interrupted():
            signal.raise_signal(signal.SIGUSR1)
            return count()

        _acl.device_count = interrupted
        assert ag.explain("softmax", np.zeros(3, np.float32)).backend == "npu"
        assert seen == [(False, "the device is being looked for")], seen
    """
    run_script(script)


def test_calls_at_the_end_of_the_process_find_no_device(run_script):
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import atexit
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import npu
        from stand_in import StandIn, build

        x = np.zeros((2, 3), np.float32)

        def late():
            backend, reason = ag.explain("softmax", x)
            assert backend == "cpu" and "npu: the process is ending" in reason, reason
            ag.softmax(x)
            try:
                there.numpy()
            except ag.BackendUnavailableError:
                print("late", StandIn(build("split")).violations())

        atexit.register(late)
        ag.softmax(x)
        there = npu.asarray(x)
    """
    assert run_script(script).stdout.strip() == "late []"


def test_an_interrupt_at_the_end_of_a_call_leaves_the_session_free(device):
    x = np.zeros((64, 128), np.float32)
    ag.softmax(x)
    body = session.Session.call.__wrapped__.__code__

    def trace(frame, event, argument):
        if frame.f_code is body:
            return interrupt if event == "call" else None
        return None

    def interrupt(frame, event, argument):
        if event == "line" and "allocations" in frame.f_locals:
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            ag.softmax(x)
    finally:
        sys.settrace(None)
    ag.softmax(x)
    device.reset()
    for _ in range(3):
        ag.softmax(x)
    assert [device.calls(name) for name in ("aclrtMalloc", "aclrtMallocHost", "aclrtCreateStream")] == [0, 0, 0]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_whoever_interrupts_waits_for_the_device(times, device, monkeypatch):
    """However often: memory is given back when nothing is on its way any more."""
    x = np.ones((64, 128), np.float32)
    ag.softmax(x)
    synchronize = session.Session.synchronize
    interrupts = iter(range(times))

    def interrupted(self):
        if next(interrupts, None) is not None:
            raise KeyboardInterrupt
        synchronize(self)

    monkeypatch.setattr(session.Session, "synchronize", interrupted)
    device.set_delay(100_000)
    try:
        with pytest.raises(KeyboardInterrupt):
            ag.softmax(x)
        npu.release()
    finally:
        device.set_delay(200)
    assert device.violations() == []
    assert_identical(ag.softmax(x), ag.softmax(x, backend="npu"))


def test_a_subclass_takes_a_large_result(device):
    x = np.zeros((600, 1000), np.float32)
    out = x.copy().view(Noted)
    assert ag.softmax(x, out=out, backend="npu") is out
    np.testing.assert_allclose(np.asarray(out), 1e-3, rtol=1e-6)


def test_overflow_is_no_warning(device):
    h, w, target = np.zeros((4, 5), np.float16), np.zeros((6, 5), np.float16), np.zeros(4, np.int64)
    for reduction in ("sum", "mean"):
        ag.linear_cross_entropy(h, w, target, reduction=reduction, grad_loss=1e300, backend="npu")


def test_a_broken_library_on_the_loaders_path_is_a_warning(run_script, tmp_path):
    (tmp_path / "libascendcl.so").write_text("garbage")
    script = """
        import logging
        logging.basicConfig(level=logging.WARNING)
        import ascend_grad as ag
        print(ag.backends()["npu"].reason)
    """
    run = run_script(script, LD_LIBRARY_PATH=str(tmp_path), ASCEND_HOME_PATH="/nowhere", ASCEND_TOOLKIT_HOME="/nowhere")
    assert "does not load" in run.stdout
    assert "WARNING" in run.stderr


def test_sets_that_other_threads_change():
    class Member:
        pass

    members: weakref.WeakSet[Member] = weakref.WeakSet()
    kept = [Member() for _ in range(200)]
    for member in kept:
        members.add(member)
    over = threading.Event()

    def change():
        while not over.is_set():
            members.add(Member())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=change) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert len(session._snapshot(members)) >= len(kept)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


def test_daemon_threads_at_the_end_of_the_process(run_script):
    script = f"""
        import os
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import threading
        import numpy as np
        import ascend_grad as ag

        x = np.zeros((64, 128), np.float32)
        worked = threading.Barrier(4)

        def work():
            ag.softmax(x)
            worked.wait()
            while True:
                ag.softmax(x)

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        worked.wait()
        print("ending")
    """
    for _ in range(5):
        result = run_script(script)
        assert (result.stdout, result.stderr) == ("ending\n", "")
