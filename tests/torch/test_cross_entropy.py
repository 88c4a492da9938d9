"""Compare the loss of logits for tensors with torch's own in float64, and with the call of arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad.torch.loss_operators import CROSS_ENTROPY, NUMBERS

SHAPES = ((7,), (5, 9), (3, 6, 4), (2, 5, 3, 2))
REDUCTIONS = ("mean", "sum", "none")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}


def problem_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(len(shape))
    dim = 1 if len(shape) > 1 else 0
    rows = shape[:dim] + shape[dim + 1 :]
    target = torch.randint(0, shape[dim], rows)
    if rows:
        target.view(-1)[::4] = -100
    return torch.randn(shape, dtype=dtype).requires_grad_(), target, torch.rand(shape[dim], dtype=torch.float64) + 0.5


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients_are_those_of_torch(shape, dtype):
    x, target, weight = problem_of(shape, dtype)
    for reduction, smoothing, classes in itertools.product(REDUCTIONS, (0.0, 0.2), (None, weight)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        wide = x.detach().double().requires_grad_()
        right = F.cross_entropy(wide, target, classes, **options)
        loss = agt.cross_entropy(x, target, classes, **options)
        above = torch.randn(right.shape).double()
        (gradient,) = torch.autograd.grad(loss, x, above.to(dtype))
        (wanted,) = torch.autograd.grad(right, wide, above.to(dtype).double())
        assert (loss.dtype, gradient.dtype) == (dtype, dtype)
        tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
        torch.testing.assert_close(loss.double(), right, **tolerance)
        torch.testing.assert_close(gradient.double(), wanted, **tolerance)


def test_options_have_the_bits_of_the_call_of_arrays():
    x, target, weight = problem_of((4, 6, 3), torch.float32)
    rows = torch.rand(4, 3) + 0.5
    several = torch.stack([target, (target + 1).clamp(0, 5)], -1)
    for options in (
        {"token_weight": rows, "lse_square_scale": 0.01, "temperature": rows},
        {"temperature": torch.tensor(0.5), "denominator": 5.0, "weight": weight},
        {"temperature": 0.7, "label_smoothing": 0.1, "reduction": "sum", "num_threads": 1},
        {"target_prob": torch.rand(4, 3, 2), "ignore_index": 3},
        {"target_prob": torch.rand(4, 3, 2), "softcap": 2.0},
        {"softcap": torch.tensor(1.5), "logit_scale": -0.5, "temperature": rows, "reduction": "none"},
    ):
        classes = several.clamp(0) if "target_prob" in options else target
        loss = agt.cross_entropy(x, classes, **options)
        arrays = {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
        if "weight" in arrays:
            arrays["class_weight"] = arrays.pop("weight")
        if np.ndim(arrays.get("temperature", 1.0)) == 0 and "temperature" in arrays:
            arrays["temperature"] = float(arrays["temperature"])
        right = ag.cross_entropy(x.detach().numpy(), classes.numpy(), 1, **arrays)
        assert torch.equal(loss, torch.as_tensor(right.loss))
        above = torch.ones_like(loss)
        assert torch.equal(torch.autograd.grad(loss, x, above)[0], torch.from_numpy(right.input_grad))


@pytest.mark.parametrize("prob", TOLERANCES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_target_prob_has_any_of_the_four_dtypes(dtype, prob):
    x, target, _ = problem_of((4, 6, 3), dtype)
    several = torch.stack([target, (target + 1).clamp(0, 5)], -1)
    target_prob = torch.rand(4, 3, 2).to(prob)
    for reduction in ("sum", "none"):
        loss = agt.cross_entropy(x, several, target_prob=target_prob, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        right = ag.cross_entropy(x.detach(), several, 1, target_prob=target_prob, reduction=reduction)
        assert torch.equal(loss, right.loss.to(dtype))
        assert torch.equal(gradient, right.input_grad)


def test_finite_differences_and_batched_gradients():
    x, target, weight = problem_of((3, 6, 4), torch.float64)
    for reduction in REDUCTIONS:
        function = lambda x, r=reduction: agt.cross_entropy(x, target, weight, reduction=r, label_smoothing=0.1)  # noqa: E731
        torch.autograd.gradcheck(function, x, check_batched_grad=True)


def outputs_by_autograd(z: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the differentiable outputs of logits that have the classes in dimension 1, 0 for ignored rows."""
    counted, log_p = target != -100, F.log_softmax(z, 1)
    found = {
        "lse": z.logsumexp(1),
        "log_prob": log_p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1),
        "entropy": -(log_p.exp() * log_p).sum(1),
    }
    return {name: torch.where(counted, each, 0) for name, each in found.items()}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_outputs_are_those_of_autograd(reduction, dtype):
    x, target, _ = problem_of((4, 6, 3), dtype)
    temperature = torch.rand(4, 3) + 0.5
    for names in (("lse",), ("log_prob",), ("entropy",), ("entropy", "log_prob", "lse")):
        for of_loss, divisor in ((0, temperature), (1, temperature), (1, 0.7)):
            wide = x.detach().double().requires_grad_()
            z = wide / (divisor.double().unsqueeze(1) if isinstance(divisor, torch.Tensor) else divisor)
            right = outputs_by_autograd(z, target) | {"loss": F.cross_entropy(z, target, reduction=reduction)}
            found = agt.cross_entropy(x, target, reduction=reduction, temperature=divisor, outputs=names)
            wanted = total = 0
            for name in ("loss",) * of_loss + names:
                above = torch.randn(right[name].shape).to(getattr(found, name).dtype)
                wanted = wanted + (right[name] * above).sum()
                total = total + (getattr(found, name) * above).sum()
                torch.testing.assert_close(
                    getattr(found, name).double(), right[name], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
                )
            (gradient,) = torch.autograd.grad(total, x)
            assert gradient.dtype == dtype
            tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
            torch.testing.assert_close(gradient.double(), torch.autograd.grad(wanted, wide)[0], **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_probabilities_are_those_of_autograd(reduction, dtype):
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for shape in SHAPES:
        x, target, _ = problem_of(shape, dtype)
        for of_loss, options in (
            (0, {}),
            (1, {"temperature": torch.rand(target.shape) + 0.5}),
            (1, {"logit_scale": -0.7, "softcap": 2.0, "temperature": 1.5}),
            (1, {"outputs": ("hessian_diag", "lse", "prob"), "temperature": 2.0}),
        ):
            outputs = options.get("outputs", ("prob",))
            found = agt.cross_entropy(x, target, reduction=reduction, **{**options, "outputs": outputs})
            wide, dim = x.detach().double().requires_grad_(), 1 if x.dim() > 1 else 0
            z = options.get("logit_scale", 1.0) * wide
            if "softcap" in options:
                z = options["softcap"] * torch.tanh(z / options["softcap"])
            divisor = torch.as_tensor(options.get("temperature", 1.0)).double()
            z = z / (divisor.unsqueeze(dim) if divisor.dim() or x.dim() == 1 else divisor)
            right = z.softmax(dim) * (target != -100).unsqueeze(dim)
            assert (found.prob.dtype, found.prob.shape) == (dtype, x.shape)
            torch.testing.assert_close(found.prob.double(), right, **tolerance)
            above = torch.randn(x.shape).to(dtype)
            wanted, total = (right * above).sum(), (found.prob * above).sum()
            if of_loss:
                wanted = wanted + 2 * F.cross_entropy(z, target, reduction=reduction).sum()
                total = total + 2 * found.loss.sum()
            (gradient,) = torch.autograd.grad(total, x)
            assert gradient.dtype == dtype
            torch.testing.assert_close(gradient.double(), torch.autograd.grad(wanted, wide)[0], **tolerance)


def test_the_diagonal_of_the_hessian_has_no_gradient():
    x, target, weight = problem_of((4, 6, 3), torch.float64)
    found = agt.cross_entropy(x, target, weight, softcap=3.0, outputs=("prob", "hessian_diag"))
    assert (found.prob.requires_grad, found.hessian_diag.requires_grad) == (True, False)
    right = ag.cross_entropy(
        x.detach().numpy(), target.numpy(), 1, class_weight=weight.numpy(), softcap=3.0, outputs=("hessian_diag",)
    )
    assert torch.equal(found.hessian_diag, torch.from_numpy(np.ascontiguousarray(right.hessian_diag)))
    with pytest.raises(RuntimeError, match="cross_entropy: the gradient cannot be differentiated once more"):
        torch.autograd.grad(found.prob[0, 0].sum(), x, create_graph=True)[0].sum().backward()


def test_probabilities_by_transforms_and_compiled():
    x, target, _ = problem_of((4, 6), torch.float64)

    def total(x):
        found = agt.cross_entropy(x, target, outputs=("prob", "hessian_diag"))
        return (found.prob**2).sum() + found.loss

    (right,) = torch.autograd.grad(total(x), x)
    torch.testing.assert_close(torch.func.grad(total)(x.detach()), right)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], right)


