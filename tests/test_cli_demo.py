"""``ascend-grad demo``: the model, its text, its training, and the command."""

from __future__ import annotations

import functools
import math
import re
import signal
import sys
import time

import numpy as np
import pytest
from processes import start

import ascend_grad as ag
from ascend_grad.cli import corpus, training
from ascend_grad.cli.byte_model import ByteModel, Sizes
from ascend_grad.cli.comparison import ALLOWED_ERRORS, rounding_errors, seconds_beside_numpy
from ascend_grad.cli.errors import CommandError
from ascend_grad.cli.main import main

SMALL = Sizes(context=6, window=3, embedding=4, width=8, heads=2, experts=3, hidden=5)
BITS = re.compile(r"model (\d+\.\d+), byte-bigram count (\d+\.\d+)")


def batch(sizes: Sizes, count: int = 2) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.random.default_rng(1).integers(0, 256, (count, sizes.window + sizes.context), np.uint8)
    return blocks[:, :-1], blocks[:, sizes.window :]


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL.parameters())
def test_gradient_agrees_with_finite_differences(name):
    model = ByteModel(SMALL, np.random.default_rng(0), np.float64)
    text, following = batch(SMALL)
    model.loss_and_gradient(text, following)
    gradient = model.gradient.copy()

    direction = np.zeros_like(gradient)
    block = model._values[name]
    start = (block.__array_interface__["data"][0] - model.parameters.__array_interface__["data"][0]) // 8
    direction[start : start + block.size] = np.random.default_rng(2).standard_normal(block.size)
    start_parameters, step, losses = model.parameters.copy(), 1e-6, []
    for sign in (1, -1):
        model.parameters[...] = start_parameters + sign * step * direction
        losses.append(model.loss_and_gradient(text, following))
    expected = (losses[0] - losses[1]) / (2 * step)
    assert abs(expected) > 1e-4
    assert gradient @ direction == pytest.approx(expected, rel=1e-6)


def test_loss_is_that_of_the_log_probabilities():
    model = ByteModel(SMALL, np.random.default_rng(0))
    text, following = batch(SMALL)
    log_p = model.log_probabilities(text)
    assert log_p.dtype == np.float32
    np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-5)
    chosen = [log_p[row, byte] for row, byte in enumerate(following.reshape(-1))]
    assert model.loss_and_gradient(text, following) == pytest.approx(-np.mean(chosen), rel=1e-6)


def test_no_prediction_sees_a_later_byte():
    model = ByteModel(SMALL, np.random.default_rng(0), np.float64)
    text, _ = batch(SMALL, 1)
    before = model.log_probabilities(text)
    for position in range(SMALL.context):
        changed = text.copy()
        changed[:, SMALL.window - 1 + position] ^= 255
        same = (model.log_probabilities(changed) == before).all(axis=1)
        assert same[:position].all()
        assert not same[position:].any()


def test_all_three_gradients_are_the_librarys():
    model = ByteModel(SMALL, np.random.default_rng(0))
    model.loss_and_gradient(*batch(SMALL))
    assert set(model.gradient_calls) == {
        "log_softmax_backward",
        "softmax_backward",
        "scaled_masked_softmax_backward",
    }
    assert model.gradient_seconds > 0


# ---- training --------------------------------------------------------------------------------------------------------


def test_adam_steps_by_the_step_size_at_first():
    parameters = np.array([1.0, 2.0, 3.0])
    training.Adam(parameters).step(np.array([0.5, -20.0, 0.0]), 0.1)
    np.testing.assert_allclose(parameters, [0.9, 2.1, 3.0], rtol=1e-6)


def test_adam_finds_a_minimum():
    parameters = np.array([3.0, -2.0])
    optimiser = training.Adam(parameters)
    for step in range(500):
        optimiser.step(2 * (parameters - [1, 1]), training.step_size(step, 500) * 10)
    np.testing.assert_allclose(parameters, 1, atol=1e-2)


@pytest.mark.parametrize("steps", [1, 2, 3, 60, 1000])
def test_step_size_rises_and_falls(steps):
    sizes = [training.step_size(step, steps) for step in range(steps)]
    peak = sizes.index(max(sizes))
    assert min(sizes) > 0
    assert max(sizes) == pytest.approx(training.STEP_SIZE)
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)


def test_blocks_are_followed_by_the_text():
    text = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    for blocks, following in (
        training.random_batch(text, SMALL, np.random.default_rng(0)),
        training.measuring_blocks(text, SMALL),
    ):
        assert blocks.shape == (len(blocks), SMALL.window - 1 + SMALL.context)
        assert following.shape == (len(blocks), SMALL.context)
        np.testing.assert_array_equal(blocks[:, SMALL.window :], following[:, :-1])
        assert all(bytes(row) + bytes(end[-1:]) in bytes(text) for row, end in zip(blocks, following))


def test_every_byte_is_measured_at_most_once(monkeypatch):
    text = np.arange(256, dtype=np.uint8)
    _, following = training.measuring_blocks(text, SMALL)
    assert following.reshape(-1).tolist() == list(range(SMALL.window, SMALL.window + following.size))
    assert following.size + SMALL.window > len(text) - SMALL.context
    monkeypatch.setattr(training, "MEASURED_BLOCKS", 5)
    _, fewer = training.measuring_blocks(text, SMALL)
    assert len(fewer) == 5
    assert (fewer[0] == following[0]).all()
    assert (fewer[-1] == following[-1]).all()


