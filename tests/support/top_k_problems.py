"""Make random calls of `linear_top_k` that a device supports, and compare results with the reference's."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

import ascend_grad as ag
from ascend_grad import npu

DTYPES = (np.float32, np.float16, bfloat16)


def random_arguments(seed: int) -> dict:
    """Return the arguments of a random call. Logits are often integers, so that many are equal."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    entries, features = int(rng.choice([1, 2, 5, 40, 300, 700])), int(rng.integers(1, 6))
    leading = tuple(int(n) for n in rng.integers(1, 5, int(rng.integers(0, 3))))
    is_tied = rng.random() < 0.7

    def values(*shape: int) -> np.ndarray:
        drawn = rng.integers(-1, 2, shape) if is_tied else rng.standard_normal(shape)
        return drawn.astype(dtype)

    arguments = {
        "input": values(*leading, features),
        "weight": values(entries, features),
        "k": int(rng.integers(1, min(entries, 128) + 1)),
    }

    def maybe(name, value, chance=0.3):
        if rng.random() < chance:
            arguments[name] = value

    of_type = rng.choice([np.float32, np.float64]) if not is_tied else np.float32
    maybe("bias", rng.integers(-2, 3, entries).astype(of_type))
    maybe("logit_scale", float(rng.choice([-2.0, 0.5, 1.0, 0.0])))
    maybe("softcap", 4.0, 0.15)
    maybe("temperature", 0.7 if rng.random() < 0.5 else rng.random(leading).astype(np.float32) + 0.5)
    maybe("workspace_bytes", 4 << 20)
    if rng.random() < 0.2:
        arguments["weight"][rng.integers(0, entries)] = rng.choice([np.nan, np.inf, -np.inf])
    if rng.random() < 0.2 and "bias" in arguments:
        arguments["bias"][rng.random(entries) < 0.5] = -np.inf
    return arguments


def in_float64(arguments: dict) -> ag.LinearTopK:
    """Return the reference's results for the same values in float64."""
    wide = {name: arguments[name].astype(np.float64) for name in ("input", "weight")}
    return ag.linear_top_k(**{**arguments, **wide}, backend="reference")


def in_rows(arguments: dict) -> dict:
    """Return a call with the dimensions of the rows merged, as arrays on devices have two dimensions."""
    merged = dict(arguments, input=arguments["input"].reshape(-1, arguments["input"].shape[-1]))
    if isinstance(arguments.get("temperature"), np.ndarray):
        merged["temperature"] = arguments["temperature"].reshape(-1)
    return merged


def on_the_host(array) -> np.ndarray:
    return array.numpy() if isinstance(array, npu.DeviceArray) else np.asarray(array)


def check(results, arguments: dict) -> None:
    """Check results. Indices may differ where logits differ by rounding errors, which integers do not have."""
    expected = in_float64(arguments)
    log_prob, index = (on_the_host(each) for each in results)
    assert (log_prob.dtype, index.dtype) == (np.float32, np.int64)
    assert log_prob.shape == index.shape == expected.index.shape
    assert np.array_equal(np.isnan(log_prob), np.isnan(expected.log_prob))
    finite = np.isfinite(expected.log_prob)
    assert np.array_equal(log_prob[~finite], expected.log_prob[~finite].astype(np.float32), equal_nan=True)
    right = expected.log_prob[finite]
    assert np.all(np.abs(log_prob[finite] - right) <= 2.0**-18 * (1 + np.abs(right)))
    with np.errstate(invalid="ignore"):
        steps = -np.diff(expected.log_prob, axis=-1)
    is_close = (steps > 0) & (steps < 1e-5)
    differs = np.any(index != expected.index, axis=-1)
    assert np.all(~differs | is_close.any(axis=-1)), "indices differ, and no two logits are close"
