"""Training and measuring the demo's model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .language_model import LanguageModel, Sizes
from .tasks import Task

#: Steps until the step size is largest; from there it falls along half a cosine.
WARM_UP = 50


class Adam:
    """The optimiser of Kingma and Ba (2015), on one parameter vector, in place."""

    MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.98, 1e-8
    #: Numbers updated at once: they stay in the cache meanwhile.
    BLOCK = 2**15

    def __init__(self, parameters: NDArray):
        self._parameters = parameters
        self._mean = np.zeros_like(parameters)
        self._square = np.zeros_like(parameters)
        self._scratch = np.empty_like(parameters[: self.BLOCK])
        self._count = 0

    def step(self, gradient: NDArray, step_size: float) -> None:
        self._count += 1
        # Both averages started at zero; these undo that.
        unbiased_mean = 1 / (1 - self.MEAN_DECAY**self._count)
        unbiased_root = math.sqrt(1 / (1 - self.SQUARE_DECAY**self._count))
        for start in range(0, gradient.size, self.BLOCK):
            block = slice(start, start + self.BLOCK)
            g, mean, square = gradient[block], self._mean[block], self._square[block]
            scratch = self._scratch[: len(g)]
            np.multiply(g, 1 - self.MEAN_DECAY, out=scratch)
            mean *= self.MEAN_DECAY
            mean += scratch
            np.multiply(g, g, out=scratch)
            scratch *= 1 - self.SQUARE_DECAY
            square *= self.SQUARE_DECAY
            square += scratch
            np.sqrt(square, out=scratch)
            scratch *= unbiased_root
            scratch += self.EPSILON
            np.divide(mean, scratch, out=scratch)
            scratch *= step_size * unbiased_mean
            self._parameters[block] -= scratch


def train(task: Task, steps: int, rng: np.random.Generator) -> Iterator[float]:
    """Train on random blocks of the text; yields the loss of each step, in bits per token."""
    optimiser = Adam(task.model.parameters)
    for step in range(steps):
        loss = task.model.loss_and_gradient(*random_batch(task.training, task.batch, task.model.sizes, rng))
        optimiser.step(task.model.gradient, task.step_size * schedule(step, steps))
        yield loss / math.log(2)


def schedule(step: int, steps: int) -> float:
    """Return the share of the largest step size: a linear warm-up, then half a cosine down to zero."""
    warm_up = min(WARM_UP, steps // 2)
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def random_batch(text: NDArray, count: int, sizes: Sizes, rng: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Return random blocks of the text, as `LanguageModel.loss_and_gradient` takes them."""
    return _blocks(text, rng.integers(len(text) - sizes.window - sizes.context + 1, size=count), sizes)


def measuring_blocks(text: NDArray, at_most: int, sizes: Sizes) -> tuple[NDArray, NDArray]:
    """Return blocks spread evenly over the text, none of which predicts a token that another one predicts."""
    count = (len(text) - sizes.window) // sizes.context
    blocks = np.linspace(0, count - 1, min(count, at_most)).astype(np.intp)
    return _blocks(text, blocks * sizes.context, sizes)


def held_out_bits(model: LanguageModel, tokens: NDArray, following: NDArray, batch: int) -> float:
    """Return the model's bits per token on such blocks."""
    nats = 0.0
    for start in range(0, len(tokens), batch):
        part = slice(start, start + batch)
        nats += float(np.sum(model.losses(tokens[part], following[part]), dtype=np.float64))
    return nats / following.size / math.log(2)


def _blocks(text: NDArray, starts: NDArray, sizes: Sizes) -> tuple[NDArray, NDArray]:
    """Return blocks of W-1+T tokens, and the token that follows each of their last T."""
    blocks = text[starts[:, None] + np.arange(sizes.window + sizes.context)]
    return blocks[:, :-1], blocks[:, sizes.window :]
