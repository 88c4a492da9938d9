"""Compare the functions of `ascend_grad.torch.compat.liger` with torch's own functions in float64."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from compat_problems import DTYPES, B, H, T, V, check, problem
from loss_formulas import Formula
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
from ascend_grad.torch.compat.liger import (
    CrossEntropyOutput,
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearScaledCrossEntropyFunction,
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
)

NAMES = "return_z_loss", "return_token_accuracy", "return_predicted_tokens"
FUSED_DEFAULTS = {
    name: each.default for name, each in inspect.signature(LigerFusedLinearCrossEntropyLoss).parameters.items()
}
LOGITS_DEFAULTS = {name: each.default for name, each in inspect.signature(LigerCrossEntropyLoss).parameters.items()}

# ---- losses of a linear layer ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use_token_scaling", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lse_square_scale", [0.0, 0.01])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_liger(
    reduction: str, lse_square_scale: float, label_smoothing: float, with_weight: bool, use_token_scaling: bool,
    dtype: torch.dtype
):  # fmt: skip
    """The function and the class give the loss of the formula with its gradients, and all further results."""
    x, w, target = problem()
    x, target = x.flatten(0, 1), target.flatten()
    target[0] = (x[0] @ w.T).argmax()
    counted = target != -100
    options = {"ce_weight": torch.rand(V) if with_weight else None, "lse_square_scale": lse_square_scale}
    options |= {"label_smoothing": label_smoothing, "reduction": reduction, "softcap": 4.0}
    options |= {"use_token_scaling": use_token_scaling, "return_z_loss": True, "return_token_accuracy": True}
    found: list[CrossEntropyOutput] = []

    def ours(x, w, bias):
        found[:] = [
            liger_fused_linear_cross_entropy(x, w, target, bias, return_predicted_tokens=True, **options),
            LigerFusedLinearCrossEntropyLoss(return_predicted_tokens=True, **options)(w, x, target, bias),
        ]
        keywords = options | {"return_predicted_tokens": True}
        ordered = [keywords.get(name, default) for name, default in FUSED_DEFAULTS.items()]
        by_apply = LigerFusedLinearCrossEntropyFunction.apply(x, w, target, bias, *ordered)
        assert type(by_apply) is tuple
        for one, same in zip(found[0], by_apply, strict=True):
            assert torch.equal(one, same)
        assert not any(each.requires_grad for each in found[0][1:])
        return found[0].loss, found[1].loss

    def reduced(values: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return values if reduction == "none" else values.sum() / (divisor if reduction == "mean" else 1)

    results: dict[str, torch.Tensor] = {}

    def right(x, w, bias):
        of_class = torch.ones(V).double() if options["ce_weight"] is None else options["ce_weight"].double()
        formula = Formula(softcap=4.0, label_smoothing=label_smoothing, weight=of_class)
        outputs = formula.outputs(x, w, bias, target)
        scaling = outputs["log_prob"].exp().detach() if use_token_scaling else torch.ones(B * T).double()
        losses = formula.loss(x, w, bias, target, "none") * scaling
        squares = lse_square_scale * outputs["lse"] ** 2 * scaling
        total = (of_class[torch.where(counted, target, 0)] * counted).sum()
        loss = reduced(losses, total) + reduced(squares, counted.sum())
        accurate = (outputs["predicted"] == target).double()
        results["z_loss"] = reduced(squares, counted.sum()).detach()
        results["token_accuracy"] = accurate if reduction == "none" else accurate.sum() / counted.sum()
        results["predicted_tokens"] = outputs["predicted"]
        return loss, loss

    check(ours, right, [x, w, torch.randn(V)], dtype)
    for each in found:
        assert each.z_loss.dtype == dtype
        assert each.token_accuracy.dtype == torch.float32
        assert_close(each.z_loss, results["z_loss"], dtype, steps=10)
        assert_close(each.token_accuracy, results["token_accuracy"], torch.float32)
        assert each.predicted_tokens.dtype == torch.int64
        assert torch.equal(each.predicted_tokens, results["predicted_tokens"])
        assert each.predicted_tokens[target == -100].eq(-1).all()


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)), ids=str)
def test_results_of_liger(flags: tuple[bool, bool, bool]):
    x, w, target = problem()
    found = liger_fused_linear_cross_entropy(x[0], w, target[0], **dict(zip(NAMES, flags)))
    if not any(flags):
        assert isinstance(found, torch.Tensor)
    else:
        assert isinstance(found, CrossEntropyOutput)
        assert tuple(each is not None for each in found) == (True, *flags)


@pytest.mark.parametrize("tokens", [T, 0])
@pytest.mark.parametrize("use_token_scaling", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_results_of_liger_without_tokens(reduction: str, with_weight: bool, use_token_scaling: bool, tokens: int):
    """If all tokens are ignored, or there is none, loss and z-loss are 0, and the accuracy is NaN."""
    x, w = torch.randn(tokens, H).bfloat16().requires_grad_(), torch.randn(V, H).bfloat16()
    weight, target = torch.rand(V) if with_weight else None, torch.full((tokens,), -100)
    options = {"lse_square_scale": 0.1, "reduction": reduction, **dict.fromkeys(NAMES, True)}
    of_layer = liger_fused_linear_cross_entropy(
        x, w, target, ce_weight=weight, use_token_scaling=use_token_scaling, **options
    )
    of_logits = liger_cross_entropy(x @ w.T, target, weight, **options)
    for found in of_layer, of_logits:
        assert (found.loss.item(), found.z_loss.item()) == (0, 0)
        assert found.token_accuracy.isnan()
        assert found.predicted_tokens.tolist() == [-1] * tokens
        assert found.z_loss.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(found.loss, x)
        assert not torch.count_nonzero(grad)


def test_class_weights_of_zero_are_no_ignored_tokens():
    """The mean loss is NaN if the class weights add up to 0, as Liger's mean loss is."""
    x, w = torch.randn(T, H), torch.randn(V, H)
    assert LigerFusedLinearCrossEntropyLoss(torch.zeros(V))(w, x, torch.zeros(T, dtype=torch.int64)).isnan()


