"""The demo's two tasks: predict the text's bytes, or its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays import BFLOAT16
from . import counts, words
from .byte_model import ByteModel
from .corpus import Corpus
from .language_model import LanguageModel, Sizes
from .word_model import WordModel

#: Words in the vocabulary, the unknown one among them.
VOCABULARY = 30_000


@dataclass(frozen=True)
class Task:
    """A text as numbers, a model for it, and how it is trained."""

    #: The meaning of one number.
    unit: str
    #: The numbers to learn from, and those to be measured on.
    training: NDArray
    held_out: NDArray
    #: The model before its training.
    model: LanguageModel
    #: Number of sequences in a step.
    batch: int
    #: The largest step size.
    step_size: float
    #: Maximum number of sequences to measure on.
    measured_blocks: int


def bytes_task(corpus: Corpus, rng: np.random.Generator) -> Task:
    """Predict the next byte."""
    model = ByteModel(Sizes(vocabulary=256), rng)
    return Task("byte", corpus.training, corpus.held_out, model, batch=32, step_size=8e-3, measured_blocks=4096)


def words_task(corpus: Corpus, rng: np.random.Generator, output_dtype: DTypeLike = BFLOAT16) -> Task:
    """Predict the next word, number, operator or blank space."""
    split = words.split(corpus.training)
    numbers = words.numbering(split, VOCABULARY)
    training, held_out = (words.numbered(part, numbers) for part in (split, words.split(corpus.held_out)))
    sizes = Sizes(vocabulary=len(numbers) + 1, window=4, embedding=64)
    model = WordModel(sizes, rng, counts.frequencies(training, sizes.vocabulary), output_dtype=output_dtype)
    return Task("token", training, held_out, model, batch=16, step_size=1e-2, measured_blocks=1024)


#: Functions that make the tasks, by the names on the command line.
TASKS: dict[str, Callable[[Corpus, np.random.Generator], Task]] = {"words": words_task, "bytes": bytes_task}
