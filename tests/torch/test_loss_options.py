"""Compare the options of `linear_cross_entropy` for tensors with their formulas in torch's float64 operations."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from loss_formulas import Formula
from torch_oracles import TOLERANCES, assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad.operators.options import LAYER_OUTPUTS

REDUCTIONS = ("mean", "sum", "none")
N, H, C = 9, 5, 13

#: Values of the options of the library; tensors are functions of the number of rows and classes.
OWN = {
    "token_weight": lambda: torch.rand(N).double(),
    "lse_square_scale": lambda: 0.01,
    "temperature": lambda: 0.7,
    "temperature of each row": lambda: 0.5 + torch.rand(N).double(),
    "logit_scale": lambda: 0.6,
    "softcap": lambda: 2.5,
    "denominator": lambda: 17.0,
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an input, a weight, a bias, and targets of which one is ignored."""
    target = torch.randint(0, C, (N,))
    target[N // 2] = -100
    return torch.randn(N, H).to(dtype), torch.randn(C, H).to(dtype), torch.randn(C).to(dtype), target


def check(
    ours: Callable,
    right: Callable,
    tensors: list[torch.Tensor],
    above: torch.Tensor,
    dtype: torch.dtype,
    steps: int = 10,
) -> None:
    """Compare a loss and its gradients with those in float64."""
    value, *grads = value_and_gradients(ours, tensors, above.to(dtype))
    right_value, *right_grads = value_and_gradients(right, [each.double() for each in tensors], above.double())
    assert value.shape == right_value.shape
    assert value.dtype == dtype
    assert_close(value, right_value, dtype, steps=2)
    for grad, right_grad in zip(grads, right_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad, right_grad, dtype, steps=steps)


def above(reduction: str) -> torch.Tensor:
    return torch.randn((N,) if reduction == "none" else (), dtype=torch.float64)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no such function")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_options_of_torch(
    reduction: str, with_weight: bool, with_bias: bool, label_smoothing: float, dtype: torch.dtype
):
    """Every combination of torch's options gives torch's loss and gradients, computed in float64."""
    x, w, bias, target = problem(dtype)
    tensors = [x, w, bias] if with_bias else [x, w]
    class_weight = torch.rand(C).to(dtype) if with_weight else None

    def loss(function: Callable, class_weight: torch.Tensor | None) -> Callable:
        def call(x, w, bias=None):
            return function(
                x, w, target, linear_bias=bias, weight=class_weight, reduction=reduction,
                label_smoothing=label_smoothing,
            )  # fmt: skip

        return call

    wide = None if class_weight is None else class_weight.double()
    right = loss(F.linear_cross_entropy, wide)
    check(loss(agt.linear_cross_entropy, class_weight), right, tensors, above(reduction), dtype)


@pytest.mark.parametrize(
    "names", [*itertools.combinations(OWN, 1), *itertools.combinations(OWN, 2), tuple(OWN)], ids=str
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_options_of_the_library(reduction: str, names: tuple[str, ...]):
    """Loss and gradients match the formula, with label smoothing, class weights and a bias."""
    x, w, bias, target = problem()
    options = {name.partition(" ")[0]: OWN[name]() for name in names}
    options |= {"label_smoothing": 0.1, "weight": torch.rand(C, dtype=torch.float64)}
    formula = Formula(**options)

    def ours(x, w, bias):
        return agt.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction, **options)

    check(ours, lambda *each: formula.loss(*each, target, reduction), [x, w, bias], above(reduction), torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_options_in_every_dtype(reduction: str, dtype: torch.dtype):
    x, w, bias, target = problem(dtype)
    options = {name.partition(" ")[0]: value() for name, value in OWN.items()} | {"label_smoothing": 0.1}
    formula = Formula(**options)

    def ours(x, w, bias):
        return agt.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction, **options)

    check(ours, lambda *each: formula.loss(*each, target, reduction), [x, w, bias], above(reduction), dtype, steps=20)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("prob", [0, "probabilities"])
