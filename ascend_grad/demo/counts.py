"""Baselines for a model: the frequencies of tokens, and of pairs of tokens, in the training text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def frequencies(training: NDArray, vocabulary: int) -> NDArray[np.float64]:
    """Return the relative frequency of every token, each counted once more than it occurs."""
    counts = np.bincount(training, minlength=vocabulary) + 1.0
    return counts / counts.sum()


def unigram_bits(training: NDArray, following: NDArray, vocabulary: int) -> float:
    """Return the bits per token of a count of tokens, fitted on one text and measured on another."""
    return -float(np.mean(np.log2(frequencies(training, vocabulary)[following])))


def bigram_bits(training: NDArray, previous: NDArray, following: NDArray, vocabulary: int) -> float:
    """Return the bits per token of a count of pairs, fitted on one text and measured on pairs of tokens of another.

    Smoothed as Witten and Bell (1991) do: a token that was followed by t different ones leaves the weight of t more
    pairs to the frequencies of single tokens.
    """
    pairs, counts = np.unique(_pairs(training[:-1], training[1:], vocabulary), return_counts=True)
    leaving = np.bincount(training[:-1], minlength=vocabulary)
    kinds = np.bincount(pairs // vocabulary, minlength=vocabulary)
    wanted = _pairs(previous, following, vocabulary)
    places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[places] == wanted, counts[places], 0)
    # A token that was never followed by another leaves all to the single ones.
    weight = np.maximum(kinds, 1)[previous]
    single = frequencies(training, vocabulary)[following]
    return -float(np.mean(np.log2((seen + weight * single) / (leaving[previous] + weight))))


def _pairs(previous: NDArray, following: NDArray, vocabulary: int) -> NDArray[np.int64]:
    """Return a number for every pair."""
    return previous.astype(np.int64) * vocabulary + following
