"""A small next-byte model in NumPy; every softmax in it, forward and backward, is computed by this library.

Each layer is a method that returns its result and a function: from the loss's gradient with respect to that result,
the function stores the gradients of the layer's parameters and returns the one with respect to the layer's input.

Shapes in the comments: B sequences, T positions, N = B*T rows, W bytes in the local window, E numbers per embedded
byte, D the width, H attention heads of D/H, K experts of F hidden units; 256 byte values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import DTypeLike, NDArray

import ascend_grad as ag

Backward = Callable[[NDArray], NDArray]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a `ByteModel`."""

    context: int = 64  # T
    window: int = 8  # W
    embedding: int = 32  # E
    width: int = 128  # D
    heads: int = 4  # H
    experts: int = 4  # K
    hidden: int = 128  # F

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter. Matrices multiply from the right."""
        return {
            "embedding": (256, self.embedding),
            "window": (self.window * self.embedding, self.width),
            "query_key_value": (self.width, 3 * self.width),
            "attended": (self.width, self.width),
            "gate": (self.width, self.experts),
            "up": (self.width, self.experts * self.hidden),
            "down": (self.experts * self.hidden, self.width),
            "logits": (self.width, 256),
        }


class ByteModel:
    """Bytes in, natural log-probabilities of each next byte out.

    A window of the last W bytes is embedded and mixed; then come causal attention over the last T positions, a layer
    of experts mixed by a softmax gate, and the logits.

    Parameters
    ----------
    sizes : Sizes
        The sizes.
    rng : numpy.random.Generator
        Draws the initial parameters.
    dtype : dtype, default float32
        Of the parameters and of every computation.

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
        for name, value in self._values.items():
            value[...] = rng.standard_normal(value.shape) / math.sqrt(1 if name == "embedding" else len(value))
        # True where attention may not look: at later positions.
        self._future = np.triu(np.ones((1, 1, sizes.context, sizes.context), bool), 1)
        self._scale = 1 / math.sqrt(sizes.width // sizes.heads)
        self.gradient_seconds = 0.0
        self.gradient_calls: dict[str, tuple] = {}

    def log_probabilities(self, text: NDArray[np.uint8]) -> NDArray:
        """Predict the byte that follows each of the last T bytes of every sequence.

        Parameters
        ----------
        text : ndarray of uint8, shape (B, W-1+T)
            The sequences. The first W-1 bytes serve the windows of the positions after them.

        Returns
        -------
        ndarray, shape (B*T, 256)
            Log-probabilities.
        """
        return self._forward(text)[0]

    def loss_and_gradient(self, text: NDArray[np.uint8], following: NDArray[np.uint8]) -> float:
        """Compute the mean of -log p(following byte), and its gradient into `gradient`.

        Parameters
        ----------
        text : ndarray of uint8, shape (B, W-1+T)
            As in `log_probabilities`.
        following : ndarray of uint8, shape (B, T)
            The byte after each position.

        Returns
        -------
        float
            The loss, in nats per byte.
        """
        log_p, backward = self._forward(text)
        chosen = np.arange(len(log_p)), following.reshape(-1)
        d_log_p = np.zeros_like(log_p)  # [N, 256]
        d_log_p[chosen] = -1 / len(log_p)
        backward(d_log_p)
        return -float(np.mean(log_p[chosen]))

    def _forward(self, text: NDArray[np.uint8]) -> tuple[NDArray, Backward]:
        x, embed_back = self._embed(text)
        x, attend_back = self._residual(self._attend, x)
        x, experts_back = self._residual(self._mix_experts, x)
        normal, normalise_back = _normalise(x)
        logits, logits_back = self._linear("logits", normal)  # [N, 256]
        log_p = ag.log_softmax(logits)

        def backward(d_log_p: NDArray) -> NDArray:
            d_logits = self._library_gradient(ag.log_softmax_backward, d_log_p, log_p)
            return embed_back(attend_back(experts_back(normalise_back(logits_back(d_logits)))))

        return log_p, backward

    def _embed(self, text: NDArray[np.uint8]) -> tuple[NDArray, Backward]:
        table, sizes = self._values["embedding"], self.sizes
        shifts = [slice(shift, shift + sizes.context) for shift in range(sizes.window)]
        embedded = table[text]  # [B, W-1+T, E]
        windows = np.concatenate([embedded[:, shift] for shift in shifts], axis=-1)  # [B, T, W*E]
        x, linear_back = self._linear("window", windows.reshape(-1, windows.shape[-1]))  # [N, D]

        def backward(d_x: NDArray) -> NDArray:
            d_windows = np.split(linear_back(d_x).reshape(windows.shape), sizes.window, axis=-1)  # W times [B, T, E]
            d_embedded = np.zeros_like(embedded)
            for shift, d_window in zip(shifts, d_windows):
                d_embedded[:, shift] += d_window
            one_hot = np.eye(256, dtype=table.dtype)[text.reshape(-1)]  # [B*(W-1+T), 256]
            np.matmul(one_hot.T, d_embedded.reshape(-1, sizes.embedding), out=self._gradients["embedding"])
            return d_embedded

        return x, backward

    def _residual(self, layer: Callable, x: NDArray) -> tuple[NDArray, Backward]:
        """x + layer(normalised x)."""
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
        """The query, key and value of every head as views: [N, 3*D] to [3, B, H, T, D/H]."""
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

    def _library_gradient(self, function: Callable[..., NDArray], *arguments) -> NDArray:
        self.gradient_calls[function.__name__] = arguments
        start = perf_counter()
        result = function(*arguments)
        self.gradient_seconds += perf_counter() - start
        return result


def _normalise(x: NDArray) -> tuple[NDArray, Backward]:
    """Every row divided by its root mean square."""
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)  # [N, 1]
    normal = x * inverse

    def backward(d_normal: NDArray) -> NDArray:
        return (d_normal - normal * np.mean(d_normal * normal, axis=-1, keepdims=True)) * inverse

    return normal, backward


def _views(vector: NDArray, shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray]:
    """Consecutive pieces of a vector, under their names and in their shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    pieces = np.split(vector, ends[:-1])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces)}
