"""The command ``python -m ascend_grad.torch.demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ...demo import words
from ...demo.corpus import read_corpus, standard_library
from ...demo.language_model import Sizes
from .comparison import LOSSES, Run, in_a_process

DESCRIPTION = """\
Train a language model of 30000 words on the source text of this Python's standard library, as a torch module,
once with each loss: this library's and torch's, the latter with all logits in memory and with its chunked option. The
seed, and so the batches, are the same. Loss, time and peak memory are printed.
"""
#: Maximum number of vocabulary entries, and the number of rows of the table, each a mean over steps.
VOCABULARY, ROWS = 30_000, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; default: the arguments of the process.

    Returns
    -------
    int
        The exit status, 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ascend_grad.torch.demo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--bfloat16", action="store_true", help="under autocast (torch's takes minutes on CPUs without AVX-512)"
    )
    parser.add_argument("--save-plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")
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