@pytest.mark.parametrize("of_logits", [False, True])
def test_log_probabilities_of_several_targets(of_logits: bool, prob: object, reduction: str):
    """Compare K log-probabilities of each row, and their gradients, with the formula, for both losses."""
    x, w, bias, _ = problem()
    target = torch.randint(0, C, (N, 3))
    target[1, :2] = -100
    target[4] = -100
    target[5] = 7
    options = {"softcap": 2.0, "logit_scale": -0.8, "label_smoothing": 0.1}
    options["target_prob"] = torch.rand(N, 3, dtype=torch.float64) if prob else 0
    formula = Formula(**options | {"target_prob": options["target_prob"] + torch.zeros(N, 3, dtype=torch.float64)})
    of_log_prob, of_loss = torch.randn(N, 3, dtype=torch.float64), above(reduction)
    wanted = {"outputs": ("log_prob",), "reduction": reduction, **options}

    def ours(x, w, bias):
        if of_logits:
            found = agt.cross_entropy(x @ w.T + bias, target, **wanted)
        else:
            found = agt.linear_cross_entropy(x, w, target, linear_bias=bias, **wanted)
        assert found.log_prob.shape == target.shape
        return (found.loss * of_loss).sum() + (found.log_prob * of_log_prob).sum()

    def right(*each):
        log_prob = formula.outputs(*each, target)["log_prob"]
        return (formula.loss(*each, target, reduction) * of_loss).sum() + (log_prob * of_log_prob).sum()

    check(ours, right, [x, w, bias], torch.tensor(1.0), torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("with_options", [False, True])
def test_several_targets(with_options: bool, reduction: str):
    x, w, bias, _ = problem()
    target = torch.randint(0, C, (N, 3))
    target[1, :2] = -100
    target[4] = -100
    target[5] = 7
    prob = torch.rand(N, 3, dtype=torch.float64)
    options = {"weight": torch.rand(C).double(), "label_smoothing": 0.1, "temperature": 0.5} if with_options else {}
    formula = Formula(target_prob=prob, **options)

    def ours(x, w, bias):
        return agt.linear_cross_entropy(
            x, w, target, linear_bias=bias, target_prob=prob, reduction=reduction, **options
        )

    check(ours, lambda *each: formula.loss(*each, target, reduction), [x, w, bias], above(reduction), torch.float64)


def test_one_row():
    x, w, bias, target = problem()
    options = {"token_weight": torch.tensor(0.5), "temperature": torch.tensor(2.0)}
    for reduction in REDUCTIONS:
        value = agt.linear_cross_entropy(x[0], w, target[0], linear_bias=bias, reduction=reduction, **options)
        formula = Formula(**{name: each.double()[None] for name, each in options.items()})
        assert value.shape == ()
        assert_close(value, formula.loss(x[:1], w, bias, target[:1], reduction).reshape(()), torch.float64)
    several = agt.linear_cross_entropy(x[0], w, torch.tensor([1, 2]), target_prob=torch.tensor([0.5, 0.5]))
    single = [agt.linear_cross_entropy(x[0], w, torch.tensor(i)) for i in (1, 2)]
    assert_close(several, sum(single) / 2, torch.float64)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "input weight", "weight bias"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_frozen_tensors(reduction: str, frozen: str):
    x, w, bias, target = problem()
    named = {"input": x, "weight": w, "bias": bias}
    wanted = [name for name in named if name not in frozen.split()]

    def loss(function: Callable) -> Callable:
        return lambda *leaves: function(*(named | dict(zip(wanted, leaves))).values())

    check(
        loss(lambda x, w, bias: agt.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction)),
        loss(lambda x, w, bias: Formula().loss(x, w, bias, target, reduction)),
        [named[name] for name in wanted],
        above(reduction),
        torch.float64,
    )


