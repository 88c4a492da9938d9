"""Test the objective in LightGBM, beside the objective that LightGBM has."""

from __future__ import annotations

from typing import Any

import lightgbm as lgb
import numpy as np
import pytest
from fit_samples import classified, log_loss
from samples import generator

from ascend_grad.objectives import lightgbm_softmax

ROWS, K = 120, 4
BUILT_IN: dict[str, Any] = {"objective": "multiclass"}
SILENT: dict[str, Any] = {"verbose": -1, "num_threads": 2, "deterministic": True, "force_row_wise": True}


def derivatives_of_leaves(booster: lgb.Booster, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the leaf of each row and class in the first trees, and sums of gradients and Hessians over its rows.

    The value of a leaf without a penalty is minus the quotient of the sums.
    """
    leaves = booster.predict(X, pred_leaf=True).astype(int)
    nodes = booster.trees_to_dataframe().set_index("node_index")
    found = nodes.loc[[f"{tree}-L{leaf}" for row in leaves for tree, leaf in enumerate(row)]]
    hess = found["weight"].to_numpy().reshape(leaves.shape)
    return leaves, -found["value"].to_numpy().reshape(leaves.shape) * hess, hess


@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives_are_those_of_the_package(weighted):
    """Trees with a leaf for a few rows show the gradients and Hessians that the package computes."""
    random = generator("lightgbm", weighted)
    scores = random.normal(0, 2, (ROWS, K))
    X, y = np.arange(ROWS, dtype=np.float64)[:, None], random.integers(0, K, ROWS)
    weight = random.random(ROWS).astype(np.float32) if weighted else None
    binning = {"min_data_in_bin": 1, "max_bin": 2 * ROWS, "feature_pre_filter": False}
    leaves_of_rows = {"num_leaves": ROWS, "min_data_in_leaf": 1, "min_sum_hessian_in_leaf": 1e-3, "learning_rate": 1}
    data = lgb.Dataset(X, y, weight=weight, init_score=scores, params=SILENT | binning)
    settings = BUILT_IN | SILENT | binning | leaves_of_rows | {"num_class": K, "boost_from_average": False}
    booster = lgb.train(settings, data, 1)
    leaves, grad_sums, hess_sums = derivatives_of_leaves(booster, X)
    assert all(len(np.unique(column)) > ROWS / 8 for column in leaves.T)
    for derivative, sums in zip(lightgbm_softmax(scores, data), (grad_sums, hess_sums)):
        for k in range(K):
            right = np.bincount(leaves[:, k], derivative[:, k].astype(np.float64))[leaves[:, k]]
            np.testing.assert_allclose(sums[:, k], right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_held_out_log_loss(weighted):
    X, y = classified(3000, 8, K)
    weight = generator("weights").random(2000) if weighted else None
    settings = SILENT | {"num_class": K, "num_leaves": 15, "boost_from_average": False}
    losses = []
    for objective in (BUILT_IN, {"objective": lightgbm_softmax}):
        data = lgb.Dataset(X[:2000], y[:2000], weight=weight, params=SILENT)
        booster = lgb.train(settings | objective, data, 20)
        losses.append(log_loss(booster.predict(X[2000:], raw_score=True), y[2000:]))
    assert losses[0] < 0.9 * np.log(K)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_classifier_of_scikit_learns_interface(weighted):
    X, y = classified(1500, 8, K)
    weight = generator("weights").random(1000) if weighted else None
    settings = SILENT | {"n_estimators": 10, "num_leaves": 7, "boost_from_average": False}
    built_in, ours = (
        lgb.LGBMClassifier(**settings, **objective).fit(X[:1000], y[:1000], sample_weight=weight)
        for objective in ({}, {"objective": lightgbm_softmax})
    )
    scores = [model.predict(X[1000:], raw_score=True) for model in (built_in, ours)]
    assert log_loss(scores[1], y[1000:]) == pytest.approx(log_loss(scores[0], y[1000:]), rel=1e-3)
