"""Training of the same model with each loss, each in a process of its own to measure its peak memory."""

from __future__ import annotations

import math
import multiprocessing
import resource
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import ascend_grad.torch as agt

from ...demo import counts
from ...demo.language_model import Sizes
from ...demo.training import random_batch, schedule
from .model import LanguageModel

#: Number of sequences in a step, and the largest step size.
BATCH, STEP_SIZE = 16, 1e-2

#: Constructors of the losses by name, called with the numbers of features and of classes.
LOSSES: dict[str, Callable[[int, int], nn.Module]] = {
    "ascend_grad": agt.LinearCrossEntropyLoss,
    "torch": lambda features, classes: torch.nn.LinearCrossEntropyLoss(features, classes),
    "torch, chunked": lambda features, classes: torch.nn.LinearCrossEntropyLoss(
        features, classes, options=torch.nn.LinearCrossEntropyOptions()
    ),
}


@dataclass(frozen=True)
class Run:
    """A training with one loss.

    Attributes
    ----------
    bits : list of float
        The loss of every step, in bits per token.
    seconds : float
        The time of all steps.
    loss_seconds : float
        The time of the last layer and the loss alone, forward and backward, on the features of one more batch.
    peak_bytes : int
        The peak memory of the process, less its peak before the first step.
    """

    bits: list[float]
    seconds: float
    loss_seconds: float
    peak_bytes: int


def in_a_process(name: str, text: NDArray[np.int32], sizes: Sizes, steps: int, seed: int, bfloat16: bool) -> Run:
    """Train in a new process, whose memory is freed at its end."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(train, (name, text, sizes, steps, seed, bfloat16))


def train(name: str, text: NDArray[np.int32], sizes: Sizes, steps: int, seed: int, bfloat16: bool) -> Run:
    """Train with the loss of this name, on random blocks of the text, under autocast to bfloat16 or in float32."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = LanguageModel(sizes, LOSSES[name](sizes.width, sizes.vocabulary))
    weight = model.loss.linear.weight
    with torch.no_grad():  # untrained, the model is as good as a count of tokens
        weight[:, -1] = torch.from_numpy(np.log(counts.frequencies(text, sizes.vocabulary)))
    optimiser = torch.optim.Adam(model.parameters(), lr=STEP_SIZE, betas=(0.9, 0.98), eps=1e-8)
    rates = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: schedule(min(step, steps - 1), steps))
    before = _peak_bytes()
    bits = []
    start = perf_counter()
    for _ in range(steps):
        tokens, following = (torch.from_numpy(each.astype(np.int64)) for each in random_batch(text, BATCH, sizes, rng))
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(tokens, following)
        loss.backward()
        optimiser.step()
        rates.step()
        bits.append(loss.item() / math.log(2))
    seconds = perf_counter() - start
    loss_seconds = _loss_seconds(model.loss, following.flatten(), sizes.width, bfloat16)
    return Run(bits, seconds, loss_seconds, _peak_bytes() - before)


def _loss_seconds(loss: nn.Module, following: torch.Tensor, width: int, bfloat16: bool) -> float:
    features = torch.randn(len(following), width, requires_grad=True)
    times = []
    for _ in range(3):
        start = perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            value = loss(features, following)
        value.backward()
        times.append(perf_counter() - start)
    return min(times)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
