"""Test products of the Hessian of the loss of logits and a vector on the device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cross_entropy_oracles import LAYOUTS, SHAPES, assert_product, expected_product, in_layout, products
from cross_entropy_problems import DTYPES, check_product, product_in_float64, random_product
from samples import assert_identical

import ascend_grad as ag
from ascend_grad import _aclnn, npu
from ascend_grad.backends.ascend import cross_entropy, limits, operators

FLOATS = ("float32", "float16", "bfloat16")
KINDS = ("one target", "several targets", "all classes")
#: Options that let the device compute all that it can.
EVERYTHING = {"softcap": 3.0, "temperature": 2.0, "label_smoothing": 0.1, "lse_square_scale": 0.1}


def on_device(arguments: dict) -> dict:
    """Copy the arrays of a call to the device, which takes no float64, and ids of int32 and int64."""
    taken = {np.dtype(np.float64): np.float32, np.dtype(np.uint8): np.int32}
    return {
        name: npu.asarray(value.astype(taken.get(value.dtype, value.dtype))) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def problem_of(kind: str, shape: tuple[int, ...] = (6, 9), dtype=np.float32) -> dict:
    """Return the arguments of a call whose last axis has the classes."""
    rng = np.random.default_rng(7)
    x, vector = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    call = {"input": x, "vector": vector}
    if kind == "all classes":
        return call | {"target": rng.random(shape, np.float32)}
    if kind == "one target":
        return call | {"target": rng.integers(0, shape[-1], shape[:-1])}
    places = (*shape[:-1], 3)
    return call | {"target": rng.integers(0, shape[-1], places), "target_prob": rng.random(places, np.float32)}


def check(arguments: dict, **settings) -> None:
    """Check the product of arrays of the host and of arrays of the device against the reference's."""
    expected, dtype = product_in_float64(arguments), arguments["input"].dtype.type
    check_product(ag.cross_entropy_hvp(**arguments, backend="npu", **settings), expected, dtype)
    check_product(ag.cross_entropy_hvp(**on_device(arguments), **settings), expected, dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(400))
def test_random_problems(seed, device):
    arguments = random_product(seed)
    assert ag.explain("cross_entropy_hvp", **arguments).backend == "npu"
    expected, dtype = product_in_float64(arguments), arguments["input"].dtype.type
    check_product(ag.cross_entropy_hvp(**arguments), expected, dtype)
    there = on_device(arguments)
    # The vector's values in float32 may be rounded once more.
    expected = product_in_float64(arguments | {"vector": there["vector"].numpy()})
    check_product(ag.cross_entropy_hvp(**there), expected, dtype)


