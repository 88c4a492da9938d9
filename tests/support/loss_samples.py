"""Make calls of the loss of a linear layer with options, and check their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from linear_samples import Shape
from loss_oracle import Right, Rows, gradients, outputs
from oracles import half_ulp
from samples import BFLOAT16, DTYPES, generator

import ascend_grad as ag
from ascend_grad import npu

#: A shape for each sweep: packed (one chunk, and several blocks in little space), few rows, few entries, few of both.
SHAPES = {
    "packed": (Shape(130, 150, 40), {}),
    "blocks": (Shape(300, 1100, 300), {"workspace_bytes": 4 << 20}),
    "few rows": (Shape(17, 900, 20), {}),
    "few entries": (Shape(700, 24, 10), {}),
    "few of both": (Shape(30, 30, 300), {}),
}


#: Shapes without features, with few entries, and without rows.
EDGES = [Shape(1, 2, 3), Shape(5, 7, 0), Shape(3, 256, 17), Shape(0, 5, 3), Shape(9, 1, 4)]


def sizes_and_settings(shape: str, dtype: str) -> tuple[Shape, dict]:
    """Return one of the shapes for its sweep, smaller where float64 would take long, and the settings it needs."""
    sizes, settings = SHAPES[shape]
    return (Shape(200, 900, 64) if dtype == "float64" and shape == "blocks" else sizes), settings


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
    "tokens and classes": {"token_weight": "tokens", "class_weight": "classes"},
    "classes and smoothing": {"class_weight": "classes", "label_smoothing": 0.3},
    "several targets": {"target_prob": "probabilities", "class_weight": "classes"},
    "several log-probabilities": {"target_prob": 0, "outputs": ("log_prob", "lse"), "softcap": 3.0},
    "targets with log-probabilities": {"target_prob": "probabilities", "outputs": ("log_prob",)},
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


def backward_of(shape: Shape, dtype: str, option: str, reduction: str = "mean") -> tuple[dict, dict, dict]:
    """Make the call of the loss, the call of its gradients, and upstream gradients of the outputs."""
    forward = arguments_of(shape, dtype, option, reduction)
    forward["outputs"] = ("lse", "entropy")
    results = ag.linear_cross_entropy(**forward, return_grad=False, backend="reference")
    random = generator("upstream", shape, option)
    lengths = {"grad_lse": shape.BT, "grad_entropy": shape.BT, "grad_log_prob": forward["target"].shape}
    upstream = {name: random.standard_normal(length) for name, length in lengths.items()}
    backward = forward | {"lse": results.lse, "entropy": results.entropy} | upstream
    del backward["outputs"]
    is_target = forward["target"] != -7
    counted = is_target.any(-1) if is_target.ndim == 2 else is_target
    there = {name: is_target if name == "grad_log_prob" else counted for name in upstream}
    return forward, backward, {name: np.where(there[name], grad, 0) for name, grad in upstream.items()}


#: Options that a device computes: by the fused operators, as they are arithmetic on vectors, and by blocks of logits.
OF_DEVICE = (
    *("no option", "token weights", "token weights alone", "denominator", "classes", "tokens and classes"),
    *("temperatures", "bias", "scale", "cap", "smoothing", "square", "classes and smoothing"),
)
#: A vocabulary that the vendor documents.
SHAPE_OF_DEVICE = Shape(40, 130, 16)


def _on_device(array: np.ndarray) -> npu.DeviceArray:
    """Copy an array to the device, which has no float64."""
    return npu.asarray(array.astype(np.float32) if array.dtype == np.float64 else array)


#: Functions that move an array of the host to where a call takes it, and the array of a result back.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the host": (lambda array: array, lambda result: result),
    "the device": (_on_device, npu.DeviceArray.numpy),
}


def on_devices(test: Callable) -> Callable:
    """Run a test with all places, the dtypes and the options of a device."""
    for name, values in (("option", OF_DEVICE), ("dtype", ["float16", "bfloat16"]), ("place", PLACES)):
        test = pytest.mark.parametrize(name, values)(test)
    return test


def moved(arguments: dict, place: Callable[[Any], Any]) -> dict:
    return {name: place(each) if isinstance(each, np.ndarray) else each for name, each in arguments.items()}


def device_losses(option: str, dtype: str) -> Iterator[dict]:
    """Make calls of the loss that a device computes."""
    for reduction in ("mean", "sum", "none"):
        arguments = arguments_of(SHAPE_OF_DEVICE, dtype, option, reduction)
        yield arguments | ({} if option == "no option" else {"outputs": ("log_prob", "lse")})
        yield arguments | {"output_mask": (False, True)}
        yield arguments | {"return_grad": False, "outputs": ("log_prob",)}


def device_gradients(option: str, dtype: str) -> Iterator[dict]:
    """Make calls of the gradients of loss and outputs that a device computes."""
    every = "grad_loss", "grad_lse", "grad_log_prob"
    for names in (every[:1], every[1:2], every[2:], every):
        _, arguments, _ = backward_of(SHAPE_OF_DEVICE, dtype, option, "none" if names == every else "mean")
        for name in {"grad_entropy", "entropy", *every} - {*names}:
            arguments.pop(name, None)
        if "grad_lse" in names:
            arguments["grad_lse"][::3] = 0
        yield arguments
        yield arguments | {"output_mask": (True, False)}


def unusual_losses(dtype: str) -> Iterator[dict]:
    """Make calls of the loss with rows of weight 0 that hold NaN, with means over nothing, and without elements."""
    plain = arguments_of(SHAPE_OF_DEVICE, dtype, "no option") | {"outputs": ("lse", "log_prob")}
    plain["target"][:3] = 100, 101, -7
    count, nothing = len(plain["input"]), np.zeros(len(plain["input"]))
    balanced = np.where(np.arange(count) < 2, (-1.0) ** np.arange(count), 0)
    for weights in (nothing, np.where(np.arange(count) == 1, 2.0, 0), balanced):
        arguments = plain | {"token_weight": weights, "input": plain["input"].copy()}
        arguments["input"][weights == 0] = np.nan
        classes = np.ones(SHAPE_OF_DEVICE.V)
        classes[2:] = np.inf  # rows of weight 0 alone have these targets
        for reduction in ("mean", "sum"):
            yield arguments | {"reduction": reduction, "class_weight": classes}
    # Rows of infinite weight, at which 0 arrives
    grad = np.where(plain["target"] == 100, 0, 0.5)
    for weights in (np.where(grad == 0, np.inf, 1), np.where(grad == 0, np.nan, 1)):
        yield plain | {"reduction": "none", "grad_loss": grad, "token_weight": weights}
    classes = np.where(np.arange(SHAPE_OF_DEVICE.V) == 0, np.inf, 1)
    yield plain | {"reduction": "none", "grad_loss": grad, "class_weight": classes}
    yield plain | {"class_weight": np.zeros(SHAPE_OF_DEVICE.V)}
    yield plain | {"target": np.full(count, -7), "token_weight": nothing + 1}
    yield plain | {"target": np.full(count, -7), "denominator": 2.0}
    for sizes in (Shape(0, 130, 16), Shape(9, 130, 0)):
        for option in ("tokens and classes", "denominator"):
            yield arguments_of(sizes, dtype, option) | {"outputs": ("lse", "log_prob")}


def unusual_gradients(dtype: str) -> Iterator[dict]:
    """Make the calls of the gradients of `unusual_losses`, with an upstream gradient of each output."""
    random = generator("unusual gradients")
    for arguments in unusual_losses(dtype):
        lse = ag.linear_cross_entropy(**arguments, backend="reference").lse
        del arguments["outputs"]
        count = lse.size
        upstream = {"grad_lse": random.standard_normal(count), "grad_log_prob": random.standard_normal(count)}
        absent = np.isnan(lse)
        for each in upstream.values():
            each[absent] = 0
        yield arguments | {"lse": lse} | upstream
        yield arguments | {"lse": lse}


def check_on_device(function: str, arguments: dict, place: Callable[[Any], Any], on_host: Callable[[Any], Any]) -> None:
    """Check a call that a device computes against the reference, within the error of factors that have 16 bits.

    `place` moves an array to where the call takes it, `on_host` returns the values of a result.
    """
    there = moved(arguments, place)
    assert ag.explain(function, **there).backend == "npu"
    results = getattr(ag, function)(**there)
    rights = getattr(ag, function)(**arguments, backend="reference")
    step = 2.0**-6 if arguments["input"].dtype == BFLOAT16 else 2.0**-9
    assert results._fields == rights._fields
    for name, result, right in zip(rights._fields, results, rights, strict=True):
        if right is None:
            assert result is None
            continue
        assert str(result.dtype).removeprefix("torch.") == str(right.dtype)
        expected = right.astype(np.float64)
        size = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
        np.testing.assert_allclose(
            on_host(result).astype(np.float64), expected, rtol=step, atol=step * size, err_msg=name
        )


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
