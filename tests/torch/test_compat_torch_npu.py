"""Compare the loss of logits of `ascend_grad.torch.compat.torch_npu` with formulas in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch_npu_real
from torch_oracles import assert_close

import ascend_grad as ag
from ascend_grad.torch.compat.torch_npu import npu_cross_entropy_loss, npu_cross_entropy_loss_backward

N, C = 9, 37
LOSS, BACKWARD = "compat.torch_npu.npu_cross_entropy_loss", "compat.torch_npu.npu_cross_entropy_loss_backward"
REDUCTIONS = "mean", "sum", "none"


def problem(dtype: torch.dtype = torch.float32, *, weighted: bool = True) -> tuple:
    """Return logits, targets of which one is ignored, and weights of the classes."""
    target = torch.randint(0, C, (N,))
    target[2] = -100
    return 3 * torch.randn(N, C).to(dtype), target, torch.rand(C) if weighted else None


def right_gradient(log_prob, target, weight, grad_loss, reduction: str) -> torch.Tensor:
    """Return the device's formula in float64: the log-probabilities are those that were rounded."""
    counts = target != -100
    classes = target.where(counts, 0)
    factors = counts.double() if weight is None else weight.double()[classes] * counts
    factors = factors / factors.sum() if reduction == "mean" else factors
    onehot = torch.nn.functional.one_hot(classes, C) * counts[:, None]
    return (log_prob.double().exp() - onehot) * (factors * grad_loss.double())[:, None]


