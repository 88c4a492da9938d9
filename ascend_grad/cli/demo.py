"""The command ``ascend-grad demo``: trains a language model with the gradients of this library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import ascend_grad as ag

from .errors import CommandError, writing
from .exit_statuses import exit_statuses
from .new_files import new_figure
from .options import add_execution_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..demo.language_model import LanguageModel
    from ..demo.tasks import Task

#: Default number of steps: about a minute on two cores.
STEPS = {"words": 110, "bytes": 600}

SUMMARY = "train a language model with this library's gradients"
DESCRIPTION = """\
Train a language model on the source text of this Python's own standard library, about a minute on two cores.

It predicts the next of 30000 words, numbers, operators and blanks (--model words), or the next byte (--model bytes).
This library computes the gradients through the loss (linear cross-entropy with bfloat16 weights, or log-softmax),
through attention (scaled masked softmax) and through a gate (softmax); NumPy computes the rest. The gradients are first
checked against the reference backend. At the end, the model is compared, on files that it was not trained on, with
counts of tokens and of pairs of tokens, and the gradients with the time of the same formulas in NumPy. The last line
has the result: how much faster than NumPy the gradients are, and the bits per token of the model.

NumPy computes the matrix products in between, on the threads of its BLAS. If other programs keep the cores busy,
threads wait for each other: --threads 1 limits this library's threads, OPENBLAS_NUM_THREADS=1 limits NumPy's.

The results are printed; only the file of --save-plot is written.
"""
EPILOG = """\
examples:
  ascend-grad demo
  ascend-grad demo --steps 400 --save-plot loss.png
  ascend-grad demo --model bytes --threads 1
