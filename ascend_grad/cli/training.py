"""Training and measuring the demo's model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .byte_model import ByteModel, Sizes

BATCH = 32
#: The largest step size, reached after the warm-up; from there it falls along half a cosine.
STEP_SIZE = 8e-3
WARM_UP = 50
#: Blocks to measure on, spread evenly over the text.
MEASURED_BLOCKS = 4096


class Adam:
    """The optimiser of Kingma and Ba (2015), on one parameter vector, in place."""

    MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.98, 1e-8

    def __init__(self, parameters: NDArray):
        self._parameters = parameters
        self._mean = np.zeros_like(parameters)
        self._square = np.zeros_like(parameters)
        self._count = 0

    def step(self, gradient: NDArray, step_size: float) -> None:
        self._count += 1
        self._mean += (1 - self.MEAN_DECAY) * (gradient - self._mean)
        self._square += (1 - self.SQUARE_DECAY) * (gradient * gradient - self._square)
        # Both averages started at zero; these undo that.
        mean = self._mean / (1 - self.MEAN_DECAY**self._count)
        square = self._square / (1 - self.SQUARE_DECAY**self._count)
        self._parameters -= step_size * mean / (np.sqrt(square) + self.EPSILON)


def train(model: ByteModel, text: NDArray[np.uint8], steps: int, rng: np.random.Generator) -> Iterator[float]:
    """Train on random blocks of the text; yields the loss of each step, in bits per byte."""
    optimiser = Adam(model.parameters)
    for step in range(steps):
        loss = model.loss_and_gradient(*random_batch(text, model.sizes, rng))
        optimiser.step(model.gradient, step_size(step, steps))
        yield loss / math.log(2)


def step_size(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    warm_up = min(WARM_UP, steps // 2)
    if step < warm_up:
        return STEP_SIZE * (step + 1) / warm_up
    return STEP_SIZE * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def random_batch(text: NDArray[np.uint8], sizes: Sizes, rng: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Blocks from anywhere in the text, as `ByteModel.loss_and_gradient` takes them."""
    return _blocks(text, rng.integers(len(text) - sizes.window - sizes.context + 1, size=BATCH), sizes)


def measuring_blocks(text: NDArray[np.uint8], sizes: Sizes) -> tuple[NDArray, NDArray]:
    """Blocks spread evenly over the text, none of which predicts a byte that another one predicts."""
    count = (len(text) - sizes.window) // sizes.context
    chosen = np.linspace(0, count - 1, min(count, MEASURED_BLOCKS)).astype(np.intp)
    return _blocks(text, chosen * sizes.context, sizes)


def held_out_bits(model: ByteModel, text: NDArray[np.uint8], following: NDArray[np.uint8]) -> float:
    """Bits per byte of the model on such blocks."""
    nats = 0.0
    for start in range(0, len(text), BATCH):
        batch = slice(start, start + BATCH)
        log_p = model.log_probabilities(text[batch])
        nats -= float(np.sum(log_p[np.arange(len(log_p)), following[batch].reshape(-1)], dtype=np.float64))
    return nats / following.size / math.log(2)


def _blocks(text: NDArray[np.uint8], starts: NDArray, sizes: Sizes) -> tuple[NDArray, NDArray]:
    """Blocks of W-1+T bytes, and the byte that follows each of their last T."""
    blocks = text[starts[:, None] + np.arange(sizes.window + sizes.context)]
    return blocks[:, :-1], blocks[:, sizes.window :]
