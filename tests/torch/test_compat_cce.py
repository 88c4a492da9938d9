"""Compare the functions of `ascend_grad.torch.compat.cce` with torch's own functions in float64."""

from __future__ import annotations

import enum

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from compat_problems import DTYPES, B, T, V, check, problem
from loss_formulas import Formula
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
from ascend_grad.torch.compat import cce
from ascend_grad.torch.compat.cce import LinearCrossEntropyImpl, linear_cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, False, True, 2])
def test_cut_cross_entropy(shift: bool | int, reduction: str):
    e, c, targets = problem()
    shape = (B, T - shift) if reduction == "none" else ()
    above = torch.randn(shape)

    def right(e, c):
        logits = (e[:, : T - shift] @ c.T).flatten(0, 1)
        return F.cross_entropy(logits, targets[:, shift:].flatten(), reduction=reduction).reshape(shape)

    values = value_and_gradients(
        lambda e, c: linear_cross_entropy(e, c, targets, reduction=reduction, shift=shift), [e, c], above
    )
    rights = value_and_gradients(right, [e.double(), c.double()], above.double())
    assert values[0].shape == shape
    for value, expected in zip(values, rights):
        assert_close(value, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_cut_cross_entropy(
    reduction: str, with_bias: bool, return_lse: bool, softcap: float | None, dtype: torch.dtype
):
    e, c, targets = problem()
    tensors = [e, c, torch.randn(V)] if with_bias else [e, c]
    formula = Formula(softcap=softcap)

    def ours(e, c, bias=None):
        keywords = {"softcap": softcap, "reduction": reduction, "shift": 1, "return_lse": return_lse}
        found = linear_cross_entropy(e, c, targets, bias, **keywords)
        module = cce.LinearCrossEntropy(**keywords)(e, c, targets, bias)
        for each, same in zip(found, module) if return_lse else [(found, module)]:
            assert torch.equal(each, same)
        return found if return_lse else (found,)

    def right(e, c, bias=None):
        rows, classes = e[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        loss = formula.loss(rows, c, bias, classes, reduction)
        results = (loss.reshape(B, T - 1) if reduction == "none" else loss,)
        return (*results, formula.outputs(rows, c, bias, classes)["lse"].reshape(B, T - 1)) if return_lse else results

    check(ours, right, tensors, dtype)


class Implementation(enum.IntEnum):
    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()


@pytest.mark.parametrize(
    "impl",
    [
        "cce", "cce_exact", "cce_kahan", "cce_kahan_full", "cce_kahan_full_c", "cce_kahan_full_e",
        "cce_kahan_full_c_full_e", "torch_compile", *Implementation,
    ],
)  # fmt: skip
def test_implementations_of_cut_cross_entropy(impl: str | Implementation):
    e, c, targets = problem()
    assert torch.equal(linear_cross_entropy(e, c, targets, impl=impl), linear_cross_entropy(e, c, targets))
    with pytest.raises(
        ag.ParamInvalidError, match=r"compat\.cce\.linear_cross_entropy: impl: expected None or one of cce,"
    ):
        linear_cross_entropy(e, c, targets, impl="fast")


def test_shards_of_cut_cross_entropy_without_processes():
    name = r"compat\.cce\.VocabParallelOptions\.from_vocab: "
    with pytest.raises(ag.ParamInvalidError, match=name + "group: expected a group, as torch.distributed has no"):
        cce.VocabParallelOptions.from_vocab(V)
    with pytest.raises(ag.ParamInvalidError, match=name + "vocab_size: expected 1 or more, got 0"):
        cce.VocabParallelOptions.from_vocab(0)
    with pytest.raises(ag.ParamTypeError, match=name + "vocab_size: expected an int, got float"):
        cce.VocabParallelOptions.from_vocab(2.5)


# ---- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords", [{}, {"filter_eps": None}, {"filter_eps": 2.0, "filter_e_grad": False, "filter_c_grad": False}]
)
def test_nothing_is_filtered(keywords: dict):
    e, c, targets = problem()
    grad = value_and_gradients(lambda e: linear_cross_entropy(e, c, targets, **keywords), [e])[1]
    right = value_and_gradients(
        lambda e: linear_cross_entropy(e, c, targets, accum_e_fp32=True, accum_c_fp32=True), [e]
    )[1]
    assert torch.equal(grad, right)
    assert torch.count_nonzero(grad)


def test_a_filter(calls: list[dict]):
    linear_cross_entropy(*problem(), filter_eps=0.25)
    linear_cross_entropy(*problem(), filter_eps=0.25, filter_e_grad=False, filter_c_grad=False)
    linear_cross_entropy(*problem())
    assert [each["filter_eps"] for each in calls] == [0.25, 0.0, 0.0]


@pytest.mark.parametrize("impl", LinearCrossEntropyImpl)
def test_exact_implementations_do_not_filter(impl: LinearCrossEntropyImpl, calls: list[dict]):
    """`filter_eps` holds with the implementation "cce" only, in the function and in the module."""
    for each in impl, impl.name.lower():
        linear_cross_entropy(*problem(), filter_eps=0.25, impl=each)
        cce.LinearCrossEntropy(filter_eps=0.25, impl=each)(*problem())
    expected = 0.25 if impl is LinearCrossEntropyImpl.CCE else 0.0
    assert [each["filter_eps"] for each in calls] == [expected] * 4


@pytest.mark.parametrize("keyword", ["filter_e_grad", "filter_c_grad"])
def test_one_filtered_gradient(keyword: str, calls: list[dict]):
    """A filter for one of the gradients filters none."""
    linear_cross_entropy(*problem(), filter_eps=0.1, **{keyword: False})
    assert [each["filter_eps"] for each in calls] == [0.0]


# ---- z-loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, True])
def test_z_loss_of_cut_cross_entropy(shift: int, reduction: str):
    e, c, targets = problem()
    e.requires_grad_()
    _, lse = linear_cross_entropy(e, c, targets, shift=shift, return_lse=True)
    classes = targets[:, shift:]
    squares = torch.logsumexp(e[:, : T - shift].double() @ c.double().T, -1) ** 2
    squares_of_rows = torch.where(classes == -100, 0, squares)
    rights = {"mean": squares[classes != -100].mean(), "sum": squares_of_rows.sum(), "none": squares_of_rows}
    found = cce.compute_z_loss(lse, targets, shift, reduction=reduction)
    assert_close(found, rights[reduction].detach(), torch.float32, steps=10)
    (grad,) = torch.autograd.grad(found.sum(), e, retain_graph=True)
    (right,) = torch.autograd.grad(rights[reduction].sum(), e)
    assert_close(grad, right.double(), torch.float32, steps=20)


def test_z_loss_without_targets():
    lse = torch.tensor([1.0, 2.0, 3.0])
    assert cce.compute_z_loss(lse, reduction="none").tolist() == [1, 4, 9]
    assert cce.compute_z_loss(lse, reduction="sum").item() == 14
    assert cce.compute_z_loss(lse).item() == pytest.approx(14 / 3)
    assert cce.compute_z_loss(lse, torch.full((3,), -100)).isnan()
    with pytest.raises(ag.ParamInvalidError, match=r"compute_z_loss: targets: expected shape \(3,\), as lse has"):
        cce.compute_z_loss(lse, torch.zeros(3, dtype=torch.int64), shift=1)
    with pytest.raises(ag.ParamInvalidError, match="compute_z_loss: reduction: expected mean, sum or none, got"):
        cce.compute_z_loss(lse, reduction="Mean")
