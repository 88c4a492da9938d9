"""Make random calls of `cross_entropy` and `cross_entropy_hvp` that a device supports, and check their results.

Right values are the reference's.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

import ascend_grad as ag
from ascend_grad import npu

DTYPES = (np.float32, np.float16, bfloat16)
EPS = {np.float32: 2.0**-24, np.float16: 2.0**-11, bfloat16: 2.0**-8}


def random_arguments(seed: int, targets: tuple = (np.int64, np.int32, np.uint8)) -> tuple[dict, np.random.Generator]:
    """Return the arguments of a random call."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    rank = int(rng.integers(1, 5))
    shape = tuple(int(n) for n in rng.integers(1, 7, rank))
    axis = int(rng.integers(-rank, rank))
    classes, rows = shape[axis], tuple(np.delete(shape, axis))
    x = (rng.standard_normal(shape) * rng.choice([1, 4])).astype(dtype)
    if rng.random() < 0.3:
        x = np.asfortranarray(x)
    is_dense, is_sparse = rng.random() < 0.3, rng.random() < 0.4
    arguments = {"input": x, "axis": axis, "reduction": str(rng.choice(["mean", "sum", "none"]))}

    def maybe(name, value, chance=0.35):
        if rng.random() < chance:
            arguments[name] = value

    if is_dense:
        target = rng.random(shape).astype(rng.choice([np.float32, np.float64]))
        target[rng.random(shape) < 0.2] = 0
    else:
        places = (*rows, int(rng.integers(1, 4))) if is_sparse else rows
        target = rng.integers(0, classes, places, rng.choice(targets))
        if target.dtype != np.uint8:
            target = np.where(rng.random(places) < 0.2, -100, target).astype(target.dtype)
        maybe("grad_log_prob", rng.standard_normal(places), 0.2)
        if is_sparse:
            arguments["target_prob"] = np.where(rng.random(places) < 0.2, 0, rng.random(places))
    arguments["target"] = target
    maybe("class_weight", np.where(rng.random(classes) < 0.2, 0, rng.random(classes) + 0.1))
    maybe("token_weight", np.where(rng.random(rows) < 0.2, 0, rng.random(rows)))
    maybe("label_smoothing", float(rng.random()))
    maybe("lse_square_scale", float(rng.random()), 0.25)
    maybe("temperature", float(rng.random() + 0.5) if rng.random() < 0.5 else rng.random(rows) + 0.5)
    maybe("logit_scale", float(rng.standard_normal()), 0.2)
    maybe("softcap", float(rng.random() + 1), 0.25)
    maybe("denominator", float(rng.random() + 1), 0.2)
    maybe("grad_lse", rng.standard_normal(rows), 0.2)
    maybe("grad_entropy", rng.standard_normal(rows), 0.2)
    outputs = ["lse", "entropy", "predicted"]
    outputs += [] if is_dense else ["log_prob"] if is_sparse else ["log_prob", "correct"]
    maybe("outputs", tuple(str(each) for each in rng.permutation(outputs)[: rng.integers(1, len(outputs) + 1)]), 0.6)
    grad_loss = rng.standard_normal(rows if arguments["reduction"] == "none" else ())
    maybe("grad_loss", np.where(rng.random(grad_loss.shape) < 0.2, 0, grad_loss), 0.5)
    if rng.random() < 0.15:
        arguments["return_grad"] = False
    return arguments, rng


def in_float64(arguments: dict) -> tuple:
    """Return the reference's results for the same values in float64."""
    widened = {"input": arguments["input"].astype(np.float64)}
    return ag.cross_entropy(**{**arguments, **widened}, backend="reference")


def random_product(seed: int, targets: tuple = (np.int64, np.int32, np.uint8)) -> dict:
    """Return the arguments of a random call of the product of the Hessian and a vector."""
    arguments, rng = random_arguments(seed, targets)
    for name in ("outputs", "return_grad", "grad_lse", "grad_log_prob", "grad_entropy"):
        arguments.pop(name, None)
    x = arguments["input"]
    vector = rng.standard_normal(x.shape)
    vector[rng.random(x.shape) < 0.1] = 0
    vector = vector.astype(rng.choice([x.dtype, x.dtype, *map(np.dtype, DTYPES), np.dtype(np.float64)]))
    return arguments | {"vector": np.asfortranarray(vector) if rng.random() < 0.3 else vector}


def product_in_float64(arguments: dict) -> np.ndarray:
    """Return the reference's product for the same values in float64. The vector has the precision of the logits."""
    x = arguments["input"]
    widened = {"input": x.astype(np.float64), "vector": arguments["vector"].astype(x.dtype).astype(np.float64)}
    return ag.cross_entropy_hvp(**{**arguments, **widened}, backend="reference")


def check_product(product, expected, dtype, *, widened: bool = False) -> None:
    """Check a product against the reference's. `widened`: a product of bfloat16 comes as float32."""
    got = product.numpy() if isinstance(product, npu.DeviceArray) else np.asarray(product)
    assert got.shape == expected.shape
    assert got.dtype == (np.float32 if widened and dtype == bfloat16 else dtype)
    assert_near(got, expected, "product", dtype)


def assert_near(got: np.ndarray, right: np.ndarray, name: str, dtype=None) -> None:
    """Check a result that is computed in float32 and, if a dtype is given, rounded to it."""
    assert np.array_equal(np.isnan(got), np.isnan(right)), name
    got, right = np.nan_to_num(got.astype(np.float64)), np.nan_to_num(right)
    rounding = 0 if dtype is None else EPS[dtype]
    bound = 2 * (2.0**-24 + rounding) * np.abs(right) + 64 * 2.0**-24 * (1 + np.abs(right).max(initial=0))
    assert np.all(np.abs(got - right) <= bound + (2.0**-24 if dtype == np.float16 else 0)), name


def check(results, expected, dtype, *, widened: bool = False) -> None:
    """Check results against the reference's. `widened`: gradients of bfloat16 come as float32."""
    assert results._fields == expected._fields
    for name, got, right in zip(results._fields, results, expected):
        if right is None:
            assert got is None
            continue
        got = got.numpy() if isinstance(got, npu.DeviceArray) else np.asarray(got)
        assert got.shape == np.shape(right)
        if name in ("predicted", "correct"):
            assert got.dtype == np.int64
            assert np.array_equal(got, right), name
            continue
        right_dtype = np.float32 if (widened and dtype == bfloat16) or name != "input_grad" else dtype
        assert got.dtype == right_dtype
        assert_near(got, np.asarray(right), name, dtype if name == "input_grad" else None)
