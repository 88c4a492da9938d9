"""Test that the modules of `ascend_grad.torch.compat` have signatures, dtypes and errors as other libraries do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from compat_problems import B, H, T, V, problem
from torch_oracles import value_and_gradients

import ascend_grad as ag
from ascend_grad.torch.compat import cce, liger, verl
from ascend_grad.torch.compat.cce import LinearCrossEntropyImpl, linear_cross_entropy
from ascend_grad.torch.compat.liger import LigerFusedLinearCrossEntropyLoss


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
    assert signature(liger.liger_fused_linear_cross_entropy) == f"input, weight, target, bias=None, {LIGER_OPTIONS}"
    assert signature(liger.LigerFusedLinearCrossEntropyFunction.apply) == (
        f"_input, weight, target, bias=None, {LIGER_OPTIONS}"
    )
    assert signature(liger.liger_cross_entropy) == (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        f"label_smoothing=0.0, lse_square_scale=0.0, softcap=None, {LIGER_RESULTS}"
    )
    assert signature(liger.LigerCrossEntropyLoss) == f"weight=None, {LIGER_LOGITS_OPTIONS}"
    assert signature(liger.LigerCrossEntropyLoss.forward) == "self, _input, target"
    assert signature(liger.LigerCrossEntropyFunction.apply) == f"_input, target, weight, {LIGER_LOGITS_OPTIONS}"
    assert liger.CrossEntropyOutput._fields == ("loss", "z_loss", "token_accuracy", "predicted_tokens")
    assert signature(liger.LigerFusedLinearScaledCrossEntropyFunction.apply) == (
        "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False"
    )
    assert verl.LinearCrossEntropy.apply is verl.linear_cross_entropy
    assert signature(verl.linear_cross_entropy) == (
        "hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None"
    )


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


def test_the_loss_of_16_bits_is_float32():
    e, c, targets = (each.bfloat16() if each.is_floating_point() else each for each in problem())
    assert linear_cross_entropy(e, c, targets).dtype == torch.float32
    module = LigerFusedLinearCrossEntropyLoss()
    assert module(c, e.flatten(0, 1), targets.flatten()).dtype == torch.float32


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


def test_errors():
    e, c, targets = problem()
    with pytest.raises(ag.ParamInvalidError, match=r"targets: expected .* \(3, 6\), got \(3, 5\)"):
        linear_cross_entropy(e, c, targets[:, 1:])
    with pytest.raises(ag.ParamInvalidError, match=r"shift: expected an int in \[0, 6\), got 6"):
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