def test_gradients_with_options_come_with_the_loss(calls: list[dict]):
    x, w, bias, target = (each.requires_grad_() if each.is_floating_point() else each for each in problem())
    options = {"label_smoothing": 0.1, "token_weight": torch.rand(N), "weight": torch.rand(C)}
    agt.linear_cross_entropy(x, w, target, linear_bias=bias, **options).backward()
    assert [(each["return_grad"], each["output_mask"]) for each in calls] == [(True, (True, True))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs(dtype: torch.dtype):
    x, w, bias, target = problem(dtype)
    target[0] = (x[0].double() @ w.double().T + bias.double()).argmax()
    options = {"temperature": 0.7, "logit_scale": 0.8, "softcap": 5.0}
    formula = Formula(**options)
    names = "lse", "log_prob", "entropy", "predicted", "correct"
    found = agt.linear_cross_entropy(x, w, target, linear_bias=bias, outputs=names, **options)
    right = formula.outputs(x.double(), w.double(), bias.double(), target)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.loss.dtype == dtype
    for name in names[:3]:
        assert getattr(found, name).dtype == accumulator
        assert_close(getattr(found, name), right[name], accumulator, steps=2)
    assert torch.equal(found.predicted, right["predicted"])
    assert torch.equal(found.correct, right["correct"])
    alone = agt.linear_cross_entropy(x, w, target, outputs=["correct"])
    assert [name for name, value in alone._asdict().items() if value is not None] == ["loss", "correct"]
    row = agt.linear_cross_entropy(x[0], w, target[0], outputs=names)
    assert {each.shape for each in row} == {()}


def test_options_of_torch_for_memory():
    """Options that change no formula are accepted. Those that would need wider sums are refused."""
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if kind is None:
        pytest.skip("torch has no such options")
    x, w, _, target = problem(torch.bfloat16)
    right = agt.linear_cross_entropy(x, w, target)
    for each in (
        kind(),
        kind(allow_retain_graph=True),
        kind(batch_chunk_size=2, chunking_method=None),
        kind(acc_policy="accurate", acc_dtype=torch.float32),
        kind(acc_dtype=torch.bfloat16),
    ):
        assert torch.equal(agt.linear_cross_entropy(x, w, target, options=each), right)
        assert torch.equal(
            agt.LinearCrossEntropyLoss(H, C, options=each, linear_weight=torch.nn.Parameter(w))(x, target), right
        )
    with pytest.raises(NotImplementedError, match=r"linear_cross_entropy: options\.acc_dtype: not supported"):
        agt.linear_cross_entropy(x, w, target, options=kind(acc_dtype=torch.float64))
    with pytest.raises(ag.ParamTypeError, match=r"options: expected None or torch\.nn\.LinearCrossEntropyOptions"):
        agt.linear_cross_entropy(x, w, target, options={})


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_module_with_options(is_shared: bool):
    shared = torch.nn.Parameter(torch.randn(C, H, dtype=torch.float64)) if is_shared else None
    settings = {"lse_square_scale": 0.01, "temperature": 0.7, "logit_scale": 0.6, "softcap": 2.5}
    module = agt.LinearCrossEntropyLoss(
        H, C, bias=True, dtype=torch.float64, weight=torch.rand(C).double(), label_smoothing=0.1, linear_weight=shared,
        **settings,
    )  # fmt: skip
    assert set(module.state_dict()) == {"weight", "linear.weight", "linear.bias"}
    assert repr(module).splitlines()[1].endswith("lse_square_scale=0.01, temperature=0.7, logit_scale=0.6, softcap=2.5")
    x, _, _, target = problem()
    calls = {"token_weight": torch.rand(N).double(), "denominator": 3.0}
    loss = module(x, target, **calls)
    loss.backward()
    formula = Formula(weight=module.weight, label_smoothing=0.1, **settings, **calls)
    right, *grads = value_and_gradients(
        lambda w, bias: formula.loss(x, w, bias, target, "mean"), [module.linear.weight, module.linear.bias]
    )
    assert_close(loss, right, torch.float64)
    assert_close(module.linear.weight.grad, grads[0], torch.float64, steps=10)
    assert_close(module.linear.bias.grad, grads[1], torch.float64, steps=10)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"linear_bias": torch.zeros(C - 1)},
            r"linear_bias: expected shape \(13,\), one for each row of linear_weight",
        ),
        ({"linear_bias": torch.zeros(C, dtype=torch.int64)}, "linear_bias: expected dtype"),
        ({"weight": torch.zeros(C, dtype=torch.int64)}, "weight: expected dtype"),
        ({"token_weight": torch.zeros(N - 1)}, r"token_weight: expected shape \(9,\), one for each row of input"),
        ({"token_weight": [1.0] * N}, "token_weight: expected a torch.Tensor, got list"),
        ({"temperature": torch.ones(N - 1)}, r"temperature: expected shape \(9,\), one for each row of input"),
        ({"temperature": torch.zeros(N)}, "temperature: expected positive finite numbers, got .* in row 0"),
        ({"temperature": 0.0}, "temperature: expected a positive finite number"),
        ({"temperature": "1"}, "temperature: expected a real number"),
        ({"label_smoothing": 1.5}, r"label_smoothing: expected a number in \[0, 1\]"),
        ({"lse_square_scale": float("nan")}, "lse_square_scale: expected a finite number"),
        ({"denominator": -1}, "denominator: expected a positive finite number"),
        ({"logit_scale": None}, "logit_scale: expected a real number"),
        ({"softcap": 0.0}, "softcap: expected a positive finite number"),
        ({"outputs": "lse"}, "outputs: expected a tuple of names"),
        ({"outputs": ("probability",)}, "outputs: expected a tuple of names"),
        ({"outputs": ("lse", "lse")}, "outputs: expected different names"),
        ({"target_prob": torch.ones(N, 1)}, r"target: expected shape \(9, 'K'\), as target_prob is given"),
    ],
)
def test_errors(change: dict, text: str):
    x, w, _, target = problem(torch.float32)
    with pytest.raises(ag.ParamInvalidError, match=f"^linear_cross_entropy: {text}"):
        agt.linear_cross_entropy(x, w, target, **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"reduction": "avg"}, "reduction: expected 'mean', 'sum' or 'none', got str 'avg'"),
        ({"ignore_index": 1.5}, "ignore_index: expected"),
        ({"label_smoothing": 1.5}, "label_smoothing: expected a number in [0, 1], got 1.5"),
        ({"lse_square_scale": float("nan")}, "lse_square_scale: expected a finite number"),
        ({"temperature": 0}, "temperature: expected a positive finite number, got 0"),
        ({"logit_scale": "1"}, "logit_scale: expected a real number, got str '1'"),
        ({"softcap": -1}, "softcap: expected a positive finite number, got -1"),
        ({"outputs": ("foo",)}, "outputs: expected"),
    ],
    ids=str,
)
def test_errors_of_the_module(change: dict, text: str):
    """Options that no call accepts are refused when the module is made."""
    with pytest.raises(ag.ParamInvalidError, match=f"^LinearCrossEntropyLoss: {re.escape(text)}"):
        agt.LinearCrossEntropyLoss(H, C, **change)


