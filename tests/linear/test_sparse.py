"""Test the loss of a linear layer whose input is a sparse array of SciPy, against the same input as a dense array."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.special
from faults import outcome
from hypothesis import given
from hypothesis import strategies as st
from linear_samples import Shape
from loss_samples import EDGES, OPTIONS, arguments_of, backward_of, check
from producers import Own
from samples import assert_identical, generator
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

LOSS, BACKWARD = "linear_cross_entropy", "linear_cross_entropy_backward"
PRODUCT = "linear_cross_entropy_hvp"

#: Numbers of classes around the vectors of every instruction set, and more than registers hold.
SHAPES = tuple(Shape(rows, classes, 30) for rows, classes in (
    (300, 1), (300, 2), (90, 3), (300, 4), (90, 5), (90, 8), (90, 9), (300, 16), (90, 17), (90, 33), (90, 63), (90, 64),
    (40, 65), (40, 129), (20, 700),
))  # fmt: skip


def assert_same(results: Any, right: Any) -> None:
    assert results._fields == right._fields
    for result, expected in zip(results, right, strict=True):
        if expected is None:
            assert result is None
        else:
            assert_identical(np.asarray(result), np.asarray(expected))


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_sums_of_many_rows(cpu_engines):
    """Errors of float32 gradients do not grow with the rows."""
    random, rows, classes, features = generator("many rows"), 60_000, 4, 2000
    x = scipy.sparse.random_array((rows, features), density=3 / features, format="csr", rng=random)
    x = scipy.sparse.csr_array(scipy.sparse.hstack([np.ones((rows, 1)), x]), dtype=np.float32)
    weight = random.standard_normal((classes, features + 1)).astype(np.float32)
    target = random.integers(0, classes, rows)
    p = scipy.special.softmax(x.astype(np.float64) @ weight.T.astype(np.float64), axis=1)
    p[np.arange(rows), target] -= 1
    bound = 32 * np.finfo(np.float32).eps * (abs(x).T @ np.abs(p)).T + 1e-30
    for _ in cpu_engines():
        result = ag.linear_cross_entropy(x, weight, target, reduction="sum", backend="cpu")
        assert (np.abs(result.weight_grad - (x.T @ p).T) <= bound).all()
        again = ag.linear_cross_entropy(x, weight, target, reduction="sum", backend="cpu", num_threads=3)
        assert_identical(again.weight_grad, result.weight_grad)
        small = ag.linear_cross_entropy(x, weight, target, reduction="sum", backend="cpu", workspace_bytes=4 << 20)
        assert (np.abs(small.weight_grad - (x.T @ p).T) <= bound).all()


def test_logits_of_long_rows(cpu_engines):
    x = scipy.sparse.csr_array(np.full((2, 100_001), 0.1, np.float32))
    weight = np.full((3, 100_001), 0.1, np.float32)
    right = x.astype(np.float64) @ weight.T.astype(np.float64)
    for _ in cpu_engines():
        lse = ag.linear_cross_entropy(x, weight, [0, 1], outputs=("lse",), return_grad=False, backend="cpu").lse
        np.testing.assert_allclose(lse, scipy.special.logsumexp(right, axis=1), rtol=64 * np.finfo(np.float32).eps)
    x.data[7] = np.inf
    assert (
        ag.linear_cross_entropy(x, weight, [0, 1], outputs=("lse",), return_grad=False).lse == [np.inf, lse[1]]
    ).all()


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_option_on_every_variant(option, dtype, cpu_engines):
    for shape in SHAPES[1:8:3]:
        arguments = with_zeros(arguments_of(shape, dtype, option))
        for _ in cpu_engines():
            result = ag.linear_cross_entropy(**sparse(arguments), backend="cpu")
            assert result.input_grad is None
            assert result.weight_grad is not None
            check(result, arguments, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_classes(shape, dtype, cpu_engines):
    arguments = with_zeros(arguments_of(shape, dtype, "cap"))
    for _ in cpu_engines():
        for columns in (np.int32, np.int64):
            call = sparse(arguments)
            call["input"].indices = call["input"].indices.astype(columns)
            check(ag.linear_cross_entropy(**call, backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_on_both_backends(option, reduction, dtype):
    arguments = with_zeros(arguments_of(Shape(60, 7, 20), dtype, option, reduction))
    for backend in ("cpu", "reference"):
        check(ag.linear_cross_entropy(**sparse(arguments), backend=backend), arguments, dtype)
        without = ag.linear_cross_entropy(**sparse(arguments), backend=backend, return_grad=False)
        assert without.weight_grad is None
        check(without, arguments, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_outputs(option, reduction, dtype, monkeypatch):
    x = with_zeros(arguments_of(Shape(60, 7, 20), dtype, option, reduction))["input"]
    monkeypatch.setattr(
        "loss_samples.arguments_of", lambda *_: arguments_of(Shape(60, 7, 20), dtype, option, reduction) | {"input": x}
    )
    forward, backward, upstream = backward_of(Shape(60, 7, 20), dtype, option, reduction)
    for backend in ("cpu", "reference"):
        results = ag.linear_cross_entropy_backward(**sparse(backward), backend=backend)
        assert results.input_grad is None
        check(results, forward, dtype, **upstream)


@pytest.mark.parametrize("shape", EDGES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_edges_of_shapes(shape, dtype):
    for option in ("outputs", "all"):
        arguments = arguments_of(shape, dtype, option, "sum")
        check(ag.linear_cross_entropy(**sparse(arguments), backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("sizes", [(0, 3), (0, 0), (4, 0)])
def test_no_rows_or_classes(sizes):
    rows, classes = sizes
    x, w = scipy.sparse.csr_array((rows, 5)), np.ones((classes, 5))
    target = np.full(rows, -100)
    result = ag.linear_cross_entropy(x, w, target, bias=np.ones(classes), reduction="sum", backend="cpu")
    right = ag.linear_cross_entropy(
        x.toarray(), w, target, bias=np.ones(classes), reduction="sum", output_mask=(False, True), backend="cpu"
    )
    assert_same(result, right)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_targets(dtype):
    arguments = with_zeros(arguments_of(Shape(5000, 6, 20), dtype, "tokens and classes"))
    prob = generator("dense targets").random((5000, 12)).astype(np.float32)
    for target in (prob[:, :6], np.asfortranarray(prob[:, 6:]), prob[:, ::2].astype(">f8")):
        dense = arguments | {"target": target, "workspace_bytes": 4 << 20}
        check(ag.linear_cross_entropy(**sparse(dense), backend="cpu"), dense, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_that_are_split(dtype, smoothing):
    """Few rows of many classes are split if their targets do not lie side by side."""
    x, w = random_matrix(5, 33, 0.5).astype(dtype), generator("split").standard_normal((20_000, 33)).astype(dtype)
    target = np.repeat(generator("split targets").random((20_000, 5)), 3, axis=1).T[::3]
    arguments = {"input": x, "weight": w, "target": target, "label_smoothing": smoothing, "reduction": "sum"}
    lse = ag.linear_cross_entropy(**arguments, return_grad=False, outputs=("lse",), backend="reference").lse
    calls = (ag.linear_cross_entropy_backward, {"lse": lse + 1, "grad_loss": 1.0}), (ag.linear_cross_entropy, {})
    for threads in (1, 2):
        for function, more in calls:  # the loss comes last, as memory of a call may be given to the next one
            result, right = (
                function(**arguments, **more, backend=backend, num_threads=threads).weight_grad
                for backend in ("cpu", "reference")
            )
            np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


# ---- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_forms_of_a_matrix(dtype, cpu_engines):
    arguments = with_zeros(arguments_of(Shape(300, 5, 40), dtype, "outputs"))
    for _ in cpu_engines():
        for way in ways(arguments["input"]):
            for threads in (1, 3):
                result = ag.linear_cross_entropy(**arguments | {"input": way}, backend="cpu", num_threads=threads)
                check(result, arguments, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_the_weight(dtype):
    arguments = with_zeros(arguments_of(Shape(300, 20, 41), dtype, "all"))
    w = arguments["weight"]
    right = ag.linear_cross_entropy(**sparse(arguments), backend="cpu")
    for way in (
        np.asfortranarray(w),
        w[::-1].copy()[::-1],
        np.repeat(w, 2, axis=1)[:, ::2],
        w.astype(w.dtype.newbyteorder()),
    ):
        assert_same(ag.linear_cross_entropy(**sparse(arguments) | {"weight": way}, backend="cpu"), right)


@given(data=st.data())
def test_any_structure(data):
    """Rows and columns may be missing, and elements in any order, several at a place, or zeros."""
    x = data.draw(structures())
    rows, columns = x.shape
    classes = data.draw(st.integers(1, 20))
    option = data.draw(st.sampled_from(("no option", "outputs", "all")))
    arguments = arguments_of(Shape(rows, classes, columns), "float64", option, "sum") | {"input": dense_copy(x)}
    threads = data.draw(st.integers(1, 3))
    for backend in ("cpu", "reference"):
        check(
            ag.linear_cross_entropy(**arguments | {"input": x}, backend=backend, num_threads=threads),
            arguments,
            "float64",
        )


@pytest.mark.parametrize("option", ["no option", "cap", "all"])
@pytest.mark.parametrize("shape", [Shape(20_000, 3, 50), Shape(3000, 40, 200), Shape(200, 300, 7)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_change_nothing(option, shape, dtype):
    for reduction in ("mean", "none"):
        arguments = with_zeros(arguments_of(shape, dtype, option, reduction))
        for call in (sparse(arguments), arguments | {"input": list(ways(arguments["input"]))[5]}):
            right = ag.linear_cross_entropy(**call, backend="cpu", num_threads=1)
            for threads in (2, 3, 4):
                assert_same(ag.linear_cross_entropy(**call, backend="cpu", num_threads=threads), right)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_parts_of_rows(option, dtype):
    """Rows of few features are cut into parts, unless the workspace is small."""
    for rows in (513, 1100):
        arguments = with_zeros(arguments_of(Shape(rows, 5, 6), dtype, option))
        for threads in (1, 2):
            check(ag.linear_cross_entropy(**sparse(arguments), backend="cpu", num_threads=threads), arguments, dtype)


def test_a_workspace_that_more_threads_exceed():
    """The number of parts and of rows of a block is that of one thread, also where more threads need more memory."""
    x = scipy.sparse.random(20_000, 2000, 0.0075, format="csr", random_state=1)
    weight, target = generator("threads").standard_normal((20, 2000)), np.arange(20_000) % 20

    def grad(threads, workspace_bytes):
        return ag.linear_cross_entropy(
            x, weight, target, backend="cpu", num_threads=threads, workspace_bytes=workspace_bytes
        ).weight_grad

    least = ag.workspace_size(LOSS, x, weight, target, workspace_bytes=0)
    for workspace_bytes in (least, 4269120, 4269184, *generator("workspaces").integers(least, 3 * least, 5)):
        right = grad(1, int(workspace_bytes))
        for threads in (2, 7, 8, 16):
            assert_identical(grad(threads, int(workspace_bytes)), right)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_loss_that_is_infinite(dtype):
    random = generator("infinite", dtype)
    x, weight = random.standard_normal((4000, 6)).astype(dtype), random.standard_normal((3, 6)).astype(dtype)
    target = np.zeros(4000, int)
    target[[7, 3990]] = 2
    for reduction in ("sum", "mean"):
        for bias in ([0, 0, -np.inf], [0, -np.inf, 0]):
            right = ag.linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, backend="cpu").loss
            found = ag.linear_cross_entropy(scipy.sparse.csr_array(x), weight, target, bias=bias, reduction=reduction)
            np.testing.assert_allclose(found.loss, right, rtol=1e-5)


def test_integers_take_the_dtype_of_the_weight():
    arguments = with_zeros(arguments_of(Shape(30, 5, 20), "float32", "no option"))
    counts = np.ceil(np.abs(arguments["input"])).astype(np.int64)
    for dtype in FLOATS:
        call = arguments | {"weight": arguments["weight"].astype(dtype)}
        right = ag.linear_cross_entropy(**sparse(call | {"input": counts.astype(dtype)}), backend="cpu")
        assert right.weight_grad.dtype == dtype
        assert_same(ag.linear_cross_entropy(**sparse(call | {"input": counts}), backend="cpu"), right)
        assert_same(
            ag.linear_cross_entropy(**sparse(call | {"input": counts > 0}), backend="cpu"),
            ag.linear_cross_entropy(**sparse(call | {"input": (counts > 0).astype(dtype)}), backend="cpu"),
        )

    with pytest.raises(ag.ParamTypeError, match="weight: expected float32 or float64 with a sparse input of integers"):
        ag.linear_cross_entropy(**sparse(call | {"input": counts, "weight": call["weight"].astype(np.float16)}))
    masked = scipy.sparse.csr_array(counts.astype(float))
    masked.data = np.ma.masked_array(masked.data)
    with pytest.raises(ag.ParamTypeError, match=r"input\.data: expected an array without a mask"):
        ag.linear_cross_entropy(**call | {"input": masked, "weight": call["weight"].astype(float)})


@pytest.mark.parametrize("dtype", FLOATS)
def test_integers_take_the_dtype_of_a_weight_of_any_library(dtype):
    """The weight may be an object that only converts to an array, and need not have a NumPy dtype."""
    arguments = with_zeros(arguments_of(Shape(30, 5, 20), dtype, "no option"))
    counts = scipy.sparse.csr_array(np.ceil(np.abs(arguments["input"])).astype(np.int64))
    right = ag.linear_cross_entropy(**arguments | {"input": counts.astype(dtype)}, backend="cpu")
    for weight in (
        memoryview(arguments["weight"]),
        arguments["weight"].astype(arguments["weight"].dtype.newbyteorder()),
    ):
        result = ag.linear_cross_entropy(**arguments | {"input": counts, "weight": weight}, backend="cpu")
        assert_same(result, right)
    result = ag.linear_cross_entropy(**arguments | {"input": counts, "weight": Own(arguments["weight"])}, backend="cpu")
    assert_identical(result.weight_grad.array, right.weight_grad)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_elements_that_are_not_stored_add_nothing(backend):
    """A stored 0 times infinity is NaN, as in the dense layer; an element that is not stored is no factor."""
    x = scipy.sparse.csr_array(np.array([[1.0, 0], [1, 1]]))
    w = np.array([[1.0, np.inf], [0, 0]])
    result = ag.linear_cross_entropy(x, w, np.array([0, 0]), reduction="none", outputs=("lse",), backend=backend)
    assert np.isfinite(result.lse[0])
    assert result.lse[1] == np.inf
    stored = scipy.sparse.csr_array(
        (np.array([1.0, 0, 1, 1]), x.toarray().nonzero()[1][[0, 2, 1, 2]], [0, 2, 4]), x.shape
    )
    call = {"target": np.array([0, 0]), "reduction": "none", "backend": backend}
    assert np.isnan(ag.linear_cross_entropy(stored, w, **call).loss[0])
    # A row whose derivatives are NaN adds them to the columns of its elements.
    w[0, 1] = 0
    unknown = ag.linear_cross_entropy(x, w, **call, grad_loss=np.array([np.nan, 1]), bias=np.zeros(2))
    assert np.isnan(unknown.weight_grad[:, 0]).all()
    assert np.isfinite(unknown.weight_grad[:, 1]).all()
    assert np.isnan(unknown.bias_grad).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_without_a_gradient_are_not_read(threads):
    """An ignored row, or one of weight 0, may hold NaN."""
    arguments = with_zeros(arguments_of(Shape(300, 5, 20), "float32", "token weights", start=0))
    right = ag.linear_cross_entropy(**sparse(arguments), num_threads=threads)
    absent = (arguments["target"] == -7) | (arguments["token_weight"] == 0)
    arguments["input"][absent] = np.where(arguments["input"][absent] == 0, 0, np.nan)
    result = ag.linear_cross_entropy(**sparse(arguments), num_threads=threads)
    assert_identical(result.weight_grad, right.weight_grad)
    assert_identical(np.asarray(result.loss), np.asarray(right.loss))


# ---- the given lse ---------------------------------------------------------------------------------------------------


def plain_backward(arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of weight and bias from the lse and the entropy that are given, with plain targets."""
    x = arguments["input"]
    with np.errstate(all="ignore"):
        z = times(x, arguments["weight"].T) + arguments["bias"].astype(float)
        lse, entropy = (arguments[name].astype(float)[:, None] for name in ("lse", "entropy"))
        p = np.exp(z - np.where(np.isfinite(lse), lse, np.nan))
        is_target = np.arange(z.shape[1]) == arguments["target"][:, None]
        gradient = arguments["grad_loss"] * (p - is_target) - arguments["grad_entropy"][:, None] * p * (
            z - lse + entropy
        )
        return transposed_times(x, gradient).T, gradient.sum(axis=0)


