"""Compute the loss of a linear layer with all of its options from their definitions, apart from the library.

Nothing here avoids cancellation: wide numbers do. All arrays are float64, or longdouble.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def matrix_product(a: NDArray, b: NDArray) -> NDArray:
    """Return a @ b. NumPy multiplies longdouble matrices several times faster where summed elements are adjacent."""
    return np.inner(a, np.ascontiguousarray(b.T))


class Right(NamedTuple):
    """Hold a value with a bound on its error."""

    value: NDArray
    bound: NDArray


def logits_of(
    products: NDArray, *, bias=None, logit_scale=1.0, softcap=None, temperature=1.0
) -> tuple[NDArray, NDArray]:
    """Return the logits, and their derivatives with respect to the products."""
    wide = products.dtype.type
    u = products if bias is None else products + bias.astype(wide)
    divisor = np.broadcast_to(np.asarray(temperature).astype(wide), len(u))[:, None]
    if softcap is None:
        return wide(logit_scale) * u / divisor, np.broadcast_to(wide(logit_scale) / divisor, u.shape)
    value = np.tanh(wide(logit_scale) * u / wide(softcap))
    return wide(softcap) * value / divisor, wide(logit_scale) / divisor * (1 - value**2)


class Rows:
    """The rows of one call: probabilities, statistics, and the parts of the loss."""

    def __init__(self, wide: type, arguments: dict[str, Any]) -> None:
        a = {
            "reduction": "mean", "ignore_index": -100, "grad_loss": 1.0, "vocab_start_index": 0, "token_weight": None,
            "class_weight": None, "target_prob": None, "label_smoothing": 0.0, "lse_square_scale": 0.0,
            "temperature": 1.0, "denominator": None, "bias": None, "logit_scale": 1.0, "softcap": None
        } | arguments  # fmt: skip
        self.x, self.w = a["input"].astype(wide), a["weight"].astype(wide)
        self.size = np.abs(self.x).astype(float) @ np.abs(self.w).T.astype(float)
        self.z, self.slope = logits_of(
            matrix_product(self.x, self.w.T),
            **{name: a[name] for name in ("bias", "logit_scale", "softcap", "temperature")},
        )
        tokens, entries = self.z.shape
        most = self.z.max(-1, keepdims=True)
        self.exponential = np.exp(self.z - most)
        self.lse = most[:, 0] + np.log(self.exponential.sum(-1))
        self.p = np.exp(self.z - self.lse[:, None])
        with np.errstate(invalid="ignore"):
            self.entropy = self.lse - np.where(self.p > 0, self.p * self.z, 0).sum(-1)

        is_dense = a["target"].dtype.kind not in "iu"
        ids = a["target"] if a["target"].ndim == 2 else a["target"][:, None]
        if is_dense:  # no entry is a target
            ids = np.full((tokens, 1), a["ignore_index"])
        self.shape_of_targets = ids.shape if is_dense else a["target"].shape
        self.is_target = ids != a["ignore_index"]
        self.counted = self.is_target.any(-1) | is_dense
        self.targets = np.where(self.is_target, ids - a["vocab_start_index"], 0)
        q = np.ones(ids.shape, wide)
        if a["target_prob"] is not None:
            q = q * np.asarray(a["target_prob"]).astype(wide)
        c = np.ones(entries, wide) if a["class_weight"] is None else a["class_weight"].astype(wide)
        r = np.ones(tokens, wide) if a["token_weight"] is None else a["token_weight"].astype(wide)
        r = np.where(self.counted, r, 0)
        s, g = wide(a["label_smoothing"]), np.broadcast_to(np.asarray(a["grad_loss"]).astype(wide), tokens)
        #: (BT, V): the weight of each entry in the cross-entropy
        self.one_hot = np.zeros_like(self.z)
        for k in range(ids.shape[1]):
            here = np.flatnonzero(self.is_target[:, k])
            self.one_hot[here, self.targets[here, k]] += q[here, k] * c[self.targets[here, k]]
        if is_dense:
            read = a["target"] if a["input"].dtype.type is np.float64 else a["target"].astype(np.float32)
            self.one_hot = read.astype(wide) * c
        self.weights = (1 - s) * self.one_hot + s / max(entries, 1) * c
        negative_log_prob = self.lse[:, None] - self.z
        self.cross_entropy = np.where(r == 0, 0, r * (self.weights * negative_log_prob).sum(-1))
        self.square = np.where(r == 0, 0, r * wide(a["lse_square_scale"]) * self.lse**2)
        over = over_square = wide(1)
        if a["reduction"] == "mean":
            over = over_square = r.sum()
            if a["target_prob"] is None and not is_dense:
                over = (r * self.one_hot.sum(-1)).sum()
            if a["denominator"] is not None:
                over = over_square = wide(a["denominator"])
        self.over, self.over_square, self.reduction = over, over_square, a["reduction"]
        self.upstream = np.where(r == 0, 0, g * r) / over
        self.upstream_square = np.where(r == 0, 0, g * r) * 2 * wide(a["lse_square_scale"]) * self.lse / over_square

    @property
    def loss(self) -> NDArray:
        if self.reduction == "none":
            return self.cross_entropy + self.square
        return np.asarray(self.cross_entropy.sum() / self.over + self.square.sum() / self.over_square)

    def gradient_of_logits(self, grad_lse=0.0, grad_log_prob=0.0, grad_entropy=0.0) -> tuple[NDArray, NDArray]:
        """Return the gradient with respect to the logits, and the sum of the magnitudes of its terms."""
        column = (slice(None), None)
        hot, of_targets = np.zeros_like(self.z), np.zeros(self.targets.shape)
        of_targets += np.reshape(grad_log_prob, (-1, 1)) if np.ndim(grad_log_prob) == 1 else grad_log_prob
        for row, k in np.argwhere(self.is_target):
            hot[row, self.targets[row, k]] += of_targets[row, k]
        a = self.upstream * self.weights.sum(-1) + self.upstream_square + grad_lse - hot.sum(-1)
        from_mean = self.z - (self.lse - self.entropy)[column]
        b = -np.broadcast_to(grad_entropy, len(a))[column]
        value = a[column] * self.p + b * self.p * from_mean - self.upstream[column] * self.weights + hot
        size = np.abs(a)[column] * self.p + np.abs(b) * self.p * (np.abs(from_mean) + self.entropy[column])
        return value, size + np.abs(self.upstream)[column] * np.abs(self.weights) + np.abs(hot)


def gradients(rows: Rows, eps: float, *, bfloat16: bool, **upstream: Any) -> dict[str, Right]:
    """Return both gradients of the matrices and the gradient of the bias, with bounds of kernels with this epsilon."""
    p, size = rows.gradient_of_logits(**upstream)
    # An error of a logit is a relative error of its probability. tanh near 1 has an absolute error in its derivative.
    of_logits = eps * (64 + 16 * rows.size + 8 * np.abs(rows.z).astype(float))
    most = np.abs(rows.slope).max(-1, keepdims=True)
    error = np.asarray(size * of_logits * most, float) + 2.0**-126
    tile = p * rows.slope
    error += (2.0**-8 if bfloat16 else 64 * eps) * np.abs(tile).astype(float)
    w, x = np.abs(rows.w).astype(float), np.abs(rows.x).astype(float)
    return {
        "input_grad": Right(matrix_product(tile, rows.w), error @ w),
        "weight_grad": Right(matrix_product(tile.T, rows.x), error.T @ x),
        "bias_grad": Right(tile.sum(0), error.sum(0)),
    }


def outputs(rows: Rows, eps: float) -> dict[str, Right]:
    """Return the results of each row beside its loss, 0 for ignored rows."""
    error = eps * (64 + 16 * rows.size.max(-1, initial=0) + 16 * np.abs(rows.z).astype(float).max(-1, initial=0))
    spread = 1 + np.ptp(rows.z, axis=-1).astype(float)
    values = {"lse": rows.lse, "entropy": rows.entropy}
    found = {name: Right(np.where(rows.counted, value, 0), error * spread) for name, value in values.items()}
    log_prob = np.take_along_axis(rows.z, rows.targets, -1) - rows.lse[:, None]
    found["log_prob"] = Right(
        np.where(rows.is_target, log_prob, 0).reshape(rows.shape_of_targets),
        np.broadcast_to((error * spread)[:, None], log_prob.shape).reshape(rows.shape_of_targets),
    )
    return found
