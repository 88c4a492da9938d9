"""Compare `linear_cross_entropy` and its module with torch's own: values, gradients, memory, second backwards."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch_oracles import assert_close, linear_cross_entropy, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt

REDUCTIONS = ("mean", "sum", "none")
#: Options that torch's function lacks.
OWN_OPTIONS = (
    "token_weight", "target_prob", "lse_square_scale", "temperature", "denominator", "logit_scale", "softcap", "outputs"
)  # fmt: skip
N, H, C = 9, 5, 13


def asked(calls: list[dict]) -> list[tuple[bool, bool]]:
    """Return for each call whether it computed the gradients of the input and of the weight."""
    return [tuple(each["return_grad"] and wanted for wanted in each["output_mask"]) for each in calls]


def problem(dtype: torch.dtype = torch.float64, rows: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an input, a weight, and targets of which one is ignored."""
    target = torch.randint(0, C, (rows,))
    target[rows // 2 :][:1] = -100
    return torch.randn(rows, H).to(dtype), torch.randn(C, H).to(dtype), target


def grad_output(reduction: str, rows: int = N) -> torch.Tensor:
    return torch.randn((rows,) if reduction == "none" else (), dtype=torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("with_weight", [False, True])
def test_values_and_gradients(reduction: str, with_weight: bool, dtype: torch.dtype):
    x, w, target = problem(dtype)
    weight = torch.rand(C).to(dtype) if with_weight else None
    above = grad_output(reduction).to(dtype)

    def ours(x, w):
        return agt.linear_cross_entropy(x, w, target, weight=weight, reduction=reduction)

    def right(x, w):
        class_weight = None if weight is None else weight.double()
        return linear_cross_entropy(x, w, target, weight=class_weight, reduction=reduction)

    value, *grads = value_and_gradients(ours, [x, w], above)
    right_value, *right_grads = value_and_gradients(right, [x.double(), w.double()], above.double())
    assert value.dtype == dtype
    assert value.shape == right_value.shape
    assert_close(value, right_value, dtype)
    for grad, right_grad in zip(grads, right_grads):
        assert grad.dtype == dtype
        assert_close(grad, right_grad, dtype, steps=4)


@given(data=st.data())
def test_any_shape_and_options(data: st.DataObject):
    rows, features, classes = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    ignored = data.draw(st.sampled_from([None, -100, 0, classes - 1, 77]))
    target = torch.tensor(
        data.draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)), dtype=torch.int64
    )
    x = torch.randn(features, rows, dtype=torch.float64).T
    w = torch.randn(classes, 2 * features, dtype=torch.float64)[:, ::2]
    weight = torch.rand(classes, dtype=torch.float64) if data.draw(st.booleans()) else None
    keywords = {"reduction": reduction, "ignore_index": ignored, "weight": weight}
    above = grad_output(reduction, rows)
    results = [
        value_and_gradients(lambda x, w: f(x, w, target, **keywords), [x, w], above)  # noqa: B023
        for f in (agt.linear_cross_entropy, linear_cross_entropy)
    ]
    value, right = results[0][0], results[1][0]
    torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    if not right.isnan().any():
        for grad, right_grad in zip(results[0][1:], results[1][1:]):
            assert_close(grad, right_grad, torch.float64, steps=10)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("with_weight", [False, True])
def test_gradcheck(reduction: str, with_weight: bool):
    x, w, target = problem()
    weight = torch.rand(C, dtype=torch.float64) if with_weight else None

    def function(x, w):
        return agt.linear_cross_entropy(x, w, target, weight=weight, reduction=reduction)

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), w.requires_grad_()))


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch has no such functions")
def test_the_signature_is_that_of_torch():
    torchs = inspect.signature(linear_cross_entropy).parameters
    ours = inspect.signature(agt.linear_cross_entropy).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    own = {*OWN_OPTIONS, "filter_eps", "num_threads", "group", "vocab_start_index", "vocab_size"}
    assert set(ours) - set(torchs) == own
    arrays = inspect.signature(ag.linear_cross_entropy).parameters
    assert {name: ours[name].default for name in OWN_OPTIONS} == {name: arrays[name].default for name in OWN_OPTIONS}
    assert [(each.kind, each.default) for each in list(ours.values())[: len(torchs)]] == [
        (each.kind, each.default) for each in torchs.values()
    ]
    torchs = inspect.signature(torch.nn.LinearCrossEntropyLoss).parameters
    ours = inspect.signature(agt.LinearCrossEntropyLoss).parameters
    assert list(ours) == [
        *torchs, "linear_weight", "lse_square_scale", "temperature", "logit_scale", "softcap", "outputs"
    ]  # fmt: skip
    assert [(ours[name].kind, ours[name].default) for name in torchs] == [
        (each.kind, each.default) for each in torchs.values()
    ]


