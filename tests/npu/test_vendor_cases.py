"""Test the losses of logits in the cases in which the vendor tests them: the test double's operators, and our calls."""

from __future__ import annotations

import numpy as np
import pytest
import vendor_cases
from acl_client import Acl, code_of
from aclnn_losses import (
    assert_near,
    dense_loss,
    gradient,
    gradient_arguments,
    loss,
    loss_arguments,
    right_dense_loss,
    right_gradient,
    right_loss,
    scale_of_dense_loss,
    scale_of_gradient,
    scale_of_loss,
)
from vendor_cases import DTYPES, REFUSED, Dense, Gradient, Loss, arrays_of, shown, values

import ascend_grad as ag

LOSSES, GRADIENTS, DENSE = (
    list(cases()) for cases in (vendor_cases.losses, vendor_cases.gradients, vendor_cases.dense)
)


def assert_refused(acl: Acl, case: Loss | Gradient | Dense, name: str, *arguments) -> None:
    code, reason = REFUSED[case.refused]
    assert code_of(acl, name, *arguments) == code, reason


@pytest.mark.parametrize("case", LOSSES, ids=shown)
def test_the_loss(case: Loss, acl, double, rng) -> None:
    x, target, weight = arrays_of(rng, case, case.logits)
    settings = case.reduction, case.ignored, case.smoothing
    if case.refused:
        arguments = loss_arguments(x, target.astype(case.target_dtype), weight, *settings)
        assert_refused(acl, case, "CrossEntropyLoss", *arguments)
        settings = case.reduction, case.ignored if case.ignored < case.classes else -100, case.smoothing
    found = loss(acl, x, target, weight, *settings)
    right, log_prob = right_loss(x, target, weight, *settings)
    assert_near(found["log_prob"], log_prob, np.abs(x[np.isfinite(x)].astype(float)).max(initial=0))
    assert_near(found["loss"], right, scale_of_loss(x, target, weight, *settings))
    assert double.violations() == []


@pytest.mark.parametrize("case", GRADIENTS, ids=shown)
def test_the_gradient(case: Gradient, acl, double, rng) -> None:
    log_prob, target, weight = arrays_of(rng, case, case.log_prob)
    grad = values(rng, case.upstream, (case.rows,) if case.reduction == "none" else (), log_prob.dtype.type)
    settings = case.reduction, case.ignored
    if case.refused:
        given = target.astype(case.target_dtype)
        arguments = gradient_arguments(grad, log_prob, given, weight, *settings, case.smoothing)
        assert_refused(acl, case, "CrossEntropyLossGrad", *arguments)
    found = gradient(acl, grad, log_prob, target, weight, *settings)
    right = right_gradient(grad, log_prob, target, weight, *settings)
    assert_near(found, right, scale_of_gradient(grad, log_prob, target, weight, *settings))
    assert double.violations() == []


@pytest.mark.parametrize("case", DENSE, ids=shown)
def test_the_dense_loss(case: Dense, acl, double, rng) -> None:
    dtype = DTYPES[case.dtype]
    x, labels = values(rng, case.logits, case.shape, dtype), values(rng, case.labels, case.labels_shape, dtype)
    if case.refused:
        assert_refused(acl, case, "SoftmaxCrossEntropyWithLogits", x, labels, np.zeros(len(x), dtype), np.zeros_like(x))
        x, labels = (np.ascontiguousarray(each) for each in np.broadcast_arrays(x, labels))
    losses, backprop = dense_loss(acl, x, labels)
    right, gradients = right_dense_loss(x, labels)
    assert_near(losses, right, scale_of_dense_loss(x, labels))
    assert_near(backprop, gradients, 1)
    assert double.violations() == []


# ---- our calls -------------------------------------------------------------------------------------------------------


def results_of_call(x: np.ndarray, *arguments, **settings) -> tuple[tuple, tuple]:
    """Return the results of a call on the device, and the reference's results in float64."""
    with np.errstate(all="ignore"):
        right = ag.cross_entropy(x.astype(float), *arguments, **settings, backend="reference")
    return ag.cross_entropy(x, *arguments, **settings, backend="npu"), right


@pytest.mark.parametrize("case", LOSSES, ids=shown)
def test_our_loss(case: Loss, device, rng) -> None:
    x, target, weight = arrays_of(rng, case, case.logits)
    settings = {"reduction": case.reduction, "ignore_index": case.ignored, "label_smoothing": case.smoothing}
    found, right = results_of_call(x, target.astype(case.target_dtype), class_weight=weight, **settings)
    assert_near(
        np.atleast_1d(found.loss), np.atleast_1d(right.loss), scale_of_loss(x, target, weight, *settings.values())
    )
    assert_near(found.input_grad, right.input_grad, np.abs(right.input_grad).max(-1, keepdims=True))


@pytest.mark.parametrize("case", DENSE, ids=shown)
def test_our_dense_loss(case: Dense, device, rng) -> None:
    dtype = DTYPES[case.dtype]
    x, labels = values(rng, case.logits, case.shape, dtype), values(rng, case.labels, case.labels_shape, dtype)
    x, labels = np.broadcast_arrays(x, labels)
    found, right = results_of_call(x, labels, reduction="none")
    if "inf" not in case.labels:  # the product with a log-probability that rounds to 0 is NaN
        assert_near(found.loss, right.loss, scale_of_dense_loss(x, labels))
    absolute = np.abs(labels.astype(float))
    p = right_dense_loss(x, np.zeros_like(labels))[1]
    assert_near(found.input_grad, right.input_grad, p * absolute.sum(-1, keepdims=True) + absolute)
