"""``ascend-grad demo``: train a next-byte model whose softmax gradients are all computed by this library."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import ascend_grad as ag

from .errors import CommandError
from .options import add_execution_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from .byte_model import ByteModel

STEPS = 600

DESCRIPTION = """\
Train a next-byte model on the source text of this Python's own standard library, about a minute on two cores.

Its gradients through log-softmax (the loss), scaled masked softmax (attention) and softmax (a gate) are computed by
this library, the rest by NumPy. They are first checked against the reference backend. At the end the model is
measured on files that it was not trained on, beside a count of byte pairs, and the gradients are timed beside the
same formulas in NumPy.

The matrix products are NumPy's and run on as many threads as its BLAS takes; where other programs keep the cores
busy, OPENBLAS_NUM_THREADS=1 is faster.
"""
EPILOG = """\
examples:
  ascend-grad demo
  ascend-grad demo --steps 100 --threads 1 --save-plot loss.png
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a next-byte model with this library's gradients",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=_at_least(1), default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--save-plot", type=Path, metavar="FILE", help="draw the loss to this file (needs matplotlib)")
    add_execution_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from .byte_model import ByteModel, Sizes
    from .corpus import bigram_bits, read_corpus, standard_library
    from .training import held_out_bits, measuring_blocks, random_batch

    figure = _new_figure(args.save_plot) if args.save_plot else None
    with ExitStack() as settings:
        if args.backend is not None:
            settings.enter_context(ag.use_backend(args.backend))
        settings.callback(ag.set_num_threads, None)
        ag.set_num_threads(args.threads)

        directory = standard_library()
        corpus = read_corpus(directory)
        print(
            f"text: {corpus.files} files of {directory}, {len(corpus.training) / 1e6:.1f} MB to train on, "
            f"{len(corpus.held_out) / 1e6:.1f} MB held out"
        )
        rng = np.random.default_rng(args.seed)
        model = ByteModel(Sizes(), rng)
        model.loss_and_gradient(*random_batch(corpus.training, model.sizes, rng))
        if not _gradients_are_right(model):
            return 1
        losses, seconds = _train(model, corpus.training, args.steps, rng)
        blocks, following = measuring_blocks(corpus.held_out, model.sizes)
        model_bits = held_out_bits(model, blocks, following)
        bigram = bigram_bits(corpus.training, blocks[:, model.sizes.window - 1 :], following)
        print(f"\nbits per byte of the held-out text: model {model_bits:.3f}, byte-bigram count {bigram:.3f}")
        _time_gradients(model, seconds)
    if figure is not None:
        _draw(figure, args.save_plot, losses, model_bits, bigram)
    return 0


def _gradients_are_right(model: ByteModel) -> bool:
    from .comparison import ALLOWED_ERRORS, rounding_errors

    print(f"\ngradients against the reference backend, in rounding errors of float32 (allowed: {ALLOWED_ERRORS:g})")
    right = True
    for name, arguments in model.gradient_calls.items():
        errors = rounding_errors(getattr(ag, name), arguments)
        # Written so that NaN fails.
        good = errors <= ALLOWED_ERRORS
        right = right and good
        print(f"  {name:<32}{'x'.join(map(str, arguments[0].shape)):<14}{errors:8.2f}  {'ok' if good else 'WRONG'}")
    return right


def _train(
    model: ByteModel, text: NDArray[np.uint8], steps: int, rng: np.random.Generator
) -> tuple[list[float], float]:
    """The loss of every step in bits per byte, and the time of all of them."""
    from tqdm import tqdm

    from .training import train

    print(f"\ntraining {model.parameters.size} parameters for {steps} steps", flush=True)
    model.gradient_seconds = 0.0
    losses: list[float] = []
    start = perf_counter()
    # In a log the bar is a new line each time, so there it shall be rare.
    seldom = 0.1 if sys.stderr.isatty() else 10
    with tqdm(train(model, text, steps, rng), total=steps, unit="step", mininterval=seldom) as progress:
        for loss in progress:
            losses.append(loss)
            recent = losses[-20:]
            progress.set_postfix_str(f"{sum(recent) / len(recent):.3f} bits per byte", refresh=False)
    return losses, perf_counter() - start


def _time_gradients(model: ByteModel, seconds: float) -> None:
    from .comparison import seconds_beside_numpy

    print(f"\nthe library's gradients took {model.gradient_seconds:.2f} s of {seconds:.1f} s of training")
    print(f"  {'one call, milliseconds (medians)':<46}{'library':>9}{'NumPy':>9}")
    for name, arguments in model.gradient_calls.items():
        ours, numpys = seconds_beside_numpy(getattr(ag, name), arguments)
        shape = "x".join(map(str, arguments[0].shape))
        print(f"  {name:<32}{shape:<14}{1e3 * ours:9.3f}{1e3 * numpys:9.3f}{numpys / ours:8.1f}x")


def _new_figure(path: Path) -> Figure:
    """An empty figure, or the reason why there will be no plot: known before the training, not after it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(f"--save-plot needs matplotlib (pip install 'ascend-grad[plot]'): {error}") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise CommandError(f"--save-plot {path}: the name must end in one of {', '.join(sorted(kinds))}")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"--save-plot {path}: cannot write in {path.parent}")
    return figure


def _draw(figure: Figure, path: Path, losses: list[float], model_bits: float, bigram: float) -> None:
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="0.6", linewidth=0.8, label="model, training batch")
    axes.axhline(bigram, color="tab:red", linestyle="--", label=f"byte-bigram count, held out: {bigram:.2f}")
    axes.axhline(model_bits, color="tab:blue", label=f"model after training, held out: {model_bits:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title="Next-byte model on the Python standard library")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"\nloss drawn to {path}")


def _at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"expected {low} or more, got {value}")
        return value

    return integer
