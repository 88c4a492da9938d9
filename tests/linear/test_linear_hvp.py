"""Test the Hessian of a linear layer's loss with respect to its weight and bias, and its products with vectors.

The products may also be of the Hessian with respect to the input.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import cross_entropy_oracles
import numpy as np
import pytest
import scipy.sparse
from cross_entropy_oracles import GAPS, LONG, OPTIONS_OF_SECOND_ORDER, near_certain, random_arguments
from hypothesis import given
from hypothesis import strategies as st
from samples import DTYPES, assert_identical, generator
from sparse_samples import (
    FLOATS,
    dense_copy,
    random_matrix,
    sparse,
    structures,
    times,
    transposed_times,
    ways,
    with_zeros,
)

import ascend_grad as ag

#: BT, H, V: few classes, more classes than rows, and blocks of rows, of which the last is shorter.
SHAPES = ((1, 1, 1), (7, 3, 4), (290, 40, 3), (70, 300, 64), (30, 17, 70), (600, 5, 700))
FEW = ((1, 1, 1), (7, 3, 4), (90, 5, 3))


def call_of(
    key: object, shape: tuple[int, int, int], dtype: str, options: dict[str, Any], *, K: int = 0, dense: bool = False
) -> dict[str, Any]:
    """Make the arguments of a product with ignored rows, a bias, and numbers of the dtype."""
    BT, H, V = shape
    random = generator("linear hvp", key, shape, dtype)
    arguments = random_arguments(key, (BT, V), -1, dtype, options=options, K=K, dense="float32" if dense else None)
    del arguments["axis"]
    arguments["input"] = random.standard_normal((BT, H)).astype(DTYPES[dtype])
    for name, size in {"weight": (V, H), "vector": (V, H), "bias": V, "vector_bias": V}.items():
        scale = 2 / np.sqrt(H) if name == "weight" else 1.0
        arguments[name] = (scale * random.standard_normal(size)).astype(DTYPES[dtype])
    return arguments


def calls(key: object, shape: tuple[int, int, int], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield calls with every option, and with one target, several, or probabilities of all classes."""
    for number, options in enumerate(OPTIONS_OF_SECOND_ORDER[:: 4 if shape[2] > 1000 else 1]):
        K, dense = ((0, False), (3, False), (0, True))[number % 3]
        yield call_of((key, number), shape, dtype, options, K=K, dense=dense)
    yield call_of((key, "plain"), shape, dtype, {}, dense=True)
    scaled = {"logit_scale": -0.6, "temperature": 0.7, "token_weight": "rows", "class_weight": "classes"}
    for K in (0, 2):
        yield call_of((key, "scaled", K), shape, dtype, scaled | {"label_smoothing": 0.2}, K=K)
    yield call_of((key, "several"), shape, dtype, {"softcap": 3.0, "label_smoothing": 0.1}, K=2)


def joint(arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Add a vector for the input, and leave out the vector for the weight of every third call."""
    x = arguments["input"]
    along = generator("joint", number, x.shape).standard_normal(x.shape).astype(x.dtype)
    return {**arguments, "vector_input": along, "vector": None if number % 3 == 2 else arguments["vector"]}


def without_bias(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in arguments.items() if name not in ("bias", "vector_bias")}


def without_vector(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in arguments.items() if not name.startswith("vector")}


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64).astype(LONG)


def logits_of(arguments: dict[str, Any], weight: np.ndarray, bias: str) -> np.ndarray:
    """Return the logits, or their changes along the vectors of weight and bias."""
    moved = wide(arguments[bias]) if "bias" in arguments else 0
    return wide(arguments["input"]) @ weight.T + moved


def of_rows(arguments: dict[str, Any], vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the product of the Hessian with respect to the logits and a vector, and the gradient, by definition."""
    options = {
        name: each for name, each in without_vector(arguments).items() if name not in ("weight", "bias", "input")
    }
    z = logits_of(arguments, wide(arguments["weight"]), "bias")
    found = cross_entropy_oracles.expected(input=z, vector=vector, **options)
    return found["product"], found["input_grad"]


Products = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]


def right_product(arguments: dict[str, Any]) -> Products:
    """Return the products by the definition, and the sums of the magnitudes of their terms."""
    x, w = wide(arguments["input"]), wide(arguments["weight"])
    along = np.zeros_like(w) if arguments["vector"] is None else wide(arguments["vector"])
    of_input = wide(arguments["vector_input"]) if "vector_input" in arguments else np.zeros_like(x)
    changes = logits_of(arguments, along, "vector_bias") + of_input @ w.T
    product, gradient = of_rows(arguments, changes)

    def products(r: np.ndarray, g: np.ndarray, x: np.ndarray, w: np.ndarray, *along: np.ndarray) -> tuple:
        return r.T @ x + g.T @ along[0], r.sum(0), r @ w + g @ along[1]

    factors = (product, gradient, x, w, of_input, along)
    return products(*factors), products(*map(np.abs, factors))