def test_held_out_bits_is_the_mean_over_all_blocks():
    model = ByteModel(SMALL, np.random.default_rng(0))
    text, following = batch(SMALL, training.BATCH + 3)
    log_p = model.log_probabilities(text)
    expected = -np.mean(log_p[np.arange(len(log_p)), following.reshape(-1)]) / math.log(2)
    assert training.held_out_bits(model, text, following) == pytest.approx(expected, rel=1e-5)


# ---- the text --------------------------------------------------------------------------------------------------------


def test_bigram_count_on_paper():
    fitted = np.frombuffer(b"abababac", np.uint8)
    single = {byte: (b"abababac".count(byte) + 1) / (8 + 256) for byte in range(256)}
    pairs = {b"ab": 3, b"ba": 3, b"ac": 1, b"cb": 0}
    leaving = {ord("a"): 4, ord("b"): 3, ord("c"): 0}
    expected = [
        -math.log2((seen + corpus.SMOOTHING * single[pair[1]]) / (leaving[pair[0]] + corpus.SMOOTHING))
        for pair, seen in pairs.items()
    ]
    previous, following = (np.array([pair[i] for pair in pairs], np.uint8) for i in (0, 1))
    assert corpus.bigram_bits(fitted, previous, following) == pytest.approx(np.mean(expected))


def test_a_text_that_repeats_costs_nothing():
    text = np.frombuffer(b"ab" * 100_000, np.uint8)
    assert corpus.bigram_bits(text, text[:-1], text[1:]) < 0.001


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library: twenty files in a package, and others that must be passed over."""
    for number in range(20):
        # A line for every number, so that the text is neither constant nor incompressible.
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
    with pytest.raises(CommandError, match="too little Python source text"):
        corpus.read_corpus(library)


def test_a_missing_library_is_refused(tmp_path):
    with pytest.raises(CommandError, match="too little Python source text"):
        corpus.read_corpus(tmp_path / "absent")


# ---- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture
def calls():
    model = ByteModel(SMALL, np.random.default_rng(0))
    model.loss_and_gradient(*batch(SMALL))
    return model.gradient_calls


def test_right_gradients_are_within_few_rounding_errors(calls):
    for name, arguments in calls.items():
        assert rounding_errors(getattr(ag, name), arguments) < ALLOWED_ERRORS / 4


def test_a_wrong_element_is_found(calls):
    for name, arguments in calls.items():
        right = getattr(ag, name)

        def wrong(*arguments, right=right, **settings):
            result = right(*arguments, **settings)
            if not settings:
                result[..., 0, 0] += 1e-4 * np.abs(result).max()
            return result

        assert rounding_errors(wrong, arguments) > ALLOWED_ERRORS


def test_numpy_is_timed_on_the_same_formula(calls):
    for name, arguments in calls.items():
        ours, numpys = seconds_beside_numpy(getattr(ag, name), arguments, rounds=3)
        assert 0 < ours < 1
        assert 0 < numpys < 1


# ---- the command -----------------------------------------------------------------------------------------------------


def demo_bits(capsys, *options: str) -> tuple[float, float]:
    assert main(["demo", *options]) == 0
    found = BITS.search(capsys.readouterr().out)
    return float(found[1]), float(found[2])


def test_it_beats_the_bigram_count_on_the_real_library(monkeypatch, capsys):
    monkeypatch.setattr(training, "MEASURED_BLOCKS", 500)
    model, bigram = demo_bits(capsys, "--steps", "80")
    assert 3 < bigram < 4
    assert model < bigram - 0.1


@pytest.mark.usefixtures("library")
def test_it_is_deterministic_for_a_seed(capsys):
    first = demo_bits(capsys, "--steps", "3")
    assert demo_bits(capsys, "--steps", "3", "--threads", "1") == first
    assert demo_bits(capsys, "--steps", "3", "--seed", "1") != first


@pytest.mark.usefixtures("library")
def test_it_reports_checks_and_times(capsys):
    assert main(["demo", "--steps", "2", "--backend", "reference"]) == 0
    out, err = capsys.readouterr()
    for name in ("log_softmax_backward", "softmax_backward", "scaled_masked_softmax_backward"):
        assert len(re.findall(rf"^  {name} +[\dx]+ +\d+\.\d+  ok$", out, re.MULTILINE)) == 1
        assert len(re.findall(rf"^  {name} +[\dx]+ +\d+\.\d+ +\d+\.\d+ +\d+\.\dx$", out, re.MULTILINE)) == 1
    assert "bits per byte" in err


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
    assert "ascend-grad[plot]" in capsys.readouterr().err


def test_settings_that_the_library_refuses(capsys):
    assert main(["demo", "--threads", "0"]) == 2
    assert "num_threads" in capsys.readouterr().err


def test_interrupted():
    process = start("demo")
    assert any(line.startswith("training") for line in process.stdout)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("\nascend-grad demo: interrupted\n")
    assert "Traceback" not in err
    assert "held-out" not in out
