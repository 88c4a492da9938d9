"""Compare results with SciPy in float64. SciPy shares no code with the library or with the other oracles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import special

import ascend_grad as ag

SHAPES = [(1,), (7,), (1000,), (3, 5), (64, 129), (4, 1, 6), (3, 40, 17), (2, 3, 4, 5)]
SHAPES_AND_DIMS = [(shape, axis) for shape in SHAPES for axis in range(len(shape))]
TOLERANCE = 1e-12

BT, V, H = 33, 500, 20
#: Cuts of the vocabulary into shards.
CUTS = (0, 1, 200, V)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def layer(random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make input, weight and targets of a linear layer."""
    return random.standard_normal((BT, H)), random.standard_normal((V, H)), random.integers(0, V, BT)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, 700])
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_DIMS)
def test_forward(shape, axis, size, random):
    x = size * random.standard_normal(shape)
    np.testing.assert_allclose(ag.softmax(x, axis), special.softmax(x, axis), rtol=TOLERANCE)
    assert_close(ag.log_softmax(x, axis), special.log_softmax(x, axis))


def softmax_jacobian(y: np.ndarray) -> np.ndarray:
    return np.diag(y) - np.outer(y, y)


def log_softmax_jacobian(y: np.ndarray) -> np.ndarray:
    return np.eye(len(y)) - y[:, None]


def jacobian_product(jacobian, y: np.ndarray, g: np.ndarray, axis: int) -> np.ndarray:
    """Return the product of each row of g with the Jacobian matrix at the same row of y."""
    y, g = np.moveaxis(y, axis, -1), np.moveaxis(g, axis, -1)
    rows = [jacobian(y[row]) @ g[row] for row in np.ndindex(y.shape[:-1])]
    return np.moveaxis(np.reshape(rows, y.shape), -1, axis)


@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_DIMS)
def test_backward(shape, axis, random):
    x, g = random.standard_normal(shape), random.standard_normal(shape)
    y = special.softmax(x, axis)
    assert_close(ag.softmax_backward(g, y, axis), jacobian_product(softmax_jacobian, y, g, axis))
    log_y = special.log_softmax(x, axis)
    assert_close(ag.log_softmax_backward(g, log_y, axis), jacobian_product(log_softmax_jacobian, y, g, axis))


@pytest.mark.parametrize("scale", [1.0, -0.125, 3.0])
def test_scaled_masked_softmax(scale, random):
    """The masked softmax equals a softmax in which masked logits are -10000. A row without other logits is uniform."""
    x, g = random.standard_normal((2, 3, 11, 17)), random.standard_normal((2, 3, 11, 17))
    mask = random.random((2, 1, 11, 17)) < 0.3
    mask[0, 0, 0] = True
    y = special.softmax(np.where(mask, -10000.0, x * scale), -1)
    assert_close(ag.scaled_masked_softmax(x, mask, scale), y)
    gradient = np.where(mask, 0, scale * jacobian_product(softmax_jacobian, y, g, -1))
    assert_close(ag.scaled_masked_softmax_backward(g, y, mask, scale), gradient)


def test_statistics_over_shards(layer):
    x, weight, target = layer
    logits = x @ weight.T
    for start, stop in pairwise(CUTS):
        shard = logits[:, start:stop]
        found = ag.fused_linear_online_max_sum(x, weight[start:stop], target, start, stop)
        assert_close(found.logits_max + np.log(found.sum_exp_logits), special.logsumexp(shard, -1))
        assert_close(found.logits_max, shard.max(-1))


def test_loss_and_probabilities(layer):
    x, weight, target = layer
    logits = x @ weight.T
    found = ag.fused_linear_online_max_sum(x, weight, target, 0, V, return_logits=True)
    loss, softmax = ag.fused_cross_entropy_loss_with_max_sum(*found[:3], vocab_parallel_logits=found[-1])
    assert_close(loss, special.logsumexp(logits, -1) - logits[np.arange(BT), target])
    assert_close(loss, -special.log_softmax(logits, -1)[np.arange(BT), target])
    assert_close(softmax, special.softmax(logits, -1))


@pytest.mark.parametrize("stored", [False, True], ids=["recomputed", "stored"])
def test_gradients_over_shards(stored, layer, random):
    x, weight, target = layer
    grad = random.standard_normal(BT)
    logits = x @ weight.T
    tile = grad[:, None] * (special.softmax(logits, -1) - np.eye(V)[target])
    # The terms exp(logits - logsumexp) are probabilities, so that the sum of exponentials is 1.
    statistics = {"logits_max": special.logsumexp(logits, -1), "sum_exp_logits": np.ones(BT)}
    input_grad = np.zeros((BT, H))
    for start, stop in pairwise(CUTS):
        mask = (target < start) | (target >= stop)
        ids = np.where(mask, 0, target - start)
        given = {"softmax": special.softmax(logits, -1)[:, start:stop]} if stored else statistics
        part, weight_grad = ag.fused_linear_cross_entropy_loss_grad(grad, x, weight[start:stop], mask, ids, **given)
        assert_close(weight_grad, tile[:, start:stop].T @ x)
        input_grad += part
    assert_close(input_grad, tile @ weight)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction, layer):
    x, weight, target = layer
    logits = x @ weight.T
    target[::5] = -100
    kept = target != -100
    losses = np.where(kept, special.logsumexp(logits, -1) - logits[np.arange(BT), np.where(kept, target, 0)], 0)
    grad = kept / kept.sum() if reduction == "mean" else 1.0 * kept
    tile = grad[:, None] * (special.softmax(logits, -1) - np.eye(V)[np.where(kept, target, 0)])
    found = ag.linear_cross_entropy(x, weight, target, reduction=reduction)
    assert_close(found.loss, losses if reduction == "none" else losses @ grad)
    assert_close(found.input_grad, tile @ weight)
    assert_close(found.weight_grad, tile.T @ x)
