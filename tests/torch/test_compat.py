"""Compare the functions of `ascend_grad.torch.compat` with torch's own functions in float64."""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from loss_formulas import Formula
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
from ascend_grad.torch.compat import cce, liger, verl
from ascend_grad.torch.compat.cce import LinearCrossEntropyImpl, linear_cross_entropy
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

B, T, H, V = 3, 6, 5, 11


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, V, (B, T))
    target[1, 2:4] = -100
    return torch.randn(B, T, H), torch.randn(V, H), target


def signature(function: Callable) -> str:
    """Return the parameters of a function with their defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    shown = (each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters)
    return ", ".join(shown)


LIGER_OPTIONS = (
    "ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, "
    "return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False, "
    "return_predicted_tokens=False"
)

LIGER_RESULTS = "return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False"
LIGER_LOGITS_OPTIONS = (
    "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, " + LIGER_RESULTS
)


def test_signatures():
    """Each signature has the same parameters, in the same order, and defaults as in the replaced library."""
    assert signature(linear_cross_entropy) == (
        "e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction='mean', shift=0, return_lse=False, "
        "filter_eps='auto', accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True, "
        "impl=<LinearCrossEntropyImpl.CCE: 1>, vocab_parallel_options=None"
    )
    assert signature(cce.LinearCrossEntropy) == (
        "ignore_index=-100, softcap=None, reduction='mean', shift=0, filter_eps='auto', accum_e_fp32=False, "
        "accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True, "
        "impl=<LinearCrossEntropyImpl.CCE: 1>, return_lse=False"
    )
    assert signature(cce.VocabParallelOptions) == "start, stop, group=None, reduce_e_grad=True"
    assert signature(cce.VocabParallelOptions.from_vocab) == "vocab_size, group=None, reduce_e_grad=True"
    assert signature(cce.compute_z_loss) == "lse, targets=None, shift=False, ignore_index=-100, reduction='mean'"
    assert [f"{each.name} {each.value}" for each in LinearCrossEntropyImpl] == [
        "CCE 1", "TORCH_COMPILE 2", "CCE_KAHAN_FULL_C 3", "CCE_KAHAN_FULL_E 4", "CCE_EXACT 5",
        "CCE_KAHAN_FULL_C_FULL_E 6", "CCE_KAHAN_FULL 7",
    ]  # fmt: skip
    assert signature(LigerFusedLinearCrossEntropyLoss) == LIGER_OPTIONS
    assert signature(LigerFusedLinearCrossEntropyLoss.forward) == "self, lin_weight, _input, target, bias=None"
    assert signature(liger_fused_linear_cross_entropy) == f"input, weight, target, bias=None, {LIGER_OPTIONS}"
    assert signature(LigerFusedLinearCrossEntropyFunction.apply) == (
        f"_input, weight, target, bias=None, {LIGER_OPTIONS}"
    )
    assert signature(liger_cross_entropy) == (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        f"label_smoothing=0.0, lse_square_scale=0.0, softcap=None, {LIGER_RESULTS}"
    )
    assert signature(LigerCrossEntropyLoss) == f"weight=None, {LIGER_LOGITS_OPTIONS}"
    assert signature(LigerCrossEntropyLoss.forward) == "self, _input, target"
    assert signature(LigerCrossEntropyFunction.apply) == f"_input, target, weight, {LIGER_LOGITS_OPTIONS}"
    assert CrossEntropyOutput._fields == ("loss", "z_loss", "token_accuracy", "predicted_tokens")
    assert signature(LigerFusedLinearScaledCrossEntropyFunction.apply) == (
        "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False"
    )
    assert verl.LinearCrossEntropy.apply is verl.linear_cross_entropy
    assert signature(verl.linear_cross_entropy) == (
        "hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None"
    )


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


@pytest.mark.parametrize("impl", LinearCrossEntropyImpl)
def test_exact_implementations_do_not_filter(impl: LinearCrossEntropyImpl, calls: list[dict]):
    """`filter_eps` holds with the implementation "cce" only, in the function and in the module."""
    for each in impl, impl.name.lower():
        linear_cross_entropy(*problem(), filter_eps=0.25, impl=each)
        cce.LinearCrossEntropy(filter_eps=0.25, impl=each)(*problem())
    expected = 0.25 if impl is LinearCrossEntropyImpl.CCE else 0.0
    assert [each["filter_eps"] for each in calls] == [expected] * 4


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


def test_shards_of_cut_cross_entropy_without_processes():
    name = r"compat\.cce\.VocabParallelOptions\.from_vocab: "
    with pytest.raises(ag.ParamInvalidError, match=name + "group: expected a group, as torch.distributed has no"):
        cce.VocabParallelOptions.from_vocab(V)
    with pytest.raises(ag.ParamInvalidError, match=name + "vocab_size: expected 1 or more, got 0"):
        cce.VocabParallelOptions.from_vocab(0)
    with pytest.raises(ag.ParamTypeError, match=name + "vocab_size: expected an int, got float"):
        cce.VocabParallelOptions.from_vocab(2.5)


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


def check(ours: Callable, right: Callable, tensors: list[torch.Tensor], dtype: torch.dtype = torch.float64) -> None:
    """Compare results and their gradients, for random upstream gradients of all results, with those in float64."""
    leaves = [each.to(dtype).requires_grad_() for each in tensors]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    values, rights = ours(*leaves), right(*wide)
    assert len(values) == len(rights)
    above = [torch.randn_like(each) for each in rights]
    for value, expected in zip(values, rights):
        assert value.shape == expected.shape
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(value, expected.detach(), value.dtype, steps=10)
    grads = torch.autograd.grad(values, leaves, [each.to(value.dtype) for each, value in zip(above, values)])
    for grad, expected in zip(grads, torch.autograd.grad(rights, wide, above), strict=True):
        assert grad.dtype == dtype
        assert_close(grad, expected, dtype, steps=20)


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("keyword", ["filter_e_grad", "filter_c_grad"])
def test_one_filtered_gradient(keyword: str, calls: list[dict]):
    """A filter for one of the gradients filters none."""
    linear_cross_entropy(*problem(), filter_eps=0.1, **{keyword: False})
    assert [each["filter_eps"] for each in calls] == [0.0]


FUSED_DEFAULTS = {
    name: each.default for name, each in inspect.signature(LigerFusedLinearCrossEntropyLoss).parameters.items()
}


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


NAMES = "return_z_loss", "return_token_accuracy", "return_predicted_tokens"


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


LOGITS_DEFAULTS = {name: each.default for name, each in inspect.signature(LigerCrossEntropyLoss).parameters.items()}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_of_liger(reduction: str, with_weight: bool, softcap: float | None, dtype: torch.dtype):
    """The function, the class and `apply` give the loss of the formula with its gradient, in the dtype of the logits.

    All further results are checked, too.
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


