"""Train a small language model, a torch module, with this library's loss and with torch's.

Run ``python docs/examples/torch_losses.py``. It compares losses, times and peak memory of training with autograd.

Shapes in the comments: B sequences, T positions, N = B*T rows, W tokens in the local window, E numbers per embedded
token, D the width, K experts of F hidden units.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import rms_norm

import ascend_grad.torch as agt
from ascend_grad.demo import counts, words
from ascend_grad.demo.corpus import read_corpus, standard_library
from ascend_grad.demo.language_model import Sizes
from ascend_grad.demo.training import random_batch, schedule

DESCRIPTION = """\
Train a language model of 30000 words on the source text of this Python's standard library, as a torch module,
once with each loss: this library's and torch's, the latter with all logits in memory and with its chunked option. The
seed, and so the batches, are the same. Loss, time and peak memory are printed.
"""
#: Maximum number of vocabulary entries, and the number of rows of the table, each a mean over steps.
VOCABULARY, ROWS = 30_000, 8
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


class LanguageModel(nn.Module):
    """A model that computes the mean of -log p(following token) from tokens.

    A window of the last W tokens is embedded and mixed; then come causal attention over the last T positions and a
    layer of experts mixed by a softmax gate. The last of the D numbers that the loss gets is 1 in every row, so that
    the last column of its weight is a bias.

    Parameters
    ----------
    sizes : Sizes
        The sizes.
    loss : torch.nn.LinearCrossEntropyLoss or LinearCrossEntropyLoss
        The last layer and the loss, for D features and the whole vocabulary.
    """

    def __init__(self, sizes: Sizes, loss: nn.Module):
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.embedding)
        self.window = nn.Linear(sizes.window * sizes.embedding, width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, sizes.experts, bias=False)
        self.up = nn.Linear(width, sizes.experts * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.experts * sizes.hidden, width, bias=False)
        self.loss = loss
        # True where attention may not look: at later positions.
        self.register_buffer("future", torch.ones(1, 1, sizes.context, sizes.context, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Compute the loss from tokens [B, W-1+T], the first W-1 only for the windows, and following tokens [B, T]."""
        windows = self.embedding(tokens).unfold(1, self.sizes.window, 1)  # [B, T, E, W]
        x = self.window(windows.flatten(2))  # [B, T, D]
        for layer in (self._attend, self._mix_experts):
            x = x + self._with_normal(layer, x)
        features = rms_norm(x, x.shape[-1:]).flatten(0, 1)  # [N, D]
        features = torch.cat([features[:, :-1], torch.ones_like(features[:, :1])], dim=1)
        return self.loss(features, following.flatten())

    @staticmethod
    def _with_normal(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return layer(rms_norm(x, x.shape[-1:]))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = (3, self.sizes.heads, self.sizes.width // self.sizes.heads)
        # Each of the three has the shape [B, heads, T, D/heads].
        query, key, value = self.query_key_value(x).unflatten(-1, heads).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2)  # [B, heads, T, T]
        weights = agt.scaled_masked_softmax(scores, self.future, 1 / math.sqrt(heads[-1]))
        return self.attended((weights @ value).transpose(1, 2).flatten(2))

    def _mix_experts(self, x: torch.Tensor) -> torch.Tensor:
        gate = agt.softmax(self.gate(x))  # [B, T, K]
        hidden = self.up(x).relu().unflatten(-1, (self.sizes.experts, self.sizes.hidden))  # [B, T, K, F]
        return self.down((hidden * gate[..., None]).flatten(2))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example with these arguments, or with the arguments of the process, and return the exit status."""
    in_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("torch_losses.py", description=DESCRIPTION, formatter_class=in_lines)
    parser.add_argument(
        "--bfloat16", action="store_true", help="under autocast (torch's takes minutes on CPUs without AVX-512)"
    )
    parser.add_argument("--save-plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"argument --steps: expected 1 or more, got {arguments.steps}")
    if not hasattr(torch.nn, "LinearCrossEntropyLoss"):
        needed = "torch 2.13 or newer, whose torch.nn.LinearCrossEntropyLoss it compares with"
        parser.error(f"the demo needs {needed}, found {torch.__version__}")

    split = words.split(read_corpus(standard_library()).training)
    numbers = words.numbering(split, VOCABULARY)
    text = words.numbered(split, numbers)
    sizes = Sizes(vocabulary=len(numbers) + 1, window=4, embedding=64)
    print(f"{len(text) / 1e6:.1f} million tokens, {sizes.vocabulary} different ones, {arguments.steps} steps")
    settings = sizes, arguments.steps, arguments.seed, arguments.bfloat16
    runs = {name: in_a_process(name, text, *settings) for name in LOSSES}
    _print(runs)
    if arguments.save_plot:
        _draw(arguments.save_plot, runs)
    return 0


def _print(runs: dict[str, Run]) -> None:
    print(f"\n{'bits per token, mean of steps':<32}" + "".join(f"{name:>16}" for name in runs))
    steps = len(next(iter(runs.values())).bits)
    width = max(1, steps // ROWS)
    for start in range(0, steps, width):
        end = min(start + width, steps)
        means = [sum(run.bits[start:end]) / (end - start) for run in runs.values()]
        print(f"{f'{start + 1} to {end}':<32}" + "".join(f"{mean:16.3f}" for mean in means))
    for label, values in (
        ("seconds, all steps", [run.seconds for run in runs.values()]),
        ("milliseconds, loss and gradients", [1e3 * run.loss_seconds for run in runs.values()]),
        ("MB of memory, at most", [run.peak_bytes / 1e6 for run in runs.values()]),
    ):
        print(f"{label:<32}" + "".join(f"{value:16.1f}" for value in values))


def _draw(path: Path, runs: dict[str, Run]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, run), style in zip(runs.items(), ("-", "--", ":")):
        axes.plot(range(1, len(run.bits) + 1), run.bits, style, label=name)
    axes.set(xlabel="step", ylabel="bits per token", title="The same model, trained with each loss")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"\nlosses drawn to {path}")


if __name__ == "__main__":
    raise SystemExit(main())
