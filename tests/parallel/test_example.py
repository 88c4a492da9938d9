"""Test the example of losses over ranks, which trains the same model on one rank and on several."""

from __future__ import annotations

import losses_over_ranks
import numpy as np
import pytest
from losses_over_ranks import ShardedWordModel
from thread_ranks import on_ranks, returned

from ascend_grad.demo import counts
from ascend_grad.demo.language_model import Sizes
from ascend_grad.demo.tasks import Task
from ascend_grad.demo.word_model import WordModel
from ascend_grad.parallel.communicators import Collectives

SIZES = Sizes(vocabulary=41, context=6, window=3, embedding=4, width=8, heads=2, experts=3, hidden=5)


def task() -> Task:
    rng = np.random.default_rng(0)
    text = (np.cumsum(rng.choice([1, 2], size=4000, p=[0.9, 0.1])) % SIZES.vocabulary).astype(np.int32)
    model = WordModel(SIZES, rng, counts.frequencies(text, SIZES.vocabulary), output_dtype=np.float32)
    return Task("word", text, text, model, batch=4, step_size=1e-2, measured_blocks=8)


@pytest.mark.parametrize("size", [1, 3])
def test_the_losses_are_those_of_one_rank(capsys, size):
    statuses = returned(on_ranks(size, lambda comm: losses_over_ranks.run(Collectives(comm), task(), 30)))
    assert statuses == [0] * size
    printed = capsys.readouterr().out.splitlines()
    rows = [list(map(float, line.split())) for line in printed if len(line.split()) == 4 and line[0].isdigit()]
    assert rows[0][0] == 1
    assert rows[-1][0] == 30
    assert rows[-1][1] < rows[0][1] - 0.5  # the training reduces the loss
    times = [line.split() for line in printed[printed.index("seconds of all steps") + 2 :]]
    assert [int(rank) for rank, *_ in times] == list(range(size))


def test_losses_without_gradients():
    whole = task().model
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, SIZES.vocabulary, (2, SIZES.window - 1 + SIZES.context))
    following = rng.integers(0, SIZES.vocabulary, (2, SIZES.context))
    right = whole.losses(tokens, following)
    for losses in returned(
        on_ranks(2, lambda comm: ShardedWordModel(whole, Collectives(comm)).losses(tokens, following))
    ):
        np.testing.assert_allclose(losses, right, rtol=1e-5)


def test_a_wrong_number_of_steps(capsys):
    with pytest.raises(SystemExit):
        losses_over_ranks.main(["--steps", "0"])
    assert "expected 1 or more, got 0" in capsys.readouterr().err
