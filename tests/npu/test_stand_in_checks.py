"""Test the status codes with which the first phase of the test double's operators refuses arguments."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from acl_client import code_of
from device_limits import KERNELS, takes
from linear_samples import GRADIENT, LOSS, STATISTICS

BF16 = ml_dtypes.bfloat16


def z(*shape: int, dtype=np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("name", ["SoftmaxBackward", "LogSoftmaxBackward"])
def test_checks_of_softmax_gradients(acl, double, name) -> None:
    assert code_of(acl, name, z(2, 3), None, -1, z(2, 3)) == 161001
    assert code_of(acl, name, z(2, 3), z(2, 3, dtype=np.float32), -1, z(2, 3)) == 161002
    assert code_of(acl, name, *[z(2, 3, dtype=np.float64)] * 2, -1, z(2, 3, dtype=np.float64)) == 161002
    assert code_of(acl, name, z(2, 3), z(2, 3), 2, z(2, 3)) == 161002
    assert code_of(acl, name, z(2, 3), z(3, 3), 1, z(2, 3)) == 161002
    assert code_of(acl, name, z(2, 3), z(2, 3), -3, z(2, 3)) == 161002
    assert code_of(acl, name, z(), z(), -1, z()) == 0
    assert code_of(acl, name, z(0, 3), z(7), 9, z(2, 3)) == 0  # other checks are skipped for an empty tensor
    assert code_of(acl, name, *[z(2, dtype=BF16)] * 2, 0, z(2, dtype=BF16)) == 0
    double.set_soc("Ascend310P3")
    assert code_of(acl, name, *[z(2, dtype=BF16)] * 2, 0, z(2, dtype=BF16)) == 161002
    assert double.violations() == []


@pytest.mark.parametrize("backward", [False, True])
def test_checks_of_scaled_masked_softmax(acl, double, backward) -> None:
    name = "ScaledMaskedSoftmaxBackward" if backward else "ScaledMaskedSoftmax"

    def code(shape=(1, 2, 3, 4), mask=(1, 1, 3, 4), mask_dtype=np.bool_, fix=False, dtype=np.float16, out=None) -> int:
        floats = [z(*shape, dtype=dtype)] * (1 + backward)
        result = z(*(shape if out is None else out), dtype=dtype)
        return code_of(acl, name, *floats, z(*mask, dtype=mask_dtype), 1.0, fix, result)

    assert code() == 0
    assert code(mask_dtype=np.uint8) == 161002
    assert code(mask=(1, 3, 3, 4)) == 161002
    assert code(mask=(1, 2, 1, 4)) == 161002
    assert code(shape=(2, 3, 4), mask=(2, 3, 4)) == 161002
    assert code(shape=(1, 2, 3, 0), mask=(1, 2, 3, 0)) == 161002
    assert code(out=(1, 2, 3, 5)) == 161002
    assert code(fix=True) == 161002
    assert code(shape=(1, 1, 1, 4096), mask=(1, 1, 1, 4096)) == 0
    assert code(shape=(1, 1, 1, 4097), mask=(1, 1, 1, 4097)) == 161002
    double.set_soc("Ascend950PR_9589")
    assert code(shape=(1, 1, 1, 8192), mask=(1, 1, 1, 8192)) == 0
    double.set_soc("Ascend310P3")
    assert code() == (0 if backward else 561003)
    assert code(dtype=BF16) == 161002
    double.set_soc("Ascend910A")
    assert code() == 561003
    assert double.violations() == []


def gradient_arguments(BT=3, V=130, H=2, stored=False, dtype=np.float16, **changes) -> tuple:
    column = z(BT, dtype=np.float32)
    values = {
        "grad": column,
        "input": z(BT, H, dtype=dtype),
        "weight": z(V, H, dtype=dtype),
        "mask": z((BT + 7) // 8, dtype=np.uint8),
        "target": z(BT, dtype=np.int64),
        "smoothing": 0.0,
        "largest": None if stored else column,
        "total": None if stored else column,
        "softmax": z(BT, V, dtype=np.float32) if stored else None,
        "input_grad": z(BT, H, dtype=dtype),
        "weight_grad": z(V, H, dtype=dtype),
    }
    return tuple((values | changes).values())


def test_checks_of_the_fused_gradient(acl, double) -> None:
    def code(**settings) -> int:
        return code_of(acl, "FusedLinearCrossEntropyLossGrad", *gradient_arguments(**settings))

    assert code() == 0
    assert code(stored=True) == 0
    assert code(total=None) == 161001
    assert code(weight=None) == 161001
    assert code(dtype=np.float32) == 161002
    assert code(mask=z(3, dtype=np.bool_)) == 161002
    assert code(BT=9, mask=z(1, dtype=np.uint8)) == 161002
    assert code(smoothing=0.1) == 161002
    assert code(grad=z(4, dtype=np.float32)) == 161002
    assert code(weight=z(130, 2, dtype=BF16)) == 161002
    assert code(V=127) == 0
    assert code(V=127, stored=True) == 161002
    assert code(BT=1, H=1, V=24560, stored=True) == 0
    assert code(BT=1, H=1, V=24561, stored=True) == 561103
    assert code(BT=65537, H=1, V=128, dtype=np.float16) == 0
    assert code(BT=1, H=65535) == 0
    assert code(BT=1, H=65536) == 561103
    double.set_soc("Ascend910_9391")
    assert code() == 0
    for soc in ("Ascend310P3", "Ascend950PR_9589", "Ascend910A"):
        double.set_soc(soc)
        assert code() == 361001
    assert double.violations() == []


def test_checks_of_online_max_sum(acl, double) -> None:
    def code(BT=3, V=4, H=2, start=0, end=4, dtype=np.float16, target=np.int64, mask=1, logits=None) -> int:
        column, ids = z(BT, dtype=np.float32), z(BT, dtype=target)
        outputs = column, column, column, z(mask, dtype=np.uint8), ids, logits
        inputs = z(BT, H, dtype=dtype), z(V, H, dtype=dtype), ids
        return code_of(acl, "FusedLinearOnlineMaxSum", *inputs, start, end, *outputs)

    assert code() == 0
    assert code(target=np.int32) == 0
    assert code(logits=z(3, 4)) == 0
    assert code(logits=z(3, 5)) == 161002
    assert code(logits=z(3, 4, dtype=np.float32)) == 161002
    assert code(dtype=np.float32) == 161002
    assert code(target=np.float32) == 161002
    assert code(mask=2) == 161002
    assert code(V=0, end=0) == 161002
    assert code(start=-1) == 161002
    assert code(start=3, end=2) == 161002
    assert code(end=5) == 161002
    assert code(BT=1, V=1, H=65535, end=1) == 161002
    double.set_soc("Ascend950PR_9589")
    assert code() == 561003
    assert double.violations() == []


def test_checks_of_the_loss(acl, double) -> None:
    def code(BT=3, smoothing=0.0, logits=None, softmax=None, total=None) -> int:
        column = z(BT, dtype=np.float32)
        inputs = column, column if total is None else total, column
        return code_of(acl, "FusedCrossEntropyLossWithMaxSum", *inputs, smoothing, None, None, logits, column, softmax)

    assert code() == 0
    assert code(logits=z(3, 4), softmax=z(3, 4, dtype=np.float32)) == 0
    assert code(logits=z(3, 4)) == 161001
    assert code(logits=z(3, 4), softmax=z(3, 4)) == 161002
    assert code(total=z(4, dtype=np.float32)) == 161002
    assert code(smoothing=0.5) == 161002
    assert code(BT=0) == 561002
    double.set_soc("Ascend310P3")
    assert code() == 561003
    assert double.violations() == []


def test_what_each_system_has(acl, double, family) -> None:
    """Each system has a kernel of an operator or reports that there is none, with bfloat16 and without."""
    for dtype in (np.float16, BF16):
        x, square, mask = z(2, 3, dtype=dtype), z(1, 1, 2, 2, dtype=dtype), z(1, 1, 2, 2, dtype=np.bool_)
        column, ids = z(3, dtype=np.float32), z(3, dtype=np.int64)
        h, bits = z(3, 2, dtype=dtype), z(1, dtype=np.uint8)
        calls = {
            "softmax": (x, -1, x),
            "log_softmax": (x, -1, x),
            "softmax_backward": (x, x, -1, x),
            "log_softmax_backward": (x, x, -1, x),
            "scaled_masked_softmax": (square, mask, 1.0, False, square),
            "scaled_masked_softmax_backward": (square, square, mask, 1.0, False, square),
            GRADIENT: gradient_arguments(dtype=dtype),
            STATISTICS: (h, h, ids, 0, 3, column, column, column, bits, ids, None),
            LOSS: (column, column, column, 0.0, None, None, z(3, 4, dtype=dtype), column, z(3, 4, dtype=np.float32)),
        }
        for operator, arguments in calls.items():
            code = code_of(acl, KERNELS[operator][0][0], *arguments)
            if takes(family, operator, np.dtype(dtype).name):
                assert code == 0, operator
            elif operator == GRADIENT:
                assert code == 361001
            elif dtype == BF16 and family not in ("910B", "910_93", "950"):  # dtypes are checked first
                assert code == 161002, operator
            else:
                assert code == 561003, operator
    assert double.violations() == []


def test_label_smoothing_passed_as_a_double_is_refused(acl) -> None:
    arguments = [acl.put(a) if isinstance(a, np.ndarray) else a for a in gradient_arguments()]
    arguments[5] = ctypes.c_double(0.1)
    phase_1 = acl.aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize
    declared = phase_1.argtypes
    phase_1.argtypes = [ctypes.c_double if each is ctypes.c_float else each for each in declared]
    try:
        assert acl.prepare("FusedLinearCrossEntropyLossGrad", *arguments)[0] == 161002
    finally:
        phase_1.argtypes = declared