def test_one_row_without_a_batch():
    x, w, target = torch.randn(H), torch.randn(C, H), torch.tensor(3)
    for reduction in REDUCTIONS:
        value = agt.linear_cross_entropy(x, w, target, reduction=reduction)
        assert value.shape == ()
        assert_close(value, linear_cross_entropy(x.double(), w.double(), target), torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
def test_what_is_frozen_is_not_computed(calls: list[dict], reduction: str, frozen: str):
    x, w, target = problem(torch.float32)
    x.requires_grad_(frozen == "weight")
    w.requires_grad_(frozen == "input")
    loss = agt.linear_cross_entropy(x, w, target, reduction=reduction)
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.sum().backward()
    wanted = (frozen == "weight", frozen == "input")
    assert (x.grad is not None, w.grad is not None) == wanted
    assert asked(calls) == ([(False, False), wanted] if reduction == "none" and frozen != "both" else [wanted])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradients_where_none_are_recorded(calls: list[dict], mode):
    x, w, target = problem(torch.float32)
    with mode():
        loss = agt.linear_cross_entropy(x, w.requires_grad_(), target)
    assert not loss.requires_grad
    assert asked(calls) == [(False, False)]


def test_gradients_come_with_the_loss_and_are_scaled(calls: list[dict]):
    x, w, target = problem(torch.float32)
    x.requires_grad_(), w.requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target)
    assert asked(calls) == [(True, True)]
    (3 * loss).backward()
    assert asked(calls) == [(True, True)]
    right = value_and_gradients(lambda x, w: 3 * linear_cross_entropy(x, w, target), [x.double(), w.double()])
    assert_close(x.grad, right[1], torch.float32)
    assert_close(w.grad, right[2], torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_backward(calls: list[dict], reduction: str):
    x, w, target = problem(torch.float32)
    w.requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target, reduction=reduction).sum()
    (first,) = torch.autograd.grad(2 * loss, w, retain_graph=True)
    kept = first.clone()
    before = len(calls)
    (second,) = torch.autograd.grad(3 * loss, w, retain_graph=True)
    assert len(calls) == before + 1  # the second backward computes the gradients again
    (third,) = torch.autograd.grad(3 * loss, w)
    assert torch.equal(first, kept)
    assert torch.equal(second, third)
    assert_close(second, 1.5 * first.double(), torch.float32)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, w)


