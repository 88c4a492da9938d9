"""A next-byte model: its loss is the log-softmax of 256 logits, computed one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .language_model import LanguageModel


class ByteModel(LanguageModel):
    """A `LanguageModel` whose logits are few enough to be kept."""

    def _log_probabilities(self, hidden: NDArray) -> NDArray:
        return ag.log_softmax(hidden @ self._values["logits"].T)  # [N, V]

    def _losses(self, hidden: NDArray, following: NDArray) -> NDArray:
        return -self._log_probabilities(hidden)[np.arange(len(hidden)), following]

    def _loss_and_gradient(self, hidden: NDArray, following: NDArray) -> tuple[float, NDArray]:
        log_p = self._log_probabilities(hidden)
        of_targets = np.arange(len(hidden)), following
        d_log_p = np.zeros_like(log_p)
        d_log_p[of_targets] = -1 / len(log_p)
        d_logits = self._library_gradient(ag.log_softmax_backward, d_log_p, log_p)  # [N, V]
        np.matmul(d_logits.T, hidden, out=self._gradients["logits"])
        return -float(np.mean(log_p[of_targets])), d_logits @ self._values["logits"]
