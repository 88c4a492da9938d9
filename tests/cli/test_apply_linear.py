"""Test ``ascend-grad apply`` with the linear operators, which have several results."""

from __future__ import annotations

import functools
import math
import os

import numpy as np
import pytest
from files import (
    GRADIENT,
    STATISTICS,
    assert_same_file,
    linear_values,
    peak_anonymous_bytes,
    refused,
    result_files,
    save,
    sparse,
)
from samples import DTYPES, generator

import ascend_grad as ag
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gradients_are_those_of_one_call(dtype):
    arguments = linear_values(DTYPES[dtype])
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    names = ("input_grad", "weight_grad")
    assert main(["apply", GRADIENT, *save(**arguments), *raw, *result_files(*names)]) == 0
    for name, expected in zip(names, ag.fused_linear_cross_entropy_loss_grad(**arguments)):
        assert_same_file(expected, f"{name}_out.npy")


@pytest.mark.parametrize("index", [0, 1])
def test_a_linear_gradient_that_is_not_asked_for_is_not_computed(index, monkeypatch):
    arguments = linear_values(np.float32)
    right, calls = ag.fused_linear_cross_entropy_loss_grad, []

    def recorded(**settings):
        calls.append(settings["output_mask"])
        return right(**settings)

    expected = right(**arguments)[index]
    name = ("input_grad", "weight_grad")[index]
    monkeypatch.setattr(ag, GRADIENT, functools.wraps(right)(recorded))
    assert main(["apply", GRADIENT, *save(**arguments), "--out-dtype", "float64", *result_files(name)]) == 0
    assert calls == [[index == 0, index == 1]]
    np.testing.assert_allclose(np.load(f"{name}_out.npy"), expected, rtol=1e-5, atol=1e-6)
    assert sorted(os.listdir()) == sorted([*(f"{a}.npy" for a in arguments), f"{name}_out.npy"])


def test_the_largest_log_probabilities():
    rng = generator("top k")
    arguments = {"input": rng.standard_normal((10, 5)), "weight": rng.standard_normal((21, 5))}
    options = [*save(**arguments), "--k", "3", "--temperature", "0.5", *result_files("log_prob", "index")]
    assert main(["apply", "linear_top_k", *options]) == 0
    results = ag.linear_top_k(**arguments, k=3, temperature=0.5)
    for name, result in results._asdict().items():
        assert_same_file(result, f"{name}_out.npy")
    bias = rng.standard_normal(21)
    options += [*save(bias=bias), "--logit-scale", "-2", "--softcap", "1.5"]
    assert main(["apply", "linear_top_k", *options]) == 0
    results = ag.linear_top_k(**arguments, k=3, temperature=0.5, bias=bias, logit_scale=-2, softcap=1.5)
    for name, result in results._asdict().items():
        assert_same_file(result, f"{name}_out.npy")