def test_class_weights_of_liger():
    e, c, targets = problem()
    with pytest.raises(ag.ParamInvalidError, match=r"ce_weight: expected shape .* one for each row of lin_weight"):
        LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(3))(c, e[0], targets[0])


@pytest.mark.parametrize(
    ("keyword", "value", "kind"),
    [
        ("accum_dtype", torch.float64, NotImplementedError),
        ("accum_dtype", "float32", ag.ParamTypeError),
        ("return_z_loss", 1, ag.ParamTypeError),
        ("use_token_scaling", None, ag.ParamTypeError),
        ("label_smoothing", 2.0, ag.ParamInvalidError),
        ("softcap", -1.0, ag.ParamInvalidError),
        ("lse_square_scale", "1", ag.ParamTypeError),
        ("ce_weight", torch.ones(V, requires_grad=True), NotImplementedError),
    ],
)
def test_options_that_liger_has_not(keyword: str, value: object, kind: type[Exception]):
    e, c, targets = problem()
    with pytest.raises(kind, match=f"LigerFusedLinearCrossEntropyLoss: {keyword}: "):
        LigerFusedLinearCrossEntropyLoss(**{keyword: value})(c, e[0], targets[0])
    with pytest.raises(kind, match=f"liger_fused_linear_cross_entropy: {keyword}: "):
        liger_fused_linear_cross_entropy(e[0], c, targets[0], **{keyword: value})


# ---- the scaled loss of a linear layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scaled_function_of_liger(temperature: float, return_entropy: bool, dtype: torch.dtype):
    x, w, target = problem()
    target = torch.where(target == -100, 3, target).flatten()
    formula = Formula(temperature=temperature, ignore_index=3)
    names = ["log_prob", "entropy"] if return_entropy else ["log_prob"]

    def ours(x, w):
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, target, temperature, 3, 2, return_entropy)
        return found if return_entropy else (found,)

    def right(x, w):
        found = formula.outputs(x, w, None, target)
        return [-found[name] if name == "log_prob" else found[name] for name in names]

    check(ours, right, [x.flatten(0, 1), w], dtype)


def test_errors_of_the_scaled_function_of_liger():
    e, c, targets = problem()
    apply = LigerFusedLinearScaledCrossEntropyFunction.apply
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    with pytest.raises(ag.ParamInvalidError, match=f"{name}: m_tiles_per_cluster: expected a positive int, got 0"):
        apply(e[0], c, targets[0], m_tiles_per_cluster=0)
    with pytest.raises(ag.ParamTypeError, match=f"{name}: return_entropy: expected True or False"):
        apply(e[0], c, targets[0], return_entropy=1)
    with pytest.raises(ag.ParamInvalidError, match=rf"{name}: _input: expected shape \(N, in_features\)"):
        apply(e, c, targets)