"""

STATUSES = exit_statuses(
    "the model was trained and measured, whatever the result",
    "a gradient exceeds its error bound; nothing was trained",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=list(STEPS), default="words", help="what the model predicts (default: %(default)s)"
    )
    default = ", ".join(f"{steps} for {model}" for model, steps in STEPS.items())
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help=f"training steps (default: {default})")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="random seed (default: %(default)s)")
    parser.add_argument("--save-plot", type=Path, metavar="FILE", help="draw the loss to this file (needs matplotlib)")
    add_execution_options(parser)


def run(args: argparse.Namespace) -> int:
    from ..demo.corpus import TooLittleTextError, read_corpus, standard_library
    from ..demo.counts import bigram_bits, unigram_bits
    from ..demo.tasks import TASKS
    from ..demo.training import held_out_bits, measuring_blocks, random_batch

    figure = new_figure("--save-plot", args.save_plot) if args.save_plot else None
    with ExitStack() as settings:
        if args.backend is not None:
            settings.enter_context(ag.use_backend(args.backend))
        settings.callback(ag.set_num_threads, None)
        ag.set_num_threads(args.threads)

        directory = standard_library()
        try:
            corpus = read_corpus(directory)
        except TooLittleTextError as error:
            raise CommandError(str(error)) from error
        rng = np.random.default_rng(args.seed)
        task = TASKS[args.model](corpus, rng)
        model, sizes = task.model, task.model.sizes
        print(
            f"text: {corpus.files} files of {directory}, {len(task.training) / 1e6:.1f} million {task.unit}s to train "
            f"on, {len(task.held_out) / 1e6:.1f} held out, {sizes.vocabulary} different {task.unit}s"
        )
        model.loss_and_gradient(*random_batch(task.training, task.batch, sizes, rng))
        if not _gradients_are_right(model):
            return 1
        losses, seconds = _train(task, args.steps or STEPS[args.model], rng)
        blocks, following = measuring_blocks(task.held_out, task.measured_blocks, sizes)
        previous = blocks[:, sizes.window - 1 :]
        bits = {
            "model": held_out_bits(model, blocks, following, task.batch),
            f"{task.unit} count": unigram_bits(task.training, following, sizes.vocabulary),
            f"{task.unit}-bigram count": bigram_bits(task.training, previous, following, sizes.vocabulary),
        }
        results = ", ".join(f"{name} {value:.3f}" for name, value in bits.items())
        print(f"\nbits per {task.unit} of the held-out text: {results}")
        low, high = _time_gradients(model, seconds)
        print(
            f"\nresult: gradients {low:.1f} to {high:.1f} times as fast as NumPy's, each within its error bound; the "
            f"model takes {bits['model']:.3f} bits per {task.unit}"
        )
    if figure is not None:
        _draw(figure, args.save_plot, task.unit, losses, bits)
    return 0


def _gradients_are_right(model: LanguageModel) -> bool:
    from ..demo.comparison import error_share, problem

    print("\ngradients against the reference backend: largest error, divided by its bound")
    right = True
    for name, arguments in model.gradient_calls.items():
        gradient = getattr(ag, name)
        share = error_share(gradient, arguments)
        # The comparison is False for NaN, so NaN is wrong.
        good = share <= 1
        right = right and good
        print(f"  {name:<32}{problem(gradient, arguments):<16}{share:8.3f}  {'ok' if good else 'WRONG'}")
    return right


def _train(task: Task, steps: int, rng: np.random.Generator) -> tuple[list[float], float]:
    """Train. Return the loss of every step in bits per token, and the time of all steps."""
    from tqdm import tqdm

    from ..demo.training import train

    print(f"\ntraining {task.model.parameters.size} parameters for {steps} steps", flush=True)
    task.model.gradient_seconds = 0.0
    losses: list[float] = []
    start = perf_counter()
    # Each update of the bar is a new line in a log: update it rarely there.
    seldom = 0.1 if sys.stderr.isatty() else 10
    with tqdm(train(task, steps, rng), total=steps, unit="step", mininterval=seldom) as progress:
        for loss in progress:
            losses.append(loss)
            recent = losses[-20:]
            progress.set_postfix_str(f"{sum(recent) / len(recent):.3f} bits per {task.unit}", refresh=False)
    return losses, perf_counter() - start


def _time_gradients(model: LanguageModel, seconds: float) -> tuple[float, float]:
    """Print the times of the gradients. Return the smallest and the largest ratio of NumPy's time to the library's."""
    from ..demo.comparison import compare_megabytes, compare_seconds, problem

    print(f"\nthe library's gradients took {model.gradient_seconds:.2f} s of {seconds:.1f} s of training")
    print(f"  {'one call, milliseconds (medians)':<48}{'library':>9}{'NumPy':>9}")
    ratios = []
    for name, arguments in model.gradient_calls.items():
        gradient = getattr(ag, name)
        ours, numpys = compare_seconds(gradient, arguments)
        ratios.append(numpys / ours)
        print(
            f"  {name:<32}{problem(gradient, arguments):<16}{1e3 * ours:9.3f}{1e3 * numpys:9.3f}{numpys / ours:8.1f}x"
        )
    if "linear_cross_entropy" in model.gradient_calls:
        ours, numpys = compare_megabytes(*model.gradient_calls["linear_cross_entropy"])
        print(f"  the loss of all words takes {ours:.0f} MB beyond its results; NumPy's logits take {numpys:.0f} MB")
    return min(ratios), max(ratios)


def _draw(figure: Figure, path: Path, unit: str, losses: list[float], bits: dict[str, float]) -> None:
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="0.6", linewidth=0.8, label="model, training batch")
    for (name, value), color in zip(bits.items(), ("tab:blue", "tab:orange", "tab:red")):
        style = "-" if name == "model" else "--"
        axes.axhline(value, color=color, linestyle=style, label=f"{name}, held out: {value:.2f}")
    axes.set(xlabel="step", ylabel=f"bits per {unit}", title="Language model of the Python standard library")
    axes.legend()
    with writing(f"--save-plot {path}"):
        figure.savefig(path, dpi=150)
    print(f"\nloss drawn to {path}")


def _at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"expected {low} or more, got {value}")
        return value

    return integer