def test_gradients_are_not_shared_with_what_is_accumulated():
    """Backwards of one graph return new gradients each time, since torch adds to ``.grad`` in place."""
    x, w, target = problem(torch.float32)
    w.requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    once = w.grad.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close(w.grad, 3 * once.double(), torch.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [
        (torch.float64, {"reduction": "none"}),
        (torch.float64, {"reduction": "none", "weight": torch.ones(C, dtype=torch.float64)}),
        (torch.float16, {}),
        (torch.float16, {"reduction": "sum"}),
    ],
    ids=str,
)
def test_a_gradient_computed_in_backward_depends_on_the_upstream_gradient(dtype: torch.dtype, keywords: dict):
    x, w, target = problem(dtype)
    x.requires_grad_()
    loss = agt.linear_cross_entropy(x, w, target, **keywords)
    above = torch.ones_like(loss, requires_grad=True)
    (grad,) = torch.autograd.grad(loss, x, above, create_graph=True)
    right = value_and_gradients(lambda x: linear_cross_entropy(x, w.double(), target, **keywords).sum(), [x.double()])
    assert_close(grad, right[1], dtype, steps=10)
    own = torch.autograd.grad(grad.sum() + above.sum(), [above, x], retain_graph=True)
    x, above = (each.detach().double().requires_grad_() for each in (x, above))
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, w.double(), target, **keywords), x, above, create_graph=True)
    for each, expected in zip(own, torch.autograd.grad(grad.sum() + above.sum(), [above, x])):
        torch.testing.assert_close(each.double(), expected, rtol=0, atol=1e-2 if dtype == torch.float16 else 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_scaled_in_backward_has_its_derivative_by_the_upstream_gradient(reduction: str):
    x, w, target = problem()
    x.requires_grad_()
    above = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def derivative(function) -> torch.Tensor:
        loss = above * function(x, w, target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(loss + grad.square().sum(), above)[0]

    assert_close(
        derivative(agt.linear_cross_entropy), derivative(linear_cross_entropy).detach(), torch.float64, steps=10
    )


def test_a_forward_derivative_by_two_backwards():
    x, w, target = problem()

    def derivative(function) -> torch.Tensor:
        return torch.autograd.functional.jvp(lambda x: function(x, w, target, reduction="none"), x, x)[1]

    assert_close(derivative(agt.linear_cross_entropy), derivative(linear_cross_entropy), torch.float64, steps=20)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_functional_gradients(reduction: str):
    x, w, target = problem()

    def gradients(function):
        return torch.func.grad(lambda x, w: function(x, w, target, reduction=reduction).sum(), argnums=(0, 1))(x, w)

    for ours, right in zip(gradients(agt.linear_cross_entropy), gradients(linear_cross_entropy)):
        assert_close(ours, right, torch.float64, steps=10)


def test_a_loss_scale_comes_before_the_rounding_to_float16():
    """Backward applies a loss scale before it rounds to float16, where unscaled gradients of a mean would underflow."""
    rows, scale = 4096, 2.0**14
    x, w, _ = problem(torch.float16, rows)
    w = w * 2**-6
    target = torch.randint(0, C, (rows,))
    _, grad, _ = value_and_gradients(lambda x, w: agt.linear_cross_entropy(x, w, target).float() * scale, [x, w])
    right = value_and_gradients(lambda x, w: linear_cross_entropy(x, w, target) * scale, [x.double(), w.double()])[1]
    assert_close(grad, right, torch.float16, steps=4)
    with pytest.raises(AssertionError):
        assert_close((right / scale).half().double() * scale, right, torch.float16, steps=4)


def test_weights_in_any_layout():
    """Values and gradients are right for a weight that is a view, and for an embedding's weight.

    The gradient of an embedding's weight is the sum of the gradients of both uses.
    """
    x, _, target = problem()
    whole = torch.randn(H + 2, 2 * C, dtype=torch.float64)
    view = lambda whole: whole[1 : H + 1, ::2].T  # noqa: E731
    results = [
        value_and_gradients(lambda whole: f(x, view(whole), target), [whole])  # noqa: B023
        for f in (agt.linear_cross_entropy, linear_cross_entropy)
    ]
    assert_close(results[0][1], results[1][1], torch.float64, steps=10)

    ids = torch.randint(0, C, (N,))
    table = torch.randn(C, H, dtype=torch.float64)
    results = [
        value_and_gradients(lambda table: f(F.embedding(ids, table), table, target), [table])  # noqa: B023
        for f in (agt.linear_cross_entropy, linear_cross_entropy)
    ]
    assert_close(results[0][1], results[1][1], torch.float64, steps=10)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(reduction: str, weight_dtype: torch.dtype):
    """Under autocast the loss of mixed dtypes is float32, and each gradient has the dtype of its leaf."""
    x, w, target = problem(torch.float32)
    w = w.to(weight_dtype)

    def loss(function):
        def inner(x, w):
            with torch.autocast("cpu", torch.bfloat16):
                return function(x, w, target, reduction=reduction)

        return inner

    above = grad_output(reduction).float()
    ours = value_and_gradients(loss(agt.linear_cross_entropy), [x, w], above)
    torchs = value_and_gradients(loss(linear_cross_entropy), [x, w], above)
    assert [each.dtype for each in ours] == [each.dtype for each in torchs] == [torch.float32, x.dtype, w.dtype]
    rounded = [each.to(torch.bfloat16).double() for each in (x, w)]
    right = value_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction), rounded, above.double()
    )
    assert_close(ours[0], right[0], torch.float32)
    for grad, right_grad in zip(ours[1:], right[1:]):
        assert_close(grad, right_grad, torch.bfloat16, steps=4)