@pytest.mark.parametrize(("shape", "axis"), [each for each in SHAPES if np.prod(each[0]) < 10_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_option_by_the_definition(shape, axis, dtype, device):
    """The calls of the tests of the CPU give the values of the definition, in every layout."""
    device.set_delay(0)
    try:
        for number, arguments in enumerate(products("options", shape, axis, dtype)):
            layout = LAYOUTS[number % len(LAYOUTS)]
            moved = {name: in_layout(arguments[name], layout) for name in ("input", "vector")}
            product = ag.cross_entropy_hvp(**arguments | moved, backend="npu")
            # The error is absolute, and relative to the coefficients of the row.
            assert_product(product, expected_product(arguments, dtype), dtype, f"{number} {layout}", absolute=1e-6)
            assert product.flags.c_contiguous
    finally:
        device.set_delay(200)


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_of_the_gradient_of_the_device(kind, options, device):
    """The product is the derivative of the gradient that the device computes."""
    call = problem_of(kind, (4, 5))
    vector, step = call.pop("vector"), np.float32(2.0**-6)
    ends = [ag.cross_entropy(**call | {"input": call["input"] + side * vector}, **options) for side in (-step, step)]
    slope = (ends[1].input_grad.astype(float) - ends[0].input_grad) / (2 * step)
    product = ag.cross_entropy_hvp(**call, vector=vector, **options, backend="npu")
    np.testing.assert_allclose(product, slope, atol=2e-4)


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_the_hessian_is_symmetric(kind, options, device):
    call = problem_of(kind, (4, 5))
    other = np.random.default_rng(8).standard_normal((4, 5)).astype(np.float32)
    first = np.sum(other * ag.cross_entropy_hvp(**call, **options, backend="npu"))
    second = np.sum(call["vector"] * ag.cross_entropy_hvp(**call | {"vector": other}, **options, backend="npu"))
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector", [np.float64, *DTYPES])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_the_vector_is_rounded_to_the_dtype_of_the_logits(dtype, vector, options, device):
    """Vectors of any dtype give the bits of vectors that have been rounded before."""
    call = problem_of("one target", dtype=dtype) | options
    call["vector"] = (np.random.default_rng(9).standard_normal((6, 9)) / 3).astype(vector)
    call["target"][2] = -100
    rounded = call | {"vector": call["vector"].astype(dtype)}
    expected = ag.cross_entropy_hvp(**rounded, backend="npu")
    assert_identical(ag.cross_entropy_hvp(**call, backend="npu"), expected)
    assert_identical(ag.cross_entropy_hvp(**on_device(rounded)).numpy(), expected)
    if vector != np.float64:
        assert_identical(ag.cross_entropy_hvp(**on_device(call)).numpy(), expected)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_rows_without_a_gradient_may_hold_anything(is_on_device, softcap, device):
    """Ignored rows, and rows whose token weight or upstream gradient is 0, are exactly 0 whatever they hold."""
    call = problem_of("one target") | {"softcap": softcap, "reduction": "none"}
    call["target"][0] = -100
    call["token_weight"] = np.array([1, 0, 1, 1, 2, 1], np.float32)
    call["grad_loss"] = np.array([1, 1, 0, 1, 1, 3], np.float32)
    for name, value in (("input", np.nan), ("vector", np.inf)):
        call[name] = call[name].copy()
        call[name][:3] = value
    product = ag.cross_entropy_hvp(**(on_device(call) if is_on_device else call), backend="npu")
    product = product.numpy() if is_on_device else product
    assert not product[:3].any()
    kept = {name: each[3:] if isinstance(each, np.ndarray) else each for name, each in call.items()}
    check_product(product[3:], product_in_float64(kept), np.float32)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_stay_in_their_rows(kind, softcap, device):
    call = problem_of(kind) | {"softcap": softcap, "lse_square_scale": 0.1}
    call["input"][1, 2], call["vector"][3, 4] = np.nan, np.inf
    expected = product_in_float64(call)
    assert np.array_equal(np.isnan(expected).any(1), [False, True, False, True, False, False])
    for product in (ag.cross_entropy_hvp(**call), ag.cross_entropy_hvp(**on_device(call)).numpy()):
        finite = np.isfinite(expected).all(1)
        assert np.array_equal(np.isfinite(product).all(1), finite)
        check_product(product[finite], expected[finite], np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_minus_infinity(kind, device):
    """Classes of probability 0 have products of 0."""
    call = problem_of(kind)
    call["input"][:, 5:] = -np.inf
    if kind == "all classes":
        call["target"][:, 5:] = 0
    else:
        call["target"] %= 5
    for softcap in (None, 4.0):
        product = ag.cross_entropy_hvp(**call, softcap=softcap, backend="npu")
        check_product(product, product_in_float64(call | {"softcap": softcap}), np.float32)
        assert not product[:, 5:].any()


@pytest.mark.parametrize(
    "options",
    [
        {"class_weight": np.array([0, 0, 1, 1.0]), "lse_square_scale": 0.5},  # no mean of the loss
        {"class_weight": np.zeros(4), "reduction": "sum", "lse_square_scale": 0.5},  # only the squared lse
        {"token_weight": np.zeros(2)},
        {"token_weight": np.array([np.nan, 1]), "grad_loss": 0.0},
        {"grad_loss": 0.0, "lse_square_scale": 0.5},
        {"logit_scale": 0.0, "softcap": 2.0},
    ],
)
def test_sums_of_weights_that_are_zero(options, device):
    check({"input": np.eye(2, 4, dtype=np.float32), "target": np.array([0, 1]), "vector": np.eye(2, 4)} | options)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.5])
def test_weights_that_add_up_to_0(label_smoothing, device):
    """A row whose targets' weights add up to 0 has a gradient, and with a softcap a second derivative."""
    call = problem_of("several targets", (3, 4)) | {"label_smoothing": label_smoothing}
    call |= {"target": np.array([[0, 1]] * 3), "target_prob": np.full((3, 2), 0.5, np.float32)}
    call["class_weight"] = np.array([1, -1, 0, 0], np.float32)
    assert not ag.cross_entropy_hvp(**call, backend="npu").any()
    assert ag.cross_entropy_hvp(**call, softcap=2.0, backend="npu").any()
    check(call | {"softcap": 2.0})


def test_the_squared_lse_of_0(device):
    """A row whose lse is 0 has a second derivative of its square, and no first one."""
    x = np.log(np.array([[0.25, 0.75], [0.5, 0.5], [2, 3]], np.float64)).astype(np.float32)
    call = {"input": np.zeros((3, 1), np.float32), "target": np.zeros(3, int), "vector": np.ones((3, 1), np.float32)}
    options = {"lse_square_scale": 1.0, "reduction": "sum", "class_weight": np.zeros(1)}
    for softcap in (None, 3.0):
        product = ag.cross_entropy_hvp(**call, **options, softcap=softcap, backend="npu")
        assert_identical(product, np.full((3, 1), 2, np.float32))
    check({"input": x, "target": np.zeros(3, int), "vector": np.ones((3, 2)), "class_weight": np.array([0, 1.0])})


@pytest.mark.parametrize(
    "options",
    [
        {"logit_scale": 1e30, "temperature": 1e-30},
        {"logit_scale": 1e30, "temperature": np.array([1e-30, 1, 1e30])},
        {"logit_scale": 1e-30, "temperature": 1e30},
        {"logit_scale": 1e30, "softcap": 1e-30, "temperature": 1e-30},
        {"logit_scale": 1e25, "softcap": 1e30},
        {"logit_scale": 1e10, "softcap": 10.0, "temperature": 1e-10, "lse_square_scale": 0.1},
    ],
)
def test_factors_beyond_their_bounds(options, device):
    """No product of a factor with 0 becomes NaN."""
    x = np.array([[0, 1, 2], [0, 0, 0], [1, -1, 0]], np.float32)
    call = {"input": x, "target": np.array([0, 1, 2]), "vector": np.array([[1, 2, -1.0]] * 3, np.float32)} | options
    expected = ag.cross_entropy_hvp(**call, backend="reference")
    product = ag.cross_entropy_hvp(**call, backend="npu")
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(product), finite)
    np.testing.assert_allclose(product[finite], expected[finite], rtol=1e-4, atol=1e-6)


