"""Make random calls of the loss of a linear layer that a device takes, and check results against the reference's."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

import ascend_grad as ag
from ascend_grad import npu

DTYPES = (np.float32, np.float16, bfloat16)
EPS = {np.float32: 2.0**-24, np.float16: 2.0**-11, bfloat16: 2.0**-8}
LOSS, BACKWARD = "linear_cross_entropy", "linear_cross_entropy_backward"


def random_arguments(seed: int) -> dict:
    """Return the arguments of a random call of the loss. The rows have one dimension, as arrays on devices have."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    rows, entries, features = int(rng.integers(1, 12)), int(rng.choice([1, 3, 17, 60])), int(rng.integers(1, 9))
    start = int(rng.choice([0, 0, 100]))
    target = start + rng.integers(0, entries, rows, rng.choice([np.int64, np.int32]))
    arguments = {
        "input": rng.standard_normal((rows, features)).astype(dtype),
        "weight": rng.standard_normal((entries, features)).astype(dtype),
        "target": np.where(rng.random(rows) < 0.2, -100, target).astype(target.dtype),
        "reduction": str(rng.choice(["mean", "sum", "none"])),
        "vocab_start_index": start,
    }

    def maybe(name, value, chance=0.35):
        if rng.random() < chance:
            arguments[name] = value

    maybe("bias", rng.standard_normal(entries).astype(rng.choice([np.float32, np.float16])))
    maybe("class_weight", np.where(rng.random(entries) < 0.2, 0, rng.random(entries) + 0.1))
    maybe("token_weight", np.where(rng.random(rows) < 0.2, 0, rng.random(rows)))
    maybe("label_smoothing", float(rng.choice([rng.random(), 1.0])))
    maybe("lse_square_scale", float(rng.random()), 0.25)
    maybe("temperature", float(rng.random() + 0.5) if rng.random() < 0.5 else rng.random(rows) + 0.5)
    maybe("logit_scale", float(rng.choice([rng.standard_normal(), 0.0])), 0.2)
    maybe("softcap", float(rng.random() + 0.5), 0.2)
    maybe("denominator", float(rng.random() + 1), 0.2)
    maybe("outputs", ("log_prob", "lse"))
    grad_loss = rng.standard_normal(rows if arguments["reduction"] == "none" else ())
    maybe("grad_loss", np.where(rng.random(grad_loss.shape) < 0.2, 0, grad_loss), 0.5)
    maybe("output_mask", (bool(rng.integers(2)), bool(rng.integers(2))), 0.3)
    maybe("return_grad", False, 0.15)
    return arguments


def backward_of(arguments: dict, seed: int) -> dict:
    """Return the arguments of a call of the gradients, with random upstream gradients."""
    rng = np.random.default_rng((1, seed))
    forward = {name: value for name, value in arguments.items() if name != "return_grad"}
    lse = in_float64(LOSS, {**forward, "outputs": ("lse",)}).lse
    forward.pop("outputs", None)
    rows = len(lse)
    upstream = {name: rng.standard_normal(rows) for name in ("grad_lse", "grad_log_prob") if rng.random() < 0.6}
    for each in upstream.values():
        each[rng.random(rows) < 0.3] = 0
    return {
        "grad_loss": np.asarray(1.0) if forward["reduction"] != "none" else np.ones(rows),
        **forward,
        **upstream,
        "lse": lse,
    }


def in_float64(function: str, arguments: dict) -> tuple:
    """Return the reference's results for the same values in float64."""
    widened = {name: arguments[name].astype(np.float64) for name in ("input", "weight")}
    return getattr(ag, function)(**{**arguments, **widened}, backend="reference")


def on_the_host(array) -> np.ndarray:
    return array.numpy() if isinstance(array, npu.DeviceArray) else np.asarray(array)


def on_device(arguments: dict) -> dict:
    """Return arguments with arrays on the device, which has no float64."""
    taken = {np.dtype(np.float64): np.float32}
    return {
        name: npu.asarray(value.astype(taken.get(value.dtype, value.dtype))) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def check(results, expected, arguments: dict, *, widened: bool = False) -> None:
    """Check results against the reference's, within the rounding of sums in float32 and of the results.

    `widened`: results in bfloat16 come as float32.
    """
    assert results._fields == expected._fields
    for name, got, right in zip(results._fields, results, expected):
        if right is None:
            assert got is None, name
            continue
        got = on_the_host(got)
        dtype = {"input_grad": arguments["input"], "weight_grad": arguments["weight"]}.get(
            name, np.empty(0, np.float32)
        ).dtype
        if name == "bias_grad":
            dtype = arguments["bias"].dtype
        assert got.shape == np.shape(right), name
        assert got.dtype == (np.float32 if widened and dtype == bfloat16 else dtype), name
        right, got = np.asarray(right, np.float64), got.astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(right)), name
        right, got = np.nan_to_num(right), np.nan_to_num(got)
        scale, eps = np.abs(right).max(initial=0), 2.0**-24 + EPS.get(dtype.type, 0)
        subnormal = 2.0**-24 if dtype == np.float16 else 0
        assert np.all(np.abs(got - right) <= 2 * eps * np.abs(right) + 256 * 2.0**-24 * (1 + scale) + subnormal), name