def test_outputs_have_the_bits_of_the_call_of_arrays():
    for shape in SHAPES:
        x, target, weight = problem_of(shape, torch.float32)
        names = ("correct", "entropy", "lse", "predicted", "log_prob")
        found = agt.cross_entropy(x, target, weight, outputs=names)
        right = ag.cross_entropy(
            x.detach().numpy(), target.numpy(), min(len(shape) - 1, 1), class_weight=weight.numpy(), outputs=names
        )
        assert isinstance(found, ag.LossResult)
        assert found._fields == ("loss", *names)
        for name in found._fields:
            assert torch.equal(getattr(found, name), torch.from_numpy(np.asarray(getattr(right, name))))
        assert not found.predicted.requires_grad
    several = torch.stack([target, target], -1).clamp(0)
    found = agt.cross_entropy(x, several, target_prob=torch.rand(several.shape), outputs=["lse"])
    assert (found._fields, found.entropy) == (("loss", "lse"), None)
    torch.autograd.grad(found.lse.sum(), x)


def test_gradients_of_outputs_ignore_rows_without_targets():
    """Logits of ignored rows may be anything, also where rows have several targets."""
    x, target, _ = problem_of((5, 9), torch.float64)
    x = x.detach()
    x[::4] = torch.nan
    x.requires_grad_()
    for targets, options in ((target, {}), (torch.stack([target, target], -1), {"target_prob": torch.rand(5, 2)})):
        found = agt.cross_entropy(x, targets, outputs=("lse", "entropy"), **options)
        (gradient,) = torch.autograd.grad(found.lse.sum() + found.entropy.sum(), x)
        assert not gradient[::4].any()
        assert gradient[1:4].isfinite().all()


