"""The last layer of a trained language model. Most of its probabilities are tiny, which random weights never give."""

from __future__ import annotations

import functools

import numpy as np

#: Steps of training, after which the model's loss is lower than the loss of a model of word frequencies.
STEPS = 100


@functools.cache
def last_layer(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train the demo's word model for STEPS steps; return input, weight and targets of its loss on held-out text."""
    from ascend_grad.demo import corpus, tasks, training

    random = np.random.default_rng(0)
    task = tasks.words_task(corpus.read_corpus(corpus.standard_library()), random)
    for _ in training.train(task, STEPS, random):
        pass
    sizes = task.model.sizes
    tokens, following = training.measuring_blocks(task.held_out, rows // sizes.context, sizes)
    task.model.loss_and_gradient(tokens, following)
    return task.model.gradient_calls["linear_cross_entropy"]