def test_probabilities_given_as_the_number_0(device):
    call = {"input": np.eye(2, 4, dtype=np.float32), "target": np.array([[0, 1], [2, 3]]), "vector": np.eye(2, 4)}
    assert not ag.cross_entropy_hvp(**call, target_prob=0, backend="npu").any()
    check(call | {"target_prob": np.zeros((2, 2)), "softcap": 2.0, "lse_square_scale": 0.2})


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (), (1,)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("is_dense", [False, True])
def test_shapes_without_rows_or_axes(shape, softcap, is_dense, device):
    x = np.ones(shape, np.float16)
    target = x.astype(np.float32) if is_dense else np.zeros(shape[:-1], int)
    call = {"input": x, "target": target, "vector": x, "softcap": softcap, "lse_square_scale": 0.5}
    expected = ag.cross_entropy_hvp(**call, backend="cpu")
    product = ag.cross_entropy_hvp(**call, backend="npu")
    assert product.shape == shape
    np.testing.assert_allclose(product.astype(float), expected.astype(float), rtol=1e-3)
    there = ag.cross_entropy_hvp(**on_device(call))
    assert there.shape == shape
    assert_identical(there.numpy(), product)


def test_all_rows_are_ignored(device):
    x, target = np.ones((3, 4), np.float16), np.full(3, -100)
    for softcap in (None, 2.0):
        assert_identical(ag.cross_entropy_hvp(x, target, x, softcap=softcap, backend="npu"), np.zeros_like(x))


# ---- what is launched, sent and kept ---------------------------------------------------------------------------------


def test_the_operators_that_a_call_is_made_of(device, monkeypatch):
    """No call launches an operator that it does not name as needed, and some call launches each that it names."""
    made = []

    def recorded(queue, call):
        made.append(call)
        return cross_entropy.cross_entropy_hvp(queue, call)

    monkeypatch.setitem(operators.OPERATORS, "cross_entropy_hvp", recorded)
    named, launched = set(), set()
    for seed in range(150):
        arguments = random_product(seed)
        device.reset()
        ag.cross_entropy_hvp(**arguments, backend="npu")
        of_call = {name for name in _aclnn.NAMES if device.calls(name)}
        needed = limits.needed(made[-1], ag.npu.runtime.state())
        assert of_call <= {*needed}
        named.update(needed)
        launched |= of_call
    assert named == launched


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_problem_passes_through_the_host(kind, options, device):
    """Logits, vector and product of arrays on the device stay there, whatever the axis is; vectors come back."""
    call = problem_of(kind, (8, 4, 500), np.float16)
    if kind == "all classes":
        call["target"] = np.moveaxis(call["target"], 2, 1)
    call |= {name: np.moveaxis(call[name], 2, 1) for name in ("input", "vector")}
    there = on_device(call)
    device.reset()
    ag.cross_entropy_hvp(**there, axis=1, **options)
    for counter in ("bytes_h2d", "bytes_d2h"):
        assert device.counter(counter) <= 8 * 32 * 16


