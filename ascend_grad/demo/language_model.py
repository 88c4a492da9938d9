"""A small next-token model in NumPy; every softmax in it, forward and backward, is computed by this library.

Each layer is a method that returns its result and a function: from the loss's gradient with respect to that result,
the function stores the gradients of the layer's parameters and returns the one with respect to the layer's input.

Shapes in the comments: B sequences, T positions, N = B*T rows, W tokens in the local window, E numbers per embedded
token, D the width, H attention heads of D/H, K experts of F hidden units, V tokens in the vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import ascend_grad as ag

Backward = Callable[[NDArray], NDArray]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a `LanguageModel`."""

    vocabulary: int  # V
    context: int = 64  # T
    window: int = 8  # W
    embedding: int = 32  # E
    width: int = 128  # D
    heads: int = 4  # H
    experts: int = 4  # K
    hidden: int = 128  # F

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter. Matrices multiply from the right, but for those with a row per token."""
        return {
            "embedding": (self.vocabulary, self.embedding),
            "window": (self.window * self.embedding, self.width),
            "query_key_value": (self.width, 3 * self.width),
            "attended": (self.width, self.width),
            "gate": (self.width, self.experts),
            "up": (self.width, self.experts * self.hidden),
            "down": (self.experts * self.hidden, self.width),
            "logits": (self.vocabulary, self.width),
        }


class LanguageModel(ABC):
    """Tokens in, a prediction of each next token out; subclasses make predictions from the last hidden layer.

    A window of the last W tokens is embedded and mixed; then come causal attention over the last T positions and a
    layer of experts mixed by a softmax gate.

    Parameters
    ----------
    sizes : Sizes
        The sizes.
    rng : numpy.random.Generator
        Draws the initial parameters.
    dtype : dtype, default float32
        Of the parameters.

    Attributes
    ----------
    parameters, gradient : ndarray
        All parameters, and the gradient that `loss_and_gradient` leaves, each as one vector.
    gradient_seconds : float
        The time spent so far in the library's gradients.
    gradient_calls : dict
        The arguments of the last call of each of those gradients, under the function's name.
    """

    def __init__(self, sizes: Sizes, rng: np.random.Generator, dtype: DTypeLike = np.float32):
        self.sizes = sizes
        shapes = sizes.parameters()
        total = sum(math.prod(shape) for shape in shapes.values())
        self.parameters = np.empty(total, dtype)
        self.gradient = np.zeros(total, dtype)
        self._values = _views(self.parameters, shapes)
        self._gradients = _views(self.gradient, shapes)
        terms = {"embedding": 1, "logits": sizes.width}  # terms of each sum; for other parameters the number of rows
        for name, value in self._values.items():
            value[...] = rng.standard_normal(value.shape) / math.sqrt(terms.get(name, len(value)))
        # True where attention may not look: at later positions.
        self._future = np.triu(np.ones((1, 1, sizes.context, sizes.context), bool), 1)
        self._scale = 1 / math.sqrt(sizes.width // sizes.heads)
        self.gradient_seconds = 0.0
        self.gradient_calls: dict[str, tuple] = {}

    def losses(self, tokens: NDArray, following: NDArray) -> NDArray:
        """Compute -log p(following token) for each of the last T tokens of every sequence.

        Parameters
        ----------
        tokens : ndarray of int, shape (B, W-1+T)
            The sequences. The first W-1 tokens serve the windows of the positions after them.
        following : ndarray of int, shape (B, T)
            The token after each position.

        Returns
        -------
        ndarray, shape (B, T)
            In nats.
        """
        hidden, _ = self._hidden(tokens)
        return self._losses(hidden, following.reshape(-1)).reshape(following.shape)

    def loss_and_gradient(self, tokens: NDArray, following: NDArray) -> float:
        """Compute the mean of `losses` for the same arguments, and its gradient into `gradient`."""
        hidden, backward = self._hidden(tokens)
        loss, d_hidden = self._loss_and_gradient(hidden, following.reshape(-1))
        backward(d_hidden)
        return loss

    @abstractmethod
    def _losses(self, hidden: NDArray, following: NDArray) -> NDArray:
        """Return -log p(following token) for each row of the last layer: [N, D] and [N] to [N]."""

    @abstractmethod
    def _loss_and_gradient(self, hidden: NDArray, following: NDArray) -> tuple[float, NDArray]:
        """Return the mean of `_losses`, and its gradient with respect to the last layer, [N, D]."""

    def _hidden(self, tokens: NDArray) -> tuple[NDArray, Backward]:
        """Return the last layer before the predictions, [N, D]."""
        x, embed_back = self._embed(tokens)
        x, attend_back = self._residual(self._attend, x)
        x, experts_back = self._residual(self._mix_experts, x)
        normal, normalise_back = _normalise(x)
        return normal, lambda d: embed_back(attend_back(experts_back(normalise_back(d))))

    def _embed(self, tokens: NDArray) -> tuple[NDArray, Backward]:
        table, sizes = self._values["embedding"], self.sizes
        shifts = [slice(shift, shift + sizes.context) for shift in range(sizes.window)]
        embedded = table[tokens]  # [B, W-1+T, E]
        windows = np.concatenate([embedded[:, shift] for shift in shifts], axis=-1)  # [B, T, W*E]
        x, linear_back = self._linear("window", windows.reshape(-1, windows.shape[-1]))  # [N, D]

        def backward(d_x: NDArray) -> NDArray:
            d_windows = np.split(linear_back(d_x).reshape(windows.shape), sizes.window, axis=-1)  # W times [B, T, E]
            d_embedded = np.zeros_like(embedded)
            for shift, d_window in zip(shifts, d_windows):
                d_embedded[:, shift] += d_window
            # Rows of the same token stand together, so that one pass sums them.
            order = np.argsort(tokens, axis=None, kind="stable")
            present, starts = np.unique(tokens.reshape(-1)[order], return_index=True)
            d_table = self._gradients["embedding"]
            d_table[...] = 0
            d_table[present] = np.add.reduceat(d_embedded.reshape(-1, sizes.embedding)[order], starts)
            return d_embedded

        return x, backward

    def _residual(self, layer: Callable, x: NDArray) -> tuple[NDArray, Backward]:
        """Return x + layer(normalised x)."""
        normal, normalise_back = _normalise(x)
        change, layer_back = layer(normal)
        return x + change, lambda d: d + normalise_back(layer_back(d))

    def _attend(self, x: NDArray) -> tuple[NDArray, Backward]:
        qkv, qkv_back = self._linear("query_key_value", x)  # [N, 3*D]
        query, key, value = self._split_heads(qkv)  # [B, H, T, D/H] each
        scores = query @ key.swapaxes(2, 3)  # [B, H, T, T]
        weights = ag.scaled_masked_softmax(scores, self._future, self._scale)
        attended = (weights @ value).swapaxes(1, 2).reshape(x.shape)  # [N, D]
        result, attended_back = self._linear("attended", attended)

        def backward(d_result: NDArray) -> NDArray:
            d_attended = attended_back(d_result).reshape(value.swapaxes(1, 2).shape).swapaxes(1, 2)  # [B, H, T, D/H]
            d_weights = d_attended @ value.swapaxes(2, 3)  # [B, H, T, T]
            d_scores = self._library_gradient(
                ag.scaled_masked_softmax_backward, d_weights, weights, self._future, self._scale
            )
            d_qkv = np.empty_like(qkv)
            d_query, d_key, d_value = self._split_heads(d_qkv)
            np.matmul(d_scores, key, out=d_query)
            np.matmul(d_scores.swapaxes(2, 3), query, out=d_key)
            np.matmul(weights.swapaxes(2, 3), d_attended, out=d_value)
            return qkv_back(d_qkv)

        return result, backward

    def _split_heads(self, qkv: NDArray) -> NDArray:
        """Return the query, key and value of every head as views: [N, 3*D] to [3, B, H, T, D/H]."""
        sizes = self.sizes
        apart = qkv.reshape(-1, sizes.context, 3, sizes.heads, sizes.width // sizes.heads)
        return apart.transpose(2, 0, 3, 1, 4)

    def _mix_experts(self, x: NDArray) -> tuple[NDArray, Backward]:
        apart = (len(x), self.sizes.experts, self.sizes.hidden)
        scores, gate_back = self._linear("gate", x)  # [N, K]
        gate = ag.softmax(scores)
        raised, up_back = self._linear("up", x)  # [N, K*F]
        hidden = np.maximum(raised, 0).reshape(apart)  # [N, K, F]
        mixed = (hidden * gate[:, :, None]).reshape(len(x), -1)  # [N, K*F]
        result, down_back = self._linear("down", mixed)  # [N, D]

        def backward(d_result: NDArray) -> NDArray:
            d_mixed = down_back(d_result).reshape(apart)  # [N, K, F]
            d_gate = np.einsum("nkf,nkf->nk", d_mixed, hidden)
            d_scores = self._library_gradient(ag.softmax_backward, d_gate, gate)
            d_raised = d_mixed * gate[:, :, None] * (hidden > 0)
            return gate_back(d_scores) + up_back(d_raised.reshape(len(x), -1))

        return result, backward

    def _linear(self, name: str, x: NDArray) -> tuple[NDArray, Backward]:
        weight = self._values[name]

        def backward(d_result: NDArray) -> NDArray:
            np.matmul(x.T, d_result, out=self._gradients[name])
            return d_result @ weight.T

        return x @ weight, backward

    def _library_gradient(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.gradient_calls[function.__name__] = arguments
        start = perf_counter()
        result = function(*arguments)
        self.gradient_seconds += perf_counter() - start
        return result


def _normalise(x: NDArray) -> tuple[NDArray, Backward]:
    """Divide every row by its root mean square."""
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)  # [N, 1]
    normal = x * inverse

    def backward(d_normal: NDArray) -> NDArray:
        return (d_normal - normal * np.mean(d_normal * normal, axis=-1, keepdims=True)) * inverse

    return normal, backward


def _views(vector: NDArray, shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray]:
    """Return consecutive parts of a vector, under their names and in their shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(vector, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}
