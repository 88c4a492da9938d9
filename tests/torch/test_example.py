"""Test the example of losses of torch, which trains the same model with each loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch_losses
from torch_losses import LanguageModel

from ascend_grad.demo.corpus import Corpus
from ascend_grad.demo.language_model import Sizes

SIZES = Sizes(vocabulary=40, context=6, window=3, embedding=4, width=8, heads=2, experts=3, hidden=5)


needs_torchs_loss = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch has no loss to compare with"
)


def text(length: int = 4000) -> np.ndarray:
    """Make a text in which most tokens are followed by the next id."""
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2], size=length, p=[0.9, 0.1])
    return (np.cumsum(steps) % SIZES.vocabulary).astype(np.int32)


@needs_torchs_loss
@pytest.mark.parametrize("bfloat16", [False, True])
def test_all_losses_learn_the_same(bfloat16: bool):
    runs = {
        name: torch_losses.train(name, text(), SIZES, 40, seed=1, bfloat16=bfloat16) for name in torch_losses.LOSSES
    }
    curves = np.array([run.bits for run in runs.values()])
    assert np.all(np.abs(curves[:, 0] - np.log2(SIZES.vocabulary)) < 1)
    assert np.all(curves[:, -1] < curves[:, 0] - 0.5)
    # The curves differ by the rounding to bfloat16, whose effect grows during the training.
    np.testing.assert_allclose(curves[:, :5], np.broadcast_to(curves[0, :5], (len(curves), 5)), rtol=0.02)
    assert all(run.seconds > 0 and run.loss_seconds > 0 and run.peak_bytes >= 0 for run in runs.values())


def test_the_models_look_at_no_later_token():
    torch.manual_seed(0)
    model = LanguageModel(SIZES, torch_losses.LOSSES["ascend_grad"](SIZES.width, SIZES.vocabulary))
    tokens = torch.randint(0, SIZES.vocabulary, (1, SIZES.window - 1 + SIZES.context))
    following = torch.full((1, SIZES.context), -100)
    following[0, 2] = 7
    changed = tokens.clone()
    changed[0, SIZES.window - 1 + 3 :] = 0
    assert torch.equal(model(tokens, following), model(changed, following))


def test_a_process_of_its_own():
    run = torch_losses.in_a_process("ascend_grad", text(400), SIZES, 2, 0, False)
    assert len(run.bits) == 2


@needs_torchs_loss
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    source = b"for word in words:\n    print(word)\n" * 200
    corpus = Corpus(np.frombuffer(source, np.uint8), np.frombuffer(source, np.uint8), 1)
    monkeypatch.setattr(torch_losses, "read_corpus", lambda directory: corpus)
    monkeypatch.setattr(torch_losses, "in_a_process", torch_losses.train)
    plot = tmp_path / "losses.png"
    assert torch_losses.main(["--steps", "3", "--save-plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in torch_losses.LOSSES)
    assert "3 to 3" in printed
    assert plot.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        torch_losses.main(["--steps", "0"])
    assert "expected 1 or more, got 0" in capsys.readouterr().err


def test_a_torch_without_a_loss_to_compare_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyLoss", raising=False)
    with pytest.raises(SystemExit):
        torch_losses.main([])
    assert "the demo needs torch 2.13 or newer, whose torch.nn.LinearCrossEntropyLoss" in capsys.readouterr().err