def test_the_chain_of_files():
    """The three operators of one vocabulary shard run on files, each on the results of the previous one."""
    rng = generator("chain")
    x, weight = rng.standard_normal((10, 5)), rng.standard_normal((21, 5))
    target = rng.integers(0, 21, 10)
    inputs = save(input=x, weight=weight)
    bounds = ("--vocab-start-index", "0", "--vocab-end-index", "21")
    options = [*inputs, *save(target=target), *bounds, *result_files(*STATISTICS)]
    assert main(["apply", "fused_linear_online_max_sum", *options]) == 0
    statistics = ag.fused_linear_online_max_sum(x, weight, target, 0, 21)
    for name in STATISTICS:
        assert_same_file(getattr(statistics, name), f"{name}_out.npy")

    def from_files(*names: str) -> list[str]:
        return [word for name in names for word in (f"--{name.replace('_', '-')}", f"{name}_out.npy")]

    options = [*from_files(*STATISTICS[:3]), *save(vocab_parallel_logits=x @ weight.T)]
    command = ["apply", "fused_cross_entropy_loss_with_max_sum", *options, *result_files("loss", "softmax")]
    assert main(command) == 0
    loss, softmax, expected = np.load("loss_out.npy"), np.load("softmax_out.npy"), np.ones(10)
    np.testing.assert_allclose(np.exp(-loss), softmax[np.arange(10), target], rtol=1e-12)
    np.testing.assert_allclose(softmax.sum(1), expected, rtol=1e-12)

    options = [*inputs, *save(grad=expected), *from_files("target_mask", "masked_target")]
    for mode in (from_files("logits_max", "sum_exp_logits"), from_files("softmax")):
        assert main(["apply", GRADIENT, *options, *mode, *result_files("weight_grad")]) == 0
        np.testing.assert_allclose(
            np.load("weight_grad_out.npy"), (softmax - np.eye(21)[target]).T @ x, rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        (GRADIENT, (), "name a file for a result, with --input-grad-out or --weight-grad-out"),
        (
            GRADIENT,
            ("--input-grad-out", "a.npy", "--weight-grad-out", "./a.npy"),
            "a.npy: expected a file for each result, got this one twice",
        ),
        (GRADIENT, ("--input-grad-out", "weight.npy"), "this is the input weight.npy"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--filter-eps", "-1"), "filter_eps: expected"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--workspace-bytes", "7"), "workspace_bytes: expected"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--dtype", "bfloat16"), "int16 or uint16, not float32"),
        ("fused_cross_entropy_loss_with_max_sum", ("--softmax-out", "a.npy"), "the call has no result softmax"),
        (
            "fused_cross_entropy_loss_with_max_sum",
            ("--loss-out", "a.npy"),
            "has the result softmax; name a file for it",
        ),
    ],
)
def test_linear_calls_that_are_refused(operator, options, message, capsys):
    arguments = linear_values(np.float32)
    if operator != GRADIENT:
        arguments = {name: arguments[name] for name in ("logits_max", "sum_exp_logits")}
        arguments["predicted_logits"] = arguments["logits_max"]
        if "--loss-out" in options:
            arguments["vocab_parallel_logits"] = np.zeros((10, 21), np.float32)
    assert message in refused(capsys, operator, *save(**arguments), *options)


@pytest.mark.parametrize("when", ["computing", "syncing"])
def test_a_failure_leaves_neither_of_two_results(when, monkeypatch, capsys):
    def fail(*arguments, **settings):
        assert sum(name.endswith(".part") for name in os.listdir()) == 2
        raise MemoryError("no memory")

    target = {"computing": (ag, GRADIENT), "syncing": (os, "fsync")}[when]
    names = save(**linear_values(np.float32))
    if when == "computing":
        fail = functools.wraps(ag.fused_linear_cross_entropy_loss_grad)(fail)
    monkeypatch.setattr(*target, fail)
    assert "no memory" in refused(capsys, GRADIENT, *names, *result_files("input_grad", "weight_grad"))


def test_memory_of_linear_gradients_is_their_workspace():
    """The linear gradients need less than 128 MiB. Weight, weight gradient and all logits would have 256 MiB each."""
    rows, vocabulary, width = 64, 2**20, 64
    sparse("w.npy", (vocabulary, width))
    np.save("x.npy", np.ones((rows, width), np.float32))
    np.save("ones.npy", np.ones(rows, np.float32))
    np.save("sum.npy", np.full(rows, vocabulary, np.float32))
    np.save("mask.npy", np.zeros(rows, bool))
    np.save("target.npy", np.arange(rows))
    inputs = ("--grad", "ones.npy", "--input", "x.npy", "--weight", "w.npy", "--target-mask", "mask.npy")
    inputs += ("--masked-target", "target.npy", "--logits-max", "ones.npy", "--sum-exp-logits", "sum.npy")
    options = ("--workspace-bytes", str(2**24), *result_files("input_grad", "weight_grad"))
    assert peak_anonymous_bytes(GRADIENT, *inputs, *options) < 2**27
    gradient = np.load("weight_grad_out.npy", mmap_mode="r")
    assert gradient.shape == (vocabulary, width)
    expected = rows * math.exp(-1) / vocabulary
    np.testing.assert_allclose(gradient[-1], expected, rtol=1e-4)
    np.testing.assert_allclose(gradient[0], expected - 1, rtol=1e-4)
