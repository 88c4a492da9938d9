"""The last layer of a trained language model: most of its probabilities are tiny, as random weights never make them."""

from __future__ import annotations

import functools

import numpy as np

#: Steps of training: the model is below the count of single words by then.
STEPS = 100


@functools.cache
def last_layer(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input, weight and targets of the loss of the demo's model of words, trained for a while, on held-out text."""
    from ascend_grad.demo import corpus, tasks, training

    random = np.random.default_rng(0)
    task = tasks.words_task(corpus.read_corpus(corpus.standard_library()), random)
    for _ in training.train(task, STEPS, random):
        pass
    sizes = task.model.sizes
    tokens, following = training.measuring_blocks(task.held_out, rows // sizes.context, sizes)
    task.model.loss_and_gradient(tokens, following)
    return task.model.gradient_calls["linear_cross_entropy"]