def test_ignored_rows_of_the_host_are_not_sent(device):
    call = problem_of("one target", (32, 500), np.float16)
    call["target"] = np.where(np.arange(32) % 4 == 0, 3, -100)
    expected = product_in_float64(call)
    device.reset()
    check_product(ag.cross_entropy_hvp(**call), expected, np.float16)
    assert device.counter("bytes_h2d") <= 2 * call["input"].nbytes / 4 + 8 * 32
    arrays = call["input"], call["target"], call["vector"]
    bytes_of_arguments = sum(each.nbytes for each in arrays)
    explanation = ag.explain("cross_entropy_hvp", *arrays)
    assert explanation.transferred_bytes == bytes_of_arguments + call["input"].nbytes


@pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.1, "temperature": 2.0}, EVERYTHING])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind, dtype, options, device):
    """At most three matrices of float32 are on the device at the same time, five with a softcap, and 16-bit ones."""
    call = problem_of(kind, (256, 2048), dtype) | options
    if options:
        call["class_weight"] = np.ones(2048)
    npu.release()
    device.reset()
    before = device.counter("peak_device_bytes")
    ag.cross_entropy_hvp(**call, backend="npu")
    size = call["input"].size
    bound = (5 if "softcap" in options else 3) * (4 * size + (1 << 17))
    bound += call["input"].nbytes + (1 << 17) if dtype == np.float16 else 0
    bound += size if "softcap" in options else 0  # of labels and log-probabilities: which ones are infinite
    vectors = 1 << 18
    bound += ag.workspace_size("cross_entropy_hvp", **call, backend="npu") + vectors
    assert device.counter("peak_device_bytes") - before <= bound


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_the_workspace(kind, options, device, monkeypatch):
    """`workspace_size` requests at least the sizes that the call requests, and launches nothing."""
    sizes: list[int] = []

    def recorded(prepare):
        def first_stage(*arguments):
            executor = prepare(*arguments)
            sizes.append(executor.workspace_size)
            return executor

        return first_stage

    for name in ("softmax", "softmax_backward", "log_softmax", "cross_entropy_loss", "cross_entropy_loss_grad"):
        monkeypatch.setattr(_aclnn, name, recorded(getattr(_aclnn, name)))
    call = problem_of(kind) | options
    for arguments in (call, on_device(call)):
        npu.release()
        device.reset()
        size = ag.workspace_size("cross_entropy_hvp", **arguments, backend="npu")
        assert size >= max(sizes) > 0
        assert device.counter("launches") == device.counter("copies_h2d") == 0
        assert device.counter("copies_d2h") <= 1  # of ids, which are checked
        del sizes[:]
        ag.cross_entropy_hvp(**arguments, backend="npu")
        assert size >= max(sizes)
        del sizes[:]


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_results(kind, device):
    """Every operator of a call is prepared with the option for deterministic results, where it is asked for."""
    call = problem_of(kind) | EVERYTHING
    expected = ag.cross_entropy_hvp(**call, backend="npu")
    device.reset()
    with npu.use_deterministic():
        assert_identical(ag.cross_entropy_hvp(**call, backend="npu"), expected)
    assert device.counter("deterministic_launches") == device.counter("launches") > 10
    with npu.use_deterministic("batch"):
        assert "batch-invariant results" in ag.explain("cross_entropy_hvp", **call).reason


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("kind", KINDS)
def test_faults_at_every_call(kind, options, device):
    """A failure of any call of the device raises, leaves the arguments as they were, and loses nothing."""
    call = problem_of(kind, (4, 5), np.float16) | options | {"class_weight": np.arange(5.0)}
    before = {name: each.copy() for name, each in call.items() if isinstance(each, np.ndarray)}
    there = on_device(call)
    for arguments, back in ((call, lambda product: product), (there, npu.DeviceArray.numpy)):
        expected = back(ag.cross_entropy_hvp(**arguments, backend="npu"))
        device.reset()
        back(ag.cross_entropy_hvp(**arguments, backend="npu"))
        calls, struck = device.calls(), 0
        for nth in range(1, calls + 1):
            device.fail("*", nth)
            try:
                product = back(ag.cross_entropy_hvp(**arguments, backend="npu"))
            except ag.AclError:
                struck += 1
            else:
                assert_identical(product, expected)
            device.reset()
            assert_identical(back(ag.cross_entropy_hvp(**arguments, backend="npu")), expected)
        assert struck > 10
    for name, each in before.items():
        assert_identical(call[name], each)
        if isinstance(there[name], npu.DeviceArray):
            assert_identical(there[name].numpy(), each.astype(there[name].dtype))


