"""A next-word model, whose logits are never in memory all at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

import ascend_grad as ag

from ..arrays import BFLOAT16
from .language_model import LanguageModel, Sizes


class WordModel(LanguageModel):
    """A `LanguageModel` whose last layer and loss are one call of `linear_cross_entropy`.

    The last of the D hidden numbers is 1 in every row, which makes the last column of the output weights a bias. It
    starts as the logarithm of how often each token occurs; so the untrained model is as good as a count of tokens.

    Parameters
    ----------
    sizes, rng, dtype
        As in `LanguageModel`.
    frequencies : ndarray, shape (V,)
        The relative frequency of each token.
    output_dtype : dtype, default bfloat16
        Of the last layer's products. The optimiser sees its weights in `dtype`.
    """

    def __init__(
        self,
        sizes: Sizes,
        rng: np.random.Generator,
        frequencies: NDArray,
        dtype: DTypeLike = np.float32,
        output_dtype: DTypeLike = BFLOAT16,
    ):
        super().__init__(sizes, rng, dtype)
        self._output_dtype = output_dtype
        self._values["logits"][...] *= 0.1
        self._values["logits"][:, -1] = np.log(frequencies)

    def _output_arguments(self, hidden: NDArray, following: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        features = hidden.astype(self._output_dtype)  # [N, D]
        features[:, -1] = 1
        return features, self._values["logits"].astype(self._output_dtype), following

    def _losses(self, hidden: NDArray, following: NDArray) -> NDArray:
        arguments = self._output_arguments(hidden, following)
        return ag.linear_cross_entropy(*arguments, reduction="none", return_grad=False).loss

    def _loss_and_gradient(self, hidden: NDArray, following: NDArray) -> tuple[float, NDArray]:
        arguments = self._output_arguments(hidden, following)
        loss, d_features, d_weight = self._library_gradient(ag.linear_cross_entropy, *arguments)
        self._gradients["logits"][...] = d_weight
        d_hidden = d_features.astype(hidden.dtype)
        d_hidden[:, -1] = 0
        return float(loss), d_hidden
