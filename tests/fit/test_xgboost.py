"""Test the objective in XGBoost, beside the objective that XGBoost has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xgboost as xgb
from fit_samples import classified, log_loss
from samples import generator

from ascend_grad.objectives import xgboost_softmax

ROWS, K = 120, 4
BUILT_IN: dict[str, Any] = {"objective": "multi:softprob"}


def derivatives_of_leaves(booster: xgb.Booster, data: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the leaf of each row and class in the first trees, and sums of gradients and Hessians over its rows.

    The value of a leaf without a penalty is minus the quotient of the sums.
    """
    nodes = booster.trees_to_dataframe().set_index(["Tree", "Node"])
    leaves = booster.predict(data, pred_leaf=True).astype(int)
    found = nodes.loc[[(tree, leaf) for row in leaves for tree, leaf in enumerate(row)]]
    hess = found["Cover"].to_numpy().reshape(leaves.shape)
    return leaves, -found["Gain"].to_numpy().reshape(leaves.shape) * hess, hess


@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives_are_those_of_the_package(weighted):
    """Trees with a leaf for a few rows show the gradients and Hessians that the package computes."""
    random = generator("xgboost", weighted)
    scores = random.normal(0, 2, (ROWS, K)).astype(np.float32)
    y, weight = random.integers(0, K, ROWS), random.random(ROWS).astype(np.float32) if weighted else None
    data = xgb.DMatrix(np.arange(ROWS)[:, None], y, weight=weight, base_margin=scores)
    settings = {"tree_method": "exact", "max_depth": 30, "min_child_weight": 0, "reg_lambda": 0, "eta": 1}
    booster = xgb.train(BUILT_IN | settings | {"num_class": K}, data, 1)
    leaves, grad_sums, hess_sums = derivatives_of_leaves(booster, data)
    assert len(np.unique(leaves)) > ROWS / 2
    for derivative, sums in zip(xgboost_softmax(scores, data), (grad_sums, hess_sums)):
        for k in range(K):
            right = np.bincount(leaves[:, k], derivative[:, k].astype(np.float64))[leaves[:, k]]
            np.testing.assert_allclose(sums[:, k], right, rtol=2e-6, atol=1e-6)


def test_the_least_hessian_is_that_of_the_package():
    scores = np.array([[90, -90, 0]], np.float32)
    data = xgb.DMatrix(np.zeros((1, 1)), [0], base_margin=scores)
    settings = {"min_child_weight": 0, "reg_lambda": 0, "eta": 1, "num_class": 3, "tree_method": "exact"}
    covers = xgb.train(BUILT_IN | settings, data, 1).trees_to_dataframe()["Cover"]
    np.testing.assert_array_equal(covers.to_numpy(np.float32), xgboost_softmax(scores, data)[1][0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["hist", "exact"])
def test_held_out_log_loss(weighted, method):
    X, y = classified(3000, 8, K)
    weight = generator("weights").random(2000) if weighted else None
    train, test = xgb.DMatrix(X[:2000], y[:2000], weight=weight), xgb.DMatrix(X[2000:])
    settings = {"num_class": K, "max_depth": 4, "base_score": np.full(K, 0.5), "tree_method": method}
    losses = [
        log_loss(booster.predict(test, output_margin=True), y[2000:])
        for booster in (
            xgb.train(settings | BUILT_IN, train, 20),
            xgb.train(settings, train, 20, obj=xgboost_softmax),
        )
    ]
    assert losses[0] < 0.9 * np.log(K)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_classifier_of_scikit_learns_interface(weighted):
    X, y = classified(1500, 8, K)
    weight = generator("weights").random(1000) if weighted else None
    settings = {"n_estimators": 10, "max_depth": 3, "base_score": np.full(K, 0.5)}
    built_in, ours = (
        xgb.XGBClassifier(**settings, **objective).fit(X[:1000], y[:1000], sample_weight=weight)
        for objective in ({}, {"objective": xgboost_softmax, "num_class": K})
    )
    scores = [model.predict(X[1000:], output_margin=True) for model in (built_in, ours)]
    assert log_loss(scores[1], y[1000:]) == pytest.approx(log_loss(scores[0], y[1000:]), rel=1e-3)
