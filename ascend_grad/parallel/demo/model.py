"""The demo's next-word model, whose output layer is split over ranks by words. All else is the same on every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...demo.language_model import LanguageModel, Sizes
from ..communicators import Collectives
from ..ranges import vocab_range
from ..vocabulary_parallel import linear_cross_entropy


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
