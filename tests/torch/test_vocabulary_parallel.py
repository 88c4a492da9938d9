"""Compare `linear_cross_entropy` over the processes of a group with torch's own function on the whole weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_ranks
import torch
from processes import run_ranks
from torch_oracles import assert_close, linear_cross_entropy, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import parallel
from ascend_grad.operators.options import LAYER_OUTPUTS


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Run a group of processes and return their outcomes."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    arguments = ["-W", "error", tensor_ranks.__file__, folder]
    for status, output in run_ranks([[*arguments, str(rank), str(size)] for rank in range(size)], timeout=300):
        assert status == 0, output
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def right_values(dtype: torch.dtype, reduction: str) -> list[torch.Tensor]:
    x, w, target, above = tensor_ranks.problem(dtype, reduction)

    def right(x, w):
        return linear_cross_entropy(x, w, target, reduction=reduction)

    return value_and_gradients(right, [x.double(), w.double()], above.double())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(outcomes, dtype, reduction):
    loss, input_grad, weight_grad = right_values(dtype, reduction)
    results = [rank[dtype, reduction] for rank in outcomes]
    for each in results:
        if isinstance(each, Exception):
            raise each
    for value, first, _, second, _ in results:
        assert value.dtype == dtype
        assert_close(value, loss, dtype)
        for grad in (first, second):
            assert_close(grad, input_grad, dtype, steps=4)
    for backward in (2, 4):
        assert_close(torch.cat([each[backward] for each in results]), weight_grad, dtype, steps=4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batches_of_upstream_gradients(outcomes, dtype, reduction):
    """Under torch's older batching, the processes communicate for one upstream gradient after another."""
    _, input_grad, weight_grad = right_values(dtype, reduction)
    results = [rank["batched", dtype, reduction] for rank in outcomes]
    for i, factor in enumerate((1.0, -2.0, 0.5)):
        for grad, _ in results:
            assert_close(grad[i], factor * input_grad, dtype, steps=6)
        assert_close(torch.cat([grad[i] for _, grad in results]), factor * weight_grad, dtype, steps=6)


@pytest.mark.parametrize("is_default_group", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cut_cross_entropy(outcomes, reduction, is_default_group):
    loss, input_grad, weight_grad = right_values(torch.float64, reduction)
    results = [rank["cce", reduction, is_default_group] for rank in outcomes]
    for each in results:
        if isinstance(each, Exception):
            raise each
        assert_close(each[0], loss, torch.float64)
        assert_close(each[1], input_grad, torch.float64, steps=4)
    assert_close(torch.cat([each[2] for each in results]), weight_grad, torch.float64, steps=4)


def rows_of_logits(x, w, bias, name):
    """Return logits of a call with options by their definition."""
    o = tensor_ranks.options(name)
    return o["softcap"] * torch.tanh(o["logit_scale"] * (x @ w.T + bias) / o["softcap"]) / o["temperature"][:, None]


def right_outputs(x, w, bias, name, reduction):
    """Return the loss and the outputs of a call with options by their definitions."""
    o, target = tensor_ranks.options(name), tensor_ranks.targets(name)
    z = rows_of_logits(x, w, bias, name)
    lse, counted = z.logsumexp(-1), target != -100
    log_p = z - lse[:, None]
    ids = torch.where(counted, target, 0).reshape(len(z), -1)
    of_class = o["weight"][ids] * counted.reshape(ids.shape)
    prob = o.get("target_prob", torch.ones_like(of_class))
    s, token_weight = o["label_smoothing"], o["token_weight"] * counted.reshape(ids.shape).any(-1)
    cross_entropy = -(1 - s) * (prob * of_class * log_p.gather(-1, ids)).sum(-1) - s / z.shape[1] * log_p @ o["weight"]
    losses, squares = token_weight * cross_entropy, token_weight * o["lse_square_scale"] * lse**2
    loss = losses + squares
    if reduction == "mean":
        weights = token_weight * of_class[:, 0] if "target_prob" not in o else token_weight
        loss = losses.sum() / weights.sum() + squares.sum() / token_weight.sum()
    some = counted.reshape(ids.shape).any(-1)
    entropy, log_prob = -(log_p.exp() * log_p).sum(-1), log_p.gather(-1, ids)[:, 0]
    predicted = torch.where(some, z.argmax(-1), -1)
    return loss, some * lse, some * log_prob, some * entropy, predicted, (predicted == ids[:, 0]).sum()


@pytest.mark.parametrize(("name", "reduction"), tensor_ranks.OPTIONS)
def test_options_and_outputs(outcomes, name, reduction):
    """Losses, outputs and gradients through all of them equal autograd's in one process."""
    x, w, _, above = tensor_ranks.problem(torch.float64, reduction)
    leaves = [x.requires_grad_(), w.requires_grad_(), tensor_ranks.options(name)["linear_bias"].requires_grad_()]
    right = right_outputs(*leaves, name, reduction)
    total = (right[0] * above).sum() + right[3].sum()
    if name == "one target":
        total = total + 2 * right[2].sum() + 3 * right[1].sum()
    gradients = [torch.autograd.grad(each, leaves, retain_graph=True) for each in ((right[0] * above).sum(), total)]
    results = [rank["options", name, reduction] for rank in outcomes]
    names = tensor_ranks.options(name)["outputs"]
    requested = [right[0], *(each for output, each in zip(LAYER_OUTPUTS, right[1:], strict=True) if output in names)]
    for each in results:
        if isinstance(each, Exception):
            raise each
        for value, expected in zip(each[0], requested, strict=True):
            torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12, check_dtype=False)
    for which, (input_grad, *of_entries) in enumerate(gradients, 1):
        for each in results:
            torch.testing.assert_close(each[which][0], input_grad, rtol=1e-11, atol=1e-12)
        for i, expected in enumerate(of_entries, 1):
            joined = torch.cat([each[which][i] for each in results])
            torch.testing.assert_close(joined, expected, rtol=1e-11, atol=1e-12)