def test_signatures():
    """Names, positions and defaults are the same as in torch_npu 2.13.0."""

    def shown(function) -> str:
        return ", ".join(str(each.replace(annotation=each.empty)) for each in parameters(function))

    def parameters(function):
        return inspect.signature(function).parameters.values()

    options = "reduction='mean', ignore_index=-100, label_smoothing=0.0, lse_square_scale_for_zloss=0.0"
    assert shown(npu_cross_entropy_loss) == f"input, target, weight=None, {options}, return_zloss=False"
    assert shown(npu_cross_entropy_loss_backward) == (
        f"grad_loss, log_prob, target, weight=None, grad_zloss=None, lse_for_zloss=None, {options}"
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_results(dtype: torch.dtype, reduction: str, weighted: bool, label_smoothing: float):
    x, target, weight = problem(dtype, weighted=weighted)
    results = npu_cross_entropy_loss(x, target, weight, reduction, label_smoothing=label_smoothing)
    assert type(results) is tuple
    loss, log_prob, zloss, lse_for_zloss = results
    right = torch.nn.functional.cross_entropy(
        x.double(), target, None if weight is None else weight.double(),
        reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip
    assert_close(loss, right.reshape(N if reduction == "none" else 1), dtype)
    assert_close(log_prob, torch.log_softmax(x.double(), -1), dtype)
    assert [each.dtype for each in results] == [dtype] * 4
    assert zloss.shape == lse_for_zloss.shape == (0,)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_come_from_the_rounded_log_probabilities(dtype: torch.dtype, reduction: str, weighted: bool):
    """A gradient is rounded once, at the end: in 16 bits it has the bits of the rounded formula."""
    x, target, weight = problem(dtype, weighted=weighted)
    x.requires_grad_()
    loss, log_prob, *_ = npu_cross_entropy_loss(x, target, weight, reduction)
    grad_loss = torch.rand(loss.shape).to(dtype)
    loss.backward(grad_loss)
    right = right_gradient(log_prob, target, weight, grad_loss, reduction)
    assert x.grad.dtype == dtype
    if dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(x.grad, right.to(dtype))
    else:
        assert_close(x.grad, right, dtype)
    above = grad_loss if reduction == "none" else grad_loss[0]  # without dimensions, as the device's documents say
    again = npu_cross_entropy_loss_backward(above, log_prob, target, weight, reduction=reduction)
    assert torch.equal(again, x.grad)


def test_gradients_of_rows_that_are_not_normalised():
    y, target, weight = problem()
    found = npu_cross_entropy_loss_backward(torch.full((1,), 0.5), y, target, weight)
    assert_close(found, right_gradient(y, target, weight, torch.full((1,), 0.5), "mean"), torch.float32)


def test_ignored_rows_have_no_gradient():
    """An ignored row has gradient 0 even if it holds NaN, and so have all rows if all are ignored."""
    x, target, weight = problem()
    x[2] = torch.nan
    x.requires_grad_()
    npu_cross_entropy_loss(x, target, weight)[0].backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.any(1).tolist() == (target != -100).tolist()
    loss = npu_cross_entropy_loss(x, torch.full((N,), 7), weight, ignore_index=7)[0]
    assert torch.isnan(loss).all()
    (gradient,) = torch.autograd.grad(loss, x)
    assert not torch.count_nonzero(gradient)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_targets_of_other_dtypes(dtype: torch.dtype):
    x, target, weight = problem()
    target[2] = 5
    rights = npu_cross_entropy_loss(x, target, weight, ignore_index=5)
    for each, right in zip(npu_cross_entropy_loss(x, target.to(dtype), weight, ignore_index=5), rights):
        assert torch.equal(each, right)


def test_what_has_a_gradient():
    x, target, weight = problem()
    loss, log_prob, zloss, lse_for_zloss = npu_cross_entropy_loss(x.requires_grad_(), target, weight)
    needs_grad = [each.requires_grad for each in (loss, log_prob, zloss, lse_for_zloss)]
    assert needs_grad == [True, False, True, False]  # as of torch_npu
    found = npu_cross_entropy_loss_backward(torch.ones(1), log_prob, target, weight, torch.zeros(0), lse_for_zloss)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(found, gradient)
    with pytest.raises(RuntimeError, match=f"^{LOSS}: the gradient cannot be differentiated once more"):
        gradient.square().sum().backward()
    found = npu_cross_entropy_loss_backward(torch.ones(1), log_prob.clone().requires_grad_(), target, weight)
    with pytest.raises(RuntimeError, match=f"^{BACKWARD}: the gradient cannot be differentiated once more"):
        found.sum().backward()


def test_label_smoothing_has_no_gradient():
    x, target, weight = problem()
    right = npu_cross_entropy_loss(x, target, weight, label_smoothing=0.1)[0]
    x.requires_grad_()
    text = "label_smoothing: not supported in the gradient"
    with pytest.raises(NotImplementedError, match=f"^{LOSS}: {text}"):
        npu_cross_entropy_loss(x, target, weight, label_smoothing=0.1)
    with torch.no_grad():
        assert torch.equal(npu_cross_entropy_loss(x, target, weight, label_smoothing=0.1)[0], right)
    with pytest.raises(NotImplementedError, match=f"^{BACKWARD}: {text}"):
        npu_cross_entropy_loss_backward(torch.ones(1), x, target, label_smoothing=0.1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_transforms_and_compilation():
    x, target, weight = problem()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return npu_cross_entropy_loss(x, target, weight)[0].sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(torch.func.grad(loss)(x), leaf.grad)
    batch = torch.stack([x, 2 * x])
    for each, one in zip(torch.vmap(torch.func.grad(loss))(batch), batch):
        assert torch.equal(each, torch.func.grad(loss)(one))
    torch._dynamo.reset()
    compiled = x.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert torch.equal(compiled.grad, leaf.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"lse_square_scale_for_zloss": 0.1}, NotImplementedError, "lse_square_scale_for_zloss: not supported"),
        ({"return_zloss": True}, NotImplementedError, "return_zloss: not supported"),
        ({"return_zloss": 1}, ag.ParamTypeError, "return_zloss: expected True or False"),
        ({"input": torch.zeros(C)}, ag.ParamInvalidError, r"input: expected shape \(N, C\), got \(37,\)"),
        ({"input": torch.zeros(N, C, dtype=torch.int64)}, ag.ParamTypeError, "input: expected dtype float32"),
        ({"input": [0.0]}, ag.ParamTypeError, "input: expected a torch.Tensor"),
        ({"target": torch.zeros(N, C)}, ag.ParamTypeError, "target: expected an integer dtype, got torch.float32"),
        ({"target": torch.ones(N) > 0}, ag.ParamTypeError, "target: expected an integer dtype, got bool"),
        ({"target": torch.zeros(N - 1).long()}, ag.ParamInvalidError, r"target: expected shape \(9,\)"),
        ({"target": torch.full((N,), C)}, ag.ParamInvalidError, r"target: expected values in \[0, 37\)"),
        ({"weight": torch.ones(C - 1)}, ag.ParamInvalidError, r"weight: expected shape \(37,\)"),
        ({"weight": torch.ones(C).requires_grad_()}, NotImplementedError, "weight: the loss has no gradient for it"),
        ({"reduction": "Mean"}, ag.ParamInvalidError, "reduction: expected mean, sum or none"),
        ({"label_smoothing": 1.5}, ag.ParamInvalidError, r"label_smoothing: expected a number in \[0, 1\]"),
        ({"ignore_index": 0.5}, ag.ParamTypeError, "ignore_index: expected an int"),
    ],
)
def test_errors(arguments: dict, kind: type[Exception], text: str):
    x, target, weight = problem()
    with pytest.raises(kind, match=f"^{LOSS}: {text}"):
        npu_cross_entropy_loss(**{"input": x, "target": target, "weight": weight, **arguments})


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"lse_square_scale_for_zloss": 0.1}, NotImplementedError, "lse_square_scale_for_zloss: not supported"),
        ({"grad_zloss": torch.ones(1)}, NotImplementedError, "grad_zloss: not supported"),
        ({"lse_for_zloss": torch.ones(N)}, NotImplementedError, "lse_for_zloss: not supported"),
        ({"grad_loss": torch.ones(N)}, ag.ParamInvalidError, r"grad_loss: expected shape \(1,\)"),
        ({"reduction": "none"}, ag.ParamInvalidError, r"grad_loss: expected shape \(9,\), as reduction is 'none'"),
        ({"grad_loss": torch.ones(1).long()}, ag.ParamTypeError, "grad_loss: expected dtype float32"),
        ({"log_prob": torch.zeros(C)}, ag.ParamInvalidError, r"log_prob: expected shape \(N, C\)"),
        ({"log_prob": torch.zeros(N, 0)}, ag.ParamInvalidError, "log_prob: expected"),
        ({"target": torch.full((N,), C)}, ag.ParamInvalidError, r"target: expected values in \[0, 37\)"),
        ({"weight": torch.ones(C + 1)}, ag.ParamInvalidError, r"weight: expected shape \(37,\)"),
        ({"reduction": "max"}, ag.ParamInvalidError, "reduction: expected mean, sum or none"),
    ],
)
def test_errors_of_the_gradient(arguments: dict, kind: type[Exception], text: str):
    x, target, weight = problem()
    given = {"grad_loss": torch.ones(1), "log_prob": x, "target": target, "weight": weight}
    with pytest.raises(kind, match=f"^{BACKWARD}: {text}"):
        npu_cross_entropy_loss_backward(**{**given, **arguments})


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.skipif(torch_npu_real.IS_INSTALLED, reason="torch_npu has the functions")
def test_a_torch_npu_without_the_functions():
    x, target, _ = (each if each is None else each.to("npu") for each in problem(weighted=False))
    with pytest.raises(
        ag.BackendUnavailableError, match=f"^{LOSS}: the installed torch_npu has no npu_cross_entropy_loss"
    ):
        npu_cross_entropy_loss(x, target)
    with pytest.raises(ag.BackendUnavailableError, match=f"^{BACKWARD}: the installed torch_npu has no npu_cross_entr"):
        npu_cross_entropy_loss_backward(torch.ones(1, device="npu"), x, target)
