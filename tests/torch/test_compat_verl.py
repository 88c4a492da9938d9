"""Compare the function of `ascend_grad.torch.compat.verl` with torch's own functions in float64."""

from __future__ import annotations

import pytest
import torch
from compat_problems import DTYPES, B, T, V, check, problem
from loss_formulas import Formula

import ascend_grad as ag
from ascend_grad.torch.compat import verl


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, "of each token"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_verl(reduction: str, temperature: float | str, dtype: torch.dtype):
    hidden, weight, labels = problem()
    divisor = 0.5 + torch.rand(B, T) if isinstance(temperature, str) else temperature
    formula = Formula(temperature=divisor.flatten().double() if isinstance(divisor, torch.Tensor) else divisor)
    counted = (labels != -100).sum()

    def right(hidden, weight):
        found = formula.outputs(hidden.flatten(0, 1), weight, None, labels.flatten())
        log_prob = found["log_prob"]
        reduced = {"none": log_prob, "sum": log_prob.sum(), "mean": log_prob.sum() / counted}
        return reduced[reduction], found["entropy"]

    check(lambda *each: verl.linear_cross_entropy(*each, labels, divisor, reduction), right, [hidden, weight], dtype)


@pytest.mark.parametrize("reduction", ["None", "SUM", "Mean"])
@pytest.mark.parametrize("shape", [(B * T,), (1, B * T), (B * T, 1), (B, T), (T, B)])
def test_labels_of_verl_have_any_shape_and_reductions_any_case(shape: tuple[int, ...], reduction: str):
    hidden, weight, labels = problem()
    divisor = 0.5 + torch.rand(B * T)
    found = verl.linear_cross_entropy(hidden, weight, labels.reshape(shape), divisor.reshape(shape), reduction)
    flat = hidden.flatten(0, 1), weight, labels.flatten()
    for each, right in zip(found, verl.linear_cross_entropy(*flat, divisor, reduction.lower())):
        assert torch.equal(each, right)


def test_errors_of_verl():
    hidden, weight, labels = problem()
    with pytest.raises(
        NotImplementedError, match=r"compat\.verl\.linear_cross_entropy: dist_process_group: not supported"
    ):
        verl.linear_cross_entropy(hidden, weight, labels, dist_process_group=object())
    with pytest.raises(ag.ParamInvalidError, match=r"labels: expected 18 elements, .* got shape \(3, 5\)"):
        verl.linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(
        ag.ParamInvalidError, match=r"temperature: expected 18 elements, one for each label, got shape \(17,\)"
    ):
        verl.linear_cross_entropy(hidden, weight, labels, torch.ones(B * T - 1))
    with pytest.raises(ag.ParamInvalidError, match="reduction: expected mean, sum or none, got str 'average'"):
        verl.linear_cross_entropy(hidden, weight, labels, reduction="Average")
    with pytest.raises(
        ag.ParamTypeError, match=r"verl.linear_cross_entropy: weight: expected torch\.float32, as hidden"
    ):
        verl.linear_cross_entropy(hidden, weight.double(), labels)
    with pytest.raises(
        ag.ParamInvalidError, match=r"verl\.linear_cross_entropy: temperature: expected a positive finite"
    ):
        verl.linear_cross_entropy(hidden, weight, labels, 0.0)
    with pytest.raises(ag.ParamInvalidError, match=r"verl\.linear_cross_entropy: labels: expected values in"):
        verl.linear_cross_entropy(hidden, weight, labels + V)