# ---- losses of logits, and modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_of_liger(reduction: str, with_weight: bool, softcap: float | None, dtype: torch.dtype):
    """The function, the class and `apply` give the loss of the formula with its gradient, in the dtype of the logits.

    All further results are also checked.
    """
    logits, target = torch.randn(B * T, V).to(dtype), problem()[2].flatten()
    target[0] = logits[0].argmax()
    counted = target != -100
    options = {"weight": torch.rand(V) if with_weight else None, "lse_square_scale": 0.01, "label_smoothing": 0.1}
    options |= {"reduction": reduction, "softcap": softcap, **dict.fromkeys(NAMES, True)}
    above = torch.randn(B * T if reduction == "none" else ()).to(dtype)

    def reduced(values: torch.Tensor) -> torch.Tensor:
        return values if reduction == "none" else values.sum() / (counted.sum() if reduction == "mean" else 1)

    wide = logits.double().requires_grad_()
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    weight = None if options["weight"] is None else options["weight"].double()
    lse = torch.where(counted, capped.logsumexp(1), 0)
    right = F.cross_entropy(capped, target, weight, reduction=reduction, label_smoothing=0.1) + reduced(0.01 * lse**2)
    (right_grad,) = torch.autograd.grad(right, wide, above.double())
    predicted = torch.where(counted, capped.argmax(1), -1)
    accurate = (predicted == target).double()

    leaf = logits.clone().requires_grad_()
    ordered = [options.get(name, default) for name, default in LOGITS_DEFAULTS.items()]
    module = LigerCrossEntropyLoss(**options)
    by_apply = LigerCrossEntropyFunction.apply(leaf, target, *ordered)
    assert type(by_apply) is tuple
    for found in liger_cross_entropy(leaf, target, **options), module(leaf, target), CrossEntropyOutput(*by_apply):
        assert [each.dtype for each in found] == [dtype, dtype, torch.float32, torch.int64]
        assert [each.requires_grad for each in found] == [True, False, False, False]
        assert_close(found.loss.detach(), right.detach(), dtype, steps=10)
        assert_close(found.z_loss, reduced(0.01 * lse**2).detach(), dtype, steps=10)
        expected = accurate if reduction == "none" else accurate.sum() / counted.sum()
        assert_close(found.token_accuracy, expected, torch.float32)
        assert torch.equal(found.predicted_tokens, predicted)
        (grad,) = torch.autograd.grad(found.loss, leaf, above)
        assert grad.dtype == dtype
        assert_close(grad, right_grad, dtype, steps=20)
    assert torch.equal(leaf, logits)  # Liger overwrites the logits


def test_liger_returns_the_loss_of_logits_alone_without_other_results():
    logits, target = torch.randn(T, V), torch.arange(T)
    found = liger_cross_entropy(logits, target)
    assert torch.equal(found, LigerCrossEntropyLoss()(logits, target))
    assert LigerCrossEntropyFunction.apply(logits, target, None) == (found, None, None, None)
    assert LigerFusedLinearCrossEntropyFunction.apply(logits, torch.eye(V), target)[1:] == (None, None, None)


def test_errors_of_logits_of_liger():
    logits, target = torch.randn(T, V), torch.arange(T)
    name = r"compat\.liger\.liger_cross_entropy: "
    for keyword in "size_average", "reduce":
        with pytest.raises(NotImplementedError, match=f"{name}{keyword}: not supported"):
            liger_cross_entropy(logits, target, **{keyword: True})
    with pytest.raises(ag.ParamInvalidError, match=name + r"input: expected shape \(BT, V\), got"):
        liger_cross_entropy(logits[0], target[0])
    with pytest.raises(ag.ParamInvalidError, match=name + "softcap: expected a positive finite number, got"):
        liger_cross_entropy(logits, target, softcap=-1.0)
    with pytest.raises(ag.ParamInvalidError, match=name + "target: expected "):
        liger_cross_entropy(logits, target + V)
    name = r"compat\.liger\.LigerCrossEntropyLoss: "
    with pytest.raises(ag.ParamTypeError, match=name + "_input: expected a torch.Tensor, got list"):
        LigerCrossEntropyLoss()(logits.tolist(), target)
    with pytest.raises(ag.ParamTypeError, match=name + "_input: expected "):
        LigerCrossEntropyLoss()(logits.int(), target)
    with pytest.raises(NotImplementedError, match=name + "weight: the loss has no gradient for it"):
        LigerCrossEntropyLoss(torch.ones(V, requires_grad=True))(logits, target)


@pytest.mark.parametrize("module", [LigerFusedLinearCrossEntropyLoss, LigerCrossEntropyLoss])
def test_modules_of_liger(module: type):
    """The settings are checked when a module is made, and are attributes that later calls read."""
    for keyword, value in {
        "label_smoothing": 2.0, "reduction": "average", "softcap": -1.0, "lse_square_scale": "1", "return_z_loss": 1,
        "ignore_index": 0.5, "return_token_accuracy": None,
    }.items():  # fmt: skip
        with pytest.raises(ag.ParamInvalidError, match=f"{module.__name__}: {keyword}: expected "):
            module(**{keyword: value})
    made = module()
    defaults = FUSED_DEFAULTS if module is LigerFusedLinearCrossEntropyLoss else LOGITS_DEFAULTS
    assert {name: getattr(made, name) for name in defaults} == defaults
    made.reduction, made.return_z_loss = "none", True
    x, w, target = torch.randn(T, V), torch.eye(V), torch.arange(T)
    found = made(w, x, target) if module is LigerFusedLinearCrossEntropyLoss else made(x, target)
    assert found.loss.shape == found.z_loss.shape == (T,)