def test_cut_cross_entropy_with_options(outcomes):
    x, w, target, _ = tensor_ranks.problem(torch.float64, "mean")
    leaves = [
        x.requires_grad_(),
        w.requires_grad_(),
        tensor_ranks.options("one target")["linear_bias"].requires_grad_(),
    ]
    z = 3 * torch.tanh((x @ w.T + leaves[2]) / 3)
    loss = torch.nn.functional.cross_entropy(z, target)
    lse = torch.where(target == -100, 0, z.logsumexp(-1))
    right = loss.detach(), lse.detach(), *torch.autograd.grad(loss + lse.sum(), leaves)
    results = [rank["cce with options"] for rank in outcomes]
    for each in results:
        if isinstance(each, Exception):
            raise each
        torch.testing.assert_close(each[:3], right[:3], rtol=1e-11, atol=1e-12)
    for i in (3, 4):
        torch.testing.assert_close(torch.cat([each[i] for each in results]), right[i], rtol=1e-11, atol=1e-12)


def test_frozen_layers(outcomes):
    _, input_grad, weight_grad = right_values(torch.float32, "mean")
    above = tensor_ranks.problem(torch.float32, "mean")[3]
    for rank in outcomes:
        (none, _), (grad, missing) = rank["frozen"]
        assert none is None
        assert missing is None
        assert_close(grad, input_grad / above.double(), torch.float32, steps=4)
    weights = torch.cat([rank["frozen"][0][1] for rank in outcomes])
    assert_close(weights, weight_grad / above.double(), torch.float32, steps=4)


def test_one_row_and_autocast(outcomes):
    x, w, target, _ = tensor_ranks.problem(torch.float32, "mean")
    row = linear_cross_entropy(x[0].double(), w.double(), target[0])
    lower = linear_cross_entropy(x.bfloat16().double(), w.bfloat16().double(), target)
    for rank in outcomes:
        assert_close(rank["one row"], row, torch.float32)
        assert rank["autocast"].dtype == torch.float32
        assert_close(rank["autocast"], lower, torch.float32, steps=4)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("shape", ag.ParamInvalidError, "linear_weight: expected shape (C, 2), got"),
        ("several dimensions", NotImplementedError, "with a group: linear_weight of several dimensions: not supported"),
        ("dtype", NotImplementedError, "target: probabilities of all classes are not supported with a group"),
        ("reduction", ag.ParamInvalidError, "reduction: expected mean, sum or none, got str 'average'"),
        ("bias", ag.ParamInvalidError, "linear_bias: expected shape ("),
        ("other dtype", ag.ParamTypeError, "linear_weight: expected torch.float32, as input is, got torch.float16"),
        (
            "no dtype of NumPy",
            ag.ParamTypeError,
            "input: expected float32, float16, bfloat16, float64 or integers, got torch.float8_e4m3fn",
        ),
        (
            "other device",
            ag.BackendUnavailableError,
            "input: with a group expected a tensor on the CPU or on an Ascend NPU, got one on meta",
        ),
        ("cce reduce_e_grad", NotImplementedError, "with vocab_parallel_options: reduce_e_grad: not supported"),
        ("cce stop", ag.ParamInvalidError, "c: expected "),
        ("cce impl", ag.ParamInvalidError, "impl: expected None or one of cce, "),
        ("cce shift", ag.ParamInvalidError, "shift: expected an int in [0, 9), got 9"),
        (
            "make_fx in one process",
            NotImplementedError,
            "make_fx and torch.export do not support a group",
        ),
    ],
)
def test_an_error_of_one_process(outcomes, name, kind, text):
    *others, last = (rank[name] for rank in outcomes)
    assert type(last) is kind
    assert text in str(last)
    for error in others:
        assert type(error) is parallel.RankError
        assert error.rank == len(others)
        assert text in str(error)


def test_processes_disagree(outcomes):
    (text,) = {str(rank["needs gradients"]) for rank in outcomes}
    assert text.startswith("linear_cross_entropy: requires_grad of input or linear_weight: expected the same on every")
    assert "got False on rank 0 and True on rank" in text
    (text,) = {str(rank["class weights"]) for rank in outcomes}
    assert text.startswith(
        "linear_cross_entropy: weight: expected the same on every rank, got None on rank 0 and an array"
    )


@pytest.mark.parametrize("name", ["second order", "second order, computed in backward"])
def test_the_gradient_cannot_be_differentiated(outcomes, name):
    for rank in outcomes:
        assert isinstance(rank[name], RuntimeError)
        assert "the gradient cannot be differentiated once more" in str(rank[name])


def test_graphs_are_refused(outcomes):
    """Graphs of calls with a group are refused.

    A graph would record only the group's number, which does not keep the group alive.
    """
    for rank in outcomes:
        assert type(rank["make_fx"]) is NotImplementedError
        assert "make_fx and torch.export do not support a group" in str(rank["make_fx"])


@pytest.mark.parametrize("keyword", ["vocab_start_index", "vocab_size"])
def test_without_a_group(keyword):
    x, w, target, _ = tensor_ranks.problem(torch.float32, "mean")
    with pytest.raises(ag.ParamInvalidError, match=f"{keyword}: expected None without a group, got 0"):
        agt.linear_cross_entropy(x, w, target, **{keyword: 0})
