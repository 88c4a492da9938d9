"""Compare the functions of `ascend_grad.torch.compat` with torch's own functions in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
from ascend_grad.torch.compat.cce import linear_cross_entropy
from ascend_grad.torch.compat.liger import LigerFusedLinearCrossEntropyLoss

B, T, H, V = 3, 6, 5, 11


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, V, (B, T))
    target[1, 2:4] = -100
    return torch.randn(B, T, H), torch.randn(V, H), target


def test_signatures():
    """Each signature has the same parameters, in the same order, as in the replaced library."""
    assert list(inspect.signature(linear_cross_entropy).parameters) == [
        "e", "c", "targets", "bias", "ignore_index", "softcap", "reduction", "shift", "return_lse", "filter_eps",
        "accum_e_fp32", "accum_c_fp32", "filter_e_grad", "filter_c_grad", "impl", "vocab_parallel_options"
    ]  # fmt: skip
    assert list(inspect.signature(LigerFusedLinearCrossEntropyLoss).parameters) == [
        "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss",
        "accum_dtype", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens"
    ]  # fmt: skip
    parameters = inspect.signature(LigerFusedLinearCrossEntropyLoss.forward).parameters
    assert list(parameters) == ["self", "lin_weight", "_input", "target", "bias"]


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


def test_the_loss_of_16_bits_is_float32():
    e, c, targets = (each.bfloat16() if each.is_floating_point() else each for each in problem())
    assert linear_cross_entropy(e, c, targets).dtype == torch.float32
    module = LigerFusedLinearCrossEntropyLoss()
    assert module(c, e.flatten(0, 1), targets.flatten()).dtype == torch.float32


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_weight", [False, True])
def test_liger(with_weight: bool, reduction: str):
    x, w, target = problem()
    x, target = x.flatten(0, 1), target.flatten()
    weight = torch.rand(V) if with_weight else None
    above = torch.randn(target.shape if reduction == "none" else ())
    module = LigerFusedLinearCrossEntropyLoss(weight, reduction=reduction)
    ours = value_and_gradients(lambda w, x: module(w, x, target), [w, x], above)
    rights = value_and_gradients(
        lambda w, x: F.cross_entropy(
            x @ w.T, target, weight=None if weight is None else weight.double(), reduction=reduction
        ),
        [w.double(), x.double()],
        above.double(),
    )
    for value, expected in zip(ours, rights):
        assert_close(value, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [B * T, 0])
def test_every_token_is_ignored(tokens: int, reduction: str, dtype: torch.dtype):
    """If all tokens are ignored, Liger's mean loss is 0, and the mean loss of cut cross-entropy is NaN.

    The gradients of both losses are zero.
    """
    x, w = torch.randn(tokens, H).to(dtype), torch.randn(V, H).to(dtype)
    target = torch.full((tokens,), 3)
    zero = torch.zeros((tokens,) if reduction == "none" else ())
    nothing = torch.full_like(zero, torch.nan) if reduction == "mean" else zero
    modules = [LigerFusedLinearCrossEntropyLoss(weight, 3, reduction=reduction) for weight in (None, torch.rand(V))]
    functions = [
        (lambda x, w: linear_cross_entropy(x, w, target, ignore_index=3, reduction=reduction), nothing),
        *((lambda x, w, module=module: module(w, x, target), zero) for module in modules),
    ]
    for function, right in functions:
        for above in (torch.ones_like(zero), torch.full_like(zero, 2.5)):
            value, *grads = value_and_gradients(function, [x, w], above.to(torch.promote_types(dtype, torch.float32)))
            torch.testing.assert_close(value.detach(), right.to(value.dtype), equal_nan=True, rtol=0, atol=0)
            assert [grad.dtype for grad in grads] == [dtype, dtype]
            assert not any(torch.count_nonzero(grad) for grad in grads)


def test_class_weights_of_zero_are_no_ignored_tokens():
    """The mean loss is NaN if the class weights add up to 0, as Liger's mean loss is."""
    x, w = torch.randn(T, H), torch.randn(V, H)
    assert LigerFusedLinearCrossEntropyLoss(torch.zeros(V))(w, x, torch.zeros(T, dtype=torch.int64)).isnan()


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("bias", torch.zeros(V)),
        ("softcap", 30.0),
        ("return_lse", True),
        ("impl", "torch_compile"),
        ("vocab_parallel_options", object()),
    ],
)
def test_what_cut_cross_entropy_has_and_this_has_not(keyword: str, value: object):
    with pytest.raises(NotImplementedError, match=f"compat.cce.linear_cross_entropy: {keyword}: not supported"):
        linear_cross_entropy(*problem(), **{keyword: value})