def right_hessian(arguments: dict[str, Any]) -> np.ndarray:
    x = wide(arguments["input"])
    if "bias" in arguments:
        x = np.column_stack([x, np.ones(len(x), LONG)])
    units = np.eye(len(arguments["weight"]))
    columns = [of_rows(arguments, np.broadcast_to(unit, (len(x), len(unit))))[0] for unit in units]
    return np.stack([np.einsum("iv,ij,ik->vjk", each, x, x) for each in columns], axis=2)


def assert_same(one: np.ndarray | None, other: np.ndarray | None) -> None:
    """Check that two results have the same bits, or are both None."""
    assert (one is None) == (other is None)
    if one is not None:
        assert_identical(one, other)


def assert_right(result: Any, right: Products, dtype: np.dtype, text: str = "") -> None:
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype.name, 0.0)
    exact = 1e-11 if dtype == np.float64 else 2e-5
    for product, wanted, size in zip(result, *right):
        if product is None:
            continue
        assert product.shape == wanted.shape
        assert product.dtype == dtype
        bound = (exact + rounding) * (size + np.max(size, initial=0) / 8) + (1e-7 if dtype == np.float16 else 1e-15)
        error = np.abs(product.astype(np.float64) - wanted)
        assert np.all(error <= bound), (text, float(np.max(error / bound)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option(shape, dtype, cpu_engines):
    for number, arguments in enumerate(calls("options", shape, dtype)):
        if number % 2:
            arguments = without_bias(arguments)
        for each in (arguments, joint(arguments, number)):
            right = right_product(each)
            for engine in cpu_engines():
                result = engine.call("linear_cross_entropy_hvp", **each)
                assert_right(result, right, DTYPES[dtype], f"{engine.name} {number}")
                assert (result.bias_product is None) == ("bias" not in each)
                assert (result.input_product is None) == ("vector_input" not in each)


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_the_reference(shape, dtype):
    for number, arguments in enumerate(calls("reference", shape, dtype)):
        each = joint(arguments, number) if number % 2 else arguments
        result = ag.linear_cross_entropy_hvp(**each, backend="reference")
        assert_right(result, right_product(each), DTYPES[dtype])
        assert (result.input_product is None) == ("vector_input" not in each)


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_and_strides_keep_the_bits(shape, dtype, cpu_engine):
    for number, further in ((0, None), (3, None), (10, None), (3, 0), (10, 2)):
        arguments = call_of(("bits", number), shape, dtype, OPTIONS_OF_SECOND_ORDER[number])
        arguments = arguments if further is None else joint(arguments, further)
        expected = cpu_engine.call("linear_cross_entropy_hvp", **arguments, num_threads=1)
        strided = {
            name: np.repeat(a, 2, axis=0)[::2] if isinstance(a, np.ndarray) else a for name, a in arguments.items()
        }
        for each in (arguments, strided):
            for threads in (1, 2, 3, 4):
                result = cpu_engine.call("linear_cross_entropy_hvp", **each, num_threads=threads)
                for one, other in zip(result, expected):
                    assert_same(one, other)


@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_hessian(shape, backend, dtype):
    exact = 1e-11 if dtype == "float64" else 2e-5
    for number, arguments in enumerate(calls("hessian", shape, dtype)):
        if number % 2:
            arguments = without_bias(arguments)
        hessian = ag.linear_cross_entropy_hessian(**without_vector(arguments), backend=backend)
        _, H, V = shape
        width = H + ("bias" in arguments)
        assert hessian.shape == (V, width, V, width)
        assert hessian.dtype == np.dtype("float64" if dtype == "float64" else "float32")
        matrix = hessian.reshape(V * width, V * width)
        assert np.array_equal(matrix, matrix.T)
        right = right_hessian(arguments).astype(np.float64)
        np.testing.assert_allclose(hessian, right, rtol=exact, atol=exact * np.max(np.abs(right)) + 1e-15)


def test_the_hessian_has_the_products_as_columns():
    arguments = call_of("columns", (50, 3, 4), "float64", OPTIONS_OF_SECOND_ORDER[3])
    matrix = ag.linear_cross_entropy_hessian(**without_vector(arguments)).reshape(16, 16)
    for column, unit in zip(matrix.T, np.eye(16)):
        vector = unit.reshape(4, 4)
        along = {"vector": vector[:, :3], "vector_bias": vector[:, 3]}
        product = ag.linear_cross_entropy_hvp(**arguments | along)
        np.testing.assert_allclose(column, np.column_stack(product[:2]).ravel(), atol=1e-13)


def test_finite_differences_of_the_gradient(cpu_engine):
    for number, arguments in enumerate(calls("differences", (9, 4, 5), "float64")):
        for each in (arguments, joint(arguments, number)):
            of_loss, sides = without_vector(each), []
            for step in (-1e-5, 1e-5):
                moved = {name: of_loss[name] + step * each[along] for name, along in vectors_of(each).items()}
                sides.append(cpu_engine.call("linear_cross_entropy", **of_loss | moved))
            result = cpu_engine.call("linear_cross_entropy_hvp", **each)
            for name, product in zip(VECTORS, result, strict=True):
                if product is not None:
                    first, second = (getattr(side, f"{name}_grad") for side in sides)
                    np.testing.assert_allclose(product, (second - first) / 2e-5, atol=1e-8, err_msg=str(number))


#: What a call is differentiated with respect to, and the arguments for its vectors, in the order of the results.
VECTORS = {"weight": "vector", "bias": "vector_bias", "input": "vector_input"}


def vectors_of(arguments: dict[str, Any]) -> dict[str, str]:
    """Return the names in `VECTORS` that a call has."""
    return {name: along for name, along in VECTORS.items() if arguments.get(along) is not None}


def test_symmetry_in_two_vectors(cpu_engine):
    for number, arguments in enumerate(calls("symmetry", (50, 6, 8), "float64")):
        random = np.random.default_rng(3)
        for each in (arguments, joint(arguments, 3 * number)):
            names = list(vectors_of(each).values())
            other = {name: random.standard_normal(each[name].shape) for name in names}
            first, second = (cpu_engine.call("linear_cross_entropy_hvp", **each | moved) for moved in ({}, other))
            sums = [
                sum(np.vdot(product, vectors[name]) for product, name in zip(result, names))
                for result, vectors in ((first, other), (second, each))
            ]
            assert sums[0] == pytest.approx(sums[1], abs=1e-10)


def test_a_vector_of_the_input_alone_has_zeros_for_the_weight(dtype):
    arguments = joint(call_of("alone", (300, 5, 90), dtype, {}), 2)
    zeros = arguments | {"vector": np.zeros((90, 5)), "vector_bias": np.zeros(90)}
    right = right_product(zeros)
    for backend in ("cpu", "reference"):
        for each in (arguments | {"vector_bias": None}, zeros):
            assert_right(ag.linear_cross_entropy_hvp(**each, backend=backend), right, DTYPES[dtype])


def test_a_vector_without_its_bias_has_zeros(dtype):
    arguments = call_of("zeros", (20, 3, 4), dtype, {})
    expected = ag.linear_cross_entropy_hvp(**arguments | {"vector_bias": np.zeros(4)})
    for backend in ("cpu", "reference"):
        result = ag.linear_cross_entropy_hvp(**arguments | {"vector_bias": None}, backend=backend)
        assert_right(result, right_product(arguments | {"vector_bias": np.zeros(4)}), DTYPES[dtype])
    for one, other in zip(ag.linear_cross_entropy_hvp(**arguments | {"vector_bias": None}), expected):
        assert_same(one, other)


def test_vectors_are_rounded_to_the_dtype_of_the_weight():
    arguments = joint(call_of("rounded", (20, 3, 4), "float32", {}), 0)
    vectors = {name: arguments[name].astype(np.float64) * (1 + 1e-12) for name in ("vector", "vector_input")}
    for backend in ("cpu", "reference"):
        for name, vector in vectors.items():
            results = [
                ag.linear_cross_entropy_hvp(**arguments | {name: each}, backend=backend)
                for each in (vector, vector.astype(np.float32))
            ]
            for one, other in zip(*results):
                assert_same(one, other)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("softcap", [None, 1e6])
def test_nearly_certain_rows(gap, softcap, dtype, cpu_engine):
    """The product at the certain class is a difference of nearly equal numbers, whose digits are kept."""
    logits = near_certain(gap, (1, 5), -1, dtype)[0]
    certain = np.argmax(logits)
    arguments = {
        "input": np.repeat(logits, 20, axis=0),
        "weight": np.eye(5, dtype=DTYPES[dtype]),
        "target": np.zeros(20, int),
        "vector": np.zeros((5, 5), DTYPES[dtype]),
        "bias": np.zeros(5, DTYPES[dtype]),
        "vector_bias": np.eye(5)[certain],
        "softcap": softcap,
    }
    product = cpu_engine.call("linear_cross_entropy_hvp", **arguments).bias_product[certain]
    error = 1e-4 + {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0.0)
    right = float(right_product(arguments)[0][1][certain])
    assert float(product) == pytest.approx(right, rel=error, abs=6e-8 if dtype == "float16" else 0)


@pytest.mark.parametrize("K", [0, 3])
def test_ids_from_another_start(K, dtype):
    arguments = call_of("start", (30, 4, 5), dtype, {"class_weight": "classes"}, K=K)
    expected = ag.linear_cross_entropy_hvp(**arguments)
    for ignored in (-100, 1003, -1):
        target = np.where(arguments["target"] == -100, ignored, arguments["target"] + 1010)
        for dtype_of_target in (np.int32, np.int64):
            moved = arguments | {"target": target.astype(dtype_of_target), "ignore_index": ignored}
            for one, other in zip(ag.linear_cross_entropy_hvp(**moved, vocab_start_index=1010), expected):
                assert_same(one, other)


def test_absent_rows_may_hold_anything(dtype, cpu_engine):
    arguments = call_of("absent", (40, 5, 4), dtype, {"token_weight": "rows", "reduction": "sum"})
    arguments["token_weight"][3] = 0
    arguments["target"][[5, 6]] = -100, 0
    kept = [i for i in range(40) if i not in (3, 5)]
    for each in (arguments, joint(arguments, 0)):
        of_rows = [name for name in ("input", "target", "token_weight", "vector_input") if name in each]
        expected = right_product({**each, **{name: each[name][kept] for name in of_rows}})[0]
        each["input"] = each["input"].copy()
        each["input"][3], each["input"][5] = np.nan, np.inf
        if "vector_input" in each:
            each["vector_input"][3], each["vector_input"][5] = np.inf, np.nan
        result = cpu_engine.call("linear_cross_entropy_hvp", **each)
        found = list(result)
        if "vector_input" in each:
            assert not result.input_product[[3, 5]].any()
            found[2] = result.input_product[kept]
        for product, right in zip(found, expected):
            if product is not None:
                bound = 2.0**-6 * np.max(np.abs(right))
                np.testing.assert_allclose(product.astype(np.float64), right.astype(np.float64), 2.0**-6, bound)
    hessian = cpu_engine.call("linear_cross_entropy_hessian", **without_vector(each))
    assert np.isfinite(hessian).all()
    arguments["input"][6] = np.nan
    assert np.isnan(cpu_engine.call("linear_cross_entropy_hvp", **arguments).bias_product.astype(np.float64)).all()


@pytest.mark.parametrize("rows", [4, 5], ids=["in blocks", "in one pass"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_class_weights_beyond_numbers(rows, backend):
    """A weight that no target has counts only in label smoothing. A row of weight 0 keeps its NaN."""
    x, weight, target, vector = np.ones((rows, 1)), np.zeros((4, 1)), np.zeros(rows, int), np.arange(4.0)[:, None]
    call = partial(ag.linear_cross_entropy_hvp, x, weight, target, vector, reduction="sum", backend=backend)
    right = call().weight_product
    for unused in (np.inf, -np.inf, np.nan):
        assert_identical(call(class_weight=[1.0, 1, 1, unused]).weight_product, right)
    assert np.isfinite(call(class_weight=[1.0, 1e308, 1e308, 1e308]).weight_product).all()
    assert_identical(call(class_weight=[np.inf, 1, 1, 1], reduction="mean").weight_product, np.zeros((4, 1)))
    nothing = call(class_weight=[0.0, 1, 1, 1]).weight_product
    assert_identical(nothing, np.zeros((4, 1)))
    x[0] = np.nan
    assert np.isnan(call(class_weight=[0.0, 1, 1, 1]).weight_product).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_infinite_elements_of_vectors(backend):
    product = ag.cross_entropy_hvp([[0.0, 0, 0]], [0], [[np.inf, 0, 0]], backend=backend)
    np.testing.assert_array_equal(product, [[np.nan, -np.inf, -np.inf]])


def test_the_floating_point_mode_of_the_caller_has_no_influence():
    x = np.full((5140, 2), 1e30, np.float32)
    x[2570:, 1] *= -1
    with np.errstate(all="raise"):
        ag.linear_cross_entropy_hessian(x, np.zeros((40, 2), np.float32), np.zeros(5140, int))


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (0, 0, 0), (5, 3, 0)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_empty_shapes(shape, backend, dtype):
    BT, H, V = shape
    x, w = np.ones((BT, H), DTYPES[dtype]), np.ones((V, H), DTYPES[dtype])
    target, bias = np.full(BT, 0 if V else -100), np.ones(V, DTYPES[dtype])
    result = ag.linear_cross_entropy_hvp(x, w, target, w, bias=bias, vector_bias=np.arange(float(V)), backend=backend)
    assert result.weight_product.shape == (V, H)
    assert not result.weight_product.any()
    for vector in (None, w):
        further = ag.linear_cross_entropy_hvp(
            x, w, target, vector, bias=bias, vector_bias=np.arange(float(V)), vector_input=x, backend=backend
        )
        assert further.input_product.shape == (BT, H)
        assert not further.input_product.any()
        assert not further.weight_product.any()
        np.testing.assert_array_equal(further.bias_product, result.bias_product)
    hessian = ag.linear_cross_entropy_hessian(x, w, target, bias=bias, backend=backend)
    assert hessian.shape == (V, H + 1, V, H + 1)
    if BT and V:  # only the bias has an effect
        right = (np.eye(V) - 1 / V) / V
        np.testing.assert_allclose(hessian[:, 0, :, 0], right, rtol=1e-6)
        np.testing.assert_allclose(result.bias_product.astype(np.float64), right @ np.arange(V), rtol=1e-2)
    else:
        assert not result.bias_product.any()
        assert not hessian.any()


def test_rows_of_several_dimensions_and_integers():
    arguments = joint(call_of("dimensions", (12, 3, 4), "float64", {"reduction": "sum"}), 0)
    expected = ag.linear_cross_entropy_hvp(**arguments)
    names = ("input", "target", "vector_input")
    moved = {name: arguments[name].reshape(3, 4, *arguments[name].shape[1:]) for name in names}
    found = ag.linear_cross_entropy_hvp(**arguments | moved)
    assert found.input_product.shape == (3, 4, 3)
    for one, other in zip(found._replace(input_product=found.input_product.reshape(12, 3)), expected):
        assert_same(one, other)
    one_row = {name: arguments[name][0] for name in names}
    product = ag.linear_cross_entropy_hvp(**arguments | one_row).input_product
    np.testing.assert_allclose(product, expected.input_product[0], rtol=1e-13)
    with pytest.raises(ag.AscendGradError, match=r"vector_input: expected shape \(3, 4, 3\) as input has, got \(12, "):
        ag.linear_cross_entropy_hvp(**arguments | moved | {"vector_input": arguments["vector_input"]})
    assert ag.linear_cross_entropy_hvp([[1, 2]], [[1, 0], [0, 1]], [0], np.ones((2, 2))).weight_product.dtype == float
    of_hessian = without_vector(arguments)
    hessian = ag.linear_cross_entropy_hessian(**of_hessian)
    for backend in ("cpu", "reference"):
        moved = {name: of_hessian[name].reshape(3, 4, *of_hessian[name].shape[1:]) for name in ("input", "target")}
        found = ag.linear_cross_entropy_hessian(**of_hessian | moved, backend=backend)
        np.testing.assert_allclose(found, hessian, rtol=1e-12, atol=1e-14)


def test_a_mean_without_weights_is_zero():
    arguments = call_of("nothing", (6, 3, 4), "float64", {})
    arguments["target"][:] = -100
    assert not ag.linear_cross_entropy_hvp(**arguments).weight_product.any()
    result = ag.linear_cross_entropy_hvp(**joint(arguments, 0))
    assert not result.weight_product.any()
    assert not result.input_product.any()
    assert not ag.linear_cross_entropy_hessian(**without_vector(arguments)).any()


VALID = {"input": np.ones((5, 3)), "weight": np.ones((4, 3)), "target": np.zeros(5, int), "vector": np.ones((4, 3))}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vector": np.ones((3, 4))}, r"vector: expected shape \(4, 3\) as weight has, got \(3, 4\)"),
        ({"vector": np.ones((4, 3), int)}, "vector: expected dtype"),
        ({"vector": None}, "vector: expected an array, as vector_input is None, got None"),
        ({"vector_input": np.ones((4, 3))}, r"vector_input: expected shape \(5, 3\) as input has, got \(4, 3\)"),
        ({"vector_input": np.ones((5, 3), int)}, "vector_input: expected dtype"),
        ({"vector_bias": np.ones(4)}, r"vector_bias: expected None, as bias is None, got shape \(4,\)"),
        ({"vector_bias": np.ones(3), "bias": np.ones(4)}, r"vector_bias: expected shape \(V = 4\), got \(3,\)"),
        ({"weight": np.ones((4, 2))}, "weight: expected shape"),
        ({"target": np.full(5, 4)}, "target: expected values"),
        ({"temperature": 0.0}, "temperature: expected a positive finite number, got 0.0"),
        ({"reduction": "all"}, "reduction: expected"),
        ({"grad_loss": np.ones(5)}, "grad_loss: expected a real number, as reduction is 'mean'"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(ag.AscendGradError, match=f"linear_cross_entropy_hvp: {message}"):
        ag.linear_cross_entropy_hvp(**VALID | wrong)
    if not wrong.keys() & set(VECTORS.values()):
        with pytest.raises(ag.AscendGradError, match=f"linear_cross_entropy_hessian: {message}"):
            ag.linear_cross_entropy_hessian(**without_vector(VALID) | wrong)


def test_explain_and_memory():
    arguments = call_of("memory", (3000, 8, 5000), "float32", {})
    product = ag.explain("linear_cross_entropy_hvp", **arguments)
    assert product.backend == "cpu"
    assert "blocks of 128 rows" in product.plan
    # The logits of all rows would take 60 MB.
    assert 0 < ag.workspace_size("linear_cross_entropy_hvp", **arguments) < 24 << 20
    assert 0 < ag.workspace_size("linear_cross_entropy_hvp", **joint(arguments, 0)) < 24 << 20
    for shape, dtype in (((1, 20, 20), "float32"), ((1, 40, 40), "float32"), ((50, 5, 5), "float64")):
        small = without_vector(call_of("memory", shape, dtype, {}))
        ag.linear_cross_entropy_hessian(**small, num_threads=1)
        tracemalloc.start()
        result = ag.linear_cross_entropy_hessian(**small, num_threads=1)
        taken = tracemalloc.get_traced_memory()[1] - result.nbytes
        tracemalloc.stop()
        assert taken <= ag.workspace_size("linear_cross_entropy_hessian", **small, num_threads=1)
    few = without_vector(call_of("memory", (100_000, 8, 3), "float32", {}))
    assert ag.explain("linear_cross_entropy_hessian", **few).backend == "cpu"
    assert 0 < ag.workspace_size("linear_cross_entropy_hessian", **few) < 16 << 20


def test_a_device_leaves_the_call_to_the_cpu(device):
    explained = ag.explain("linear_cross_entropy_hvp", **VALID)
    assert explained.backend == "cpu"
    assert "the function is not implemented for the NPU" in explained.reason


def test_a_sparse_input_with_a_vector_for_it_is_refused():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    for vector in (None, VALID["vector"]):
        wrong = VALID | {"input": scipy_sparse.csr_array(VALID["input"]), "vector": vector}
        for backend in ("cpu", "reference"):
            with pytest.raises(ag.AscendGradError, match="linear_cross_entropy_hvp: input: expected"):
                ag.linear_cross_entropy_hvp(**wrong, vector_input=VALID["input"], backend=backend)


# ---- sparse inputs ---------------------------------------------------------------------------------------------------

#: The arrays of the layer that a sparse input leaves, and the parts of a vector that belong to them.
OF_LAYER = {name: VECTORS[name] for name in ("weight", "bias")}


def sparse_calls(key: object, shape: tuple[int, int, int], dtype: str) -> Iterator[tuple[dict[str, Any], Products]]:
    """Yield calls with a sparse input and every option, and the right products; every other call has no bias."""
    for number, arguments in enumerate(calls(key, shape, dtype)):
        filled = with_zeros(without_bias(arguments) if number % 2 else arguments)
        yield sparse(filled), right_product(filled)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sparse_inputs_with_every_option(shape, dtype, cpu_engines):
    for number, (arguments, right) in enumerate(sparse_calls("sparse", shape, dtype)):
        for engine in cpu_engines():
            result = engine.call("linear_cross_entropy_hvp", **arguments)
            assert_right(result, right, DTYPES[dtype], f"{engine.name} {number}")
            assert (result.bias_product is None) == ("bias" not in arguments)


@pytest.mark.parametrize("shape", SHAPES[:5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_of_sparse_inputs(shape, dtype):
    for arguments, right in sparse_calls("sparse reference", shape, dtype):
        assert_right(ag.linear_cross_entropy_hvp(**arguments, backend="reference"), right, DTYPES[dtype])


@pytest.mark.parametrize("of_vector", DTYPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_vectors_of_every_dtype_and_layout_beside_a_sparse_input(of_vector, dtype):
    arguments = with_zeros(call_of("sparse vector", (300, 40, 5), dtype, {}))
    arguments |= {name: arguments[name].astype(DTYPES[of_vector]) for name in OF_LAYER.values()}
    rounded = arguments | {"vector": arguments["vector"].astype(dtype)}
    right = ag.linear_cross_entropy_hvp(**sparse(rounded))
    assert_right(right, right_product(rounded), DTYPES[dtype])
    v = arguments["vector"]
    for way in (
        v,
        np.asfortranarray(v),
        np.repeat(v, 2, axis=1)[:, ::2],
        v[::-1].copy()[::-1],
        v.astype(v.dtype, copy=True),
    ):
        for one, other in zip(ag.linear_cross_entropy_hvp(**sparse(arguments | {"vector": way})), right):
            assert_same(one, other)
    if dtype == of_vector:
        swapped = arguments | {
            "vector": v.astype(v.dtype.newbyteorder()),
            "weight": arguments["weight"].astype(f">{dtype[0]}{v.itemsize}"),
        }
        for one, other in zip(ag.linear_cross_entropy_hvp(**sparse(swapped)), right):
            assert_same(one, other)


@pytest.mark.parametrize("shape", [(20_000, 50, 3), (3000, 200, 40), (200, 7, 300), (20, 5, 40_000)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_keep_the_bits_of_sparse_inputs(shape, dtype):
    for number in (0, 3, 10):
        arguments = with_zeros(call_of("sparse bits", shape, dtype, OPTIONS_OF_SECOND_ORDER[number]))
        for call in (sparse(arguments), arguments | {"input": list(ways(arguments["input"]))[2]}):
            right = ag.linear_cross_entropy_hvp(**call, num_threads=1)
            for threads in (2, 3, 4):
                for one, other in zip(ag.linear_cross_entropy_hvp(**call, num_threads=threads), right):
                    assert_same(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_forms_of_a_sparse_input(dtype, cpu_engines):
    arguments = with_zeros(call_of("forms", (300, 40, 5), dtype, {"token_weight": "rows"}))
    right = right_product(arguments)
    for engine in cpu_engines():
        for way in ways(arguments["input"]):
            for threads in (1, 3):
                result = engine.call("linear_cross_entropy_hvp", **arguments | {"input": way}, num_threads=threads)
                assert_right(result, right, DTYPES[dtype])


def test_finite_differences_with_a_sparse_input(cpu_engine):
    for number, arguments in enumerate(calls("sparse differences", (23, 12, 5), "float64")):
        arguments = sparse(with_zeros(arguments))
        of_loss, sides = without_vector(arguments), []
        for step in (-1e-5, 1e-5):
            moved = {name: of_loss[name] + step * arguments[along] for name, along in OF_LAYER.items()}
            sides.append(cpu_engine.call("linear_cross_entropy", **of_loss | moved))
        result = cpu_engine.call("linear_cross_entropy_hvp", **arguments)
        for name, product in zip(OF_LAYER, result):
            first, second = (getattr(each, f"{name}_grad") for each in sides)
            np.testing.assert_allclose(product, (second - first) / 2e-5, atol=1e-8, err_msg=str(number))


@given(data=st.data())
def test_any_structure(data):
    """Rows and columns may be missing, and elements in any order, several at a place, or zeros."""
    x = data.draw(structures())
    rows, columns = x.shape
    classes = data.draw(st.integers(1, 20))
    options = {"reduction": "sum", "label_smoothing": 0.1}
    arguments = call_of("structures", (rows, max(columns, 1), classes), "float64", options)
    arguments |= {name: arguments[name][:, :columns] for name in ("weight", "vector")}
    nothing = np.zeros((classes, columns)), np.zeros(classes)
    right = right_product(arguments | {"input": dense_copy(x)}) if rows else (nothing, nothing)
    for backend in ("cpu", "reference"):
        for threads in (1, 3):
            result = ag.linear_cross_entropy_hvp(**arguments | {"input": x}, backend=backend, num_threads=threads)
            assert_right(result, right, np.dtype(np.float64), backend)


def plain_product(arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the products of the sum of plain losses, where elements that are not stored are no factors."""
    x = arguments["input"]
    with np.errstate(all="ignore"):
        z = times(x, arguments["weight"].T) + arguments["bias"].astype(float)
        u = times(x, arguments["vector"].T) + arguments["vector_bias"].astype(float)
        e = np.exp(z - z.max(axis=1, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)
        product = p * (u - (p * u).sum(axis=1, keepdims=True))
        return transposed_times(x, product).T, product.sum(axis=0)


def assert_equal_but_for_rounding(result: Any, right: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    """Check results that may be infinite or NaN: both kinds of numbers count as one, and the others are compared."""
    for one, other in zip(result[:2], right[:2], strict=True):
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        tolerance = 1e-4 if dtype == "float32" else 1e-10
        finite = [np.where(np.isfinite(each), each, 0) for each in (one, other)]
        np.testing.assert_allclose(*finite, rtol=tolerance, atol=tolerance * np.abs(finite[1]).max(initial=1))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["input", "weight", "bias", "vector", "vector_bias"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinite_and_missing_numbers_beside_a_sparse_input(dtype, where, value):
    """Elements that are not stored multiply nothing, neither an infinite weight nor an infinite derivative.

    Rows 0 and 7 have no elements: they change with the bias alone.
    """
    arguments = with_zeros(call_of(("not finite", where), (40, 13, 6), dtype, {"reduction": "sum"}))
    arguments["target"][:] = np.arange(40) % 6
    arguments = sparse(arguments)
    if where == "input":
        arguments["input"].data[[5, 90]] = value
    else:
        arguments[where] = arguments[where].copy()
        arguments[where].flat[4] = value
    right = plain_product(arguments)
    assert np.isfinite(right[0]).any()
    # A class with a negative infinite logit has the probability 0.
    assert not np.isfinite(right[1]).all() or (value == -np.inf and where in ("weight", "bias"))
    for backend in ("cpu", "reference"):
        for threads in (1, 2):
            result = ag.linear_cross_entropy_hvp(**arguments, backend=backend, num_threads=threads)
            assert_equal_but_for_rounding(result, right, dtype)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300])
@pytest.mark.parametrize("where", ["input", "weight", "bias", "vector", "vector_bias"])
@pytest.mark.parametrize("classes", [3, 90])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_dense_product_gives_the_same(dtype, classes, where, value):
    """If all elements are stored, or none matters, infinite and missing numbers have the same effect."""
    arguments = call_of(("as dense", where), (40, 7, classes), dtype, {"token_weight": "rows"})
    arguments["bias"], arguments["vector_bias"] = (
        arguments[name].astype(np.float64) for name in ("bias", "vector_bias")
    )
    arguments[where] = arguments[where].copy()
    with np.errstate(over="ignore"):
        arguments[where].flat[2] = value
    expected, result = (ag.linear_cross_entropy_hvp(**each) for each in (arguments, sparse(arguments)))
    assert_equal_but_for_rounding(result, expected, dtype)
    if where == "vector_bias":  # the product of the bias has no factors of the input
        arguments["input"][::3] = 0
        expected, result = (ag.linear_cross_entropy_hvp(**each) for each in (arguments, sparse(arguments)))
        assert_equal_but_for_rounding(result[1:2], expected[1:2], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_absent_rows_of_a_sparse_input_may_hold_anything(dtype, cpu_engine):
    arguments = with_zeros(call_of("sparse absent", (40, 13, 6), dtype, {"token_weight": "rows", "reduction": "sum"}))
    arguments["token_weight"][3] = 0
    arguments["target"][5] = -100
    right = right_product(arguments)
    for row, value in ((3, np.nan), (5, np.inf)):
        arguments["input"][row] = np.where(arguments["input"][row] == 0, 0, value)
    for backend in (cpu_engine.backend, "reference"):
        assert_right(ag.linear_cross_entropy_hvp(**sparse(arguments), backend=backend), right, DTYPES[dtype])


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (0, 0, 0), (5, 3, 0), (0, 2**57, 0), (5, 2**57, 0)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_empty_shapes_of_sparse_inputs(shape, backend):
    rows, columns, classes = shape
    x, w = scipy.sparse.csr_array((rows, columns), dtype=np.float32), np.ones((classes, columns), np.float32)
    target, bias = np.full(rows, 0 if classes else -100), np.ones(classes, np.float32)
    vector_bias = np.arange(classes, dtype=np.float32)
    result = ag.linear_cross_entropy_hvp(x, w, target, w, bias=bias, vector_bias=vector_bias, backend=backend)
    assert result.weight_product.shape == (classes, columns)
    assert not result.weight_product.any()
    right = (
        (np.eye(classes) - 1 / max(classes, 1)) / max(classes, 1) @ np.arange(classes) if rows else np.zeros(classes)
    )
    np.testing.assert_allclose(result.bias_product, right, rtol=1e-6)


def test_explain_and_memory_of_sparse_inputs():
    x = random_matrix(3000, 400, 0.01).astype(np.float32)
    random = generator("sparse memory")
    w, v = random.standard_normal((2, 20, 400)).astype(np.float32)
    arguments = {"input": x, "weight": w, "target": np.zeros(3000, np.int64), "vector": v}
    explanation = ag.explain("linear_cross_entropy_hvp", **arguments, num_threads=3)
    assert (explanation.backend, explanation.plan, explanation.threads) == ("cpu", "nonzeros of rows", 3)
    size = ag.workspace_size("linear_cross_entropy_hvp", **arguments)
    assert 3 * 32 * 400 * 4 < size < 2**23


@pytest.mark.parametrize("of_vector", ["float32", "float64"])
def test_a_sparse_input_is_never_dense(of_vector):
    """Two million columns: a dense copy of the rows would take 80 GB."""
    rows, columns = 5000, 2_000_000
    random = generator("wide")
    x = scipy.sparse.csr_array((rows, columns), dtype=np.float32)
    x.data = random.standard_normal(3 * rows).astype(np.float32)
    x.indices, x.indptr = random.integers(0, columns, 3 * rows), 3 * np.arange(rows + 1)
    w = np.zeros((3, columns), np.float32)
    arguments = {
        "input": x,
        "weight": w,
        "target": np.zeros(rows, np.int64),
        "vector": np.ones((3, columns), of_vector),
    }
    ag.linear_cross_entropy_hvp(**arguments, num_threads=1)
    tracemalloc.start()
    ag.linear_cross_entropy_hvp(**arguments, num_threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = ag.workspace_size("linear_cross_entropy_hvp", **arguments, num_threads=1)
    assert peak <= size + w.nbytes + 2**14
    assert size <= 3 * columns * 16 + 24 * columns + 2**24


def test_a_sparse_vector_or_a_sparse_hessian_is_refused():
    x = scipy.sparse.csr_array(np.ones((5, 3)))
    with pytest.raises(ag.ParamTypeError, match="vector: expected a dense array, got csr_array"):
        ag.linear_cross_entropy_hvp(**VALID | {"vector": x})
    with pytest.raises(ag.ParamTypeError, match="input: expected a dense array, got csr_array"):
        ag.linear_cross_entropy_hessian(**without_vector(VALID) | {"input": x})
    with pytest.raises(ag.ParamTypeError, match="input: expected a sparse array in CSR format, got csc"):
        ag.linear_cross_entropy_hvp(**VALID | {"input": x.tocsc()})
    x.indices[4] = 3
    for backend in ("cpu", "reference"):
        with pytest.raises(ag.ParamInvalidError, match=r"_hvp: input: .* with a column index outside"):
            ag.linear_cross_entropy_hvp(**VALID | {"input": x}, backend=backend)
