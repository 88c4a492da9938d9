"""Compare losses of several dimensions, and `dtype` of softmax, with the documented formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from loss_formulas import Formula
from torch_oracles import assert_close

import ascend_grad as ag
import ascend_grad.torch as agt

N, C, H = 5, 7, 4
POSITIONS = (2, 3)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, C, (N, *POSITIONS))
    target[0, 1], target[3, 0, 2] = -100, -100
    return torch.randn(N, H).to(dtype), torch.randn(C, *POSITIONS, H).to(dtype), target


def one_dimension(x, w, target, bias=None, of_rows=None):
    """Return the same loss as one of rows with a block of H features for each position, which is 0 at the others."""
    count = target.shape[1:3].numel()
    features = torch.eye(count, dtype=x.dtype)[None, :, :, None] * x[:, None, None, :]
    rows = features.reshape(N * count, count * H)
    weight = w.flatten(1, 2).reshape(C, count * H)
    if bias is not None:
        rows = torch.cat([rows, torch.eye(count, dtype=x.dtype).repeat(N, 1)], 1)
        weight = torch.cat([weight, bias.flatten(1)], 1)
    return rows, weight, target.flatten(0, 2)


OPTIONS = {
    "none": {},
    "class weights": {"weight": 0.5 + torch.rand(C)},
    "class weights and squares": {"weight": 0.5 + torch.rand(C), "lse_square_scale": 0.1},
    "token weights": {"token_weight": 0.5 + torch.rand(N, *POSITIONS), "lse_square_scale": 0.1},
    "all weights": {"token_weight": torch.rand(N, *POSITIONS), "weight": torch.rand(C), "lse_square_scale": 0.1},
    "smoothing": {"label_smoothing": 0.1, "weight": 0.5 + torch.rand(C)},
    "logits": {"temperature": 0.7, "logit_scale": 1.5, "softcap": 3.0},
    "temperatures": {"temperature": 0.5 + torch.rand(N, *POSITIONS)},
    "a denominator": {"denominator": 4.0, "weight": 0.5 + torch.rand(C), "lse_square_scale": 0.1},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_of_several_dimensions(options: dict, reduction: str):
    x, w, target = problem()
    bias = torch.randn(C, *POSITIONS).double()
    flat = {
        name: value.double().flatten() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    leaves = [each.requires_grad_() for each in (x, w, bias)]
    loss = agt.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction, **options)
    rows, weight, classes = one_dimension(x, w, target, bias)
    right = Formula(**flat).loss(rows, weight, None, classes, reduction)
    right = right.reshape(target.shape) if reduction == "none" else right
    above = torch.randn(right.shape).double()
    assert_close(loss, right, torch.float64, steps=20)
    grads, rights = torch.autograd.grad(loss, leaves, above), torch.autograd.grad(right, leaves, above)
    for grad, expected in zip(grads, rights):
        assert_close(grad, expected, torch.float64, steps=50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_several_dimensions_are_rounded_once(reduction: str, dtype: torch.dtype):
    leaves, target = [each.requires_grad_() for each in problem(dtype)[:2]], problem()[2]
    loss = agt.linear_cross_entropy(*leaves, target, reduction=reduction)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    right = F.cross_entropy(torch.einsum("nh,cabh->ncab", *wide), target, reduction=reduction)
    above = torch.ones_like(right)
    assert loss.dtype == dtype
    assert_close(loss, right, dtype)
    rights = torch.autograd.grad(right, wide, above)
    for grad, expected in zip(torch.autograd.grad(loss, leaves, above.to(dtype)), rights):
        assert grad.dtype == dtype
        assert_close(grad, expected, dtype, steps=1 if dtype.itemsize == 2 else 10)


def test_outputs_of_several_dimensions():
    x, w, target = problem()
    leaves = [x.requires_grad_(), w.requires_grad_()]
    found = agt.linear_cross_entropy(x, w, target, outputs=("lse", "log_prob", "entropy", "predicted", "correct"))
    rows, weight, classes = one_dimension(x, w, target)
    rights = Formula().outputs(rows, weight, None, classes)
    for name, right in rights.items():
        each = getattr(found, name)
        assert each.shape == (() if name == "correct" else target.shape)
        assert_close(each.double(), right.reshape(each.shape).double(), torch.float64, steps=20)
    above = torch.randn(target.shape).double()
    grads = torch.autograd.grad((found.entropy * above).sum() + found.loss, leaves)
    right = (rights["entropy"] * above.flatten()).sum() + Formula().loss(rows, weight, None, classes, "mean")
    for grad, expected in zip(grads, torch.autograd.grad(right, leaves)):
        assert_close(grad, expected, torch.float64, steps=50)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_targets_in_several_dimensions(reduction: str):
    x, w, target = problem()
    target = torch.stack([target, torch.randint(0, C, target.shape)], -1)
    target[0, 1] = -100
    prob = torch.rand(N, *POSITIONS, 2).double()
    options = {"lse_square_scale": 0.1, "weight": 0.5 + torch.rand(C).double()}
    loss = agt.linear_cross_entropy(x, w, target, target_prob=prob, reduction=reduction, **options)
    rows, weight, classes = one_dimension(x, w, target)
    right = Formula(target_prob=prob.flatten(0, 2), **options).loss(rows, weight, None, classes, reduction)
    assert_close(loss, right.reshape(loss.shape), torch.float64, steps=20)


@pytest.mark.parametrize("weight", [None, torch.zeros(C)], ids=["ignored", "weights of 0"])
def test_a_mean_over_nothing(weight: torch.Tensor | None):
    x, w, target = problem()
    target = torch.full_like(target, -100) if weight is None else target
    loss = agt.linear_cross_entropy(x.requires_grad_(), w, target, weight=weight)
    assert loss.isnan()
    (grad,) = torch.autograd.grad(loss, x)
    assert not torch.count_nonzero(grad)


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_with_several_dimensions(bias: bool):
    x, _, target = problem(torch.float32)
    module = agt.LinearCrossEntropyLoss(H, C, out_features=POSITIONS, bias=bias)
    assert module.out_features == POSITIONS
    assert module.linear.weight.shape == (C * 6, H)
    loss = module(x, target)
    logits = F.linear(x, module.linear.weight, module.linear.bias).reshape(N, C, *POSITIONS)
    assert_close(loss, F.cross_entropy(logits.double(), target), torch.float32, steps=10)
    tied = agt.LinearCrossEntropyLoss(H, C, out_features=POSITIONS, linear_weight=module.linear.weight, bias=bias)
    assert tied(x, target).isfinite()
    assert (tied.linear.bias is not None) == bias
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        torchs = torch.nn.LinearCrossEntropyLoss(H, C, out_features=POSITIONS, bias=bias)
        torchs.load_state_dict(module.state_dict())
        assert_close(loss, torchs(x, target).double(), torch.float32, steps=10)
    assert f"out_features={POSITIONS}" in repr(module)


def test_compiled_and_batched_losses_of_several_dimensions():
    x, w, target = problem(torch.float32)
    right = agt.linear_cross_entropy(x, w, target)
    compiled = torch.compile(agt.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, w, target), right.double(), torch.float32)
    batch = torch.vmap(agt.linear_cross_entropy, in_dims=(0, None, 0))(x[None], w, target[None])
    assert_close(batch[0], right.double(), torch.float32)
    assert (
        agt.linear_cross_entropy(x.to("meta"), w.to("meta"), target.to("meta"), reduction="none").shape == target.shape
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, w, t: ((x[0], w, t[0]), {}), r"input: expected shape \(N, in_features\), as linear_weight has"),
        (lambda x, w, t: ((x, w, t[:, 0]), {}), r"target: expected shape \(5, 2, 3\), one for each row and position"),
        (lambda x, w, t: ((x, w[:, :0], t[:, :0]), {}), r"linear_weight: expected at least one position, got shape"),
        (lambda x, w, t: ((x, w, t + C), {}), "target: expected values in"),
        (lambda x, w, t: ((x, w[..., 1:], t), {}), r"linear_weight: expected shape \('C', 2, 3, 4\), got"),
        (lambda x, w, t: ((x, w.float(), t), {}), "linear_weight: expected torch.float64, as input is"),
        (lambda x, w, t: ((x.int(), w.int(), t), {}), "input: expected "),
        (lambda x, w, t: ((x, w, t), {"linear_bias": x[0]}), r"linear_bias: expected shape \(7, 2, 3\)"),
        (lambda x, w, t: ((x, w, t), {"weight": x[0]}), r"weight: expected shape \(7,\), one for each class"),
        (lambda x, w, t: ((x, w, t), {"token_weight": x}), r"token_weight: expected shape \(5, 2, 3\)"),
        (lambda x, w, t: ((x, w, t), {"temperature": x}), r"temperature: expected shape \(5, 2, 3\)"),
        (lambda x, w, t: ((x, w, t), {"target_prob": x}), r"target: expected shape \(5, 2, 3, 'K'\)"),
        (lambda x, w, t: ((x, w, t), {"reduction": "Mean"}), "reduction: expected mean, sum or none, got str 'Mean'"),
        (lambda x, w, t: ((x, w, t), {"denominator": 0}), "denominator: expected "),
        (lambda x, w, t: ((x, w, t), {"outputs": "lse"}), "outputs: expected "),
        (
            lambda x, w, t: ((x, w, w[..., 0]), {}),
            "target: probabilities of all classes are not supported with several",
        ),
    ],
)
def test_errors_of_several_dimensions(change, text: str):
    arguments, keywords = change(*problem())
    with pytest.raises((ag.ParamInvalidError, NotImplementedError), match=f"linear_cross_entropy: {text}"):
        agt.linear_cross_entropy(*arguments, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_dtype_of_softmax(name: str, given: torch.dtype, dtype: torch.dtype):
    """The input is converted first, and its gradient has its dtype, as in torch."""
    x, above = torch.randn(3, 5).to(given).requires_grad_(), torch.randn(3, 5).to(dtype)
    for found in getattr(agt, name)(x, -1, dtype), getattr(agt, name)(x, dtype=dtype):
        right = getattr(torch, name)(x, -1, dtype)
        assert found.dtype == dtype
        assert_close(found.detach(), right.detach().double(), dtype, steps=4)
        (grad,), (expected,) = (torch.autograd.grad(each, x, above) for each in (found, right))
        assert grad.dtype == given
        assert_close(grad, expected.double(), max(given, dtype, key=lambda each: torch.finfo(each).eps), steps=4)


def test_the_dtype_of_softmax_of_integers():
    assert agt.softmax(torch.tensor([1, 1]), dtype=torch.float32).tolist() == [0.5, 0.5]
    compiled = torch.compile(agt.softmax, fullgraph=True, backend="aot_eager")
    assert compiled(torch.zeros(2).half(), dtype=torch.float32).dtype == torch.float32
    for name in "softmax", "log_softmax":
        for dtype in torch.int32, "float32":
            with pytest.raises(ag.ParamTypeError, match=f"{name}: dtype: expected None or one of torch.float32, "):
                getattr(agt, name)(torch.zeros(2), dtype=dtype)
        with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a tensor of a real dtype, got"):
            getattr(agt, name)(torch.zeros(2) + 1j, dtype=torch.float32)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_row_of_weight_0_adds_nothing(value):
    x, w, target = torch.randn(4, 3), torch.randn(5, 2, 3, requires_grad=True), torch.randint(5, (4, 2))
    token_weight = torch.tensor([0.0, 1, 1, 1])[:, None].expand(4, 2)
    options = {"weight": torch.rand(5), "lse_square_scale": 0.1}
    right = agt.linear_cross_entropy(x[1:], w, target[1:], **options)
    (expected,) = torch.autograd.grad(right, w)
    x[0] = value
    found = agt.linear_cross_entropy(x, w, target, token_weight=token_weight, **options)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found, w)[0], expected)


def test_a_squared_lse_that_is_a_tensor():
    x, w, target = torch.randn(4, 3), torch.randn(5, 2, 3), torch.randint(5, (4, 2))
    loss = lambda scale: agt.linear_cross_entropy(x, w, target, weight=torch.ones(5), lse_square_scale=scale)  # noqa: E731
    scales = torch.tensor([0.0, 0.1])
    expected = torch.stack([loss(0.0), loss(0.1)])
    torch.testing.assert_close(torch.vmap(loss)(scales), expected)
    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(scales[1]), expected[1])


@pytest.mark.parametrize(("name", "size"), [("token_weight", (4, 2)), ("weight", (5,))])
def test_weights_of_integers(name, size):
    x, w, target = torch.randn(4, 3), torch.randn(5, 2, 3), torch.randint(5, (4, 2))
    with pytest.raises(ag.ParamTypeError, match=f"{name}: expected a floating dtype, got torch.int64"):
        agt.linear_cross_entropy(x, w, target, **{name: torch.ones(size, dtype=torch.int64)})