def test_finite_differences_of_outputs():
    x, target, weight = problem_of((3, 6, 4), torch.float64)

    def function(x):
        found = agt.cross_entropy(x, target, weight, temperature=0.8, outputs=("log_prob", "entropy", "lse"))
        return found.loss, found.lse, found.log_prob, found.entropy

    torch.autograd.gradcheck(function, x, check_batched_grad=True)


def test_gradients_of_outputs_by_transforms_compiled_and_once():
    x, target, _ = problem_of((3, 5, 9), torch.float32)
    target = target[:, :5].new_tensor([[0, 1, 2, 3, -100]]).expand(3, 5)

    def total(x, t):
        found = agt.cross_entropy(x, t, outputs=("entropy", "log_prob"))
        return found.loss + (found.entropy * found.log_prob).sum()

    gradients = torch.vmap(torch.func.grad(total))(x.detach(), target)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for i in range(3):
        leaf = x[i].detach().requires_grad_()
        (right,) = torch.autograd.grad(total(leaf, target[i]), leaf, create_graph=True)
        torch.testing.assert_close(gradients[i], right)
        torch.testing.assert_close(torch.autograd.grad(compiled(leaf, target[i]), leaf)[0], right)
        with pytest.raises(RuntimeError, match="cross_entropy: the gradient cannot be differentiated once more"):
            right.sum().backward()
    loss = agt.cross_entropy(x, target[:, :5].new_zeros(3, 9), outputs=("lse",)).loss
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_backward_after_the_gradient_was_changed():
    x, target, _ = problem_of((5, 9), torch.float32)
    loss = agt.cross_entropy(x, target)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(loss, x)[0], kept)