def test_autocast_leaves_float64_alone():
    x, w, target = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = agt.linear_cross_entropy(x, w, target)
        right = linear_cross_entropy(x, w, target)
    assert loss.dtype == right.dtype == torch.float64
    assert_close(loss, right, torch.float64)


def test_options_of_the_library(calls: list[dict]):
    x, w, target = problem(torch.float32, 600)
    everything = agt.linear_cross_entropy(x, w, target, num_threads=1)
    assert torch.equal(agt.linear_cross_entropy(x, w, target, num_threads=2), everything)
    agt.linear_cross_entropy(x.requires_grad_(), w, target, filter_eps=0.25).backward()
    assert [(each["num_threads"], each["filter_eps"]) for each in calls] == [(1, 0.0), (2, 0.0), (None, 0.25)]


def test_an_unused_loss():
    """Backward works if no differentiated value depends on the loss."""
    x, w, target = problem(torch.float32)
    loss = agt.linear_cross_entropy(x.requires_grad_(), w, target)
    assert torch.autograd.grad(x.sum() + 0 * loss.detach(), x)[0].eq(1).all()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_leading_dimensions(reduction: str):
    x, w, target = problem(torch.float64)
    weights = torch.linspace(0, 1, N, dtype=torch.float64)
    results = []
    for shape in ((), (3, 3), (1, 3, 3)):
        leaf = x.detach().reshape(*(shape or (N,)), -1).requires_grad_()
        keywords = {"token_weight": weights.reshape(shape or (N,)), "reduction": reduction, "outputs": ("lse",)}
        result = agt.linear_cross_entropy(leaf, w, target.reshape(shape or (N,)), **keywords)
        assert result.lse.shape == leaf.shape[:-1]
        assert result.loss.shape == (leaf.shape[:-1] if reduction == "none" else ())
        (gradient,) = torch.autograd.grad((result.loss * torch.ones_like(result.loss)).sum() + result.lse.sum(), leaf)
        results.append([each.detach().flatten() for each in (result.loss, result.lse, gradient)])
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
    batch = torch.stack([x.detach().reshape(3, 3, -1)] * 2)
    mapped = torch.vmap(lambda x: agt.linear_cross_entropy(x, w, target.reshape(3, 3), reduction="none"))(batch)
    assert mapped.shape == (2, 3, 3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64"])
def test_targets_of_integer_dtypes(dtype: str):
    x, w, target = problem(torch.float32)
    target = target.clamp(0, C - 1)
    converted = target.to(getattr(torch, dtype))
    assert torch.equal(agt.linear_cross_entropy(x, w, converted), agt.linear_cross_entropy(x, w, target))
    assert torch.equal(agt.cross_entropy(x @ w.T, converted), agt.cross_entropy(x @ w.T, target))
    if dtype == "uint64":  # -100 modulo 2**64 is no ignore_index
        with pytest.raises(ag.ParamInvalidError, match="target: expected values in"):
            agt.linear_cross_entropy(x, w, torch.full((N,), -100).to(torch.uint64))


def test_integers_as_logits_are_refused():
    x, w, target = torch.ones(N, 4, dtype=torch.int64), torch.ones(C, 4), torch.zeros(N, dtype=torch.int64)
    for name, call in (
        ("input", lambda: agt.softmax(x)),
        ("input", lambda: agt.log_softmax(x > 0)),
        ("x", lambda: agt.scaled_masked_softmax(x[None, None], x[None, None] > 0)),
        ("input", lambda: agt.cross_entropy(x, target)),
        ("input", lambda: agt.linear_cross_entropy(x, w, target)),
        ("linear_weight", lambda: agt.linear_cross_entropy(x.float(), w.long(), target)),
    ):
        with pytest.raises(
            ag.ParamTypeError, match=rf"{name}: expected dtype float32.* \({name}.float\(\) converts it"
        ):
            call()


def test_errors():
    x, w, target = problem(torch.float32)
    call = agt.linear_cross_entropy
    with pytest.raises(ag.ParamInvalidError, match=r"linear_cross_entropy: target: expected shape \(1, 9\)"):
        call(x[None], w, target)
    with pytest.raises(ag.ParamInvalidError, match=r"linear_weight: expected shape \(C, 5\), got \(13, 4\)"):
        call(x, w[:, :4], target)
    with pytest.raises(ag.ParamInvalidError, match=r"target: expected shape \(9,\), .*, got \(8,\)"):
        call(x, w, target[1:])
    with pytest.raises(ag.ParamInvalidError, match=r"weight: expected shape \(13,\), .*, got \(12,\)"):
        call(x, w, target, weight=torch.zeros(12))
    with pytest.raises(ag.ParamInvalidError, match="reduction: expected mean, sum or none, got str 'max'"):
        call(x, w, target, reduction="max")
    with pytest.raises(ag.ParamInvalidError, match="target: "):
        call(x, w, target + C)
    with pytest.raises(ag.ParamTypeError, match=r"linear_weight: expected torch\.float32, as input is"):
        call(x, w.double(), target)
    with pytest.raises(ag.ParamTypeError, match="target: expected an integer dtype, got bool"):
        call(x, w, target > 0)
    with pytest.raises(ag.ParamTypeError, match=r"linear_weight: expected a torch.Tensor, got None"):
        call(x, None, target)
    with pytest.raises(ag.ParamInvalidError, match="num_threads: "):
        call(x, w, target, num_threads=0)
    with pytest.raises(ag.ParamInvalidError, match="filter_eps: "):
        call(x, w, target, filter_eps=-1.0)


@pytest.mark.parametrize(
    ("keyword", "value", "kind"),
    [
        ("ignore_index", 1.5, ag.ParamTypeError),
        ("ignore_index", 2**63, ag.ParamInvalidError),
        ("filter_eps", "auto", ag.ParamTypeError),
        ("filter_eps", None, ag.ParamTypeError),
        ("num_threads", 1.5, ag.ParamTypeError),
        ("num_threads", True, ag.ParamTypeError),
        ("num_threads", -1, ag.ParamInvalidError),
        ("num_threads", 2**70, ag.ParamInvalidError),
    ],
)
def test_numbers_are_refused_as_by_the_function_for_arrays(keyword: str, value: object, kind: type[Exception]):
    x, w, target = problem(torch.float32)
    texts = []
    for call, arguments in (
        (agt.linear_cross_entropy, (x, w, target)),
        (ag.linear_cross_entropy, (x.numpy(), w.numpy(), target.numpy())),
    ):
        with pytest.raises(kind, match=f"^linear_cross_entropy: {keyword}: expected ") as error:
            call(*arguments, **{keyword: value})
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_the_module_owns_its_weight():
    module = agt.LinearCrossEntropyLoss(
        H, C, reduction="sum", ignore_index=3, weight=torch.rand(C), dtype=torch.float32
    )
    assert set(module.state_dict()) == {"weight", "linear.weight"}
    x, _, target = problem(torch.float32)
    target[target == -100] = 3
    loss = module(x, target)
    loss.backward()
    right = value_and_gradients(
        lambda w: linear_cross_entropy(
            x.double(), w, target, reduction="sum", ignore_index=3, weight=module.weight.double()
        ),
        [module.linear.weight.double()],
    )
    assert_close(loss, right[0], torch.float32)
    assert_close(module.linear.weight.grad, right[1], torch.float32)
    with pytest.raises(ag.ParamInvalidError, match=r"weight: expected shape \(13,\), one for each class, got \(12,\)"):
        agt.LinearCrossEntropyLoss(H, C, weight=torch.ones(12))


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch has no such module")
def test_the_module_is_one_of_torchs(run_script):
    """The module is a `torch.nn.LinearCrossEntropyLoss` if torch has this class.

    With an older torch the module is a class of the library, with the same attributes and the same state.
    """
    module = agt.LinearCrossEntropyLoss(H, C, weight=torch.rand(C))
    assert isinstance(module, torch.nn.LinearCrossEntropyLoss)
    run_script(
        """
        import torch

        torchs = torch.nn.LinearCrossEntropyLoss
        del torch.nn.LinearCrossEntropyLoss
        import ascend_grad.torch as agt

        settings = {"reduction": "sum", "ignore_index": 3, "weight": torch.rand(7), "bias": True}
        settings["label_smoothing"] = 0.1
        module, right = agt.LinearCrossEntropyLoss(5, 7, **settings), torchs(5, 7, **settings)
        assert not isinstance(module, torchs)
        names = "reduction", "num_classes", "out_features", "ignore_index", "label_smoothing", "options"
        own = {"lse_square_scale", "temperature", "logit_scale", "softcap", "outputs"}
        assert set(vars(module)) - set(vars(right)) == own
        assert set(vars(right)) < set(vars(module))
        assert [getattr(module, name) for name in names] == [getattr(right, name) for name in names]
        right.load_state_dict(module.state_dict())
        module.load_state_dict(right.state_dict())
        x, target = torch.randn(4, 5), torch.tensor([1, 3, 6, 0])
        for each in (module, right):
            each(x, target).backward()
        torch.testing.assert_close(module.linear.weight.grad, right.linear.weight.grad)
        assert repr(module).replace(", ", ",") == repr(right).replace(", ", ",")
        """
    )


def test_the_module_shares_a_weight():
    embedding = torch.nn.Embedding(C, H)
    module = agt.LinearCrossEntropyLoss(H, C, linear_weight=embedding.weight)
    assert module.linear.weight is embedding.weight
    assert len(list(torch.nn.ModuleList([embedding, module]).parameters())) == 1
    ids, target = torch.randint(0, C, (N,)), torch.randint(0, C, (N,))
    module(embedding(ids), target).backward()
    right = value_and_gradients(
        lambda w: linear_cross_entropy(F.embedding(ids, w), w, target), [embedding.weight.double()]
    )
    assert_close(embedding.weight.grad, right[1], torch.float32)
    with pytest.raises(ag.ParamInvalidError, match=r"linear_weight: expected shape \(12, 5\), got \(13, 5\)"):
        agt.LinearCrossEntropyLoss(H, 12, linear_weight=embedding.weight)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("in_dims", [(0, None, 0), (1, 0, 0), (None, 1, None)], ids=str)
def test_batches(in_dims: tuple[int | None, ...], reduction: str):
    """Values and gradients of several problems, batched by `torch.vmap`, equal torch's own."""
    x, w, target = torch.randn(N, H, dtype=torch.float64), torch.randn(C, H, dtype=torch.float64), torch.arange(N)
    arguments = [
        each if dim is None else torch.stack([each, each.roll(1, 0), each.flip(0)], dim)
        for each, dim in zip((x, w, target), in_dims)
    ]

    def values(function, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = lambda x, w, target: function(x, w, target, reduction=reduction)  # noqa: E731
        gradients = torch.func.grad(lambda *arguments: loss(*arguments).sum(), (0, 1))
        return torch.vmap(loss, in_dims)(*arguments), *torch.vmap(gradients, in_dims)(*arguments)

    rights = values(linear_cross_entropy, *arguments)
    for ours, right in zip(values(agt.linear_cross_entropy, *arguments), rights, strict=True):
        assert_close(ours, right, torch.float64, steps=10)
    nothing = [each if dim is None else each.narrow(dim, 0, 0) for each, dim in zip(arguments, in_dims)]
    with pytest.raises(
        ag.ParamInvalidError, match=r"linear_cross_entropy: torch\.vmap: expected a batch of at least one"
    ):
        torch.vmap(lambda *each: agt.linear_cross_entropy(*each, reduction=reduction), in_dims)(*nothing)
