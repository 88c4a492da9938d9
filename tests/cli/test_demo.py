"""Test ``ascend-grad demo``: the models, their training, the text that they read, and the command."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import signal
import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16
from processes import end_stopped, stopped

import ascend_grad as ag
from ascend_grad.cli.main import main
from ascend_grad.demo import comparison, corpus, counts, tasks, training, words
from ascend_grad.demo.byte_model import ByteModel
from ascend_grad.demo.comparison import compare_seconds, error_share
from ascend_grad.demo.language_model import LanguageModel, Sizes
from ascend_grad.demo.word_model import WordModel

SMALL = Sizes(vocabulary=40, context=6, window=3, embedding=4, width=8, heads=2, experts=3, hidden=5)
MODELS = ("bytes", "words")
BITS = re.compile(r"model (\d+\.\d+), \w+ count (\d+\.\d+), \w+-bigram count (\d+\.\d+)")


def small_model(kind: str, dtype: type = np.float32) -> LanguageModel:
    """Make a model of random parameters. If the dtype is float64, no part of the model is in bfloat16."""
    rng = np.random.default_rng(0)
    if kind == "bytes":
        return ByteModel(SMALL, rng, dtype)
    frequencies = rng.dirichlet(np.ones(SMALL.vocabulary))
    return WordModel(SMALL, rng, frequencies, dtype, bfloat16 if dtype == np.float32 else dtype)


def batch(sizes: Sizes, count: int = 2) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.random.default_rng(1).integers(0, sizes.vocabulary, (count, sizes.window + sizes.context))
    return blocks[:, :-1], blocks[:, sizes.window :]


# ---- the models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", SMALL.parameters())
def test_gradient_agrees_with_finite_differences(name, kind):
    model = small_model(kind, np.float64)
    tokens, following = batch(SMALL)
    model.loss_and_gradient(tokens, following)
    gradient = model.gradient.copy()

    direction = np.zeros_like(gradient)
    block = model._values[name]
    start = (block.__array_interface__["data"][0] - model.parameters.__array_interface__["data"][0]) // 8
    direction[start : start + block.size] = np.random.default_rng(2).standard_normal(block.size)
    start_parameters, step, losses = model.parameters.copy(), 1e-6, []
    for sign in (1, -1):
        model.parameters[...] = start_parameters + sign * step * direction
        losses.append(np.mean(model.losses(tokens, following)))
    expected = (losses[0] - losses[1]) / (2 * step)
    assert abs(expected) > 1e-5
    assert gradient @ direction == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_every_prediction_is_a_distribution(kind):
    model = small_model(kind, np.float64)
    tokens, following = batch(SMALL)
    losses = [model.losses(tokens, np.full_like(following, token)) for token in range(SMALL.vocabulary)]
    np.testing.assert_allclose(np.exp(-np.array(losses)).sum(axis=0), 1, rtol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_loss_is_the_mean_of_losses(kind):
    model = small_model(kind)
    tokens, following = batch(SMALL)
    losses = model.losses(tokens, following)
    assert losses.shape == following.shape
    assert losses.dtype == np.float32
    assert model.loss_and_gradient(tokens, following) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_no_prediction_sees_a_later_token(kind):
    model = small_model(kind, np.float64)
    tokens, following = batch(SMALL, 1)
    before = model.losses(tokens, following)
    for position in range(SMALL.context):
        changed = tokens.copy()
        changed[:, SMALL.window - 1 + position] += 1
        changed %= SMALL.vocabulary
        same = (model.losses(changed, following) == before)[0]
        assert same[:position].all()
        assert not same[position:].any()


@pytest.mark.parametrize("kind", MODELS)
def test_all_gradients_are_the_librarys(kind):
    model = small_model(kind)
    model.loss_and_gradient(*batch(SMALL))
    loss = {"bytes": "log_softmax_backward", "words": "linear_cross_entropy"}[kind]
    assert set(model.gradient_calls) == {loss, "softmax_backward", "scaled_masked_softmax_backward"}
    assert model.gradient_seconds > 0


def test_words_start_from_their_frequencies():
    rng = np.random.default_rng(0)
    frequencies = rng.dirichlet(np.ones(SMALL.vocabulary))
    model = WordModel(SMALL, rng, frequencies, np.float64, np.float64)
    model._values["logits"][:, :-1] = 0
    tokens, following = batch(SMALL)
    np.testing.assert_allclose(model.losses(tokens, following), -np.log(frequencies[following]), rtol=1e-12)


def test_the_output_weights_of_words_are_bfloat16():
    model = small_model("words")
    model.loss_and_gradient(*batch(SMALL))
    hidden, weight, _ = model.gradient_calls["linear_cross_entropy"]
    assert hidden.dtype == weight.dtype == bfloat16
    assert weight.shape == (SMALL.vocabulary, SMALL.width)
    assert (hidden[:, -1] == 1).all()


# ---- training --------------------------------------------------------------------------------------------------------


def test_adam_steps_by_the_step_size_at_first():
    parameters = np.array([1.0, 2.0, 3.0])
    training.Adam(parameters).step(np.array([0.5, -20.0, 0.0]), 0.1)
    np.testing.assert_allclose(parameters, [0.9, 2.1, 3.0], rtol=1e-6)


def test_adam_is_the_published_one(monkeypatch):
    """Adam's steps equal the published formulas, also if the parameters take several blocks."""
    monkeypatch.setattr(training.Adam, "BLOCK", 7)
    rng = np.random.default_rng(0)
    parameters = rng.standard_normal(30)
    expected, mean, square = parameters.copy(), 0.0, 0.0
    optimiser = training.Adam(parameters)
    for step in range(1, 6):
        gradient = rng.standard_normal(30)
        optimiser.step(gradient, 0.1)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.98**step)) + 1e-8)
    np.testing.assert_allclose(parameters, expected, rtol=1e-12)