def test_float16_takes_the_scale_of_the_loss_first():
    x, target, _ = problem_of((400, 50), torch.float16)
    (gradient,) = torch.autograd.grad(4096 * agt.cross_entropy(x, target).float(), x)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(4096 * F.cross_entropy(wide, target), wide)
    torch.testing.assert_close(gradient.double(), wanted, rtol=4e-3, atol=1e-6)


def test_transforms_compilation_and_tensors_without_values():
    x, target, weight = problem_of((3, 5, 9), torch.float32)
    target = target[:, :5].new_zeros(3, 5)
    x = x.detach()

    def loss(x, t):
        return agt.cross_entropy(x, t, weight, label_smoothing=0.1) if x.shape[-1] != 9 else agt.cross_entropy(x, t)

    losses, gradients = torch.vmap(loss)(x, target), torch.vmap(torch.func.grad(loss))(x, target)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for i in range(3):
        leaf = x[i].clone().requires_grad_()
        one = compiled(leaf, target[i])
        right = torch.autograd.grad(loss(leaf, target[i]), leaf)[0]
        assert torch.equal(losses[i], one)
        assert torch.equal(gradients[i], right)
        assert torch.equal(torch.autograd.grad(one, leaf)[0], right)
    x, target = torch.empty(2, 7, 3, device="meta"), torch.empty(2, 3, dtype=int, device="meta")
    meta = agt.cross_entropy(x, target, reduction="none")
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 3), torch.float32, "meta")


def test_the_registered_operator():
    x, target, weight = problem_of((5, 9), torch.float32)
    for reduction, with_gradient in (("mean", True), ("none", False)):
        given = {"dim": 1, "reduction": reduction, "ignore_index": -100, "input_grad": with_gradient}
        given |= {"label_smoothing": 0.1, "outputs": ["entropy", "lse"] if with_gradient else []}
        arguments = CROSS_ENTROPY.arguments(
            {**NUMBERS, "input": x.detach(), "target": target, "class_weight": weight, **given}
        )
        operator = torch.ops.ascend_grad.cross_entropy.default
        torch.library.opcheck(operator, arguments)
        loss, gradient, *_ = operator(x, *arguments[1:])
        (found,) = torch.autograd.grad(loss.sum(), x)
        if with_gradient:
            assert torch.equal(found, gradient)
        derivative = operator(x, *arguments[1:])[1].sum()
        if with_gradient:  # the gradients of a row add up to 0
            assert torch.autograd.grad(derivative, x)[0].abs().max() < 1e-7
        else:
            with pytest.raises(RuntimeError, match="cannot be differentiated once more"):
                derivative.backward()
    found = operator(x, *arguments[1:-2], ["log_prob"], None)
    (gradient,) = torch.autograd.grad(found[3].sum(), x)
    log_prob = torch.log_softmax(x, 1).gather(1, target.clamp(0)[:, None])[:, 0]
    right = torch.autograd.grad(log_prob[target != -100].sum(), x)[0]
    torch.testing.assert_close(gradient, right)