@pytest.mark.parametrize("classes", [3, 40, 3000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_reads_the_given_lse(dtype, classes, cpu_engines):
    """Any lse counts, such as that of a vocabulary of which the weight has a part; an infinite one gives NaN."""
    random = generator("given lse", dtype, classes)
    x = random_matrix(50, 30, 0.3).astype(dtype)
    x.indptr[8:] -= x.indptr[8] - x.indptr[7]  # a row without elements; the elements of the others are others then
    arguments = {"input": x, "weight": random.standard_normal((classes, 30)).astype(dtype), "target": np.arange(50) % 3}
    arguments |= {"bias": random.standard_normal(classes), "reduction": "sum", "grad_loss": 0.7}
    arguments |= {"lse": random.uniform(-1, 9, 50), "entropy": random.random(50)}
    arguments |= {"grad_entropy": random.standard_normal(50)}
    for special in (None, np.inf, -np.inf, np.nan):
        if special is not None:
            arguments["lse"] = np.where(np.arange(50) == 9, special, arguments["lse"])
        right = plain_backward(arguments)
        for engine in cpu_engines():
            for threads in (1, 3):
                result = engine.call(BACKWARD, **arguments, num_threads=threads)[1:]
                compare_finite(result, right, dtype)
        compare_finite(ag.linear_cross_entropy_backward(**arguments, backend="reference")[1:], right, dtype)


def compare_finite(results: Any, right: Any, dtype: str) -> None:
    """Compare results which may be infinite or NaN; these count as one kind of number."""
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    for one, other in zip(results, right, strict=True):
        assert np.array_equal(np.isfinite(one), np.isfinite(other))
        finite = [np.where(np.isfinite(each), each, 0) for each in (one, other)]
        np.testing.assert_allclose(*finite, rtol=tolerance, atol=tolerance * np.abs(finite[1]).max(initial=1))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_is_that_of_the_dense_input(option, dtype):
    """With every option, and an lse that is another number than that of the logits."""
    _, backward, _ = backward_of(Shape(60, 9, 20), dtype, option, "none")
    backward = with_zeros(backward) | {"lse": backward["lse"] + 0.25, "output_mask": (False, True)}
    for bits in (dtype, "float16"):
        call = backward | {name: backward[name].astype(bits) for name in ("lse", "entropy")}
        expected = ag.linear_cross_entropy_backward(**call)[1:]
        for backend in ("cpu", "reference"):
            result = ag.linear_cross_entropy_backward(**sparse(call), backend=backend)[1:]
            pairs = [pair for pair in zip(result, expected, strict=True) if pair[1] is not None]
            compare_finite(*zip(*pairs), dtype)


@pytest.mark.parametrize("classes", [3, 40])
def test_the_backward_with_probabilities_of_all_classes(classes):
    random = generator("given lse, dense targets", classes)
    x, target = random_matrix(50, 30, 0.3), random.random((50, classes))
    arguments = {"input": x, "weight": random.standard_normal((classes, 30)), "target": target, "grad_loss": 1.5}
    # Some classes have the probability 1, or more, by the given lse.
    arguments["lse"] = (x @ arguments["weight"].T).max(axis=1) - np.repeat([0.0, 0.5], 25)
    for more in (
        {},
        {"label_smoothing": 0.2, "class_weight": random.random(classes), "temperature": random.random(50) + 0.5},
    ):
        dense_input = {"input": x.toarray(), "output_mask": (False, True)}
        expected = ag.linear_cross_entropy_backward(**arguments | more | dense_input)
        for backend in ("cpu", "reference"):
            result = ag.linear_cross_entropy_backward(**arguments | more, backend=backend)
            np.testing.assert_allclose(result.weight_grad, expected.weight_grad, rtol=1e-9, atol=1e-11)


# ---- errors ----------------------------------------------------------------------------------------------------------


def broken() -> Iterator[tuple[str, Any, str]]:
    """Yield matrices with a wrong structure, and the errors."""
    x = random_matrix(40, 30, 0.3)

    def changed(name: str, part: Any) -> Any:
        copy = x.copy()
        setattr(copy, name, part)
        return copy

    for dtype in (np.int32, np.int64):
        for place in (0, 17, len(x.indices) - 1):
            for column in (30, -1, np.iinfo(dtype).max, np.iinfo(dtype).min):
                indices = x.indices.astype(dtype)
                indices[place] = column
                yield (
                    f"column {column} at {place}",
                    changed("indices", indices),
                    "with a column index outside [0, 30)",
                )
    starts = x.indptr.copy()
    starts[5] = starts[6] + 1
    message = "whose indptr does not begin with 0, decreases, or exceeds the number of elements"
    yield "descending starts", changed("indptr", starts), message
    yield "a negative start", changed("indptr", np.append(-1, x.indptr[1:])), message
    yield "a later start", changed("indptr", np.append(1, x.indptr[1:])), message
    yield "an end beyond", changed("indptr", np.append(x.indptr[:-1], 2**40)), message
    yield "fewer elements", changed("data", x.data[:-1]), message
    yield "fewer columns", changed("indices", x.indices[:-1]), message
    yield "fewer starts", changed("indptr", x.indptr[:-1]), "expected 41 elements of indptr, got 40"
    yield "a matrix of data", changed("data", x.data[None]), "with vectors as data, indices and indptr"
    yield "floating columns", changed("indices", x.indices * 1.0), "with vectors as data, indices and indptr"


@pytest.mark.parametrize(("what", "x", "message"), list(broken()), ids=[each[0] for each in broken()])
def test_a_wrong_structure_is_an_error(what, x, message):
    w, target = np.ones((3, 30)), np.zeros(40, np.int64)
    for backend in ("cpu", "reference"):
        for threads in (1, 3):
            error = outcome(ag.linear_cross_entropy, x, w, target, backend=backend, num_threads=threads)
            assert isinstance(error, ag.ParamInvalidError), what
            assert message in str(error)


@pytest.mark.parametrize("function", [LOSS, "linear_cross_entropy_hvp"])
def test_a_wrong_structure_is_an_error_without_rows_or_classes(function):
    w, target = np.ones((3, 5)), np.full(4, -100)
    without_rows, without_classes = scipy.sparse.csr_array((0, 5)), scipy.sparse.csr_array((4, 5))
    without_rows.indptr = np.array([1])
    without_classes.indptr = np.array([0, 2, 1, 1, 1])
    for x, weight, ids in ((without_rows, w, target[:0]), (without_classes, w[:0], target)):
        of_product = {} if function == LOSS else {"vector": weight}
        for backend in ("cpu", "reference"):
            error = outcome(getattr(ag, function), x, weight, ids, **of_product, backend=backend)
            assert "input: expected a valid sparse array, got one whose indptr" in str(error)


@pytest.mark.parametrize("kind", ["csc", "coo", "lil", "bsr", "dok", "dia"])
def test_other_formats(kind):
    """SciPy's conversions read beyond the arrays of a wrong structure, so that they are left to the caller."""
    x = random_matrix(40, 30, 0.3, kind)
    error = outcome(ag.linear_cross_entropy, x, np.ones((3, 30)), np.zeros(40, np.int64))
    message = f"input: expected a sparse array in CSR format, got {kind}; pass input.tocsr()"
    assert isinstance(error, ag.ParamTypeError)
    assert message in str(error)


def test_what_is_refused():
    x, w, target = scipy.sparse.csr_array(np.eye(3)), np.ones((2, 3)), np.zeros(3, np.int64)
    cases = (
        (
            {"output_mask": (True, False)},
            "output_mask: expected (True, True) or (False, True), as a sparse input has no",
        ),
        ({"weight": np.ones((2, 4))}, "weight"),
        ({"weight": np.ones((2, 3), np.float32)}, "weight: expected dtype float64 as input has"),
        ({"target": np.zeros(4, np.int64)}, "target"),
        ({"target": np.full(3, 2)}, "target"),
        (
            {"input": scipy.sparse.coo_array(np.ones(3))},
            "input: expected a sparse array with 2 dimensions, got coo_array",
        ),
        ({"input": x * 1j}, "input: expected a sparse array of float32, float64 or integers, got complex128"),
        ({"weight": x}, "weight: expected a dense array, got csr_array; pass weight.toarray()"),
        ({"bias": x}, "bias: expected a dense array, got csr_array; pass bias.toarray()"),
        ({"workspace_bytes": 2**20}, "workspace_bytes: expected"),
    )
    for change, message in cases:
        for function, more in (
            (ag.linear_cross_entropy, {}),
            (ag.linear_cross_entropy_backward, {"lse": np.ones(3), "grad_loss": 1.0}),
        ):
            error = outcome(function, **{"input": x, "weight": w, "target": target} | more | change)
            assert isinstance(error, ag.ParamInvalidError)
            assert message in str(error)


def test_the_npu_takes_no_sparse_arrays(device):
    x, w, target = (
        scipy.sparse.csr_array(np.eye(3, dtype=np.float32)),
        np.ones((2, 3), np.float32),
        np.zeros(3, np.int64),
    )
    assert "not npu: sparse arrays are computed on the CPU" in ag.explain(LOSS, x, w, target).reason
    error = outcome(ag.linear_cross_entropy, x, w, target, backend="npu")
    assert isinstance(error, ag.UnsupportedDeviceError)


@pytest.mark.parametrize("what", ["rows", "columns", "classes"])
@pytest.mark.parametrize("function", [LOSS, BACKWARD, PRODUCT])
def test_sizes_that_fit_no_memory(function, what):
    """Broadcast arrays have any size. No size of a buffer overflows, and every loop ends soon."""
    x, w, target = scipy.sparse.csr_array((2, 3), dtype=np.float32), np.ones((4, 3), np.float32), np.zeros(2, np.int8)
    if what == "rows":
        x = scipy.sparse.csr_array((0, 0), dtype=np.float32)
        x._shape, x.indptr = (2**61, 0), np.broadcast_to(np.int8(0), 2**61 + 1)
        w, target = w[:, :0], np.broadcast_to(np.int8(0), 2**61)
    elif what == "columns":
        x, w = scipy.sparse.csr_array((2, 2**58), dtype=np.float32), np.broadcast_to(np.float32(1), (4, 2**58))
    else:
        w = np.broadcast_to(np.float32(1), (2**58, 3))
    more: dict[str, Any] = {LOSS: {"return_grad": False}, BACKWARD: {"lse": np.ones(2), "grad_loss": 1.0}}.get(
        function, {"vector": w}
    )
    if what == "rows" and function == BACKWARD:
        more["lse"] = np.broadcast_to(np.float16(0), 2**61)
    with pytest.raises((MemoryError, ag.ParamInvalidError)):
        getattr(ag, function)(x, w, target, **more)
    with pytest.raises((MemoryError, ag.ParamInvalidError)):
        ag.workspace_size(function, x, w, target, **more)


# ---- memory, plans ---------------------------------------------------------------------------------------------------


def test_explain_and_workspace():
    x = random_matrix(5000, 400, 0.01).astype(np.float32)
    w, target = np.zeros((20, 400), np.float32), np.zeros(5000, np.int64)
    explanation = ag.explain(LOSS, x, w, target, num_threads=3)
    assert (explanation.backend, explanation.plan, explanation.threads) == ("cpu", "nonzeros of rows", 3)
    assert ag.explain(LOSS, x.toarray(), w, target).plan != explanation.plan
    size = ag.workspace_size(LOSS, x, w, target)
    assert 2 * 32 * 400 * 4 < size < 2**23
    assert ag.workspace_size(LOSS, x, w, target, workspace_bytes=0) >= 2**22
    limited = ag.workspace_size(LOSS, x, w, target, workspace_bytes=2**22)
    assert limited <= 2**22 + target.nbytes + 2**12


@pytest.mark.parametrize("start", [0, 2**40])
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
@pytest.mark.parametrize(("function", "is_sparse"), [(LOSS, True), (PRODUCT, True), (PRODUCT, False)])
def test_the_workspace_covers_shifted_ids(function, is_sparse, dtype, start):
    """Ids are copied if they do not begin with 0; those that begin beyond their dtype are all ignored."""
    x = np.ones((200_000, 4), np.float32)
    arguments: dict[str, Any] = {"weight": np.ones((3, 4), np.float32), "target": np.full(len(x), 1, dtype)}
    arguments |= {"ignore_index": 1 if start > 3 else -100, "vocab_start_index": start, "num_threads": 1}
    arguments |= {"input": scipy.sparse.csr_array(x) if is_sparse else x}
    arguments |= {"workspace_bytes": 4 << 20} if function == LOSS else {"vector": np.ones((3, 4), np.float32)}
    getattr(ag, function)(**arguments)
    tracemalloc.start()
    getattr(ag, function)(**arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= ag.workspace_size(function, **arguments) + 2**14


def test_blocks_change_sums_but_little():
    arguments = with_zeros(arguments_of(Shape(30_000, 20, 20), "float32", "outputs"))
    for workspace in (None, 4 << 20):
        check(ag.linear_cross_entropy(**sparse(arguments), workspace_bytes=workspace), arguments, "float32")


SCIPY = """
import sys
import numpy as np
import ascend_grad as ag
ag.linear_cross_entropy(np.eye(3), np.eye(3), np.arange(3))
assert not [name for name in sys.modules if name.startswith(("scipy", "ascend_grad.sparse_arrays"))]
"""


def test_scipy_is_not_imported():
    subprocess.run([sys.executable, "-P", "-c", SCIPY], check=True)
