"""Test that ``ascend-grad score`` writes files with the values that the library gives, chunk by chunk."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from files import assert_same_file, assert_target_refused, peak_anonymous_bytes, refused, sparse
from samples import BFLOAT16, DTYPES, generator

import ascend_grad as ag
from ascend_grad.cli import score, score_job
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")

ROWS, VOCABULARY, WIDTH, K = 10, 21, 5, 3
LOSSES = ("log_prob", "entropy", "lse", "predicted")
TOP_K = ("top_k_log_prob", "top_k_index")
INPUTS = ("hidden.npy", "weight.npy", "targets.npy")


def problem(dtype: type = np.float32, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make and save a problem whose rows 1 and 4 are ignored, if it has these rows."""
    rng = generator(str(np.dtype(dtype)), rows)
    hidden, weight = (rng.standard_normal((n, WIDTH)).astype(dtype) for n in (rows, VOCABULARY))
    targets = rng.integers(0, VOCABULARY, rows)
    targets[1:5:3] = -100
    for name, array in zip(INPUTS, (hidden, weight, targets)):
        np.save(name, array)
    return hidden, weight, targets


def outputs(*names: str) -> list[str]:
    """Return the options that write results to files of their names."""
    return [word for name in names for word in (f"--{name.replace('_', '-')}-out", f"{name}.npy")]


def losses(hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, **settings) -> dict[str, np.ndarray]:
    """Return the results of one call."""
    result = ag.linear_cross_entropy(
        hidden, weight, targets, reduction="none", return_grad=False, outputs=LOSSES, **settings
    )
    return {name: getattr(result, name) for name in LOSSES}


