"""Test the cross-entropy of dask arrays: the values of the whole array, for any chunks."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cross_entropy_oracles import random_arguments
from samples import assert_identical

import ascend_grad as ag
import ascend_grad.dask as agd

#: Options, with the number of sparse targets, or the dtype of dense ones.
OPTIONS: tuple[tuple[dict[str, Any], int | str], ...] = (
    ({}, 0),
    ({"class_weight": "classes", "token_weight": "rows", "lse_square_scale": 0.1, "label_smoothing": 0.1}, 0),
    ({"reduction": "none", "grad_loss": "rows", "temperature": "rows", "outputs": ("entropy", "log_prob")}, 0),
    ({"reduction": "sum", "outputs": ("correct", "predicted"), "return_grad": False}, 0),
    ({"denominator": 5.0, "outputs": ("lse", "entropy")}, 3),
    ({"denominator": 5.0, "reduction": "sum"}, 0),
    ({"token_weight": "rows", "label_smoothing": 0.1}, "float32"),
    ({"token_weight": "rows", "softcap": 3.0, "outputs": ("hessian_diag", "prob")}, 0),
    ({"class_weight": "classes", "reduction": "none", "outputs": ("lse", "entropy")}, "float64"),
)


def computed(function, *args, **kwargs):
    return dask.compute(*function(*args, **kwargs), scheduler="synchronous")


@pytest.mark.parametrize(("options", "K"), OPTIONS)
@pytest.mark.parametrize(
    ("shape", "axis", "chunks"), [((7, 5), -1, (3, 5)), ((4, 3, 6), 1, (2, 3, 4)), ((5,), 0, (5,))]
)
def test_values(options, K, shape, axis, chunks):
    kind: dict[str, Any] = {"dense" if isinstance(K, str) else "K": K}
    arguments = random_arguments("dask", shape, axis, "float64", options=options, **kind)
    right = ag.cross_entropy(**arguments)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    lazy = {
        name: da.from_array(value, chunks=1) for name, value in arrays.items() if name not in ("input", "class_weight")
    }
    lazy["input"] = da.from_array(arrays["input"], chunks=chunks)
    result = agd.cross_entropy(**arguments | lazy)
    assert result._fields == right._fields
    for name, value, wanted in zip(result._fields, dask.compute(*result, scheduler="synchronous"), right, strict=True):
        if wanted is None:
            assert value is None
            continue
        assert getattr(result, name).dtype == wanted.dtype
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("size", [1e-50, 1e50, -1e50, np.inf])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_the_size_of_weights_cancels_in_means(function, size):
    """Losses of chunks are float32, and weights of float64 beyond its range cancel nevertheless."""
    arguments = random_arguments("size", (7, 5), -1, "float32")
    arguments["target"][:] = np.arange(7) % 5
    arguments |= {"class_weight": (1 + np.arange(5)) * size, "label_smoothing": 0.1, "lse_square_scale": 0.1}
    if function == "linear_cross_entropy":
        arguments["weight"] = np.eye(5, dtype=np.float32)
        del arguments["axis"]
    right = getattr(ag, function)(**arguments)
    lazy = {
        name: da.from_array(arguments[name], chunks=(3, -1)[: arguments[name].ndim]) for name in ("input", "target")
    }
    results = computed(getattr(agd, function), **arguments | lazy)
    for value, wanted in zip(results[:1] if np.isinf(size) else results, right):  # gradients may be NaN or 0 then
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_means_over_nothing():
    loss, gradient = computed(agd.cross_entropy, da.ones((4, 3), chunks=(2, 3)), np.full(4, -100))
    assert np.isnan(loss)
    assert not gradient.any()


def test_several_chunks_along_the_classes_are_refused():
    with pytest.raises(ag.ParamInvalidError, match="expected one chunk along axis 1"):
        agd.cross_entropy(da.ones((4, 4), chunks=2), np.zeros(4, int))


def test_targets_are_checked_when_a_block_is_computed():
    with pytest.raises(ag.ParamInvalidError, match="target: expected values in"):
        computed(agd.cross_entropy, da.ones((4, 3), chunks=(2, 3)), np.array([0, 1, 3, 0]))


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8"])
def test_integers_become_float64(dtype):
    x, target = np.arange(8).reshape(4, 2).astype(dtype), np.array([0, 1, 1, 0], np.uint64)
    blocks = da.from_array(x, chunks=(3, 2))
    assert_identical(agd.softmax(blocks).compute(), ag.softmax(x))
    assert_identical(agd.log_softmax(blocks).compute(), ag.log_softmax(x))
    for weight, kind in ((x, "f8"), (x.astype("f4"), "f4")):
        got = dask.compute(*agd.linear_cross_entropy(blocks, weight, target))
        right = ag.linear_cross_entropy(x.astype(kind), weight.astype(kind), target.astype(np.int64))
        for one, other in zip(got, right, strict=True):
            assert one.dtype == other.dtype == kind
            np.testing.assert_allclose(one, other, rtol=1e-5)
    got, right = (
        dask.compute(*agd.cross_entropy(blocks, target % 2)),
        ag.cross_entropy(x.astype("f8"), target.astype(int)),
    )
    np.testing.assert_allclose(got[1], right.input_grad, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dimensions(reduction):
    random = np.random.default_rng(3)
    h, w, t = random.standard_normal((2, 6, 3)), random.standard_normal((5, 3)), random.integers(0, 5, (2, 6))
    weight = random.random((2, 6))
    options = {"reduction": reduction, "outputs": ("lse", "predicted"), "token_weight": weight}
    right = ag.linear_cross_entropy(h, w, t, **options)
    found = agd.linear_cross_entropy(da.from_array(h, chunks=(1, 4, 3)), w, t.astype(np.uint8), **options)
    for name, each in zip(right._fields, dask.compute(*found)):
        assert np.shape(each) == np.shape(getattr(right, name)), name
        np.testing.assert_allclose(each, getattr(right, name), rtol=1e-13, err_msg=name)
    right = ag.linear_top_k(h, w, 2)
    for each, wanted in zip(dask.compute(*agd.linear_top_k(da.from_array(h, chunks=(1, 4, 3)), w, 2)), right):
        np.testing.assert_allclose(each, wanted, rtol=1e-13)