def test_adam_finds_a_minimum():
    parameters = np.array([3.0, -2.0])
    optimiser = training.Adam(parameters)
    for step in range(500):
        optimiser.step(2 * (parameters - [1, 1]), 0.08 * training.schedule(step, 500))
    np.testing.assert_allclose(parameters, 1, atol=1e-2)


@pytest.mark.parametrize("steps", [1, 2, 3, 60, 1000])
def test_step_size_rises_and_falls(steps):
    sizes = [training.schedule(step, steps) for step in range(steps)]
    peak = sizes.index(max(sizes))
    assert min(sizes) > 0
    assert max(sizes) == pytest.approx(1)
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)


def test_blocks_are_followed_by_the_text():
    text = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    for blocks, following in (
        training.random_batch(text, 5, SMALL, np.random.default_rng(0)),
        training.measuring_blocks(text, 5, SMALL),
    ):
        assert blocks.shape == (5, SMALL.window - 1 + SMALL.context)
        assert following.shape == (5, SMALL.context)
        np.testing.assert_array_equal(blocks[:, SMALL.window :], following[:, :-1])
        assert all(bytes(row) + bytes(end[-1:]) in bytes(text) for row, end in zip(blocks, following))


def test_every_token_is_measured_at_most_once():
    text = np.arange(256, dtype=np.uint8)
    _, following = training.measuring_blocks(text, 1000, SMALL)
    assert following.reshape(-1).tolist() == list(range(SMALL.window, SMALL.window + following.size))
    assert following.size + SMALL.window > len(text) - SMALL.context
    _, fewer = training.measuring_blocks(text, 5, SMALL)
    assert len(fewer) == 5
    assert (fewer[0] == following[0]).all()
    assert (fewer[-1] == following[-1]).all()


def test_held_out_bits_is_the_mean_over_all_blocks():
    model = small_model("bytes")
    tokens, following = batch(SMALL, 7)
    expected = np.mean(model.losses(tokens, following)) / math.log(2)
    assert training.held_out_bits(model, tokens, following, 3) == pytest.approx(expected, rel=1e-5)


# ---- the text --------------------------------------------------------------------------------------------------------


def test_counts_on_paper():
    text = np.frombuffer(b"abababac", np.uint8)
    single = {byte: (b"abababac".count(byte) + 1) / (8 + 256) for byte in range(256)}
    pairs = {b"ab": 3, b"ba": 3, b"ac": 1, b"cb": 0}
    leaving = {ord("a"): 4, ord("b"): 3, ord("c"): 0}
    kinds = {ord("a"): 2, ord("b"): 1, ord("c"): 1}
    expected = [
        -math.log2((seen + kinds[pair[0]] * single[pair[1]]) / (leaving[pair[0]] + kinds[pair[0]]))
        for pair, seen in pairs.items()
    ]
    previous, following = (np.array([pair[i] for pair in pairs], np.uint8) for i in (0, 1))
    assert counts.bigram_bits(text, previous, following, 256) == pytest.approx(np.mean(expected))
    assert counts.unigram_bits(text, following, 256) == pytest.approx(np.mean([-math.log2(single[b]) for b in b"bacb"]))


