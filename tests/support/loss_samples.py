"""Make calls of the loss of a linear layer with options, and check their results."""

from __future__ import annotations

import numpy as np
from linear_samples import Shape
from loss_oracle import Right, Rows, gradients, outputs
from oracles import half_ulp
from samples import BFLOAT16, DTYPES, generator

#: A shape for each sweep: packed (one chunk, and several blocks in little space), few rows, few entries, few of both.
SHAPES = {
    "packed": (Shape(130, 150, 40), {}),
    "blocks": (Shape(300, 1100, 300), {"workspace_bytes": 4 << 20}),
    "few rows": (Shape(17, 900, 20), {}),
    "few entries": (Shape(700, 24, 10), {}),
    "few of both": (Shape(30, 30, 300), {}),
}

EVERY = ("lse", "log_prob", "entropy", "predicted", "correct")

#: The names in a value stand for arrays that `arguments_of` makes.
OPTIONS = {
    "no option": {},
    "outputs": {"outputs": EVERY},
    "token weights": {"token_weight": "tokens", "outputs": ("lse",)},
    "token weights alone": {"token_weight": "tokens"},
    "denominator": {"denominator": 7.5},
    "temperature": {"temperature": 0.7, "outputs": EVERY},
    "temperatures": {"temperature": "positive"},
    "bias": {"bias": "entries"},
    "scale": {"logit_scale": -1.3},
    "cap": {"softcap": 2.0, "bias": "entries"},
    "smoothing": {"label_smoothing": 0.1},
    "square": {"lse_square_scale": 0.01, "token_weight": "tokens"},
    "classes": {"class_weight": "classes"},
    "classes and smoothing": {"class_weight": "classes", "label_smoothing": 0.3},
    "several targets": {"target_prob": "probabilities", "class_weight": "classes"},
    "all": {
        "token_weight": "tokens", "class_weight": "classes", "target_prob": "probabilities", "label_smoothing": 0.1,
        "lse_square_scale": 0.01, "temperature": "positive", "bias": "entries", "logit_scale": 1.2, "softcap": 5.0,
        "outputs": ("entropy", "lse", "predicted")
    },
}  # fmt: skip


def arguments_of(shape: Shape, dtype: str, option: str, reduction: str = "mean", start: int = 100) -> dict:
    """Make a call whose ids start at `start`. A sixth of the rows is ignored, and some rows have the token weight 0."""
    random = generator("loss options", shape, option, reduction)
    x = random.standard_normal((shape.BT, shape.H))
    w = 1.5 * random.standard_normal((shape.V, shape.H)) / np.sqrt(max(shape.H, 1))
    tokens = random.random(shape.BT)
    tokens[random.random(shape.BT) < 0.2] = 0
    arrays = {
        "tokens": tokens.astype(np.float32),
        "positive": 0.5 + random.random(shape.BT),
        "entries": random.standard_normal(shape.V).astype(np.float16),
        "classes": 0.5 + random.random(shape.V),
        "probabilities": random.random((shape.BT, 3)),
    }
    settings = {name: arrays[a] if isinstance(a, str) else a for name, a in OPTIONS[option].items()}
    count = (3,) if "target_prob" in settings else ()
    target = start + random.integers(0, shape.V, (shape.BT, *count))
    target[random.random(target.shape) < (0.5 if count else 1 / 6)] = -7
    grad = random.standard_normal(shape.BT) if reduction == "none" else 0.7
    return {
        "input": x.astype(DTYPES[dtype]),
        "weight": w.astype(DTYPES[dtype]),
        "target": target,
        "reduction": reduction,
        "ignore_index": -7,
        "grad_loss": grad,
        "vocab_start_index": start,
    } | settings


def assert_near(result: np.ndarray, right: Right, name: str) -> None:
    """Check a result against a value and the bound on the error before the result was rounded."""
    bound = right.bound + half_ulp(np.abs(right.value).astype(float) + right.bound, result.dtype)
    error = np.abs(result.astype(right.value.dtype) - right.value).astype(float)
    worst = np.max(error / (bound + 1e-300), initial=0)
    assert worst <= 1, f"{name}: {worst} times the bound"


def check(results, arguments: dict, dtype: str, **upstream) -> None:
    """Check the results of a call, with every field."""
    wide, eps = (np.longdouble, 2.0**-53) if dtype == "float64" else (np.float64, 2.0**-24)
    rows = Rows(wide, arguments)
    right = gradients(rows, eps, bfloat16=DTYPES[dtype] == BFLOAT16, **upstream) | outputs(rows, eps)
    each = 64 + 16 * rows.size.max(initial=0) + 16 * float(np.abs(rows.z).max(initial=0))
    size = np.abs(rows.cross_entropy) + np.abs(rows.square)
    total = np.asarray(size if rows.reduction == "none" else size.sum() / max(min(rows.over, rows.over_square), 1e-300))
    right["loss"] = Right(rows.loss, eps * each * (1 + total.astype(float)) * (1 if rows.reduction == "none" else 4))
    for name, result in zip(results._fields, results, strict=True):
        if name == "predicted":
            place = np.where(rows.counted, result - arguments["vocab_start_index"], 0)
            largest = rows.z.max(-1)
            reached = rows.z[np.arange(len(place)), place]
            assert np.all(result[~rows.counted] == -1)
            assert np.all((np.abs(largest - reached) <= right["lse"].bound)[rows.counted])
        elif name == "correct":
            assert result == np.count_nonzero(rows.counted & (results.predicted == arguments["target"]))
        elif result is not None:
            assert_near(result, right[name], name)