def test_options_of_the_module_that_are_tensors():
    x, w, _, target = problem(torch.float32)
    settings = {"temperature": torch.rand(N) + 0.5, "softcap": torch.tensor(2.0), "outputs": ["lse"]}
    module = agt.LinearCrossEntropyLoss(H, C, linear_weight=torch.nn.Parameter(w), **settings)
    right = agt.linear_cross_entropy(x, w, target, **settings)
    assert all(torch.equal(*pair) for pair in zip(module(x, target), right, strict=True))


def test_errors_of_several_targets():
    x, w, _, _ = problem(torch.float32)
    target = torch.zeros(N, 2, dtype=torch.int64)
    with pytest.raises(
        ag.ParamInvalidError, match=r"target_prob: expected shape \(9, 2\), as target has, got \(9, 1\)"
    ):
        agt.linear_cross_entropy(x, w, target, target_prob=torch.ones(N, 1))
    with pytest.raises(ag.ParamInvalidError, match="outputs: expected no output of a single target"):
        agt.linear_cross_entropy(x, w, target, target_prob=torch.ones(N, 2), outputs=("correct",))


@pytest.mark.parametrize(
    "option",
    [
        {"weight": torch.ones(C, requires_grad=True)},
        {"token_weight": torch.ones(N, requires_grad=True)},
        {"temperature": torch.ones(N, requires_grad=True)},
        {"temperature": torch.tensor(1.0, requires_grad=True)},
    ],
    ids=str,
)
def test_options_without_a_gradient(option: dict):
    """An option that requires grad is refused, as its gradient would silently be left out."""
    x, w, _, target = problem(torch.float32)
    (name,) = option
    with pytest.raises(NotImplementedError, match=f"linear_cross_entropy: {name}: the loss has no gradient for it"):
        agt.linear_cross_entropy(x, w, target, **option)
    with torch.no_grad():
        agt.linear_cross_entropy(x, w, target, **option)