@pytest.mark.parametrize("keyword", ["filter_e_grad", "filter_c_grad"])
def test_one_filtered_gradient(keyword: str):
    with pytest.raises(NotImplementedError, match=f"compat.cce.linear_cross_entropy: {keyword}: not supported"):
        linear_cross_entropy(*problem(), filter_eps=0.1, **{keyword: False})


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("lse_square_scale", 1e-4),
        ("label_smoothing", 0.1),
        ("softcap", 30.0),
        ("return_z_loss", True),
        ("accum_dtype", torch.float64),
        ("use_token_scaling", True),
        ("return_token_accuracy", True),
        ("return_predicted_tokens", True),
    ],
)
def test_what_liger_has_and_this_has_not(keyword: str, value: object):
    with pytest.raises(NotImplementedError, match=f"LigerFusedLinearCrossEntropyLoss: {keyword}: not supported"):
        LigerFusedLinearCrossEntropyLoss(**{keyword: value})


def test_errors():
    e, c, targets = problem()
    with pytest.raises(ag.ParamInvalidError, match=r"targets: expected .* \(3, 6\), got \(3, 5\)"):
        linear_cross_entropy(e, c, targets[:, 1:])
    with pytest.raises(ag.ParamInvalidError, match="shift: expected an int from 0 to below 6, got 6"):
        linear_cross_entropy(e, c, targets, shift=6)
    with pytest.raises(ag.ParamTypeError, match=r"shift: expected an int, got float 1\.5"):
        linear_cross_entropy(e, c, targets, shift=1.5)
    with pytest.raises(ag.ParamTypeError, match=r"compat.cce.linear_cross_entropy: targets: expected a torch.Tensor"):
        linear_cross_entropy(e, c, targets.tolist())
    with pytest.raises(NotImplementedError, match="LigerFusedLinearCrossEntropyLoss: bias: not supported"):
        LigerFusedLinearCrossEntropyLoss()(c, e[0], targets[0], torch.zeros(V))
    LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e, c, targets: (e, c.half(), targets), "{c}: expected torch.float32, as {e} is, got torch.float16"),
        (lambda e, c, targets: (e, c[:, 1:], targets), r"{c}: expected shape \(C, {H}\), got"),
        (lambda e, c, targets: (e, c.tolist(), targets), "{c}: expected a torch.Tensor, got list"),
        (lambda e, c, targets: (e, c, targets.double()), "{targets}: probabilities are not supported"),
        (lambda e, c, targets: (e, c, targets + len(c)), "{targets}: expected values in"),
    ],
)
def test_errors_name_the_arguments_as_the_other_library_does(change, text):
    e, c, targets = problem()
    e, c, targets = change(e[0], c, targets[0])
    kinds = ag.ParamInvalidError, NotImplementedError
    with pytest.raises(
        kinds, match="compat.cce.linear_cross_entropy: " + text.format(e="e", c="c", targets="targets", H=H)
    ):
        linear_cross_entropy(e, c, targets)
    names = {"e": "_input", "c": "lin_weight", "targets": "target", "H": H}
    with pytest.raises(kinds, match="LigerFusedLinearCrossEntropyLoss: " + text.format(**names)):
        LigerFusedLinearCrossEntropyLoss()(c, e, targets)


def test_class_weights_of_liger():
    e, c, targets = problem()
    with pytest.raises(ag.ParamInvalidError, match=r"ce_weight: expected shape .* one for each row of lin_weight"):
        LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(3))(c, e[0], targets[0])
