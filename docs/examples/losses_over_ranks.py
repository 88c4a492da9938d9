"""Train a language model whose output layer is split over processes by words; all else is the same on every rank.

Run ``mpiexec -n 2 python docs/examples/losses_over_ranks.py``. It shows that the split gives the losses of one process,
and measures the communication.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag
from ascend_grad.bench.parallel.timing import TimedCollectives
from ascend_grad.demo.corpus import read_corpus, standard_library
from ascend_grad.demo.language_model import LanguageModel, Sizes
from ascend_grad.demo.tasks import Task, words_task
from ascend_grad.demo.training import train
from ascend_grad.parallel import linear_cross_entropy
from ascend_grad.parallel.communicators import Collectives
from ascend_grad.parallel.ranges import vocab_range
from ascend_grad.parallel.transports import collectives

DESCRIPTION = """\
Train a language model of 30000 words on the source text of this Python's standard library, with the output layer and
the loss split over the processes of mpiexec by words; then once more on one of them, from the same parameters and with
the same batches. The losses of both are printed side by side, then the time of each process in kernels and in
communication (which includes waiting for others).

  mpiexec -n 2 python docs/examples/losses_over_ranks.py
"""


@dataclass(frozen=True)
class ShardSizes(Sizes):
    """The sizes of a `ShardedWordModel`."""

    entries: int = 0  # rows of the output layer on this rank

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return super().parameters() | {"logits": (self.entries, self.width)}


class ShardedWordModel(LanguageModel):
    """A `WordModel` that computes in float32, of which this rank has some rows of the output layer.

    Sums are deterministic: all ranks compute the same gradients, bit by bit, and their copies of the other layers stay
    the same.

    Parameters
    ----------
    whole : LanguageModel
        The model whose parameters this one starts with.
    ranks : Collectives
        The ranks that the vocabulary is split over.
    """

    def __init__(self, whole: LanguageModel, ranks: Collectives):
        self._ranks = ranks
        start, stop = vocab_range(whole.sizes.vocabulary, ranks.rank, ranks.size)
        sizes = ShardSizes(**dataclasses.asdict(whole.sizes), entries=stop - start)
        super().__init__(sizes, np.random.default_rng(0), whole.parameters.dtype)
        for name, value in self._values.items():
            value[...] = whole._values[name][start:stop] if name == "logits" else whole._values[name]

    def _features(self, hidden: NDArray) -> NDArray:
        features = hidden.copy()  # [N, D]
        features[:, -1] = 1
        return features

    def _losses(self, hidden: NDArray, following: NDArray) -> NDArray:
        features, weight = self._features(hidden), self._values["logits"]
        return linear_cross_entropy(
            features, weight, following, comm=self._ranks, reduction="none", return_grad=False
        ).loss

    def _loss_and_gradient(self, hidden: NDArray, following: NDArray) -> tuple[float, NDArray]:
        loss, d_hidden, d_weight = self._library_gradient(self._loss_of_features, self._features(hidden), following)
        self._gradients["logits"][...] = d_weight
        d_hidden[:, -1] = 0
        return float(loss), d_hidden

    def _loss_of_features(self, features: NDArray, following: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        return linear_cross_entropy(features, self._values["logits"], following, comm=self._ranks, deterministic=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example with these arguments, or with the arguments of the process, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="losses_over_ranks.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of each process; default: an equal share of the CPUs")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"argument --steps: expected 1 or more, got {arguments.steps}")

    from mpi4py import MPI

    ranks = collectives(MPI.COMM_WORLD, "comm", parser.prog)
    ag.set_num_threads(arguments.threads or max(1, len(os.sched_getaffinity(0)) // ranks.size))
    task = words_task(read_corpus(standard_library()), np.random.default_rng(arguments.seed), np.float32)
    return run(ranks, task, arguments.steps)


def run(ranks: Collectives, task: Task, steps: int) -> int:
    """Train a task whose model computes in float32, and print the results on the first rank."""
    timed = TimedCollectives(ranks)
    model = ShardedWordModel(task.model, timed)
    split_losses = _losses(dataclasses.replace(task, model=model), steps)
    times = ranks.allgather(np.array([model.gradient_seconds, timed.seconds]))
    alone = np.array([_losses(task, steps) if ranks.rank == 0 else np.zeros(steps)])
    ranks.allreduce(alone, "sum")
    if ranks.rank == 0:
        _print(task, split_losses, alone[0], times)
    return int(not np.allclose(split_losses, alone[0], rtol=1e-4))


def _losses(task: Task, steps: int) -> np.ndarray:
    """Train and return the loss of every step, in bits per word."""
    return np.array(list(train(task, steps, np.random.default_rng(0))))


def _print(task: Task, split_losses: np.ndarray, alone: np.ndarray, times: np.ndarray) -> None:
    size = len(times)
    print(f"{len(task.training) / 1e6:.1f} million words, {task.model.sizes.vocabulary} different ones")
    print(f"\nbits for each word\n{'step':<8}{f'{size} processes':>16}{'one process':>16}{'difference':>14}")
    for step in sorted({*range(0, len(alone), max(1, len(alone) // 10)), len(alone) - 1}):
        both = f"{split_losses[step]:16.6f}{alone[step]:16.6f}"
        print(f"{step + 1:<8}{both}{split_losses[step] - alone[step]:14.1e}")
    print(f"\nseconds of all steps\n{'process':<8}{'kernels':>16}{'communication':>16}")
    for rank, (gradients, communication) in enumerate(times):
        print(f"{rank:<8}{gradients - communication:16.2f}{communication:16.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