def test_autocast_and_no_grad():
    x, target, _ = problem_of((5, 9), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert agt.cross_entropy(x, target).dtype == torch.float32
    with torch.no_grad():
        assert not agt.cross_entropy(x, target).requires_grad


def test_what_is_refused():
    x, target, weight = problem_of((5, 9), torch.float32)
    for arguments, options, kind, message in (
        (
            (x, torch.rand(5, 8)),
            {},
            ag.ParamInvalidError,
            r"cross_entropy: target: expected shape \(5, 9\), as floating",
        ),
        ((x, torch.rand(5)), {}, ag.ParamTypeError, "cross_entropy: target: expected an integer dtype"),
        ((x, torch.rand(5, 9).requires_grad_()), {}, NotImplementedError, "cross_entropy: target: the loss has no"),
        ((x, target, weight.requires_grad_()), {}, NotImplementedError, "cross_entropy: weight: the loss has no"),
        ((x, target, weight.detach()[:3]), {}, ag.ParamInvalidError, r"cross_entropy: weight: expected shape \(9,\)"),
        ((x, target + 9), {}, ag.ParamInvalidError, "cross_entropy: target: expected values in"),
        ((x, target[:2]), {}, ag.ParamInvalidError, "cross_entropy: target: expected shape"),
        ((x, [0]), {}, ag.ParamTypeError, "cross_entropy: target: expected a torch.Tensor"),
        ((x, target), {"reduction": "all"}, ag.ParamInvalidError, "cross_entropy: reduction: expected mean, sum or"),
        ((x, target), {"temperature": 0.0}, ag.ParamInvalidError, "cross_entropy: temperature: expected a positive"),
        ((x, target), {"outputs": "lse"}, ag.ParamTypeError, "cross_entropy: outputs: expected a tuple of names"),
        ((x, target), {"outputs": ["z"]}, ag.ParamInvalidError, "cross_entropy: outputs: expected a tuple of names"),
        (
            (x, target),
            {"ignore_index": 2**63},
            ag.ParamInvalidError,
            "cross_entropy: ignore_index: expected a 64-bit int",
        ),
    ):
        with pytest.raises(kind, match=message):
            agt.cross_entropy(*arguments, **options)


@pytest.mark.parametrize("outputs", [(), ("lse", "log_prob")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoints_recompute_the_losses(outputs, reduction):
    """Saved tensors are unpacked once in each backward, as `torch.utils.checkpoint` demands."""
    random = torch.Generator().manual_seed(1)
    x, w = (torch.randn(size, generator=random, requires_grad=True) for size in ((6, 5), (7, 5)))
    target = torch.randint(0, 5, (6,), generator=random)

    def loss(a):
        total = torch.zeros(())
        for result in (
            agt.cross_entropy(2 * a, target, reduction=reduction, outputs=outputs),
            agt.linear_cross_entropy(2 * a, w, target, reduction=reduction, outputs=outputs),
        ):
            for each in result if outputs else (result,):
                total = total + each.sum()
        return total

    expected = torch.autograd.grad(loss(x), (x, w))
    again = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), (x, w))
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one, other)


def test_rows_without_an_upstream_gradient_of_outputs_have_none_whatever_they_hold():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    x[0], x[1] = torch.nan, torch.inf
    x.requires_grad_()
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0])
    result = agt.cross_entropy(
        x, torch.tensor([0, 1, 2, 3]), token_weight=weights, outputs=("lse", "entropy", "log_prob")
    )
    (result.loss + result.lse[2:].sum() + result.entropy[3] + result.log_prob[2]).backward()
    assert not x.grad[:2].any()
    assert x.grad[2:].all()


def test_numbers_that_are_traced_as_symbols():
    x, target = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5
    compiled = torch.compile(lambda x, T: agt.cross_entropy(x, target, temperature=T), fullgraph=True, backend="eager")
    for temperature in (0.5, 0.6, 0.7):
        assert torch.equal(compiled(x, temperature), agt.cross_entropy(x, target, temperature=temperature))
    count = torch.compile(
        lambda x: agt.cross_entropy(x, target[: len(x)], denominator=len(x), temperature=len(x)),
        fullgraph=True,
        backend="eager",
    )
    for rows in (6, 5, 4):
        right = agt.cross_entropy(x[:rows], target[:rows], temperature=rows)
        assert torch.equal(count(x[:rows]), right)
    dynamic = torch.compile(lambda x: agt.cross_entropy(x, target), fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(dynamic(x), agt.cross_entropy(x, target))