# ---- who computes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soc", "is_there", "has_loss_of_ids"),
    [
        ("Ascend910A", True, False),
        ("Ascend310P3", True, False),
        ("Ascend950PR_9589", True, True),
        ("Ascend310B1", False, False),
    ],
)
def test_systems(soc, is_there, has_loss_of_ids, device, monkeypatch):
    """Without a softcap, all systems with the softmax's gradient compute the product. With one they need the loss's."""
    monkeypatch.setitem(ag.npu.runtime.found, "state", ag.npu.runtime.state()._replace(soc=soc))
    device.set_soc(soc)
    try:
        for kind, is_capped_there in zip(KINDS, (has_loss_of_ids, False, is_there), strict=True):
            for softcap, has in ((None, is_there), (3.0, is_capped_there)):
                call = problem_of(kind) | {"softcap": softcap, "lse_square_scale": 0.1}
                choice = ag.explain("cross_entropy_hvp", **call)
                assert choice.backend == ("npu" if has else "cpu"), (kind, softcap)
                if has:
                    check(call)
                elif has_loss_of_ids:  # an undocumented operator, which a forced call may use
                    assert "the vendor documents the operator only on 910B, 910_93" in choice.reason
                    check(call)
                else:
                    with pytest.raises(ag.UnsupportedDeviceError) as info:
                        ag.cross_entropy_hvp(**call, backend="npu")
                    assert info.value.code == 361001
        if is_there:
            call = problem_of("one target", dtype=ml_dtypes.bfloat16)
            assert (ag.explain("cross_entropy_hvp", **call).backend == "npu") == has_loss_of_ids
    finally:
        device.set_soc("Ascend910B2")


def test_float64_is_computed_on_the_cpu(device):
    call = problem_of("one target", dtype=np.float64)
    choice = ag.explain("cross_entropy_hvp", **call)
    assert choice.backend == "cpu"
    assert "input: the device supports dtype float32 or float16 or bfloat16, got float64" in choice.reason
    with pytest.raises(ag.ParamTypeError, match="cross_entropy_hvp: input: the device supports dtype"):
        ag.cross_entropy_hvp(**call, backend="npu")
    assert_identical(ag.cross_entropy_hvp(**call), ag.cross_entropy_hvp(**call, backend="cpu"))


@pytest.mark.parametrize("operator", ["linear_cross_entropy_hvp", "linear_cross_entropy_hessian"])
def test_second_derivatives_of_a_layer_stay_on_the_cpu(operator, device):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (3, 4)))
    call = {"input": x, "weight": weight, "target": np.array([0, 1, 2, 1, -100])}
    if operator == "linear_cross_entropy_hvp":
        call["vector"] = weight
    reason = "the function is not implemented for the NPU"
    choice = ag.explain(operator, **call)
    assert (choice.backend, choice.reason) == ("cpu", f"automatic choice; not npu: {reason}")
    function = getattr(ag, operator)
    device.reset()
    function(**call)
    assert device.calls() == 0
    with pytest.raises(ag.UnsupportedDeviceError, match=f"{operator}: {reason}") as info:
        function(**call, backend="npu")
    assert info.value.code == 361001
    with pytest.raises(ag.UnsupportedDeviceError, match=reason):
        function(**on_device(call))


@pytest.mark.parametrize("place", ["host", "device"])
def test_bad_calls_raise_the_same_errors(place, device):
    call = problem_of("one target")
    for name, value, message in (
        ("vector", np.ones((9, 6), np.float32), r"vector: expected shape \(6, 9\) as input has, got \(9, 6\)"),
        ("vector", None, "vector: expected an array, got None"),
        ("target", np.full(6, 9), r"target: expected values in \[0, 9\) or -100, got 9 at index \(0,\)"),
    ):
        bad = call | {name: value}
        with pytest.raises(ag.AscendGradError, match=f"cross_entropy_hvp: {message}"):
            ag.cross_entropy_hvp(**(on_device(bad) if place == "device" else bad), backend="npu")
    if place == "device":
        with pytest.raises(ag.AscendGradError, match="vector"):
            ag.cross_entropy_hvp(**on_device(call) | {"vector": call["vector"]})