def test_labels_of_several_targets_require_no_gradient():
    x, w, _, _ = problem(torch.float32)
    prob = torch.ones(N, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: target_prob: the loss has no gradient for it"):
        agt.linear_cross_entropy(x, w, torch.zeros(N, 1, dtype=torch.int64), target_prob=prob)


def test_autocast_with_a_bias():
    x, w, bias, target = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = agt.linear_cross_entropy(x, w, target, linear_bias=bias.requires_grad_())
    loss.backward()
    assert loss.dtype == bias.grad.dtype == torch.float32
    rounded = [each.bfloat16().double() for each in (x, w)]
    right = value_and_gradients(lambda bias: Formula().loss(*rounded, bias, target, "mean"), [bias.detach().double()])
    assert_close(loss, right[0], torch.float32)
    assert_close(bias.grad, right[1], torch.bfloat16, steps=4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_batches(reduction: str):
    """`torch.vmap` computes loss and gradients of several problems with a bias and options."""
    x, w, bias, target = problem()
    temperatures = 0.5 + torch.rand(3, N).double()

    def batched(loss: Callable) -> tuple[torch.Tensor, ...]:
        gradient = torch.func.grad(lambda *each: loss(*each).sum(), (0, 1, 2))
        dims = (None, None, None, 0)
        return torch.vmap(loss, dims)(x, w, bias, temperatures), *torch.vmap(gradient, dims)(x, w, bias, temperatures)

    ours = batched(
        lambda x, w, bias, temperature: agt.linear_cross_entropy(
            x, w, target, linear_bias=bias, temperature=temperature, reduction=reduction
        )
    )
    rights = batched(
        lambda x, w, bias, temperature: Formula(temperature=temperature).loss(x, w, bias, target, reduction)
    )
    for each, right in zip(ours, rights, strict=True):
        assert_close(each, right, torch.float64, steps=10)


@pytest.mark.parametrize("outputs", [("lse",), ("log_prob",), ("entropy",), ("lse", "log_prob", "entropy")], ids=str)
@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_outputs(reduction: str, with_loss: bool, outputs: tuple[str, ...], dtype: torch.dtype):
    """Outputs are differentiable, alone and together with the loss."""
    x, w, bias, target = problem(dtype)
    options = {"temperature": 0.7, "logit_scale": 0.8, "softcap": 5.0, "label_smoothing": 0.1, "lse_square_scale": 0.01}
    formula = Formula(**options)
    factors = {name: torch.randn(N, dtype=torch.float64) for name in outputs}
    of_loss = above(reduction) if with_loss else torch.zeros(())

    def ours(x, w, bias):
        found = agt.linear_cross_entropy(
            x, w, target, linear_bias=bias, reduction=reduction, outputs=outputs, **options
        )
        terms = [(getattr(found, name) * factors[name].to(getattr(found, name).dtype)).sum() for name in outputs]
        return sum(terms) + ((found.loss * of_loss.to(found.loss.dtype)).sum() if with_loss else 0)

    def right(x, w, bias):
        found = formula.outputs(x, w, bias, target)
        terms = [(found[name] * factors[name]).sum() for name in outputs]
        return sum(terms) + ((formula.loss(x, w, bias, target, reduction) * of_loss).sum() if with_loss else 0)

    value, *grads = value_and_gradients(ours, [x, w, bias])
    right_value, *right_grads = value_and_gradients(right, [x.double(), w.double(), bias.double()])
    if not with_loss:
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        assert_close(value, right_value, accumulator, steps=10)
    for grad, right_grad in zip(grads, right_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad, right_grad, dtype, steps=20)


def test_a_logged_output_costs_nothing(calls: list[dict]):
    """Gradients of a mean come with the loss if outputs have no upstream gradient."""
    x, w, _, target = problem()
    found = agt.linear_cross_entropy(x.requires_grad_(), w, target, outputs=("entropy", "predicted"))
    (2 * found.loss).backward()
    assert len(calls) == 1
    assert not found.predicted.requires_grad


def test_a_second_order_of_outputs_is_refused():
    x, w, _, target = problem()
    found = agt.linear_cross_entropy(x.requires_grad_(), w, target, outputs=("entropy",))
    (grad,) = torch.autograd.grad(found.entropy.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: the gradient cannot be differentiated"):
        grad.sum().backward()


def test_gradcheck_of_outputs():
    x, w, bias, target = (each.requires_grad_() if each.is_floating_point() else each for each in problem())

    def outputs(x, w, bias):
        names = "lse", "log_prob", "entropy"
        return agt.linear_cross_entropy(x, w, target, linear_bias=bias, temperature=0.5, outputs=names)[:4]

    assert torch.autograd.gradcheck(outputs, (x, w, bias), check_batched_grad=True)


def test_batches_of_requested_outputs():
    """`torch.vmap` takes results of which some outputs were not requested, and these have gradients."""
    torch.manual_seed(0)
    x, w, target = torch.randn(3, 4, 5), torch.randn(7, 5), torch.tensor([0, 6, -100, 2])

    def results(x):
        return agt.linear_cross_entropy(x, w, target, outputs=("correct", "lse"))

    found = torch.vmap(results)(x)
    assert found._fields == ("loss", "correct", "lse")
    assert found.entropy is None
    gradients = torch.vmap(torch.func.grad(lambda x: results(x).loss + results(x).lse.sum()))(x)
    for i, each in enumerate(x):
        one = results(each.requires_grad_())
        for got, wanted in zip(found, one, strict=True):
            assert torch.equal(got[i], wanted)
        assert torch.allclose(gradients[i], torch.autograd.grad(one.loss + one.lse.sum(), each)[0], atol=1e-6)


@pytest.mark.parametrize("outputs", [("entropy",), ("correct", "lse"), tuple(LAYER_OUTPUTS)], ids=str)
def test_results_are_instances_of_the_exported_class(outputs: tuple[str, ...]):
    x, w, _, target = problem()
    found = agt.linear_cross_entropy(x, w, target, outputs=outputs)
    assert isinstance(found, ag.LossResult)
    assert isinstance(found, tuple)
    made = ag.LossResult(found.loss, **{name: getattr(found, name) for name in outputs})
    for each in (made, pickle.loads(pickle.dumps(found)), found._replace(loss=found.loss)):
        assert type(each) is type(found)
        assert all(torch.equal(*pair) for pair in zip(each, found, strict=True))
    assert not isinstance((found.loss,), ag.LossResult)
    alone = ag.LossResult(found.loss)
    assert (alone._fields, alone.lse) == (("loss",), None)


def test_requested_outputs_are_pickled_and_compiled():
    x, w, target = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 3])
    function = partial(agt.linear_cross_entropy, outputs=("entropy",))
    found = function(x, w, target)
    again = pickle.loads(pickle.dumps(found))
    compiled = torch.compile(function, backend="eager", fullgraph=True)(x, w, target)
    for each in (again, compiled):
        assert each._fields == ("loss", "entropy")
        assert each.lse is None
        assert torch.equal(each.entropy, found.entropy)