@pytest.mark.parametrize("previous", range(5))
def test_pairs_are_a_distribution(previous):
    text = np.random.default_rng(0).integers(0, 4, 100)
    following = np.arange(5)
    bits = [counts.bigram_bits(text, np.array([previous]), np.array([token]), 5) for token in following]
    assert np.exp2(-np.array(bits)).sum() == pytest.approx(1)


def test_a_text_that_repeats_costs_nothing():
    text = np.frombuffer(b"ab" * 100_000, np.uint8)
    assert counts.bigram_bits(text, text[:-1], text[1:], 256) < 0.001


def test_every_byte_is_part_of_one_token():
    text = bytes(range(256)) + b"def f(x) -> None:\n    return  x_1 + 12\n\n" + "\u00fcber".encode()
    tokens = words.split(np.frombuffer(text, np.uint8))
    assert b"".join(tokens) == text
    for token in (
        b"def",
        b" f",
        b"(",
        b"x",
        b")",
        b" ->",
        b" None",
        b":",
        b"\n    ",
        b"return",
        b" +",
        b" 12",
        b"\n\n",
    ):
        assert token in tokens


def test_frequent_tokens_have_small_numbers():
    tokens = [b"c"] + 3 * [b"a"] + 2 * [b"b"]
    numbers = words.numbering(tokens, 3)
    assert numbers == {b"a": 1, b"b": 2}
    assert words.numbered([b"b", b"c", b"a"], numbers).tolist() == [2, words.UNKNOWN, 1]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a small library: twenty files in a package, and other files that must be ignored."""
    for number in range(20):
        # Each function has a different number, so that the text is neither constant nor incompressible.
        lines = (f"def function_{i}(argument):\n    return argument + {i % 97}\n" for i in range(number, number + 200))
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / f"module_{number:02}.py").write_text("".join(lines))
    for directory in ("site-packages", "test", "package/tests"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "other.py").write_text("@" * 1000)
    (tmp_path / "package" / "data.txt").write_text("@" * 1000)
    monkeypatch.setattr(corpus, "standard_library", lambda: tmp_path)
    return tmp_path


def test_every_tenth_file_is_held_out(library):
    read = corpus.read_corpus(library)
    files = sorted((library / "package").glob("*.py"))
    assert read.files == 20
    assert bytes(read.held_out) == files[9].read_bytes() + files[19].read_bytes()
    assert bytes(read.training) == b"".join(file.read_bytes() for file in files[:9] + files[10:19])


@pytest.mark.parametrize("remaining", [0, 1, 9])
def test_too_little_text_is_refused(library, remaining):
    for file in sorted((library / "package").glob("*.py"))[remaining:]:
        file.unlink()
    with pytest.raises(corpus.TooLittleTextError, match=r"expected at least .* bytes of Python source text"):
        corpus.read_corpus(library)


def test_a_missing_library_is_refused(tmp_path):
    with pytest.raises(corpus.TooLittleTextError, match=r"expected at least .* bytes of Python source text"):
        corpus.read_corpus(tmp_path / "absent")


def test_too_little_text_is_one_line_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "standard_library", lambda: tmp_path)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith(f"ascend-grad demo: error: {tmp_path}: expected at least ")


# ---- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture(params=MODELS)
def calls(request):
    model = small_model(request.param)
    model.loss_and_gradient(*batch(SMALL))
    return model.gradient_calls


def test_right_gradients_have_small_errors(calls):
    for name, arguments in calls.items():
        assert error_share(getattr(ag, name), arguments) < 0.75


def test_a_wrong_element_is_found(calls):
    for name, arguments in calls.items():
        right = getattr(ag, name)

        @functools.wraps(right)
        def wrong(*arguments, right=right, **settings):
            result = right(*arguments, **settings)
            if not settings:
                last = result[-1] if isinstance(result, tuple) else result
                last[..., 0, 0] += last.dtype.type(0.03 if last.itemsize == 2 else 1e-4) * np.abs(last).max()
            return result

        assert error_share(wrong, arguments) > 1


def test_numpy_is_timed_on_the_same_formula(calls):
    for name, arguments in calls.items():
        ours, numpys = compare_seconds(getattr(ag, name), arguments, rounds=3)
        assert 0 < ours < 1
        assert 0 < numpys < 1


def test_the_formula_of_numpy_is_the_same():
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (11, 5)))
    target = rng.integers(0, 11, 7)
    right = ag.linear_cross_entropy(x, weight, target, backend="reference")
    for got, expected in zip(comparison.numpy_linear_cross_entropy(x, weight, target), right):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


# ---- the command -----------------------------------------------------------------------------------------------------


def demo_bits(capsys, *options: str) -> tuple[float, ...]:
    """Run the command, and return the bits that it prints for the model, the count of tokens and the count of pairs."""
    assert main(["demo", *options]) == 0
    found = BITS.search(capsys.readouterr().out)
    return tuple(map(float, found.groups()))


@pytest.fixture
def few_blocks(monkeypatch):
    """Make the measurement faster and less precise."""
    for kind, make in tasks.TASKS.items():

        def fewer(*arguments, make=make):
            return dataclasses.replace(make(*arguments), measured_blocks=100)

        monkeypatch.setitem(tasks.TASKS, kind, fewer)


@pytest.mark.usefixtures("few_blocks")
def test_bytes_beat_the_bigram_count_on_the_real_library(capsys):
    model, single, pairs = demo_bits(capsys, "--model", "bytes", "--steps", "80")
    assert 3 < pairs < 4 < single < 6
    assert model < pairs - 0.1


@pytest.mark.usefixtures("few_blocks")
def test_words_beat_their_count_on_the_real_library(capsys):
    model, single, pairs = demo_bits(capsys, "--steps", "12")
    assert 5 < pairs < 7 < 8 < single < 10
    assert model < single - 0.1


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_deterministic_for_a_seed(kind, capsys):
    options = ("--model", kind, "--steps", "3")
    first = demo_bits(capsys, *options)
    assert demo_bits(capsys, *options, "--threads", "1") == first
    assert demo_bits(capsys, *options, "--seed", "1") != first


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("kind", "loss"), [("bytes", "log_softmax_backward"), ("words", "linear_cross_entropy")])
def test_it_reports_checks_and_times(kind, loss, capsys):
    assert main(["demo", "--model", kind, "--steps", "2", "--backend", "reference"]) == 0
    out, err = capsys.readouterr()
    for name in (loss, "softmax_backward", "scaled_masked_softmax_backward"):
        assert len(re.findall(rf"^  {name} +[\dx]+ +\d+\.\d+  ok$", out, re.MULTILINE)) == 1
        assert len(re.findall(rf"^  {name} +[\dx]+ +\d+\.\d+ +\d+\.\d+ +\d+\.\dx$", out, re.MULTILINE)) == 1
    assert "bits per" in err
    result = (
        r"result: gradients \d+\.\d to \d+\.\d times as fast as NumPy's, each within its error bound; the model takes "
    )
    last = [line for line in out.splitlines() if line][-1]
    assert re.fullmatch(rf"{result}\d+\.\d{{3}} bits per (token|byte)", last)
    memory = re.findall(r"^  the loss of all words takes \d+ MB beyond its results; .* take \d+ MB$", out, re.MULTILINE)
    assert len(memory) == (kind == "words")


@pytest.mark.usefixtures("library")
def test_a_wrong_gradient_fails_it(monkeypatch, capsys):
    right = ag.softmax_backward

    @functools.wraps(right)
    def wrong(grad_output, output, dim=-1, **settings):
        factor = 1 if settings else 1.001
        return factor * right(grad_output, output, dim, **settings)

    monkeypatch.setattr(ag, "softmax_backward", wrong)
    assert main(["demo", "--steps", "2"]) == 1
    assert re.search(r"^  softmax_backward .* WRONG$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("library")
def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["demo", "--steps", "2", "--save-plot", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["loss.txt", "loss", "absent/loss.png"])
def test_a_plot_that_cannot_be_written_is_refused_first(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["demo", "--save-plot", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"ascend-grad demo: error: --save-plot .*\n", err)


def test_without_matplotlib_the_plot_is_refused_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo", "--save-plot", "loss.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_settings_that_the_library_refuses(capsys):
    assert main(["demo", "--threads", "0"]) == 2
    assert "num_threads" in capsys.readouterr().err


def test_interrupted():
    with stopped("ascend_grad.demo.training:Adam", "step", 2, "demo") as process:
        out, err = end_stopped(process, signal.SIGINT)
    assert process.returncode == 130
    assert err.endswith("\nascend-grad demo: interrupted\n")
    assert "Traceback" not in err
    assert "\ntraining " in out
    assert "held-out" not in out