def assert_losses(expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        assert_same_file(values, f"{name}.npy")


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Cut HIDDEN into chunks of three rows."""
    monkeypatch.setattr(score_job, "CHUNK_ROWS", 3)
    monkeypatch.setattr(score_job, "CHUNK_BYTES", 1)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_chunk_has_the_bits_of_one_call(dtype):
    hidden, weight, targets = problem(DTYPES[dtype])
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(K), *raw]) == 0
    assert_losses(losses(hidden, weight, targets))
    top = ag.linear_top_k(hidden, weight, K)
    assert_same_file(top.log_prob, "top_k_log_prob.npy")
    assert_same_file(top.index, "top_k_index.npy")


def test_bits_of_bfloat16_in_integers(capsys):
    """Targets of 2 bytes stay integers."""
    hidden, weight, targets = problem(DTYPES["bfloat16"])
    for name, array in zip(INPUTS, (hidden.view("i2"), weight.view("u2"), targets.astype("i2"))):
        np.save(name, array)
    assert "hidden.npy: expected floating-point numbers, got int16; if" in refused(
        capsys, *INPUTS, "-o", "a", command="score"
    )
    assert main(["score", *INPUTS, *outputs(*LOSSES), "--dtype", "bfloat16"]) == 0
    assert_losses(losses(hidden, weight, targets))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_have_the_bits_of_calls_on_them(dtype, order):
    hidden, weight, targets = problem(DTYPES[dtype])
    np.save("hidden.npy", np.asarray(hidden, order=order))
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(K), *raw]) == 0
    parts = [losses(hidden[i : i + 3], weight, targets[i : i + 3]) for i in range(0, ROWS, 3)]
    assert_losses({name: np.concatenate([part[name] for part in parts]) for name in LOSSES})
    parts = [ag.linear_top_k(hidden[i : i + 3], weight, K) for i in range(0, ROWS, 3)]
    assert_same_file(np.concatenate([part.log_prob for part in parts]), "top_k_log_prob.npy")
    assert_same_file(np.concatenate([part.index for part in parts]), "top_k_index.npy")
    # One call may add in another order: only the values are equal, but for rounding.
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    for name, expected in losses(hidden, weight, targets).items():
        np.testing.assert_allclose(np.load(f"{name}.npy"), expected, rtol=tolerance, atol=tolerance)


def test_the_values_are_those_of_the_formulas():
    hidden, weight, targets = problem(np.float64)
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(VOCABULARY), "--temperature", "0.5"]) == 0
    logits = hidden @ weight.T / 0.5
    lse = np.log(np.exp(logits).sum(1))
    log_p = logits - lse[:, None]
    scored = targets != -100
    expected = {
        "log_prob": log_p[np.arange(ROWS), np.maximum(targets, 0)],
        "entropy": -(np.exp(log_p) * log_p).sum(1),
        "lse": lse,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(np.load(f"{name}.npy"), np.where(scored, values, 0), rtol=1e-12)
    assert (np.load("predicted.npy") == np.where(scored, log_p.argmax(1), -1)).all()
    np.testing.assert_allclose(np.load("top_k_log_prob.npy"), -np.sort(-log_p), rtol=1e-12)
    assert (np.load("top_k_index.npy") == np.argsort(-log_p)).all()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bias_dtype", ["float32", "float64", "bfloat16"])
def test_options_of_the_logits(bias_dtype):
    hidden, weight, targets = problem()
    bias = generator("bias").standard_normal(VOCABULARY).astype(DTYPES[bias_dtype])
    np.save("bias.npy", bias)
    raw = ["--dtype", "bfloat16"] if bias_dtype == "bfloat16" else []
    options = ["--bias", "bias.npy", "--logit-scale", "-1.5", "--softcap", "2", "--temperature", "0.5", *raw]
    assert main(["score", *INPUTS, *outputs(*LOSSES, *TOP_K), "--top-k", str(K), *options]) == 0
    settings = {"bias": bias, "logit_scale": -1.5, "softcap": 2.0, "temperature": 0.5}
    parts = [losses(hidden[i : i + 3], weight, targets[i : i + 3], **settings) for i in range(0, ROWS, 3)]
    assert_losses({name: np.concatenate([part[name] for part in parts]) for name in LOSSES})
    tops = [ag.linear_top_k(hidden[i : i + 3], weight, K, **settings) for i in range(0, ROWS, 3)]
    assert_same_file(np.concatenate([top.log_prob for top in tops]), "top_k_log_prob.npy")
    assert_same_file(np.concatenate([top.index for top in tops]), "top_k_index.npy")
    # The formula, apart from the library.
    logits = 2 * np.tanh(-1.5 * (hidden.astype(float) @ weight.T.astype(float) + bias.astype(float)) / 2) / 0.5
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    right = np.where(targets == -100, 0, log_p[np.arange(ROWS), np.maximum(targets, 0)])
    np.testing.assert_allclose(np.load("log_prob.npy"), right, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.load("top_k_log_prob.npy"), -np.sort(-log_p)[:, :K], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_no_targets():
    hidden, weight, _ = problem()
    assert main(["score", *INPUTS[:2], *outputs("entropy", "lse", "predicted")]) == 0
    parts = [losses(hidden[i : i + 3], weight, np.zeros(ROWS, int)[i : i + 3]) for i in range(0, ROWS, 3)]
    for name in ("entropy", "lse", "predicted"):
        assert_same_file(np.concatenate([part[name] for part in parts]), f"{name}.npy")


def test_results_that_are_not_asked_for_are_not_computed(monkeypatch):
    problem()
    asked, loss, top_k = [], ag.linear_cross_entropy, ag.linear_top_k

    def record_loss(*arguments, **settings):
        asked.append(settings["outputs"])
        return loss(*arguments, **settings)

    def record_top_k(*arguments, **settings):
        asked.append("top-k")
        return top_k(*arguments, **settings)

    monkeypatch.setattr(ag, "linear_cross_entropy", functools.wraps(loss)(record_loss))
    monkeypatch.setattr(ag, "linear_top_k", functools.wraps(top_k)(record_top_k))
    assert main(["score", *INPUTS[:2], *outputs("top_k_index"), "--top-k", "1"]) == 0
    assert main(["score", *INPUTS[:2], *outputs("entropy")]) == 0
    assert main(["score", *INPUTS, *outputs("lse")]) == 0
    # The log-probabilities are needed for the mean.
    assert asked == ["top-k", ("entropy",), ("lse", "log_prob")]
    assert sorted(os.listdir()) == sorted([*INPUTS, "entropy.npy", "lse.npy", "top_k_index.npy"])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int32", "uint64", ">i4", ">i8"])
def test_targets_of_any_integer_dtype(dtype):
    hidden, weight, targets = problem()
    np.save("targets.npy", np.abs(targets % 21).astype(dtype))
    assert main(["score", *INPUTS, *outputs("log_prob")]) == 0
    assert_same_file(losses(hidden, weight, targets % 21)["log_prob"], "log_prob.npy")


def test_another_index_to_ignore(capsys):
    hidden, weight, targets = problem()
    targets = np.where(targets == -100, 7, targets)
    np.save("targets.npy", targets)
    assert main(["score", *INPUTS, *outputs(*LOSSES), "--ignore-index", "7"]) == 0
    assert_losses(losses(hidden, weight, targets, ignore_index=7))
    assert f"targets.npy: {np.count_nonzero(targets != 7)} tokens scored, " in capsys.readouterr().out


def test_settings_are_passed_on(monkeypatch, capsys):
    problem()
    calls, loss = [], ag.linear_cross_entropy
    monkeypatch.setattr(
        ag,
        "linear_cross_entropy",
        functools.wraps(loss)(lambda *arguments, **settings: calls.append(settings) or loss(*arguments, **settings)),
    )
    options = ["--threads", "2", "--backend", "reference", "--workspace-bytes", str(2**23), "--temperature", "2"]
    assert main(["score", *INPUTS, "-o", "out", *options]) == 0
    (settings,) = calls
    assert settings == {
        "reduction": "none",
        "return_grad": False,
        "ignore_index": -100,
        "outputs": ("log_prob",),
        "bias": None,
        "logit_scale": 1.0,
        "softcap": None,
        "temperature": 2.0,
        "workspace_bytes": 2**23,
        "backend": "reference",
        "num_threads": 2,
    }
    assert "(backend reference)" in capsys.readouterr().out


@pytest.mark.parametrize("targets", [(), ("targets.npy",)])
def test_no_rows(targets, capsys):
    problem(rows=0)
    names = ("entropy", "lse", "predicted", *(["log_prob"] if targets else []))
    assert main(["score", *INPUTS[:2], *targets, *outputs(*names, *TOP_K), "--top-k", str(K)]) == 0
    for name in names:
        assert_same_file(np.zeros(0, np.int64 if name == "predicted" else np.float32), f"{name}.npy")
    assert_same_file(np.zeros((0, K), np.float32), "top_k_log_prob.npy")
    assert_same_file(np.zeros((0, K), np.int64), "top_k_index.npy")
    assert ("targets.npy: 0 tokens scored\n" in capsys.readouterr().out) == bool(targets)


# ---- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("result", ["log_prob", "entropy"])
def test_the_mean_over_the_scored_tokens(result, capsys):
    hidden, weight, targets = problem()
    assert main(["score", *INPUTS, *outputs(result)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    number = r"(\d+\.\d+)"
    match = re.fullmatch(
        rf"{result}\.npy: float32 \(10,\), computed and written in \d+\.\d\d s \(backend \w+\)\n"
        rf"targets\.npy: 8 tokens scored, mean negative log-likelihood {number}, perplexity {number}\n",
        out,
    )
    assert match, out
    mean = float(ag.linear_cross_entropy(hidden, weight, targets, return_grad=False).loss)
    assert float(match[1]) == pytest.approx(mean, rel=1e-5)
    assert float(match[2]) == pytest.approx(math.exp(mean), rel=1e-5)


@pytest.mark.parametrize(
    ("log_prob", "text"),
    [
        ([], "0 tokens scored"),
        ([-2000.0], "1 tokens scored, mean negative log-likelihood 2000, perplexity inf"),
        ([-1.0, np.nan], "2 tokens scored, mean negative log-likelihood nan, perplexity nan"),
    ],
)
def test_means_that_are_no_ordinary_numbers(log_prob, text):
    likelihood = score_job.Likelihood()
    likelihood.add(np.array(log_prob, np.float32), np.ones(len(log_prob), bool))
    assert likelihood.describe("t") == f"t: {text}"


def test_each_result_is_a_line_in_the_order_of_the_help(capsys):
    problem()
    assert main(["score", *INPUTS[:2], "--top-k", "2", *reversed_pairs(outputs("lse", *TOP_K))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", computed")[0] for line in lines] == [
        "lse.npy: float32 (10,)",
        "top_k_log_prob.npy: float32 (10, 2)",
        "top_k_index.npy: int64 (10, 2)",
    ]


def reversed_pairs(options: list[str]) -> list[str]:
    return [word for i in range(len(options) - 2, -1, -2) for word in options[i : i + 2]]


@pytest.mark.parametrize(("options", "shown"), [((), False), (("--progress",), True), (("--no-progress",), False)])
def test_progress_goes_to_stderr(options, shown, capsys):
    problem()
    assert main(["score", *INPUTS, "-o", "out", *options]) == 0
    assert ("score: 100%" in capsys.readouterr().err) == shown


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*INPUTS,), "name a file for a result, with --log-prob-out or --entropy-out or "),
        (
            (*INPUTS[:2], "-o", "a"),
            "--log-prob-out needs TARGETS, a third file after HIDDEN and WEIGHT: the id of each",
        ),
        ((*INPUTS[:2], "--lse-out", "a", "--ignore-index", "3"), "--ignore-index needs TARGETS"),
        ((*INPUTS[:2], "--top-k-index-out", "a"), "--top-k-index-out needs --top-k"),
        ((*INPUTS, "-o", "a", "--top-k", "3"), "--top-k needs a file for its result"),
        ((*INPUTS[:2], "--top-k-index-out", "a", "--top-k", "22"), "linear_top_k: k: expected"),
        ((*INPUTS, "-o", "a", "--entropy-out", "./a"), "a: expected a file for each result, got this one twice"),
        ((*INPUTS, "-o", "weight.npy"), "weight.npy: this is the input weight.npy"),
        ((*INPUTS, "-o", "a.zarr"), "a.zarr: ends in .zarr, but the result of .npy files is a .npy file"),
        ((*INPUTS, "-o", "absent/a"), "absent/a: there is no directory"),
        ((*INPUTS, "-o", "a", "--dtype", "bfloat16"), "hidden.npy: --dtype bfloat16 is for elements of 2 raw bytes"),
        ((*INPUTS, "-o", "a", "--temperature", "0"), "temperature: expected"),
        ((*INPUTS, "-o", "a", "--softcap", "0"), "softcap: expected"),
        ((*INPUTS, "-o", "a", "--logit-scale", "inf"), "logit_scale: expected"),
        ((*INPUTS, "-o", "a", "--bias", "absent.npy"), "absent.npy: No such file"),
        ((*INPUTS, "-o", "a", "--bias", "hidden.npy"), "hidden.npy: linear_cross_entropy: bias: expected"),
        (
            (*INPUTS[:2], "--top-k", "2", "--top-k-index-out", "a", "--bias", "targets.npy"),
            "targets.npy: linear_top_k: bias: expected",
        ),
        ((*INPUTS, "-o", "bias.npy", "--bias", "bias.npy"), "bias.npy: this is the input bias.npy"),
        ((*INPUTS, "-o", "a", "--workspace-bytes", "7"), "workspace_bytes: expected"),
        ((*INPUTS, "-o", "a", "--threads", "0"), "num_threads: expected"),
        (("absent.npy", *INPUTS[1:], "-o", "a"), "absent.npy: No such file"),
        (("hidden.npy", "absent.npy", "targets.npy", "-o", "a"), "absent.npy: No such file"),
        (("weight.npy", "hidden.npy", "targets.npy", "-o", "a"), "targets.npy: linear_cross_entropy: target: expected"),
        (
            ("hidden.npy", "targets.npy", "targets.npy", "-o", "a"),
            "targets.npy: linear_cross_entropy: weight: expected",
        ),
        (("targets.npy", "weight.npy", "targets.npy", "-o", "a"), "targets.npy: expected shape (N, H), got (10,)"),
        (
            ("hidden.npy", "weight.npy", "hidden.npy", "-o", "a"),
            "hidden.npy: expected ids of an integer dtype, got float32 of shape",
        ),
    ],
)
def test_calls_that_are_refused(options, message, capsys):
    problem()
    np.save("bias.npy", np.zeros(VOCABULARY))
    assert message in refused(capsys, *options, command="score")


@pytest.mark.parametrize("name", ["hidden.npy", "targets.npy", "out"])
def test_standard_streams_are_refused(name, capsys):
    problem()
    options = ["-" if each == name else each for each in (*INPUTS, "-o", "out")]
    message = refused(capsys, *options, command="score")
    assert message.startswith("-: standard input and output are not supported; name a file")


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_one_hot_targets_are_refused(dtype, capsys):
    hidden, weight, targets = problem()
    one_hot = np.eye(VOCABULARY, dtype=dtype)[np.abs(targets) % VOCABULARY]
    np.save("targets.npy", one_hot)
    message = refused(capsys, *INPUTS, "-o", "out", command="score")
    expected = f"targets.npy: {one_hot.shape} looks one-hot (all ids are 0 or 1, as many as classes)"
    assert message == f"{expected}; argmax(-1) converts it to ids"
    # Other ids, as many as classes or not, are ids.
    for several in (one_hot * 2, one_hot[:, 1:]):
        np.save("targets.npy", several)
        assert main(["score", *INPUTS, *outputs("log_prob")]) == 0
        expected = ag.linear_cross_entropy(
            hidden, weight, several, reduction="none", return_grad=False, target_prob=0, outputs=("log_prob",)
        )
        np.testing.assert_array_equal(np.load("log_prob.npy"), expected.log_prob)


@pytest.mark.parametrize("option", ["-o", "--entropy-out"])
def test_floating_targets_are_refused(option, capsys):
    _, _, targets = problem()
    for floating, advice in (
        (np.eye(VOCABULARY)[np.abs(targets) % VOCABULARY], "argmax(-1) converts it to ids"),
        (np.float64(targets), "astype(numpy.int64) converts it to ids"),
        (np.float64(targets)[:, None], "astype(numpy.int64) converts it to ids"),
    ):
        np.save("targets.npy", floating)
        message = refused(capsys, *INPUTS, option, "out", command="score")
        expected = f"expected ids of an integer dtype, got float64 of shape {floating.shape}; {advice}"
        assert message == f"targets.npy: {expected}"


def test_two_ids_of_two_classes_are_no_one_hot_rows():
    _, weight, targets = problem()
    np.save("weight.npy", weight[:2])
    np.save("targets.npy", np.eye(2, dtype=np.int64)[targets % 2])
    assert main(["score", *INPUTS, *outputs("log_prob")]) == 0
    assert np.load("log_prob.npy").shape == (len(targets), 2)


@pytest.mark.usefixtures("small_chunks")
def test_a_target_out_of_the_vocabulary_is_named_by_its_row(capsys):
    _, _, targets = problem()
    assert_target_refused(capsys, INPUTS, targets, 8)


def test_an_empty_vocabulary(capsys):
    problem()
    np.save("weight.npy", np.zeros((0, WIDTH), np.float32))
    message = refused(capsys, *INPUTS[:2], "--lse-out", "a", command="score")
    assert message == "weight.npy: expected at least one row, got none"


def test_raw_elements_need_a_dtype(capsys):
    problem(BFLOAT16)
    assert "hidden.npy: elements of 2 raw bytes" in refused(capsys, *INPUTS, "-o", "a", command="score")


def test_damaged_files(capsys):
    for name in INPUTS:
        problem()
        os.truncate(name, os.path.getsize(name) - 1)
        message = refused(capsys, *INPUTS, "-o", "a", command="score")
        assert message.startswith(f"{name}: expected a .npy file of numbers: it is truncated")


@pytest.mark.usefixtures("small_chunks")
def test_a_failure_leaves_no_result(monkeypatch, capsys):
    problem()
    calls, loss = [], ag.linear_cross_entropy

    @functools.wraps(loss)
    def fail(*arguments, **settings):
        calls.append(settings)
        if len(calls) == 2:
            assert sum(name.endswith(".part") for name in os.listdir()) == 2
            raise MemoryError("no memory")
        return loss(*arguments, **settings)

    monkeypatch.setattr(ag, "linear_cross_entropy", fail)
    message = refused(capsys, *INPUTS, *outputs("log_prob", "lse"), command="score")
    text = "cannot be computed from hidden.npy, weight.npy, targets.npy: out of memory: no memory"
    assert message == f"log_prob.npy, lse.npy: {text}"


@pytest.mark.parametrize(("page", "results"), [("preprocessing", 4), ("command_line", 1)])
def test_the_commands_of_the_documents(page, results, capsys):
    """The commands of a page succeed."""
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    commands = re.findall(r"^ascend-grad score ((?:.*\\\n)*.*)", text, re.MULTILINE)
    rng = generator(page)
    for name in ("hidden", "teacher_hidden"):
        np.save(f"{name}.npy", rng.standard_normal((30, 8), np.float32))
    for name in ("weight", "teacher_weight"):
        np.save(f"{name}.npy", rng.standard_normal((100, 8), np.float32))
    np.save("targets.npy", np.arange(30))
    for command in commands:
        assert main(["score", *shlex.split(command.replace("\\\n", " "))]) == 0
    assert capsys.readouterr().out.count("computed and written") == results


# ---- chunks and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "top_k", "multiple", "expected"),
    [
        (2**10, None, 1, 2**14),  # 64 MiB of float32
        (2**20, None, 1, 2**10),  # the least number of rows
        (1, None, 1, 2**20),  # results count, too
        (1, 128, 1, 2**15),
        (2**10, None, 3000, 15000),  # whole chunks of a Zarr array
        (2**10, None, 2**15, 2**15),
    ],
)
def test_the_number_of_rows_of_a_chunk(width, top_k, multiple, expected):
    assert score_job.chunk_rows(np.broadcast_to(np.float32(0), (2**26, width)), top_k, multiple) == expected
    assert score_job.chunk_rows(np.broadcast_to(np.float32(0), (0, width)), top_k, multiple) == multiple


def test_memory_does_not_grow_with_the_files():
    """The command needs less than 128 MiB. HIDDEN has 512 MiB, and all logits would have 1 GiB."""
    rows, vocabulary, width = 2**21, 2**7, 2**6
    assert sparse("hidden.npy", (rows, width)) > 2**29
    np.save("weight.npy", np.ones((vocabulary, width), np.float32))
    sparse("targets.npy", (rows,), "<i4")
    options = [*outputs("log_prob", "lse"), "--workspace-bytes", str(2**23)]
    assert peak_anonymous_bytes(*INPUTS, *options, command="score") < 2**27
    np.testing.assert_allclose(np.load("lse.npy", mmap_mode="r")[-1], math.log(vocabulary), rtol=1e-6)


def test_every_result_has_an_option():
    assert set(score.RESULTS) == {*LOSSES, *TOP_K}