def test_public_names():
    """Each module has the public names with which the replaced library computes these losses."""
    assert set(cce.__all__) == {
        "LinearCrossEntropy", "LinearCrossEntropyImpl", "VocabParallelOptions", "compute_z_loss", "linear_cross_entropy"
    }  # fmt: skip
    assert set(liger.__all__) == {
        "CrossEntropyOutput", "LigerCrossEntropyFunction", "LigerCrossEntropyLoss",
        "LigerFusedLinearCrossEntropyFunction", "LigerFusedLinearCrossEntropyLoss",
        "LigerFusedLinearScaledCrossEntropyFunction", "liger_cross_entropy", "liger_fused_linear_cross_entropy",
    }  # fmt: skip
    assert set(verl.__all__) == {"LinearCrossEntropy", "linear_cross_entropy"}
    for each in cce, liger, verl:
        assert all(hasattr(each, name) for name in each.__all__)


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
    with pytest.raises(ag.ParamInvalidError, match=r"labels: expected .* tokens, 18, got shape \(3, 5\)"):
        verl.linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ag.ParamInvalidError, match=r"temperature: expected .* labels has, 18, got shape \(17,\)"):
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
    with pytest.raises(ag.ParamInvalidError, match=r"LigerFusedLinearCrossEntropyLoss: bias: expected shape \(11,\)"):
        LigerFusedLinearCrossEntropyLoss()(c, e[0], targets[0], torch.zeros(V - 1))
    right = LigerFusedLinearCrossEntropyLoss()(c, e[0], targets[0])
    for accumulator in (torch.float32, e.dtype):
        assert LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)(c, e[0], targets[0]).equal(right)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e, c, targets: (e, c.half(), targets), "{c}: expected torch.float32, as {e} is, got torch.float16"),
        (lambda e, c, targets: (e, c[:, 1:], targets), r"{c}: expected shape \(C, {H}\), got"),
        (lambda e, c, targets: (e, c.tolist(), targets), "{c}: expected a torch.Tensor, got list"),
        (
            lambda e, c, targets: (e, c, targets.double()),
            r"{targets}: expected shape \(\d+, \d+\), as floating targets",
        ),
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
